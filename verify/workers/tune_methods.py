"""Advisory timing of schedule points inside a worker, by the worker's own clock. No gate reads these numbers.

Each point is bound once over several input sets (as many as the model has layers with the op, so that states do not
stay in a cache that a real step would have flushed); all points are then timed in turns, so that drift of the machine
hits them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verify.workers.main import Method, Session
from verify.workers.op_methods import as_tensor

__all__ = ["METHODS"]

MIN_SECONDS = 1e-3
"""Length of one timed turn of one point."""


def points(
    session: Session,
    *,
    op: str,
    rows: int,
    sets: Sequence[Mapping[str, Any]],
    attrs: Mapping[str, int | float],
    tunables: Sequence[Mapping[str, int]],
    turns: int,
) -> dict[str, Any]:
    """Time points of one op.

    Args:
        session: the worker's.
        op: op name.
        rows: M of every set.
        sets: views by tensor name; null for an absent optional one.
        attrs: attributes by name.
        tunables: the points.
        turns: interleaved timings per point; their median counts.

    Returns:
        `seconds` per call of each point.
    """
    from k3_backend.aot.cpu.launch import LaunchList
    from verify.workers.arm import kernels

    loaded = kernels(session)[op]
    pool = kernels(session).runtime.pool(session.threads)
    try:
        bound = []
        for point in tunables:
            launches = LaunchList(pool)
            for views in sets:
                tensors = {name: as_tensor(session, view) for name, view in views.items()}
                launches.add(loaded, tensors, attrs, rows=rows, tunables=point)
            bound.append(launches)
        loops = [_loops(launches) for launches in bound]
        samples: list[list[float]] = [[] for _ in bound]
        for turn in range(turns):
            for at in range(len(bound)):
                index = (at + turn) % len(bound)
                samples[index].append(_time(bound[index], loops[index]) / len(sets))
        return {"seconds": [statistics.median(s) for s in samples]}
    finally:
        pool.close()


def _time(launches: Any, loops: int) -> float:
    """Seconds per replay."""
    started = time.perf_counter()
    for _ in range(loops):
        launches.replay()
    return (time.perf_counter() - started) / loops


def _loops(launches: Any) -> int:
    """Replays that fill one turn; the first, cold one is not counted."""
    launches.replay()
    loops = 1
    while True:
        seconds = _time(launches, loops) * loops
        if seconds >= MIN_SECONDS:
            return loops
        loops = max(2 * loops, int(loops * MIN_SECONDS / max(seconds, 1e-9)))


METHODS: dict[str, Method] = {"tune.points": points}
