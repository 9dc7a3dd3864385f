"""What an optimisation task says: which op, in which cells, from which baseline, within which budget.

A task file is TOML under `tasks/`. It can narrow what a proposer may edit, never widen it: the scope gate applies
`harness.toml` in any case.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from harness import toml
from harness.records import Cell, GateName, Record

__all__ = ["Baseline", "Budget", "Search", "Task", "TaskCells", "load_task", "task_files"]

TASKS_DIR = "tasks"


class TaskCells(Record):
    """Cells in which an accepted candidate must be strictly faster than the current best."""

    scope: str
    """An op's name, or `step` for whole decode steps."""
    batches: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(min_length=1)
    contexts: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Cached tokens per request; empty for ops whose cost does not depend on it."""
    tokens: int = Field(default=1, ge=1, le=8)

    def cells(self) -> tuple[Cell, ...]:
        """The cells as records, batches outermost."""
        contexts: tuple[int | None, ...] = self.contexts or (None,)
        return tuple(
            Cell(scope=self.scope, batch=batch, context=context, tokens=self.tokens)
            for batch in self.batches
            for context in contexts
        )


class Baseline(Record):
    """Where a run starts."""

    kind: Literal["head", "tuned_at_batch"]
    """`head`: the kernels and schedules as committed. `tuned_at_batch`: the task's op gets the schedule that the tuner
    finds at one batch size, used in every bucket; measured anew at the start of each run, so nobody can sandbag it."""
    batch: int | None = Field(default=None, ge=1, le=64)
    hold: dict[str, int] = Field(default_factory=dict)
    """Tunables that the baseline's tuning leaves at a value: for those whose best value at that batch is a toss-up, so
    that every run starts from the same one."""

    @model_validator(mode="after")
    def _batch_with_its_kind(self) -> Baseline:
        if (self.batch is None) != (self.kind == "head"):
            raise ValueError("baseline.batch belongs to kind tuned_at_batch, and only there")
        if self.hold and self.kind == "head":
            raise ValueError("baseline.hold belongs to kind tuned_at_batch")
        return self


class Search(Record):
    """How candidates are searched and judged on the way."""

    agent: Literal["tuner", "replay"]
    candidates: int = Field(ge=1, le=1000)
    """Candidates that one run may try: the perf gate spends its error budget over exactly so many."""
    screen_tier: str = "smoke"
    """Tier at which every candidate is judged."""
    screen_gates: tuple[GateName, ...] | None = None
    """Gates of that judgement; all that the target requires if null. The final one always needs all of them."""
    final_tier: str = "pr"
    """Tier at which the best screened candidate must be accepted."""
    patches: tuple[str, ...] = ()
    """Patch files of agent `replay`, relative to the task file."""


class Budget(Record):
    """Hard limits of one run; consumed budget is part of the run's state and survives a resume."""

    minutes: float = Field(gt=0)


class Task(Record):
    """One optimisation task."""

    version: Literal[1]
    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    title: str
    objective: str
    conditions: str
    """Where the optimisation applies, for the report: hardware, geometry, batches, kinds of step."""
    target: str
    ops: tuple[str, ...] = Field(min_length=1)
    editable: tuple[str, ...] = Field(min_length=1)
    """Repository globs that the proposer may change."""
    baseline: Baseline
    cells: tuple[TaskCells, ...] = Field(min_length=1)
    search: Search
    budget: Budget

    def all_cells(self) -> tuple[Cell, ...]:
        """Every cell of the task; duplicates were refused at load."""
        return tuple(cell for group in self.cells for cell in group.cells())

    @model_validator(mode="after")
    def _consistent(self) -> Task:
        keys = [cell.key for cell in self.all_cells()]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"cells named twice: {', '.join(twice)}")
        if self.baseline.kind == "tuned_at_batch" and len(self.ops) != 1:
            raise ValueError("baseline kind tuned_at_batch tunes one op; ops must name exactly one")
        if (self.search.agent == "replay") != bool(self.search.patches):
            raise ValueError("search.patches belongs to agent replay, and only there")
        for patch in self.search.patches:
            if PurePosixPath(patch).is_absolute() or ".." in PurePosixPath(patch).parts:
                raise ValueError(f"search.patches: {patch} leaves the task's folder")
        return self


def load_task(path: Path) -> Task:
    """Read and validate a task file.

    Raises:
        FasttrackError: missing file, broken TOML, or a rule of the schema broken; names file, line and key.
    """
    return toml.validate(Task, toml.read(path), next=f"edit {path}, then: fasttrack tasks lint")


def task_files(root: Path) -> list[Path]:
    """Task files of a checkout, by name."""
    return sorted((root / TASKS_DIR).glob("*.toml"))
