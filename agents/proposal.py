"""What a proposer hands over, and what it may know."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from harness.records import Record

__all__ = ["BestView", "Exhausted", "History", "Proposal", "Proposer", "Tried"]


class Proposal(Record):
    """One change to try: whole new contents of files in the task's editable scope, and why it should help."""

    hypothesis: str
    """One sentence: what changes and what it is expected to do."""
    predicted: dict[str, float]
    """Cell key to expected speed ratio over the current best; empty when the proposer makes no prediction."""
    files: dict[str, str] | None = None
    """Repository path to new text content. Exactly one of `files` and `patch` is given."""
    patch: str | None = None
    """A git patch against the current best."""


class Tried(Record):
    """What became of an earlier proposal of this run, as a proposer may see it: never seeds or expected values."""

    number: int
    hypothesis: str
    outcome: str
    """`kept`, `beaten`, `rejected` or `inconclusive`."""
    reason: str
    measured: dict[str, float]
    """Cell key to measured ratio over the best of that time, where perf was measured."""


History = tuple[Tried, ...]


class Exhausted(Exception):  # noqa: N818 - an ending, not an error
    """The proposer has nothing left to propose; the message says why."""


class BestView(Protocol):
    """Read access to the editable files of the current best candidate."""

    def path(self, path: str) -> Path:
        """Where an exported, read-only copy of a repository file lies; FasttrackError if the best has none."""
        ...


class Proposer(Protocol):
    """Makes proposals from what was tried so far."""

    name: str

    def propose(self, history: History, best: BestView) -> Proposal:
        """The next proposal against the current best.

        Calling it again with the same history must give the same proposal (a resumed run asks again).

        Raises:
            Exhausted: nothing left to try.
        """
        ...
