"""Methods that run single ops inside a worker, over views into the shared buffer."""

from __future__ import annotations

import os
import time
from typing import Any

from verify.workers.main import Method, Session

__all__ = ["METHODS"]


def ping(session: Session, **echo: Any) -> dict[str, Any]:
    """Answer with what was asked: proves the channel and the process, nothing else."""
    return {
        "pid": os.getpid(),
        "kind": session.kind,
        "threads": session.threads,
        "echo": echo,
        "clock": time.perf_counter(),
    }


METHODS: dict[str, Method] = {"op.ping": ping}
