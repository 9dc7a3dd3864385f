"""What the campaign needs of whatever runs the arms: processes per block, chains per cell, legs on two clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from verify.gates.perf.compare import Left
from verify.protocol.perf_plan import CellPlan

__all__ = ["ArmFault", "Block", "Leg", "Sampler"]


class ArmFault(Exception):  # noqa: N818 - error classes are named for the finding
    """An arm's process did not answer as asked."""

    def __init__(self, arm: str, code: str, message: str, detail: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.arm = arm
        self.code = code
        """`crash`, `timeout`, `protocol` or `error`."""
        self.detail = dict(detail or {})


class Leg(NamedTuple):
    """One timed leg."""

    evaluator_ns: int
    worker_ns: int
    specialized: int
    """Calls that took the specialised path."""
    standard: int


class Block(Protocol):
    """Fresh processes of some arms with fresh secret contents."""

    def prepare(self, arm: str, cell: CellPlan, calls: int) -> None:
        """Set a cell's chain of `calls` calls in an arm's process.

        Raises:
            ArmFault: the process died or refused.
        """

    def fit(self, cell: CellPlan, calls: int) -> int:
        """The least length that a chain of the cell can have and that is not below `calls`."""

    def leg(self, arm: str, cell: CellPlan, warm: int) -> Leg:
        """Run some untimed calls, go back to the start, run the prepared chain once against the clock.

        Raises:
            ArmFault: the process died, hung or raised.
        """

    def left(self, arm: str, cell: CellPlan) -> Left:
        """What the arm's last leg left behind. The part of the state is drawn anew for each cell, after its first leg.

        Raises:
            ArmFault: the process died or raised.
        """

    def reference(self, cell: CellPlan, left: Left) -> Mapping[str, float]:
        """Distance of sampled calls from the evaluator's own expected values; empty for whole steps."""

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
