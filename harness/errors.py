"""The one way in which bad input, a broken environment or a full disk is reported: what, where, expected, next."""

from __future__ import annotations

__all__ = ["FasttrackError"]


class FasttrackError(Exception):
    """A problem that a person can act on. The command line prints it as one message and exits with 2.

    Args:
        what: what happened, one clause.
        where: file and line, key, path or command.
        expected: what would have been right.
        next: the command or action that comes next.
    """

    def __init__(self, what: str, *, where: str, expected: str, next: str) -> None:  # noqa: A002 - the field's name everywhere
        super().__init__(f"{where}: {what}; expected {expected}; next: {next}")
        self.what = what
        self.where = where
        self.expected = expected
        self.next = next
