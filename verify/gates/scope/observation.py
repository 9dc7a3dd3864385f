"""What a scanner saw: one rule, one place."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Observation"]


@dataclass(frozen=True)
class Observation:
    """A violated rule. `code` is a key of `verify.protocol.scope.CODES`."""

    code: str
    line: int
    message: str
    """One sentence; quotes what was seen."""
    expected: str
