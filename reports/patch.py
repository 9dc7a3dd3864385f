"""Reading a candidate's patch: which files, how many lines, which ops. It applies nothing and judges nothing.

The input is the canonical diff of the run store (`git diff --binary --full-index`), but it may come from a stranger:
any bytes give an answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["FileChange", "Patch", "read_patch"]

Status = Literal["added", "deleted", "renamed", "modified"]
_HEADER = re.compile(rb'^diff --git (?:"?a/(.*?)"?) (?:"?b/(.*?)"?)$')
_HUNK = re.compile(rb"^@@ -\d+(?:,(\d{1,9}))? \+\d+(?:,(\d{1,9}))? @@")
_OP_PATH = re.compile(r"^k3_backend/(?:kernels/([a-z_]+)/|schedules/(?:[^/]+/)+([a-z_]+)\.toml$)")


@dataclass(frozen=True)
class FileChange:
    """One file of the patch."""

    path: str
    status: Status
    added: int
    removed: int
    binary: bool

    @property
    def op(self) -> str | None:
        """The op whose kernel or schedule this file is; `common` for shared kernel headers; None outside of both."""
        match = _OP_PATH.match(self.path)
        return None if match is None else match.group(1) or match.group(2)


@dataclass(frozen=True)
class Patch:
    """What a patch changes."""

    files: tuple[FileChange, ...]

    @property
    def added(self) -> int:
        """Added lines."""
        return sum(file.added for file in self.files)

    @property
    def removed(self) -> int:
        """Removed lines."""
        return sum(file.removed for file in self.files)

    @property
    def ops(self) -> tuple[str, ...]:
        """Ops touched, sorted."""
        return tuple(sorted({file.op for file in self.files if file.op}))

    @property
    def band(self) -> Literal["low", "medium", "high"]:
        """Complexity by added lines: below 50 low, 50 to 250 medium, above 250 high."""
        return "low" if self.added < 50 else "medium" if self.added <= 250 else "high"


def read_patch(data: bytes) -> Patch:
    """Read a git diff.

    Hunk lengths are taken from the hunk headers, so that an added line that looks like a header stays an added line.
    """
    files: list[FileChange] = []
    lines = data.split(b"\n")
    index = 0
    while index < len(lines):
        header = _HEADER.match(lines[index])
        index += 1
        if header:
            change, index = _read_file(header.group(2).decode("utf-8", "backslashreplace"), lines, index)
            files.append(change)
    return Patch(files=tuple(files))


def _read_file(path: str, lines: list[bytes], index: int) -> tuple[FileChange, int]:
    status: Status = "modified"
    added = removed = 0
    binary = False
    while index < len(lines) and not lines[index].startswith(b"diff --git "):
        line = lines[index]
        index += 1
        hunk = _HUNK.match(line)
        if hunk:
            old, new = (1 if n is None else int(n) for n in hunk.groups())
            while index < len(lines) and (old > 0 or new > 0):
                mark = lines[index][:1]
                if mark == b"+":
                    added, new = added + 1, new - 1
                elif mark == b"-":
                    removed, old = removed + 1, old - 1
                elif mark != b"\\":
                    old, new = old - 1, new - 1
                index += 1
        elif line.startswith(b"new file mode"):
            status = "added"
        elif line.startswith(b"deleted file mode"):
            status = "deleted"
        elif line.startswith(b"rename to "):
            status = "renamed"
        elif line.startswith((b"GIT binary patch", b"Binary files ")):
            binary = True
    return FileChange(path=path, status=status, added=added, removed=removed, binary=binary), index
