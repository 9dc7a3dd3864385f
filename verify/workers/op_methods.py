"""Methods that run single ops inside a worker, over views into the shared buffer."""

from __future__ import annotations

import os
from typing import Any

from verify.workers.main import Method, Session

__all__ = ["METHODS"]


def ping(session: Session, **echo: Any) -> dict[str, Any]:
    """Answer with what was asked and where the worker's code comes from; touches no candidate code."""
    return {"pid": os.getpid(), "kind": session.kind, "threads": session.threads, "echo": echo, "source": __file__}


METHODS: dict[str, Method] = {"op.ping": ping}
