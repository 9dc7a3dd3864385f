"""Files that survive a crash: append-only canonical JSON lines, and documents replaced in one rename.

A file of lines is only ever extended. A crash can leave one torn last line; whoever opens the file for appending next
cuts it, readers skip it, and nothing else is ever removed. Failed writes (full disk) leave the file as it was. Needs
the standard library only: the evaluation kit writes its results with it on machines that have nothing else.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import canonical
from harness.errors import FasttrackError

__all__ = ["DISK_ERRNOS", "DiskError", "JsonLines", "disk_error", "disk_errors", "fsync_folder", "write_atomic"]

DISK_ERRNOS = frozenset(
    (errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS)
)
"""How the operating system says that a place cannot be written or read."""


class DiskError(FasttrackError):
    """A full, read-only or failing disk. It says nothing about a candidate: the work stops and goes on later."""


class JsonLines:
    """One append-only JSONL file. One writer at a time; the run's lock sees to that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._repaired = False

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines in one write and wait until they are on disk.

        Raises:
            FasttrackError: full or read-only disk; the file is unchanged.
        """
        data = b"".join(canonical.line(line) + b"\n" for line in lines)
        if not data:
            return
        try:
            self._append(data)
        except OSError as error:
            raise disk_error(error, self.path) from error

    def _append(self, data: bytes) -> None:
        created = not self.path.exists()
        if created:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not self._repaired:
                _cut_torn_line(fd)
                self._repaired = True
            size = os.fstat(fd).st_size
            try:
                _write_all(fd, data)
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        if created:
            fsync_folder(self.path.parent)

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; a torn last line is skipped. An absent file has no lines.

        Raises:
            FasttrackError: a complete line is not a JSON object (names the line).
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise disk_error(error, self.path) from error
        complete = data[: data.rfind(b"\n") + 1]
        return [self._parse(number, raw) for number, raw in enumerate(complete.splitlines(), start=1)]

    def _parse(self, number: int, raw: bytes) -> dict[str, Any]:
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise FasttrackError(
                "damaged line",
                where=f"{self.path}:{number}",
                expected="one JSON object",
                next="restore the file from a backup, or start a new run",
            )
        return value


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file so that a reader or a crash sees either the old or the new content, on disk when this returns.

    Raises:
        FasttrackError: full or read-only disk; the old content stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def fsync_folder(path: Path) -> None:
    """Make created or renamed names of a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def disk_error(error: OSError, path: Path) -> DiskError:
    """An operating-system error on a path, as a message for a person."""
    why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or error
    return DiskError(
        f"cannot use the file ({why})",
        where=str(path),
        expected="a writable disk with free space; what was stored so far is kept",
        next=f"df -h {path.parent}; then resume the run",
    )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Operating-system errors of the block as a `DiskError` about a path."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _cut_torn_line(fd: int) -> None:
    """Drop bytes after the last newline. They are the rest of a write that never finished, so nobody relied on them."""
    size = os.fstat(fd).st_size
    end = size
    while end:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(fd, end)
        os.fsync(fd)
