"""How commands talk: people read stderr, programs read one JSON document on stdout, exit codes have written meanings.

0 accept or fine; 1 reject or falls short; 2 usage or environment; 3 incomplete or inconclusive.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.errors import FasttrackError
from harness.evidence import DiskError
from harness.records import VerdictWord

__all__ = [
    "EXIT_FALLS_SHORT",
    "EXIT_FINE",
    "EXIT_INCOMPLETE",
    "EXIT_USAGE",
    "Json",
    "Output",
    "report_problem",
    "verdict_exit",
]

EXIT_FINE, EXIT_FALLS_SHORT, EXIT_USAGE, EXIT_INCOMPLETE = 0, 1, 2, 3

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]
"""The option that every command has."""


class _People(Console):
    """Stderr. Whoever closed it reads no more; the work and its result do not depend on them."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _discard(self.file)


_stderr = _People(stderr=True, highlight=False)


def verdict_exit(word: VerdictWord) -> int:
    """Exit code of a verdict."""
    return {
        VerdictWord.ACCEPT: EXIT_FINE,
        VerdictWord.REJECT: EXIT_FALLS_SHORT,
        VerdictWord.INCOMPLETE: EXIT_INCOMPLETE,
    }[word]


class Output:
    """One command's output: text and tables for people on stderr, or with `json_mode` one document on stdout."""

    def __init__(self, json_mode: bool) -> None:
        self.json_mode = json_mode

    def say(self, text: str) -> None:
        """One line for people; strings from candidates are escaped so that they cannot style the terminal."""
        _stderr.print(escape(_printable(text)))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table for people; left out in JSON mode, where `document` carries the same record."""
        if self.json_mode:
            return
        table = Table(*columns, title=escape(title), title_justify="left")
        for row in rows:
            table.add_row(*(escape(_printable(str(cell))) for cell in row))
        _stderr.print(table)

    def document(self, value: Mapping[str, Any]) -> None:
        """The result itself; printed only in JSON mode."""
        if self.json_mode:
            self.write(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")

    @staticmethod
    def write(text: str) -> None:
        """Text on stdout. A reader that leaves early, as `head` does, has what it wanted.

        Raises:
            DiskError: stdout is closed, or a file on a full disk; what the command did is done.
        """
        if sys.stdout is None:
            raise _no_stdout("it is closed")
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard(sys.stdout)
        except OSError as error:
            _discard(sys.stdout)
            raise _no_stdout(str(error.strerror)) from error


def report_problem(error: FasttrackError, json_mode: bool) -> int:
    """Print the four parts of a problem; its exit code is 2."""
    parts = {"what": error.what, "where": error.where, "expected": error.expected, "next": error.next}
    if json_mode:
        with contextlib.suppress(DiskError):  # the same is on stderr
            Output.write(json.dumps({"error": parts}, indent=2, sort_keys=True) + "\n")
    for name, text in parts.items():
        _stderr.print(f"[bold]{name:>9}[/bold]  {escape(_printable(text))}")
    return EXIT_USAGE


def _discard(stream: IO[str]) -> None:
    """What is left in a stream's buffer must not fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _no_stdout(why: str) -> DiskError:
    return DiskError(
        f"cannot write the result ({why})",
        where="stdout",
        expected="an open stdout with space; what the command did is kept",
        next="fasttrack runs, or the same command with another stdout",
    )


def _printable(text: str) -> str:
    """Text with control characters (terminal escapes among them) made visible, newlines and tabs kept."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
