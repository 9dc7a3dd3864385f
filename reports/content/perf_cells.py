"""What the performance section needs, read out of `raw/perf.jsonl` with the protocol's own functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.records import Cell, Outcome
from reports import protocols
from reports.load import Loaded

__all__ = ["CellResult", "Comparison", "PerfView"]


@dataclass(frozen=True)
class Comparison:
    """A cell's ratio against one arm."""

    ratio: float | None
    """Other arm's time divided by the candidate's; None where it could not be had."""
    low: float | None
    high: float | None
    word: str
    """FAST, SAME, SLOW, AMBG or ????."""
    blocks: Sequence[float | None] = ()
    """The same ratio per block, in the order of measurement."""


@dataclass(frozen=True)
class CellResult:
    """One cell of the matrix."""

    cell: Cell
    against: Mapping[str, Comparison]
    """By arm name."""
    median_us: Mapping[str, float]
    """Median time of a call (a step, a half-layer, an op) by arm name, in microseconds."""
    in_task: bool = False


@dataclass(frozen=True)
class PerfView:
    """All cells."""

    cells: Sequence[CellResult]
    arms: Sequence[str]
    """Arms that the candidate is compared with, headline first."""
    arm_names: Mapping[str, str]
    note: str
    """How intervals and words were made, in one or two sentences."""
    controls: Sequence[tuple[str, str]] = field(default_factory=tuple)

    def worst(self, arm: str) -> CellResult | None:
        """The cell with the lowest ratio against an arm."""
        measured = [cell for cell in self.cells if arm in cell.against and cell.against[arm].ratio is not None]
        return min(measured, key=lambda cell: cell.against[arm].ratio or 0.0, default=None)

    def best(self, arm: str) -> CellResult | None:
        """The cell with the highest ratio against an arm."""
        measured = [cell for cell in self.cells if arm in cell.against and cell.against[arm].ratio is not None]
        return max(measured, key=lambda cell: cell.against[arm].ratio or 0.0, default=None)

    def groups(self) -> Iterator[tuple[str, list[CellResult]]]:
        """Cells that share everything but batch and context, with a suffix that tells the groups apart."""
        groups: dict[tuple[str, int, str, str | None], list[CellResult]] = {}
        for result in self.cells:
            cell = result.cell
            groups.setdefault((cell.scope, cell.tokens, cell.workload, cell.layout), []).append(result)
        for (scope, tokens, workload, layout), members in groups.items():
            parts = [scope, workload, f"{tokens} tokens per request" if tokens > 1 else "", layout or ""]
            suffix = ", ".join(part for part in parts if part)
            yield (f" ({suffix})" if len(groups) > 1 else ""), members


def perf_view(loaded: Loaded) -> PerfView | None:
    """The view of a bundle's performance data; None where nothing was evaluated."""
    result = loaded.results.get("perf")
    if result is None or result.outcome is Outcome.NOT_EVALUATED:
        return None
    summary = protocols.implementation("perf", result.protocol_id).summarise(loaded.raw["perf"])
    task = {cell.key for cell in loaded.bundle.task_cells}
    cells = [_cell(entry, task) for entry in summary["cells"]]
    return PerfView(
        cells=cells,
        arms=tuple(arm for arm in _NAMES if any(arm in cell.against for cell in cells)),
        arm_names=_NAMES,
        note=summary["note"],
        controls=[(str(name), str(value)) for name, value in summary["controls"]],
    )


_NAMES = {
    "standard": "the standard path",
    "best": "the current best",
    "candidate": "the candidate",
    "control": "the current best again (control)",
}


def _cell(entry: Mapping[str, Any], task: set[str]) -> CellResult:
    cell = Cell(**entry["cell"])
    against = {arm: Comparison(**values) for arm, values in entry["against"].items()}
    return CellResult(cell, against, entry["median_us"], in_task=cell.key in task)
