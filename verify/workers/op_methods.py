"""Methods that run single ops inside a worker, over views into the shared buffer.

A call is bound once (arguments packed against the op's interface, tunables from the schedule) and replayed as often as
the evaluator asks, through the same launch lists that whole steps use. The evaluator fills and reads the buffers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verify.workers.main import Method, Session
from verify.workers.shared import View

__all__ = ["METHODS", "as_tensor"]


def ping(session: Session, **echo: Any) -> dict[str, Any]:
    """Answer with what was asked and where the worker's code comes from; touches no candidate code."""
    return {"pid": os.getpid(), "kind": session.kind, "threads": session.threads, "echo": echo, "source": __file__}


@dataclass
class _Area:
    pools: dict[int, Any] = field(default_factory=dict)
    """threads -> launch pool."""
    jitters: dict[int, Any] = field(default_factory=dict)
    """threads -> pool with random delays."""
    calls: dict[int, Any] = field(default_factory=dict)
    """handle -> bound launch list."""


def _area(session: Session) -> _Area:
    area = session.areas.setdefault("op", _Area())
    assert isinstance(area, _Area)
    return area


def load(session: Session) -> dict[str, Any]:
    """Load the arm's objects; says which file each op came from."""
    from verify.workers.arm import kernels

    return {"objects": {op: str(loaded.artifact.object_path) for op, loaded in kernels(session).items()}}


def bind(
    session: Session,
    *,
    op: str,
    tensors: Mapping[str, Any],
    attrs: Mapping[str, int | float],
    rows: int,
    threads: int,
    jitter: int | None = None,
) -> dict[str, Any]:
    """Pack one call.

    Args:
        session: the worker's.
        op: op name.
        tensors: views by name; null for an absent optional one.
        attrs: attributes by name.
        rows: M, selects the schedule's bucket.
        threads: workers of the pool.
        jitter: seed of random delays in the pool's regions; none if null.

    Returns:
        `handle` and `tunables`; or `refused`, why no planner would launch this call.
    """
    from k3_backend.aot.cpu.launch import LaunchList
    from verify.workers.arm import kernels

    loaded = kernels(session)[op]
    chosen = loaded.choose(rows)
    if chosen is None:
        return {"refused": f"no schedule bucket for {rows} rows"}
    for attr, values in loaded.supports.items():
        if attrs.get(attr) not in values:
            return {"refused": f"attribute {attr} = {attrs.get(attr)}; the kernel supports {list(values)}"}
    area = _area(session)
    launches = LaunchList(_pool(session, threads, jitter))
    launches.add(loaded, {name: as_tensor(session, view) for name, view in tensors.items()}, attrs, rows=rows)
    handle = len(area.calls)
    area.calls[handle] = launches
    return {"handle": handle, "tunables": chosen}


def replay(session: Session, *, handle: int, times: int = 1, scratch: int | None = None) -> dict[str, Any]:
    """Run a bound call.

    Args:
        session: the worker's.
        handle: from `bind`.
        times: how often, without anything in between.
        scratch: fill the launch scratch with this byte first (0xff makes NaNs); leave it as it is if null.

    Returns:
        `denormals`: whether this thread still computes with denormals afterwards.
    """
    launches = _area(session).calls[handle]
    if scratch is not None:
        launches.pool.scratch[:] = scratch
    for _ in range(times):
        launches.replay()
    return {"denormals": bool(np.float32(1e-40) * np.float32(1.0) != 0)}


def release(session: Session) -> dict[str, Any]:
    """Forget all bound calls, so that the evaluator may place other tensors at their addresses."""
    area = _area(session)
    count = len(area.calls)
    area.calls.clear()
    return {"released": count}


def spoil(session: Session, *, op: str, on: bool) -> dict[str, Any]:
    """Make an op deliberately wrong for calls first replayed from now on, or honest again: see `verify.workers.arm`."""
    from verify.workers import arm

    (arm.spoil if on else arm.unspoil)(session, op)
    return {}


def _pool(session: Session, threads: int, jitter: int | None) -> Any:
    from verify.workers.arm import kernels
    from verify.workers.stress import Jitter

    area = _area(session)
    runtime = kernels(session).runtime
    if jitter is None:
        if threads not in area.pools:
            area.pools[threads] = runtime.pool(threads)
        return area.pools[threads]
    if threads not in area.jitters:
        area.jitters[threads] = Jitter(runtime.pool(threads), jitter)
    return area.jitters[threads].pool


def as_tensor(session: Session, view: Mapping[str, Any] | None) -> Any:
    """A torch tensor over the shared buffer."""
    import torch

    if view is None:
        return None
    parsed = View.from_json(view)
    array = parsed.array(session.buffer)
    if parsed.dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if parsed.dtype == "e4m3":
        return torch.from_numpy(array).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


METHODS: dict[str, Method] = {
    "op.ping": ping,
    "op.load": load,
    "op.bind": bind,
    "op.replay": replay,
    "op.release": release,
    "op.spoil": spoil,
}
