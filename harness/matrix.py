"""The matrix of a target as data: axes, stated prune rules, and the cells that remain.

Knows nothing about tiers, gates or files; `harness.settings` reads the axes and rules and asks for cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from harness.records import Cell, Record

__all__ = ["Axes", "Layout", "Name", "Point", "PositiveInt", "Prune", "PrunedMatrix", "as_cells", "prune"]

PositiveInt = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_.+-]+$")]


class Layout(Record):
    """A parallel layout. Small targets time one rank's shapes on fewer GPUs than ranks."""

    tp: PositiveInt
    dcp: PositiveInt
    gpus: PositiveInt | None = None
    """GPUs on which the layout's rank shapes are measured; null: one per rank."""

    @property
    def key(self) -> str:
        """For example `tp8.dcp1` or `tp8.dcp1.gpus2`."""
        return f"tp{self.tp}.dcp{self.dcp}" + (f".gpus{self.gpus}" if self.gpus else "")


class Point(NamedTuple):
    """A cell of the unpruned matrix, before it becomes a record."""

    layout: Layout
    workload: str
    drafts: int
    context: int
    batch: int

    @property
    def cached_tokens_per_rank(self) -> int:
        """Batch * context / dcp: what one rank's KV cache holds."""
        return self.batch * self.context // self.layout.dcp


class Prune(Record):
    """A stated reason to leave cells out: a cell goes when every condition that is given holds for it."""

    reason: Annotated[str, Field(min_length=10)]
    workloads: tuple[Name, ...] | None = None
    """The cell's workload is one of these."""
    context_above: PositiveInt | None = None
    """Cached tokens per request are more than this."""
    context_below: PositiveInt | None = None
    batch_above: PositiveInt | None = None
    drafts_above: Count | None = None
    dcp_above: PositiveInt | None = None
    cached_tokens_above: PositiveInt | None = None
    """batch * context / dcp, the cached tokens that one rank holds, is more than this."""

    @model_validator(mode="after")
    def _has_condition(self) -> Prune:
        if len(self.model_fields_set) < 2:
            raise ValueError("a prune rule without conditions removes every cell")
        return self

    def applies(self, point: Point) -> bool:
        """Whether the rule removes the cell."""
        return (
            (self.workloads is None or point.workload in self.workloads)
            and (self.context_above is None or point.context > self.context_above)
            and (self.context_below is None or point.context < self.context_below)
            and (self.batch_above is None or point.batch > self.batch_above)
            and (self.drafts_above is None or point.drafts > self.drafts_above)
            and (self.dcp_above is None or point.layout.dcp > self.dcp_above)
            and (self.cached_tokens_above is None or point.cached_tokens_per_rank > self.cached_tokens_above)
        )


class PrunedMatrix(NamedTuple):
    """A matrix after pruning, with the account of what went."""

    cells: tuple[Cell, ...]
    total: int
    """Cells before pruning."""
    pruned: tuple[int, ...]
    """Per prune rule, in file order: cells that it was the first to remove."""


class Axes(NamedTuple):
    """The values whose product is the unpruned matrix."""

    layouts: tuple[Layout, ...]
    workloads: tuple[str, ...]
    drafts: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]

    def points(self) -> Iterator[Point]:
        """Every combination; batches vary fastest."""
        return (Point(*values) for values in product(*self))


def prune(points: Iterable[Point], rules: Sequence[Prune]) -> tuple[list[Point], tuple[int, ...]]:
    """(points that no rule removes, how many each rule was the first to remove)."""
    kept: list[Point] = []
    counts = [0] * len(rules)
    for point in points:
        first = next((i for i, rule in enumerate(rules) if rule.applies(point)), None)
        if first is None:
            kept.append(point)
        else:
            counts[first] += 1
    return kept, tuple(counts)


def as_cells(points: Iterable[Point], *, name_layout: bool) -> tuple[Cell, ...]:
    """Points as records in `step` scope; the layout enters the key only where a target has several."""
    return tuple(
        Cell(
            scope="step",
            batch=point.batch,
            context=point.context,
            tokens=1 + point.drafts,
            workload=point.workload,
            layout=point.layout.key if name_layout else None,
        )
        for point in points
    )
