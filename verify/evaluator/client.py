"""The evaluator's end of one worker process: call methods on it, notice how it dies.

Everything that the worker does after loading a candidate's objects is untrusted. So this end owns the clock and the
deadline, refuses messages without the run's nonce, reads no result from stdout, and turns every way of dying into a
`WorkerFailure` with the facts. How a worker is started is its subclasses' business: `verify.evaluator.worker` in the
sandbox, `verify.kit.child` on a GPU machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verify.evaluator.failures import WorkerCrashed, WorkerError, WorkerProtocolError, WorkerTimeout
from verify.evaluator.memory import SharedBuffer
from verify.workers.protocol import Channel, ChannelClosed, ChannelTimeout, ProtocolError

__all__ = ["START_TIMEOUT_S", "Client"]

START_TIMEOUT_S = 60.0
_LOG_TAIL_BYTES = 4096


class Client:
    """A running worker.

    Args:
        process: the worker, or the sandbox around it.
        channel: control channel to it.
        buffer: memory shared with it.
        log: file with its stdout and stderr.
        kill: ends the process and all that it started, and waits for it.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: Channel,
        buffer: SharedBuffer,
        log: Path,
        kill: Callable[[subprocess.Popen[bytes]], None],
    ) -> None:
        self._process = process
        self._channel = channel
        self._requests = 0
        self._last_method = "start"
        self._kill = kill
        self.buffer = buffer
        self.log = log
        """File with the worker's stdout and stderr."""

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

    def finish(self, timeout_s: float) -> int | None:
        """Let the worker end by itself; its exit status, null if it does not end in time. `stop` has still to follow.

        What a tool around the worker says at its end is lost with `stop`, which kills.
        """
        self._channel.close()
        return _wait(self._process, timeout_s)

    def stop(self) -> None:
        """Kill the process tree, wait for it and release the buffer's descriptor. Idempotent."""
        self._channel.close()
        self._kill(self._process)
        self.buffer.close()

    def greet(self, sock: socket.socket, nonce: str, hello: dict[str, Any], timeout_s: float) -> None:
        """Send the nonce and the first message, and wait for the worker to say that it is there."""
        with contextlib.suppress(BrokenPipeError):  # a process that is already dead is reported by the exchange below
            sock.sendall(nonce.encode() + b"\n")
        self._exchange(hello, timeout_s)

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self._channel.send(message)
            return self._channel.receive(timeout_s)
        except ChannelClosed:
            raise self._crash() from None
        except ChannelTimeout:
            self._kill(self._process)
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
            self._kill(self._process)
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
        self._kill(self._process)
        return WorkerProtocolError(f"{self._last_method}: {what}", method=self._last_method, log=self._log_tail())

    def _log_tail(self) -> str:
        with self.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace")


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
