"""Keep all CPUs busy while a case runs, so that kernels meet a loaded machine and not only a quiet one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from harness.sandbox_command import required

__all__ = ["Competitors"]

_SPIN = "print(flush=True)\nwhile True: pass"
"""The line says that the process runs, and with it that it dies with its parent."""


class Competitors:
    """Processes that spin, one per CPU, stopped except inside `busy`. Use as a context manager.

    They end with this process, however it ends: what is left would take a CPU from every later measurement.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Competitors:
        command = [required("setpriv"), "--pdeathsig", "KILL", "--", sys.executable, "-I", "-S", "-c", _SPIN]
        for _ in os.sched_getaffinity(0):
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd="/"))
        for process in self._processes:
            assert process.stdout is not None
            with process.stdout:
                process.stdout.readline()
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Spin during the block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)
