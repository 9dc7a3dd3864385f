"""One cell of the path gate: place a half-layer's inputs, have it replayed, and measure what came out.

The measurements go into the raw line; `verify.protocol.path_cuda` decides on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_backend.aot.arguments import TORCH_DTYPES
from verify.evaluator.buffers import Arena
from verify.evaluator.client import Client
from verify.evaluator.compare import distance
from verify.evaluator.execute import as_tensor, bits
from verify.evaluator.half_layers import (
    Constants,
    HalfLayer,
    constant_views,
    draw,
    rows_of,
    run_reference,
    run_standard,
)
from verify.kit.card import GUARD_BYTES
from verify.kit.path_plan import Planned

__all__ = ["Expected", "expect", "walk_half"]

TIMEOUT_S = 120.0
"""Deadline of a capture and of a cell's replays; honest ones take seconds where the standard path is compiled first."""
_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Expected:
    """A cell's inputs and what its results are held against. Never leaves this process."""

    half: HalfLayer
    standard: Mapping[str, Tensor]
    """Judged binding -> rows on the standard path, after all replays."""
    earned: Mapping[str, Mapping[str, Any]]
    """Judged binding -> distance of the standard path from the fp64 reference."""


def expect(planned: Planned, constants: Constants, replays: int, device: torch.device) -> Expected:
    """Draw a cell's inputs, and run standard path and reference on them."""
    half = draw(
        planned.geometry, planned.half, batch=planned.batch, tokens=planned.tokens, context=planned.context,
        seed=planned.seed, constants=constants,
    )  # fmt: skip
    usual, exact = (run(half, replays, device) for run in (run_standard, run_reference))
    standard = {name: rows_of(half, name, tensor) for name, tensor in usual.items()}
    earned = {name: distance(rows, rows_of(half, name, exact[name])) for name, rows in standard.items()}
    return Expected(half, standard, earned)


def walk_half(
    worker: Client, planned: Planned, expected: Expected, rng: np.random.Generator, replays: int, *, profile: bool
) -> dict[str, Any]:
    """Run one cell in the worker.

    Args:
        worker: with the arm loaded.
        planned: the cell.
        expected: its inputs and expected values.
        rng: source of red-zone patterns and of what fills foreign slots and cache rows.
        replays: of the captured graph.
        profile: count kernels.

    Returns:
        `sites`, `ledger`, `kernels`, `results` (distance and what the standard path earns, by judged tensor) and
        `changed`.

    Raises:
        WorkerFailure: the worker died, or something raised in it.
    """
    half = expected.half
    arena = _place(worker, half, rng)
    views = {name: view.to_json() for name, view in arena.views().items()}
    used = worker.buffer.used
    sites = worker.call(
        "half.bind", timeout_s=TIMEOUT_S, half=planned.half, tokens=planned.tokens, mode=planned.mode, views=views,
        used=used, spoil=[planned.spoil] if planned.spoil else [],
    )["sites"]  # fmt: skip
    answer = worker.call("half.run", timeout_s=TIMEOUT_S, used=used, replays=replays, profile=profile)
    results = {}
    for name, rows in expected.standard.items():
        found = as_tensor(arena.array(name), arena.views()[name].dtype)
        got = rows_of(half, name, found).to(rows.device)
        results[name] = {"distance": distance(got, rows), "standard": dict(expected.earned[name])}
    changed = [hit.record() for hit in arena.touched()]
    return {
        "sites": sites, "ledger": answer["ledger"], "kernels": answer["kernels"], "results": results,
        "changed": changed,
    }  # fmt: skip


def _place(worker: Client, half: HalfLayer, rng: np.random.Generator) -> Arena:
    """Fill the image: NaN in everything that must not matter, and in what the sites write."""
    weights = constant_views(half)
    given = {**half.tensors, **weights}
    layout: list[tuple[str, str, tuple[int, ...]]] = [
        (name, _DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in given.items()
    ]
    layout += [(name, dtype, shape) for name, (dtype, shape) in half.produced.items()]
    worker.buffer.reset()
    arena = Arena(worker.buffer, layout, rng, GUARD_BYTES)
    arena.paint("nan")
    for name, tensor in given.items():
        free, written = half.masks.free.get(name), half.masks.written.get(name)
        unread = None if free is None else free.numpy()
        if written is None:
            arena.put_input(name, bits(tensor), free=unread, kind="nan")
        else:
            arena.put_state(name, bits(tensor), free=unread, fixed=~written.numpy(), kind="nan")
    for name in half.produced:
        arena.put_output(name, "nan")
    return arena
