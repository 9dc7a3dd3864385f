"""Files between git trees and the disk: which names are safe, how a tree is written out, how a folder is read back.

Trees of candidates and folders that proposers edit are untrusted: nothing here follows a link, and a tree is refused as
a whole before its first file is written. Runs no git.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness.errors import FasttrackError
from harness.evidence import disk_error

__all__ = [
    "MODE_EXECUTABLE", "MODE_FILE", "MODE_SUBMODULE", "MODE_SYMLINK", "Entry", "blob_id", "refuse_unsafe",
    "unsafe_name", "walk", "write_tree",
]  # fmt: skip

MODE_FILE = "100644"
MODE_EXECUTABLE = "100755"
MODE_SYMLINK = "120000"
MODE_SUBMODULE = "160000"
MAX_TREE_BYTES = 512 << 20
MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class Entry:
    """One file of a tree."""

    mode: str
    """Git mode: 100644, 100755, 120000 (symlink), 160000 (submodule)."""
    blob: str
    """Object id."""
    path: str
    """Repository path; bytes that are not UTF-8 appear as surrogate escapes."""
    size: int | None = None
    """Bytes; null for submodules."""


def unsafe_name(path: str) -> str | None:
    """Why a repository path must not be written to disk, or None."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or PurePosixPath(path).is_absolute():
        return "leaves its folder"
    if any(part.lower().rstrip(". ") == ".git" for part in parts):
        return "reaches into git's own folder"
    if not path.isprintable() or "\\" in path or any(len(os.fsencode(part)) > 255 for part in parts):
        return "has control characters, bytes that are not UTF-8, a backslash, or an over-long component"
    return None


def refuse_unsafe(entries: Sequence[Entry], commit: str) -> None:
    """Refuse a tree that holds anything but plain files with portable names, or too many bytes.

    Raises:
        FasttrackError: names the first offender.
    """

    def refuse(path: str, what: str) -> FasttrackError:
        return FasttrackError(
            f"{what} in commit {commit[:12]}",
            where=repr(path) if not path.isprintable() else path,
            expected="plain files with portable names",
            next=f"git ls-tree -r {commit[:12]}",
        )

    seen: dict[str, str] = {}
    for entry in entries:
        if entry.mode == MODE_SYMLINK:
            raise refuse(entry.path, "symbolic link")
        if entry.mode not in (MODE_FILE, MODE_EXECUTABLE):
            raise refuse(
                entry.path,
                f"entry of mode {entry.mode} (submodule)"
                if entry.mode == MODE_SUBMODULE
                else f"entry of mode {entry.mode}",
            )
        if why := unsafe_name(entry.path):
            raise refuse(entry.path, f"file name that {why}")
        parts = entry.path.split("/")
        for depth in range(1, len(parts) + 1):
            actual = "/".join(parts[:depth])
            if seen.setdefault(actual.casefold(), actual) != actual:
                raise refuse(entry.path, f"name that differs from {seen[actual.casefold()]!r} in case only")
    total = sum(e.size or 0 for e in entries)
    if total > MAX_TREE_BYTES:
        raise refuse(max(entries, key=lambda e: e.size or 0).path, f"{total} bytes of files (limit {MAX_TREE_BYTES})")


def write_tree(entries: Sequence[Entry], contents: Mapping[str, bytes], dest: Path) -> None:
    """Write files into a new or empty folder. Modes become 0644 or 0755, whatever the umask.

    Args:
        entries: files that `refuse_unsafe` has let pass.
        contents: blob id to bytes.
        dest: the folder; made with its parents.

    Raises:
        FasttrackError: the folder is not empty or cannot be written.
    """
    try:
        dest.mkdir(parents=True, exist_ok=True)
        if any(dest.iterdir()):
            raise FasttrackError(
                "the folder is not empty", where=str(dest), expected="a new or empty folder", next=f"rm -r {dest}"
            )
        dest.chmod(0o755)
        for entry in entries:
            target = dest / entry.path
            _make_parents(dest, target)
            target.write_bytes(contents[entry.blob])
            target.chmod(0o755 if entry.mode == MODE_EXECUTABLE else 0o644)
    except OSError as error:
        raise disk_error(error, Path(error.filename or dest)) from error


def _make_parents(root: Path, target: Path) -> None:
    for folder in reversed(target.relative_to(root).parents[:-1]):
        path = root / folder
        if not path.exists():
            path.mkdir()
            path.chmod(0o755)


def blob_id(content: bytes) -> str:
    """Git's id of a blob with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def walk(root: Path, ignore: frozenset[str]) -> Iterator[tuple[str, str, bytes]]:
    """(path, git mode, content) of every file below a folder; links are reported, never followed.

    Folders are opened by descriptor, so that a writer who is still at work cannot swap one for a link in between.

    Raises:
        FasttrackError: a device, socket or pipe, an unreadable file or one above 64 MiB.
    """
    for folder, names, files, fd in os.fwalk(root, follow_symlinks=False):
        links = [n for n in names if stat.S_ISLNK(os.stat(n, dir_fd=fd, follow_symlinks=False).st_mode)]
        names[:] = sorted(n for n in names if n not in ignore and n not in links)
        for name in sorted([*files, *links]):
            relative = (Path(folder) / name).relative_to(root).as_posix()
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                yield relative, MODE_SYMLINK, os.fsencode(os.readlink(name, dir_fd=fd))
            elif not stat.S_ISREG(info.st_mode) or info.st_size > MAX_FILE_BYTES:
                raise FasttrackError(
                    "not a regular file of at most 64 MiB",
                    where=relative,
                    expected="source files",
                    next=f"rm {relative}",
                )
            else:
                mode = MODE_EXECUTABLE if info.st_mode & stat.S_IXUSR else MODE_FILE
                yield relative, mode, _read(name, fd, relative)


def _read(name: str, folder: int, relative: str) -> bytes:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise FasttrackError(
            f"cannot read it ({error.strerror})", where=relative, expected="a readable file", next=f"ls -l {relative}"
        ) from error
    with os.fdopen(fd, "rb") as file:
        return file.read(MAX_FILE_BYTES)
