"""What the campaign needs of whatever runs the arms: processes per block, chains per cell, slices on two clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from verify.evaluator.failures import WorkerFailure
from verify.protocol.perf_plan import CellPlan
from verify.timing.compare import Left

__all__ = ["ArmFault", "Block", "Paths", "Sampler", "Slice", "as_fault"]


class ArmFault(Exception):  # noqa: N818 - error classes are named for the finding
    """An arm's process did not answer as asked."""

    def __init__(self, arm: str, code: str, message: str, detail: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.arm = arm
        self.code = code
        """`crash`, `timeout`, `protocol` or `error`."""
        self.detail = dict(detail or {})


class Slice(NamedTuple):
    """One timed request."""

    evaluator_ns: int
    worker_ns: int


class Paths(NamedTuple):
    """Timed calls by the path that they took."""

    specialized: int
    standard: int


class Block(Protocol):
    """Fresh processes of some arms with fresh secret contents.

    The sequence of an arm in a visit is `prepare`, `reset`, `slice` as often as asked for, for an op also `again`, then
    `left` (in between too) and `paths`. All of them raise `ArmFault` if the process died, hung, raised or refused.
    """

    def prepare(self, arm: str, cell: CellPlan, calls: int, slices: int) -> None:
        """Set a cell's chain in an arm's process: so many slices of so many calls."""

    def most(self, cell: CellPlan) -> int:
        """The largest number of calls that a slice of the cell can have."""

    def reset(self, arm: str, cell: CellPlan) -> None:
        """Run a few untimed calls, then go back to the chain's start; poison what the timed calls must write."""

    def slice(self, arm: str, cell: CellPlan) -> Slice:
        """Run the chain's next calls against the clock; of an op, its one chain, on states that go on."""

    def again(self, arm: str, cell: CellPlan, calls: int) -> None:
        """Run the first calls of an op's chain once more, not timed; `left` then tells of this run."""

    def left(self, arm: str, cell: CellPlan) -> Left:
        """What the slices since `reset` left behind; of an op, the last run.

        Which part of the state is secret, and drawn after the first.
        """

    def paths(self, arm: str, cell: CellPlan) -> Paths:
        """Timed calls since `reset`."""

    def reference(self, cell: CellPlan, left: Left) -> Mapping[str, float]:
        """Distance of sampled calls from the evaluator's own expected values; empty for whole steps."""

    def facts(self, arm: str, cell: CellPlan) -> Mapping[str, Any]:
        """What an arm runs in a cell, for the record; nothing is decided by it."""

    def foreign_share(self) -> float:
        """Share of the machine's CPU time since the block began that other processes used."""


class Sampler(Protocol):
    """Makes blocks."""

    def block(self, arms: Sequence[str], seed: str, cells: Sequence[CellPlan]) -> AbstractContextManager[Block]:
        """Start fresh processes of the arms; they end with the context, however it is left.

        Args:
            arms: names of `verify.protocol.perf_plan.ARMS`.
            seed: secret of this block; everything secret in it derives from it.
            cells: what will be measured, for sizing.

        Raises:
            ArmFault: a process did not come up.
        """


@contextmanager
def as_fault(arm: str) -> Iterator[None]:
    """Turn a worker's failure into its arm's fault."""
    try:
        yield
    except WorkerFailure as failure:
        raise ArmFault(arm, failure.kind, str(failure), failure.record()) from failure
