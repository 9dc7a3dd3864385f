"""Walk a worker through a chain of decode steps and measure what came out and what was touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.evaluator.buffers import Arena
from verify.evaluator.compare import distance
from verify.evaluator.steps import Chain, batch_json, ownership
from verify.evaluator.worker import Worker

__all__ = ["STEP_TIMEOUT_S", "distance", "walk"]

STEP_TIMEOUT_S = 60.0
"""Deadline of one step; honest steps of small models take milliseconds, their capture up to seconds."""


def walk(
    worker: Worker,
    chain: Chain,
    expected: Sequence[Tensor],
    rng: np.random.Generator,
    *,
    mode: str,
    threads: int,
    spoil: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a chain of steps in the worker.

    Args:
        worker: with `path.open` done.
        chain: start and batches.
        expected: hidden of the standard path, per step.
        rng: source of red-zone patterns and of what fills foreign slots and cache rows.
        mode: `decode_backend` of the worker.
        threads: workers of the specialised path.
        spoil: ops made deliberately wrong.

    Returns:
        `distances` from the standard path per step, `refusals`, `ledger`, `changed_pools`, `steps`.

    Raises:
        WorkerFailure: the worker died or a step raised.
    """
    worker.buffer.reset()
    pools = chain.state.tensors()
    rows, width = expected[0].shape
    layout = [(name, "bf16" if t.dtype == torch.bfloat16 else "f32", tuple(t.shape)) for name, t in pools.items()]
    arena = Arena(worker.buffer, [*layout, ("hidden", "bf16", (rows, width))], rng)
    arena.paint("finite")
    masks = ownership(chain)
    for name, pool in pools.items():
        bits = pool.view(torch.int16).numpy().view(np.uint16) if pool.dtype == torch.bfloat16 else pool.numpy()
        fixed, free = ~masks.written[name].numpy(), masks.free[name].numpy()
        arena.put_state(name, bits, free=free, fixed=fixed, kind="finite")
    views = {name: view.to_json() for name, view in arena.views().items()}
    hidden = views.pop("hidden")
    worker.call("path.bind", timeout_s=STEP_TIMEOUT_S, mode=mode, pools=views, threads=threads, spoil=list(spoil))
    refusals: list[list[str]] = []
    distances: list[dict[str, Any]] = []
    for batch, want in zip(chain.batches, expected, strict=True):
        arena.put_output("hidden", "nan")
        answer = worker.call("path.step", timeout_s=STEP_TIMEOUT_S, batch=batch_json(batch), hidden=hidden)
        refusals += answer["refusal"] or []
        got = torch.from_numpy(arena.array("hidden").view(np.int16)).view(torch.bfloat16)
        distances.append(distance(got, want))
    return {
        "steps": len(expected),
        "distances": distances,
        "refusals": refusals,
        "ledger": worker.call("path.ledger", timeout_s=STEP_TIMEOUT_S),
        "changed_pools": sorted({hit.tensor for hit in arena.touched()}),
    }
