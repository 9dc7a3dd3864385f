"""Workers in the sandbox: start one on an arm's objects, and stop its whole process tree at the end.

The worker is trusted Python from an export of the base commit which loads the arm's objects; everything after that
load is untrusted. What can be asked of it, and how its failures show, is `verify.evaluator.client`. It does not judge
outputs: that is `verify.evaluator.compare` on the bytes of `Worker.buffer`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness import sandbox
from verify.evaluator.client import START_TIMEOUT_S, Client
from verify.evaluator.failures import WorkerCrashed, WorkerError, WorkerFailure, WorkerProtocolError, WorkerTimeout
from verify.evaluator.memory import SharedBuffer
from verify.workers.protocol import Channel

__all__ = [
    "ArmSpec", "SharedBuffer", "Worker", "WorkerCrashed", "WorkerError", "WorkerFailure", "WorkerProtocolError",
    "WorkerTimeout",
]  # fmt: skip

LOG_BYTES = 16 << 20
"""Where a worker's log ends: writes beyond it fail inside the worker."""
_MAPPED_BYTES = 16 << 30
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


class Worker(Client):
    """A running worker in the sandbox. Use `Worker.start`."""

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
        worker = cls(process, Channel(ours, nonce), buffer, log, sandbox.kill)
        hello = {
            "kind": arm.kind,
            "artifacts": {op: str(path) for op, path in arm.artifacts.items()},
            "schedules": None if arm.schedules is None else str(arm.schedules),
            "threads": threads,
        }
        try:
            worker.greet(ours, nonce, hello, START_TIMEOUT_S)
            yield worker
        finally:
            worker.stop()


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
