"""Writes the patches of mutants.toml against the kernels of this checkout: `python make.py [--check]`.

Patches carry one line of context, so that they apply while other lines of a kernel change. `--check` writes nothing and
fails if a patch on disk is not the one that would be written; run without it after a kernel's file was rearranged.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
CHECKOUT = FOLDER.parents[3]
KERNELS = "k3_backend/kernels"
EVERY_ROW = (1, 512)


class MutantError(Exception):
    """A row of mutants.toml that does not fit the kernels."""


@dataclass(frozen=True)
class Mutant:
    """One planted fault."""

    name: str
    op: str
    plants: str
    """The fault, in one sentence."""
    shows: str
    """Where it shows, in one sentence."""
    kinds: tuple[str, ...]
    """Input classes that show it; empty: all classes."""
    tokens: int
    """Least tokens per request at which it shows."""
    rows: tuple[int, int]
    """Least and most rows M of a call at which it shows: those of the schedule's choices that hold the line."""
    changes: tuple[tuple[str, str], ...]
    """(lines as they stand, lines as planted)."""

    def edits(self, checkout: Path) -> dict[str, tuple[str, str]]:
        """Path to (text, planted text) of every file that changes.

        Raises:
            MutantError: lines that do not stand exactly once in the op's kernel files.
        """
        files = sorted((checkout / KERNELS / self.op).glob("*.py"))
        before = {file.relative_to(checkout).as_posix(): file.read_text(encoding="utf-8") for file in files}
        after = dict(before)
        for old, new in self.changes:
            found = [path for path, text in after.items() if old in text]
            if len(found) != 1 or after[found[0]].count(old) != 1:
                count = sum(text.count(old) for text in after.values())
                raise MutantError(
                    f"mutants.toml: {self.name}: {old.strip().splitlines()[0]!r} stands {count} times in "
                    f"{KERNELS}/{self.op}; expected once; next: write the kernel's present line into the row, "
                    f"then python {Path(__file__).relative_to(CHECKOUT)}"
                )
            after[found[0]] = after[found[0]].replace(old, new)
        return {path: (before[path], after[path]) for path in before if before[path] != after[path]}

    def patch(self, checkout: Path) -> str:
        """Unified diff for `git apply`."""
        lines: list[str] = []
        for path, (old, new) in self.edits(checkout).items():
            pair = (old.splitlines(keepends=True), new.splitlines(keepends=True))
            lines += [f"diff --git a/{path} b/{path}\n", *difflib.unified_diff(*pair, f"a/{path}", f"b/{path}", n=1)]
        return "".join(lines)


def mutants() -> tuple[Mutant, ...]:
    """Rows of mutants.toml, by name."""
    rows: dict[str, dict[str, Any]] = tomllib.loads((FOLDER / "mutants.toml").read_text(encoding="utf-8"))
    return tuple(
        Mutant(
            name, row["op"], row["plants"], row["shows"], tuple(row["kinds"]), row["tokens"],
            tuple(row.get("rows", EVERY_ROW)), tuple((old, new) for old, new in row["changes"]),
        )
        for name, row in sorted(rows.items())
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Write or check; 0 if every patch on disk is as it should be afterwards."""
    if arguments not in ([], ["--check"]):
        print(f"unknown arguments {arguments}; expected: nothing, or --check", file=sys.stderr)
        return 2
    try:
        wanted = {FOLDER / f"{mutant.name}.patch": mutant.patch(CHECKOUT) for mutant in mutants()}
    except MutantError as error:
        print(error, file=sys.stderr)
        return 1
    there = {file: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.patch")}
    differing = sorted(file for file in {**wanted, **there} if wanted.get(file) != there.get(file))
    for file in differing:
        print(file.name)
        if not arguments and file in wanted:
            file.write_text(wanted[file], encoding="utf-8")
        elif not arguments:
            file.unlink()
    return 1 if arguments and differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
