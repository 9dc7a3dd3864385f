"""CPU time of the machine that other processes used while a block ran, from the host's kernel."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

__all__ = ["ForeignTime"]


class HasTasks(Protocol):
    """A worker."""

    def tasks(self) -> frozenset[int]:
        """Ids of its processes and threads."""
        ...


class ForeignTime:
    """Time that neither this process nor the workers used, since construction."""

    def __init__(self, workers: Iterable[HasTasks]) -> None:
        self._workers = list(workers)
        self._start = self._read()

    def share(self) -> float:
        """Share of all CPU time since construction."""
        now = self._read()
        total, busy, own = (after - before for after, before in zip(now, self._start, strict=True))
        return max(0.0, (busy - own) / total) if total > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """(all, busy, own) CPU seconds since boot."""
        fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        tick = os.sysconf("SC_CLK_TCK")
        idle = fields[3] + fields[4]
        own = time.process_time() * tick + math.fsum(_ticks(task) for w in self._workers for task in w.tasks())
        return sum(fields[:8]) / tick, (sum(fields[:8]) - idle) / tick, own / tick


def _ticks(task: int) -> int:
    """User and system ticks of one thread; 0 if it is gone."""
    try:
        text = Path(f"/proc/{task}/task/{task}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = text.rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])
