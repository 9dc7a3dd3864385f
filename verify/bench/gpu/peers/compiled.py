"""torch.compile over an op's standard implementation, the whole op, with dependent launches where Inductor has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from k3_backend.ops.registry import standard
from verify.bench.gpu.arm import Arm, Inputs, Missing, Tensors

__all__ = ["COMPILED_BATCHES", "arm"]

COMPILED_BATCHES = (1, 64)
"""Batches at which dense ops are compiled: each shape takes seconds."""
SHAPES = 64
"""Shapes of one function that are compiled before torch gives up on it."""


@cache
def _compiled(op: str, attrs: tuple[tuple[str, int | float], ...]) -> Callable[[Tensors], Mapping[str, Tensor]]:
    """One compiled function per op and attributes; shapes are compiled when first seen."""
    from torch._inductor import config

    config.triton.enable_pdl = True
    path = standard(op)

    def call(t: Tensors) -> Mapping[str, Tensor]:
        return path(dict(t), dict(attrs))

    torch._dynamo.config.recompile_limit = SHAPES
    return torch.compile(call, fullgraph=True, dynamic=False)


def arm(inputs: Inputs) -> Arm:
    """The standard implementation, compiled.

    Raises:
        Missing: a batch that is left out for the time that compiling takes.
    """
    cell = inputs.cell
    if cell.op != "attn_res" and cell.batch not in COMPILED_BATCHES:
        raise Missing(f"compiled at batches {', '.join(map(str, COMPILED_BATCHES))} only, for time")
    function = _compiled(cell.op, tuple(sorted(inputs.attrs.items())))
    kept: dict[int, Mapping[str, Any]] = {}

    def launch(i: int) -> None:
        kept[i] = function(inputs.sets[i])

    def results() -> Mapping[str, Tensor]:
        found = dict(kept[0])
        if cell.op == "attn_res":
            found["prefix"] = inputs.sets[0]["prefix"]
        return found

    calls = [lambda i=i: launch(i) for i in range(len(inputs.sets))]
    return Arm(calls, results, pdl=True, note="the whole op; kernels that Inductor generates launch dependently")
