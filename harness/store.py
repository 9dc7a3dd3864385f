"""The run store: one folder per run, from which everything about the run can be recomputed after any crash.

```
runs/<run_id>/
  run.json                 what was asked, written once
  lock                     held (flock) by the one writer
  events.jsonl             canonical history: proposals, outcomes, state changes; append-only
  run.sqlite               the same as tables, for queries; rebuilt from events.jsonl whenever they differ
  candidates/001-<head12>/ raw/<gate>.jsonl, gates/<gate>.json, and what gates add
```
Two runs never share a file. The store judges nothing and starts nothing; it does not know what a gate measures.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from pydantic import ValidationError

from harness import canonical
from harness.errors import FasttrackError
from harness.evidence import JsonLines, disk_error, fsync_folder, write_atomic
from harness.proposals import CandidateOutcome, CandidateRow
from harness.records import EvidenceRef, GateName, GateResult
from harness.tables import Tables

__all__ = ["EvidenceSink", "RunStore", "new_run_id"]

_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def new_run_id() -> str:
    """A sortable, unique run id: UTC second plus 32 random bits."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


class EvidenceSink:
    """The evidence folder of one verification: `raw/<name>.jsonl` and `gates/<gate>.json`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, JsonLines] = {}
        self._lock = threading.Lock()

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append one line to `raw/<name>.jsonl`; it is on disk when this returns. Several threads may append.

        Raises:
            FasttrackError: full or read-only disk; earlier lines are intact.
            ValueError: NaN, infinity or a value that JSON does not have.
        """
        self.append_block(name, [line])

    def append_block(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append several lines in one write and one wait for the disk; after a crash a prefix of them may remain."""
        with self._lock:
            self._file(name).append(lines)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All complete lines of `raw/<name>.jsonl`; empty if it does not exist."""
        return self._file(name).read()

    def ref(self, name: str) -> EvidenceRef:
        """Reference to `raw/<name>.jsonl`, relative to this folder."""
        return self._file(name).ref(self.root)

    def save_gate(self, result: GateResult) -> None:
        """Write `gates/<gate>.json` atomically; the gate counts as finished from then on."""
        write_atomic(self._gate_path(result.gate), result.model_dump_json(indent=2).encode() + b"\n")

    def gate(self, name: GateName) -> GateResult | None:
        """The finished result of a gate, or None.

        Raises:
            FasttrackError: the file is damaged.
        """
        path = self._gate_path(name)
        try:
            return GateResult.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise FasttrackError(
                "damaged gate result",
                where=str(path),
                expected="a GateResult record",
                next=f"rm {path} and resume the run",
            ) from error

    def _gate_path(self, name: str) -> Path:
        return self.root / "gates" / f"{name}.json"

    def _file(self, name: str) -> JsonLines:
        if not _NAME.fullmatch(name):
            raise ValueError(f"evidence name {name!r} must match {_NAME.pattern}")
        return self._files.setdefault(name, JsonLines(self.root / "raw" / f"{name}.jsonl"))


class RunStore:
    """One run. Use `create` or `open` as a context manager to write, `read` to look at a run that may be in progress.

    Every change is one event: it is appended to `events.jsonl` (fsynced) and then shown in `run.sqlite`. A crash
    between the two is repaired at the next opening.
    """

    def __init__(self, path: Path, lock_fd: int | None) -> None:
        self.path = path
        self.run_id = path.name
        self._lock_fd = lock_fd
        self._events = JsonLines(path / "events.jsonl")
        self._candidates: dict[int, CandidateRow] = {}
        self._state: dict[str, Any] = {}
        self._totals: dict[str, float] = {}
        self._count = 0
        self._tables: Tables | None = None
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        for event in self._events.read():
            self._apply(event)
        if self._lock_fd is not None:
            for row in self._candidates.values():
                self._make_folder(row)
            self._tables = Tables(self.path / "run.sqlite")
            self._tables.sync(self._count, self.candidates(), self._state, self._totals)

    # --- opening ---------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, root: Path, spec: Mapping[str, Any]) -> RunStore:
        """Start a new run below `root`; nothing existing is touched.

        Args:
            root: the `runs` folder; made if absent.
            spec: what was asked (JSON values), stored unchanged in run.json.

        Raises:
            FasttrackError: the folder cannot be written.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            while True:
                path = root / new_run_id()
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    continue
            fsync_folder(root)
        except OSError as error:
            raise disk_error(error, root) from error
        fd = _lock(path)
        write_atomic(
            path / "run.json",
            canonical.document({"schema_version": 1, "run_id": path.name, "created": _now(), "spec": dict(spec)}),
        )
        return cls(path, fd)

    @classmethod
    def open(cls, root: Path, run_id: str) -> RunStore:
        """Take up a run again, for writing. A torn last line is cut, tables are repaired.

        Raises:
            FasttrackError: unknown run, the lock is taken (names the owner), or damaged history.
        """
        path = _existing(root, run_id)
        return cls(path, _lock(path))

    @classmethod
    def read(cls, root: Path, run_id: str) -> RunStore:
        """Look at a run without locking it; methods that write raise."""
        return cls(_existing(root, run_id), None)

    @staticmethod
    def list(root: Path) -> tuple[str, ...]:
        """Ids of all runs below `root`, oldest first."""
        if not root.is_dir():
            return ()
        return tuple(sorted(p.name for p in root.iterdir() if _RUN_ID.fullmatch(p.name) and (p / "run.json").is_file()))

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. The run stays as it is."""
        if self._tables is not None:
            self._tables.close()
            self._tables = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # --- content ---------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> dict[str, Any]:
        """What was asked."""
        return dict(json.loads((self.path / "run.json").read_bytes())["spec"])

    def propose(self, key: str, *, head: str, origin: str, note: str = "") -> CandidateRow:
        """Enter a proposal into the run's history before anything judges it.

        Idempotent per key: after a crash the proposer may propose again what it cannot know was stored.

        Raises:
            FasttrackError: the key was used for another head, or the disk refuses.
        """
        known = next((row for row in self._candidates.values() if row.key == key), None)
        if known is not None:
            if known.head != head:
                raise FasttrackError(
                    f"proposal {key!r} was entered before with another commit ({known.head[:12]}, now {head[:12]})",
                    where=str(self.path),
                    expected="one commit per proposal key",
                    next="fasttrack runs",
                )
            return known
        number = len(self._candidates) + 1
        self._record({"kind": "proposed", "number": number, "key": key, "head": head, "origin": origin, "note": note})
        row = self._candidates[number]
        self._make_folder(row)
        return row

    def finish(self, number: int, outcome: CandidateOutcome, reason: str | None = None) -> CandidateRow:
        """Close a proposal, once and for good.

        Raises:
            KeyError: no such proposal.
            ValueError: unknown outcome word, or it was closed with another outcome (the same again is accepted).
        """
        row = self._candidates[number]
        if outcome not in get_args(CandidateOutcome):
            raise ValueError(f"outcome {outcome!r} is not one of {get_args(CandidateOutcome)}")
        if row.outcome is not None:
            if row.outcome != outcome:
                raise ValueError(f"candidate {number} was closed as {row.outcome}, cannot become {outcome}")
            return row
        self._record({"kind": "finished", "number": number, "outcome": outcome, "reason": reason})
        return self._candidates[number]

    def candidates(self) -> tuple[CandidateRow, ...]:
        """Every proposal in order; each exactly once."""
        return tuple(self._candidates[n] for n in sorted(self._candidates))

    def evidence(self, row: CandidateRow) -> EvidenceSink:
        """The evidence folder of a candidate."""
        return EvidenceSink(self.candidate_dir(row))

    def candidate_dir(self, row: CandidateRow) -> Path:
        """The folder of a candidate."""
        return self.path / "candidates" / row.folder

    def put(self, key: str, value: Any) -> None:
        """Store a JSON value under a name; the last one counts."""
        if self._state.get(key) != value or key not in self._state:
            self._record({"kind": "state", "key": key, "value": value})

    def get(self, key: str, default: Any = None) -> Any:
        """The stored value of a name."""
        return self._state.get(key, default)

    def spend(self, what: str, amount: float) -> float:
        """Add to a consumed budget, which survives stop and resume; returns the sum."""
        if not amount >= 0:
            raise ValueError(f"cannot spend {amount} of {what}: must be a number >= 0")
        self._record({"kind": "spent", "what": what, "amount": amount})
        return self._totals[what]

    def spent(self, what: str) -> float:
        """Sum of all that was spent under a name, over all sessions of the run."""
        return self._totals.get(what, 0.0)

    # --- events ----------------------------------------------------------------------------------------------------

    def _record(self, event: dict[str, Any]) -> None:
        if self._lock_fd is None:
            raise RuntimeError(f"run {self.run_id} is open for reading only")
        self._events.append([{"seq": self._count + 1, "time": _now(), **event}])
        self._apply(event)
        if self._tables is None:
            raise RuntimeError(f"run {self.run_id} is closed")
        self._tables.sync(self._count, self.candidates(), self._state, self._totals)

    def _apply(self, event: Mapping[str, Any]) -> None:
        self._count += 1
        if event.get("seq", self._count) != self._count:
            raise FasttrackError(
                f"event {event['seq']} follows event {self._count - 1}",
                where=f"{self._events.path}:{self._count}",
                expected="consecutive numbers: the history is damaged",
                next="restore the file from a backup",
            )
        match event["kind"]:
            case "proposed":
                row = CandidateRow(event["number"], event["key"], event["head"], event["origin"], event["note"])
                self._candidates[row.number] = row
            case "finished":
                row = self._candidates[event["number"]]
                closed = CandidateRow(
                    row.number, row.key, row.head, row.origin, row.note, event["outcome"], event["reason"]
                )
                self._candidates[row.number] = closed
            case "state":
                self._state[event["key"]] = event["value"]
            case "spent":
                self._totals[event["what"]] = self._totals.get(event["what"], 0.0) + event["amount"]
            case kind:
                raise FasttrackError(
                    f"unknown kind of event {kind!r}",
                    where=f"{self._events.path}:{self._count}",
                    expected="a run written by this version",
                    next="use the version that wrote it",
                )

    def _make_folder(self, row: CandidateRow) -> None:
        path = self.candidate_dir(row)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, path) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _existing(root: Path, run_id: str) -> Path:
    if not _RUN_ID.fullmatch(run_id) or not (root / run_id / "run.json").is_file():
        raise FasttrackError(
            f"unknown run {run_id!r}", where=str(root), expected="the id of a run", next="fasttrack runs"
        )
    return root / run_id


def _lock(path: Path) -> int:
    """Take the run's lock; the kernel drops it when the process dies, however it dies."""
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise disk_error(error, path / "lock") from error
    try:
        _flock(fd)
    except BlockingIOError:
        owner = os.pread(fd, 4096, 0).decode("utf-8", "replace").strip() or "unknown"
        os.close(fd)
        raise FasttrackError(
            f"another process works on this run ({owner})",
            where=str(path / "lock"),
            expected="one writer per run",
            next="wait for it, or stop that process and resume",
        ) from None
    except OSError as error:
        os.close(fd)
        raise disk_error(error, path / "lock") from error
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()} since {_now()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise disk_error(error, path / "lock") from error
    return fd


def _flock(fd: int, patience_s: float = 0.2) -> None:
    """A process that just died may need a moment until the kernel has dropped its lock."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
