"""Which kernels the GPU ran, by symbol and resources, as CUPTI reports them through torch's profiler.

The rows come from the driver's own record of each kernel that finished, inside graph replays too: they are counted here
and judged elsewhere (`verify.protocol.path_cuda`).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["counted", "obstacle", "traced"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the trace's events that the GPU executed."""


def traced(run: Callable[[], None]) -> list[dict[str, Any]]:
    """Run something and count what the device executed.

    Args:
        run: enqueues work; it is waited for here.

    Returns:
        One row per different kernel, sorted: `name` (its symbol, or `gpu_memcpy: ...` and the like), `block` (threads),
        `registers` per thread, `shared` (bytes of shared memory), null for what is no kernel, and `count`.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return counted(events)


def counted(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `traced` from the events of a trace."""
    found: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            found[json.dumps(_row(event))] += 1
    return [{**json.loads(row), "count": count} for row, count in sorted(found.items())]


def _row(event: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one kernel from another; the launch descriptor of an artifact names the same four."""
    if event["cat"] != "kernel":
        return {"name": f"{event['cat']}: {event['name']}", "block": None, "registers": None, "shared": None}
    facts = event["args"]
    return {
        "name": event["name"],
        "block": math.prod(facts["block"]),
        "registers": facts["registers per thread"],
        "shared": facts["shared memory"],
    }


def obstacle(launch: Callable[[], None]) -> tuple[str | None, str | None]:
    """Whether kernels can be counted here: (why not, symbol of the traced kernel), one of them null.

    Args:
        launch: enqueues exactly one kernel.
    """
    try:
        seen = traced(launch)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        return f"the profiler failed: {type(error).__name__}: {error}"[:300], None
    if [row["count"] for row in seen] == [1]:
        return None, str(seen[0]["name"])
    return f"one launch was traced as {seen or 'nothing'} (CUPTI may be missing or not permitted)"[:300], None
