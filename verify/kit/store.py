"""The folder of results, R: what one kit measured on one machine, bound to the kit and to this run of it.

```
R/manifest.json       the kit's manifest
R/run.json            the kit's digest and this run's nonce, written once, first
R/raw/<gate>.jsonl    raw lines, append-only, fsynced, each with the digest of all before it (`verify.protocol.chain`)
R/sessions.jsonl      machine and clocks at each start and end
R/result.json         counts and last chain values when a session ended; absent after a crash
```
A killed run loses at most the line that was being written. One process at a time may write.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import canonical
from harness.durable import JsonLines, disk_error, write_atomic
from harness.errors import FasttrackError
from verify.protocol import chain

__all__ = ["Results", "now"]

VERSION = 1


def now() -> str:
    """UTC time, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Results:
    """An open folder of results. Several threads may append."""

    def __init__(self, root: Path, kit: str, nonce: str, lock: int) -> None:
        self.root = root
        self.kit = kit
        self.nonce = nonce
        self._lock_fd = lock
        self._mutex = threading.Lock()
        self._files: dict[str, JsonLines] = {}
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._sessions = JsonLines(root / "sessions.jsonl")

    @classmethod
    def open(cls, root: Path, kit: str, manifest: bytes, *, resume: bool) -> Results:
        """Begin a folder, or go on with one.

        Args:
            root: the folder.
            kit: digest of the kit.
            manifest: bytes of its manifest, which travel back with the results.
            resume: whether results may be there already.

        Raises:
            FasttrackError: it exists and `resume` was not asked, belongs to another kit, is in use, or cannot be
                written.
        """
        header = root / "run.json"
        begun = header.exists()
        if begun and not resume:
            raise FasttrackError(
                "holds results already", where=str(root), expected="a new folder",
                next=f"python3 kit.py run --out {root} --resume",
            )  # fmt: skip
        if not begun and root.exists() and any(root.iterdir()):
            raise FasttrackError(
                "is not empty and holds no results", where=str(root), expected="a new folder", next=f"ls {root}"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, root) from error
        lock = _lock(root)
        if not begun:
            content = {"version": VERSION, "kit": kit, "nonce": secrets.token_hex(32), "begun": now()}
            write_atomic(root / "manifest.json", manifest)
            write_atomic(header, canonical.document(content))
        run = _header(header)
        if run["kit"] != kit:
            os.close(lock)
            raise FasttrackError(
                f"belongs to kit {run['kit'][:12]}", where=str(header), expected=f"results of kit {kit[:12]}",
                next="choose another folder with --out",
            )  # fmt: skip
        return cls(root, kit, str(run["nonce"]), lock)

    def close(self) -> None:
        """Let others write."""
        os.close(self._lock_fd)

    def lines(self, gate: str) -> list[dict[str, Any]]:
        """All raw lines of a gate.

        Raises:
            FasttrackError: a line does not follow from those before it.
        """
        with self._mutex:
            return list(self._open(gate))

    def append(self, gate: str, line: Mapping[str, Any]) -> None:
        """Append a raw line; it is on disk when this returns.

        Raises:
            FasttrackError: full or read-only disk.
            ValueError: NaN, infinity or a value that JSON does not have.
        """
        with self._mutex:
            lines = self._open(gate)
            previous = lines[-1][chain.KEY] if lines else chain.start(self.kit, self.nonce, gate)
            sealed = chain.seal(previous, json.loads(canonical.line(line)))
            self._files[gate].append([sealed])
            lines.append(sealed)

    def session(self, line: Mapping[str, Any]) -> None:
        """Note what the machine says about itself, with the time."""
        with self._mutex:
            self._sessions.append([{"time": now(), **line}])

    def finish(self, outcomes: Mapping[str, Mapping[str, Any]]) -> None:
        """Write `result.json`: what the session ends with."""
        with self._mutex:
            files = {
                gate: {"lines": len(lines), "chain": lines[-1][chain.KEY]}
                for gate, lines in self._lines.items()
                if lines
            }
            content = {"version": VERSION, "kit": self.kit, "nonce": self.nonce, "ended": now(), "files": files}
            write_atomic(self.root / "result.json", canonical.document({**content, "outcomes": dict(outcomes)}))

    def _open(self, gate: str) -> list[dict[str, Any]]:
        if gate not in self._lines:
            file = JsonLines(self.root / "raw" / f"{gate}.jsonl")
            lines = file.read()
            number = chain.broken(chain.start(self.kit, self.nonce, gate), lines)
            if number is not None:
                raise FasttrackError(
                    "does not follow from the lines before it", where=f"{file.path}:{number}",
                    expected="the lines as they were written", next="begin again in a new folder",
                )  # fmt: skip
            self._files[gate], self._lines[gate] = file, lines
        return self._lines[gate]


def _header(path: Path) -> dict[str, Any]:
    try:
        value = canonical.parse(path.read_bytes())
        if value["version"] != VERSION or not all(isinstance(value[key], str) for key in ("kit", "nonce")):
            raise ValueError(f"version {value['version']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FasttrackError(
            f"not the header of results ({str(error)[:100]})", where=str(path), expected=f"version {VERSION}",
            next="choose another folder with --out",
        ) from error  # fmt: skip
    return dict(value)


def _lock(root: Path) -> int:
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise FasttrackError(
            "another process writes here", where=str(root), expected="one kit per folder of results",
            next="wait for it, or choose another folder",
        ) from error  # fmt: skip
    return fd
