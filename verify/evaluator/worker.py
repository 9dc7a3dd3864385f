"""Client of one sandboxed worker process: start it, call methods on it, notice how it dies.

The worker is trusted Python from an export of the base commit which loads the arm's objects; everything after that
load is untrusted. So this end owns the clock and the deadline, refuses messages without the run's nonce, reads no
result from stdout, and turns every way of dying into a `WorkerFailure` with the facts. It does not judge outputs:
that is `verify.evaluator.compare` on the bytes of `Worker.buffer`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from harness import sandbox
from verify.protocol.decision import Finding
from verify.workers.protocol import Channel, ChannelClosed, ChannelTimeout, ProtocolError
from verify.workers.shared import ALIGNMENT, ITEM_BYTES, View

__all__ = [
    "ArmSpec", "SharedBuffer", "Worker", "WorkerCrashed", "WorkerError", "WorkerFailure", "WorkerProtocolError",
    "WorkerTimeout",
]  # fmt: skip

START_TIMEOUT_S = 60.0
LOG_BYTES = 16 << 20
"""Where a worker's log ends: writes beyond it fail inside the worker."""
_MAPPED_BYTES = 16 << 30
_LOG_TAIL_BYTES = 4096
_SCRATCH_FILE_BYTES = 1 << 30
"""Largest file of an arm with a scratch folder: a compiler's precompiled header takes hundreds of megabytes."""
_BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from verify.workers.main import main; main()"


@dataclass(frozen=True)
class ArmSpec:
    """What a worker runs."""

    kind: str
    """`standard` or `specialized`."""
    artifacts: dict[str, Path] = field(default_factory=dict)
    """op name -> folder of its built artifact, and `runtime` -> that of the launcher; empty for the standard arm."""
    schedules: Path | None = None
    """Folder of the arm's schedules: the one that holds `cpu/`."""


