"""How long work reports progress: a function from one line of text. The command line shows it on stderr."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "silent"]

Progress = Callable[[str], None]


def silent(message: str) -> None:
    """Show nothing."""
