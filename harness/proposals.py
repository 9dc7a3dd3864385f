"""One proposal of a run: how the store hands it out and the tables show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CandidateOutcome", "CandidateRow"]

CandidateOutcome = Literal["accepted", "rejected", "incomplete", "beaten", "duplicate", "invalid"]
"""How a proposal ended: verdict words; `beaten` was refused by no gate but another is faster in a cell of the task;
`duplicate` equals an earlier tree; `invalid` never became a tree that gates could judge."""


@dataclass(frozen=True)
class CandidateRow:
    """One proposal as the run knows it."""

    number: int
    """1, 2, … in the order of proposing."""
    key: str
    """The proposer's own name for it; proposing the same key again returns the same row."""
    head: str
    """Commit of the candidate; for `invalid` ones the base."""
    origin: str
    note: str
    """What the proposer says it tries."""
    outcome: CandidateOutcome | None = None
    """None while it is being judged."""
    reason: str | None = None
    """One line for tables: the first failed gate's message, or what beat it."""

    @property
    def folder(self) -> str:
        """Name of its folder below `candidates/`."""
        return f"{self.number:03d}-{self.head[:12]}"
