"""Which kernels the GPU ran, by symbol, as CUPTI reports them through torch's profiler.

The names come from the driver's own record of each kernel that finished, inside graph replays too: they are counted
here and judged elsewhere (`verify.protocol.path_cuda`).
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["obstacle", "traced"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the trace's events that the GPU executed."""


def traced(run: Callable[[], None]) -> dict[str, int]:
    """Run something and count what the device executed: kernel symbol, or `gpu_memcpy: ...` and the like, to count.

    Args:
        run: enqueues work; it is waited for here.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    found: Counter[str] = Counter()
    for event in events:
        kind = event.get("cat")
        if kind in _ON_DEVICE:
            found[event["name"] if kind == "kernel" else f"{kind}: {event['name']}"] += 1
    return dict(sorted(found.items()))


def obstacle(launch: Callable[[], None]) -> tuple[str | None, str | None]:
    """Whether kernels can be counted here: (why not, symbol of the traced kernel), one of them null.

    Args:
        launch: enqueues exactly one kernel.
    """
    try:
        seen = traced(launch)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        return f"the profiler failed: {type(error).__name__}: {error}"[:300], None
    if list(seen.values()) == [1]:
        return None, next(iter(seen))
    return f"one launch was traced as {seen or 'nothing'} (CUPTI may be missing or not permitted)"[:300], None
