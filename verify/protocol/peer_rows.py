"""What a read peer table is: rows with times, ratios and judged demands, and the counts over all of them.

`verify.protocol.peers` makes one from raw lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verify.protocol.decision import Line
from verify.protocol.peer_figures import FIGURES, HALF_CELLS, HALF_LAYERS, HALF_MEAN, Figure, Mean

__all__ = ["OURS", "Ceiling", "Judged", "Ratio", "Row", "Table", "Timing", "meant"]

OURS = "ours"


@dataclass(frozen=True)
class Timing:
    """One arm in one cell, us per call."""

    median: float
    low: float
    high: float
    """Quartiles."""
    samples: int
    device_us: float | None
    """By the profiler, kernels alone; null where it saw none."""
    pdl: bool
    note: str
    fallbacks: tuple[str, ...] = ()
    """Of a half-layer: the sites that took the standard path, with the reason."""


@dataclass(frozen=True)
class Ratio:
    """A peer's time divided by ours, from the same rounds: above 1 we are faster."""

    value: float
    low: float
    high: float
    """Bounds of the median at `CONFIDENCE`, from order statistics of the rounds."""


@dataclass(frozen=True)
class Ceiling:
    """The fastest that trusted code moved bytes in this run."""

    kind: str
    gbps: float
    method: str


@dataclass(frozen=True)
class Judged:
    """A figure's demand on one cell."""

    figure: int
    """Row of the issue's table."""
    demand: str
    state: str
    """`met`, `missed`, `open` (the interval holds the limit) or `unknown` (a number is missing)."""
    found: str


@dataclass(frozen=True)
class Row:
    """One cell."""

    key: str
    cell: Mapping[str, Any]
    bytes: int
    ceiling: Ceiling | None
    floor_us: float | None
    share: float | None
    """Of the ceiling, by our median."""
    arms: Mapping[str, Timing] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    """Arm to the reason why it has no number."""
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    judged: Sequence[Judged] = ()
    rotated_bytes: int | None = None
    calls: int | None = None
    failure: str | None = None
    """Why the cell has no arms at all."""


@dataclass(frozen=True)
class Table:
    """The whole record."""

    header: Line
    ceilings: Mapping[str, Ceiling]
    empty_us: float | None
    """Spacing of empty one-block kernels in a graph of dependent launches."""
    rows: Sequence[Row]
    unmeasured: Sequence[str]
    """Planned cells without a line."""

    def figures(self) -> list[tuple[Figure, dict[str, int]]]:
        """Per figure, how many of its demands are met, missed, open and unknown.

        A planned cell without a line is unknown, and so is any half-layer without one where another of its kind has
        one: their figure names all its cells.
        """
        counted = []
        measured = {_place(row.cell) for row in self.rows}
        missing = set(self.unmeasured)
        absent = [cell for cell in self.header["planned"] if cell["key"] in missing and cell["op"] not in HALF_LAYERS]
        for figure in FIGURES:
            states = dict.fromkeys(("met", "missed", "open", "unknown"), 0)
            for row in self.rows:
                if meant(figure, row.cell):
                    for judged in row.judged:
                        states[judged.state] += 1
            for cell in absent:
                if meant(figure, cell):
                    states["unknown"] += sum(need.applies(cell["batch"], cell["cache_bytes"]) for need in figure.needs)
            if any(states.values()):
                states["unknown"] += sum(cell[0] == figure.op and cell not in measured for cell in HALF_CELLS)
            counted.append((figure, states))
        return counted

    def mean(self) -> tuple[Mean, Judged]:
        """The demand on the half-layers' geometric mean; unknown while any of their cells has no ratio.

        The bounds are the geometric means of the cells' own bounds, so they are wider than the mean's would be.
        """
        ratios = {
            _place(row.cell): row.ratios[HALF_MEAN.peer]
            for row in self.rows
            if HALF_MEAN.peer in row.ratios and row.cell["tokens"] == 1
        }
        found = [ratios[cell] for cell in HALF_CELLS if cell in ratios]
        demand = f"{HALF_MEAN.peer}'s time / ours at least {HALF_MEAN.limit:g}"
        if not found:
            return HALF_MEAN, Judged(HALF_MEAN.row, demand, "unknown", f"0 of {len(HALF_CELLS)} cells")
        value, low, high = (
            math.exp(math.fsum(math.log(getattr(ratio, name)) for ratio in found) / len(found))
            for name in ("value", "low", "high")
        )
        state = "met" if low >= HALF_MEAN.limit else "missed" if high < HALF_MEAN.limit else "open"
        state = state if len(found) == len(HALF_CELLS) else "unknown"
        text = f"{value:.3f} ({low:.3f}-{high:.3f}) in {len(found)} of {len(HALF_CELLS)} cells"
        return HALF_MEAN, Judged(HALF_MEAN.row, demand, state, text)


def meant(figure: Figure, cell: Mapping[str, Any]) -> bool:
    """Whether a figure is about a cell. Steps of several tokens have no figure of their own."""
    return (
        cell["op"] == figure.op
        and cell["tokens"] == 1
        and (not figure.widths or cell["width"] in figure.widths)
    )  # fmt: skip


def _place(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What `HALF_CELLS` names a cell by."""
    return tuple(cell.get(name) for name in ("op", "geometry", "batch", "context"))
