"""Workers on a GPU machine: a process of its own per op, so that a kernel that breaks its context ends only that.

There is no sandbox: no host code of a candidate runs. The worker is the kit's own Python; only device code is
untrusted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from verify.evaluator.client import Client
from verify.evaluator.memory import SharedBuffer
from verify.workers.protocol import Channel

__all__ = ["BOOTSTRAP", "started", "started_arm"]

BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from verify.workers.main import main; main()"
START_TIMEOUT_S = 180.0
"""A first import of torch from a cold disk takes its time."""


def started(
    op: str,
    artifact: Path,
    schedules: Path,
    *,
    code: Path,
    logs: Path,
    buffer_bytes: int,
    bootstrap: str = BOOTSTRAP,
    wrapper: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> contextlib.AbstractContextManager[Client]:
    """Start a worker for one op; see `started_arm`.

    Args:
        op: op name.
        artifact: folder of its artifact.
        schedules: the arm's schedules.
        code: folder of the trusted Python.
        logs: where the log file goes.
        buffer_bytes: size of the image of device memory; pages are taken when touched.
        bootstrap: first line of the worker; tests give one that has no GPU.
        wrapper: command that starts the worker's, such as a sanitizer.
        environment: variables beside this process's own.
    """
    return started_arm(
        op, {op: artifact}, schedules, code=code, logs=logs, buffer_bytes=buffer_bytes, bootstrap=bootstrap,
        wrapper=wrapper, environment=environment,
    )  # fmt: skip


@contextlib.contextmanager
def started_arm(
    name: str,
    artifacts: Mapping[str, Path],
    schedules: Path | None,
    *,
    code: Path,
    logs: Path,
    buffer_bytes: int,
    bootstrap: str = BOOTSTRAP,
    wrapper: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Client]:
    """Start a worker and stop it at the end, however the block is left.

    Args:
        name: in the log's name.
        artifacts: folders of artifacts, by the names that the worker's methods use; none for a standard arm.
        schedules: the arm's schedules; None for a standard arm.
        code: folder of the trusted Python.
        logs: where the log file goes.
        buffer_bytes: size of the shared buffer; pages are taken when touched.
        bootstrap: first line of the worker; tests give one that has no GPU.
        wrapper: command that starts the worker's, such as a sanitizer.
        environment: variables beside this process's own.

    Raises:
        WorkerFailure: it did not come up.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"worker-{name}-{secrets.token_hex(4)}.log"
    buffer = SharedBuffer(buffer_bytes)
    ours, theirs = socket.socketpair()
    nonce = secrets.token_hex(16)
    argv = [*wrapper, sys.executable, "-B", "-c", bootstrap, str(code), str(theirs.fileno()), str(buffer.fd)]
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv, cwd=code, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=(theirs.fileno(), buffer.fd), start_new_session=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
    except BaseException:
        ours.close()
        buffer.close()
        raise
    finally:
        theirs.close()
    worker = Client(process, Channel(ours, nonce), buffer, log, _kill)
    hello = {
        "kind": "card", "artifacts": {key: str(path) for key, path in artifacts.items()},
        "schedules": None if schedules is None else str(schedules), "threads": 1,
    }  # fmt: skip
    try:
        worker.greet(ours, nonce, hello, START_TIMEOUT_S)
        yield worker
    finally:
        worker.stop()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the worker's whole process group; a process that hangs in the driver is waited for only so long."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30.0)