class WorkerFailure(Exception):  # noqa: N818 - error classes are named for the finding
    """A worker did not answer as asked. Subclasses say how; `record` is the raw line's account of it."""

    kind: ClassVar[str]

    def __init__(self, message: str, *, method: str, log: str = "", detail: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.method = method
        """The method that was running."""
        self.log = log
        """Last bytes of the worker's stdout and stderr: evidence for people, never parsed."""
        self.detail = detail or {}

    def record(self) -> dict[str, Any]:
        """JSON for a raw line."""
        return {"failure": self.kind, "method": self.method, "message": str(self), "log": self.log, **self.detail}

    def finding(self, gate: str, *, where: str, next: str) -> Finding:  # noqa: A002 - the field's name everywhere
        """The failure as `<gate>.<kind>`."""
        return Finding(
            f"{gate}.{self.kind}", str(self), where, "the call returns within its deadline, the process lives on", next
        )


class WorkerCrashed(WorkerFailure):
    """The process ended, whatever its exit status: success is an answer, never an exit code."""

    kind = "crash"


class WorkerTimeout(WorkerFailure):
    """No answer before the deadline; the process tree was killed."""

    kind = "timeout"


class WorkerProtocolError(WorkerFailure):
    """A message that trusted worker code never sends; the process tree was killed."""

    kind = "protocol"


class WorkerError(WorkerFailure):
    """The method raised in the worker, for example because a kernel returned an error. The worker lives on."""

    kind = "error"


class SharedBuffer:
    """One anonymous shared mapping with a bump allocator; owned by the evaluator.

    The file is sealed against growing and shrinking: truncation by a worker could kill the evaluator by SIGBUS.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("fasttrack-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        """The whole buffer, u8 [nbytes]."""
        self._used = 0

    def alloc(self, nbytes: int, *, alignment: int = ALIGNMENT) -> int:
        """Reserve bytes and return their offset.

        Raises:
            MemoryError: the buffer is full; says how much was asked and left.
        """
        offset = -(-self._used // alignment) * alignment
        if offset + nbytes > self.bytes.nbytes:
            raise MemoryError(
                f"shared buffer: {nbytes} bytes asked, {self.bytes.nbytes - offset} of {self.bytes.nbytes} left"
            )
        self._used = offset + nbytes
        return offset

    def view(self, dtype: str, shape: Sequence[int]) -> View:
        """Reserve a tensor; its content is whatever was there."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
        return View(self.alloc(nbytes), dtype, tuple(shape))

    def array(self, view: View) -> npt.NDArray[Any]:
        """The view's elements, sharing memory."""
        return view.array(self.bytes)

    @property
    def used(self) -> int:
        """Bytes from the start that are reserved."""
        return self._used

    def reset(self, mark: int = 0) -> None:
        """Forget every reservation above `mark`; the memory is kept."""
        self._used = mark

    def close(self) -> None:
        """Release the descriptor; the mapping goes when the last array over it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Worker:
    """A running worker. Use `Worker.start`."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, buffer: SharedBuffer, log: Path) -> None:
        self._process = process
        self._channel = channel
        self._requests = 0
        self._last_method = "start"
        self.buffer = buffer
        self.log = log
        """File with the worker's stdout and stderr."""

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        arm: ArmSpec,
        *,
        base_tree: Path,
        run_dir: Path,
        threads: int,
        buffer_bytes: int,
        scratch: Path | None = None,
        timed: bool = False,
    ) -> Iterator[Worker]:
        """Start a worker and stop its whole process tree at the end, however the block is left.

        Args:
            arm: objects and schedules to load; their folders become readable in the sandbox.
            base_tree: export of the base commit; the worker imports its Python from there only.
            run_dir: where the log file goes; not visible to the worker.
            threads: threads that kernels and torch may use.
            buffer_bytes: size of the shared buffer; memory is taken when touched.
            scratch: a folder the worker may write, for arms whose code is trusted (a compile cache).
            timed: torch's threads spin between operations, as in an engine; else they sleep and leave the CPUs to
                others.

        Raises:
            WorkerFailure: it did not come up.
            FasttrackError: there is no sandbox on this machine.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        log = run_dir / f"worker-{arm.kind}-{secrets.token_hex(4)}.log"
        buffer = SharedBuffer(buffer_bytes)
        ours, theirs = socket.socketpair()
        nonce = secrets.token_hex(16)
        try:
            process = _spawn(
                arm,
                base_tree=base_tree,
                log=log,
                threads=threads,
                control=theirs.fileno(),
                memory=buffer.fd,
                scratch=scratch,
                timed=timed,
            )
        except BaseException:
            ours.close()
            buffer.close()
            raise
        finally:
            theirs.close()
        worker = cls(process, Channel(ours, nonce), buffer, log)
        try:
            worker._greet(arm, ours, nonce, threads)
            yield worker
        finally:
            worker.stop()

    def call(self, method: str, *, timeout_s: float, **params: Any) -> dict[str, Any]:
        """Run a method in the worker and return its answer.

        Args:
            method: `<area>.<name>`.
            timeout_s: deadline on the evaluator's clock; past it the process tree is killed.
            params: JSON values.

        Raises:
            WorkerError: the method raised; the worker can be called again.
            WorkerCrashed, WorkerTimeout, WorkerProtocolError: the worker is gone.
        """
        return self.timed_call(method, timeout_s=timeout_s, **params)[0]

    def timed_call(self, method: str, *, timeout_s: float, **params: Any) -> tuple[dict[str, Any], float]:
        """As `call`; also the seconds between sending the request and having the answer, on the evaluator's clock."""
        self._requests += 1
        self._last_method = method
        start = time.perf_counter()
        message = self._exchange({"id": self._requests, "method": method, "params": params}, timeout_s)
        seconds = time.perf_counter() - start
        if message.get("id") != self._requests:
            raise self._protocol_failure(f"answer to request {message.get('id')!r}; expected {self._requests}")
        if "error" in message:
            error = message["error"]
            raise WorkerError(
                f"{method}: {error['type']}: {error['message']}",
                method=method,
                log=self._log_tail(),
                detail={"traceback": str(error.get("traceback", ""))},
            )
        result = message.get("result")
        if not isinstance(result, dict):
            raise self._protocol_failure("answer without a result object")
        return result, seconds

    @property
    def pid(self) -> int:
        """Process id of the sandbox (the worker itself has another one inside its own namespace)."""
        return self._process.pid

    def tasks(self) -> frozenset[int]:
        """Ids of all processes and threads inside, as the host's kernel lists them; the worker cannot hide any."""
        found: set[int] = set()
        waiting = [self._process.pid]
        while waiting:
            for task in Path(f"/proc/{waiting.pop()}/task").glob("*"):
                found.add(int(task.name))
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended in between
                    waiting += [int(child) for child in (task / "children").read_text().split()]
        return frozenset(found)

    def stop(self) -> None:
        """Kill the process tree, wait for it and release the buffer's descriptor. Idempotent."""
        self._channel.close()
        sandbox.kill(self._process)
        self.buffer.close()

    def _greet(self, arm: ArmSpec, sock: socket.socket, nonce: str, threads: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # a process that is already dead is reported by the exchange below
            sock.sendall(nonce.encode() + b"\n")
        hello = {
            "kind": arm.kind,
            "artifacts": {op: str(path) for op, path in arm.artifacts.items()},
            "schedules": None if arm.schedules is None else str(arm.schedules),
            "threads": threads,
        }
        self._exchange(hello, START_TIMEOUT_S)

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self._channel.send(message)
            return self._channel.receive(timeout_s)
        except ChannelClosed:
            raise self._crash() from None
        except ChannelTimeout:
            sandbox.kill(self._process)
            raise WorkerTimeout(
                f"{self._last_method}: no answer within {timeout_s:g} s",
                method=self._last_method,
                log=self._log_tail(),
                detail={"timeout_s": timeout_s},
            ) from None
        except ProtocolError as error:
            raise self._protocol_failure(str(error)) from error

    def _crash(self) -> WorkerCrashed:
        status = _wait(self._process, 5.0)
        if status is None:
            sandbox.kill(self._process)
            how = "closed its control channel"
            detail: dict[str, Any] = {"signal": None, "status": None}
        else:
            number = -status if status < 0 else status - 128 if 128 < status <= 192 else None  # bubblewrap says 128 + n
            name = None if number is None else signal.Signals(number).name
            how = f"was ended by {name}" if name else f"exited with status {status} before answering"
            detail = {"signal": name, "status": status}
        return WorkerCrashed(
            f"{self._last_method}: the worker {how}", method=self._last_method, log=self._log_tail(), detail=detail
        )

    def _protocol_failure(self, what: str) -> WorkerProtocolError:
        sandbox.kill(self._process)
        return WorkerProtocolError(f"{self._last_method}: {what}", method=self._last_method, log=self._log_tail())

    def _log_tail(self) -> str:
        with self.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace")


_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Weights and caches on huge pages, as serving has them: where small pages happen to lie makes processes of the same
arm differ by some per cent."""

_SLEEPING = {"OMP_WAIT_POLICY": "passive"}


def _spawn(
    arm: ArmSpec,
    *,
    base_tree: Path,
    log: Path,
    threads: int,
    control: int,
    memory: int,
    scratch: Path | None,
    timed: bool,
) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", "-B", "-c", _BOOTSTRAP, str(base_tree), str(control), str(memory)]
    readable = [base_tree, *sandbox.python_paths(), *arm.artifacts.values()]
    if arm.schedules is not None:
        readable.append(arm.schedules)
    with log.open("ab") as output:
        return sandbox.popen(
            argv,
            ro=readable,
            rw=[] if scratch is None else [scratch],
            cwd=base_tree,
            env=_HUGE_PAGES | dict.fromkeys(_THREAD_COUNTS, str(threads)) | ({} if timed else _SLEEPING),
            pass_fds=(control, memory),
            limits=sandbox.Limits(
                file_bytes=LOG_BYTES if scratch is None else _SCRATCH_FILE_BYTES,
                mapped_bytes=_MAPPED_BYTES + os.fstat(memory).st_size,
            ),
            stdout=output,
            stderr=output,
        )


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
