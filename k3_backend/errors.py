"""The one error base of this package: what happened, where, what was expected, what comes next.

It decides nothing; it keeps the four facts as fields so that callers can turn an error into a reason of a report.
"""

from __future__ import annotations

__all__ = ["BackendError", "StorageError"]


class BackendError(RuntimeError):
    """A problem that a person can act on.

    Args:
        what: what happened, one clause.
        where: file and line, op and tensor, or command.
        expected: what would have been right.
        next: the command or action that comes next.
    """

    def __init__(self, what: str, *, where: str, expected: str, next: str) -> None:  # noqa: A002 - the field's name everywhere
        super().__init__(f"{where}: {what}; expected {expected}; next: {next}")
        self.what = what
        self.where = where
        self.expected = expected
        self.next = next


class StorageError(BackendError):
    """A full, read-only or failing disk: it says nothing about the sources that were being built."""
