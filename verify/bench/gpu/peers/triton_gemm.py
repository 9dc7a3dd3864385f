"""A plain Triton kernel for the input projection: one block of output rows per program, all of k in a loop.

Best of a few block shapes, with and without dependent launch, timed per call shape in the same process, as a user's
autotuner would.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from verify.bench.gpu.arm import Arm, Inputs
from verify.bench.gpu.graphs import quick_us

__all__ = ["projection"]

_SHAPES = ((16, 256, 4, 4), (16, 512, 4, 3), (32, 256, 4, 3), (32, 128, 4, 5), (64, 128, 4, 4), (64, 64, 8, 5))
"""(rows of w, columns of k, warps, stages) of a block."""
CALLS = 48
"""Of a graph that a choice is timed by: about a millisecond."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x, w, out, tokens, width, depth,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k x[m, k] w[n, k], fp32 sum, for ROWS rows n and all m; depth is a multiple of COLUMNS."""
    gdc_launch_dependents()
    gdc_wait()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, TOKENS)
    k = tl.arange(0, COLUMNS)
    rows_in, tokens_in = n < width, m < tokens
    left = w + n[:, None] * depth + k[None, :]
    right = x + m[None, :] * depth + k[:, None]
    total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for _ in range(0, depth, COLUMNS):
        a = tl.load(left, mask=rows_in[:, None], other=0.0)
        b = tl.load(right, mask=tokens_in[None, :], other=0.0)
        total = tl.dot(a, b, total)
        left += COLUMNS
        right += COLUMNS
    at = out + m[None, :] * width + n[:, None]
    tl.store(at, total.to(tl.bfloat16), mask=rows_in[:, None] & tokens_in[None, :])


@cache
def _best(tokens: int, width: int, depth: int) -> tuple[tuple[int, int, int, int], bool]:
    """The fastest block shape for a call shape and whether to launch dependently, on weights that no cache holds."""
    x = torch.randn(tokens, depth, dtype=torch.bfloat16, device="cuda")
    weights = torch.randn(8, width, depth, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device="cuda")
    times = {}
    for shape in _SHAPES:
        try:
            _launch(x, weights[0], out, shape, dependent=False)
        except triton.runtime.errors.OutOfResources:
            continue  # too much shared memory for this many tokens
        for dependent in (False, True):
            calls = [partial(_launch, x, w, out, shape, dependent) for w in weights]
            times[shape, dependent] = quick_us(calls, CALLS)
    return min(times, key=lambda choice: times[choice])


def _launch(x: Tensor, w: Tensor, out: Tensor, shape: tuple[int, int, int, int], dependent: bool) -> None:
    rows, columns, warps, stages = shape
    tokens, depth = x.shape
    grid = (triton.cdiv(w.shape[0], rows),)
    padded = max(16, triton.next_power_of_2(tokens))
    _kernel[grid](
        x, w, out, tokens, w.shape[0], depth, TOKENS=padded, ROWS=rows, COLUMNS=columns, num_warps=warps,
        num_stages=stages, launch_pdl=dependent,
    )  # fmt: skip


def projection(inputs: Inputs) -> Arm:
    """The whole op, with the best of `_SHAPES`."""
    first = inputs.sets[0]
    width, depth = first["w"].shape
    shape, dependent = _best(inputs.cell.rows, width, depth)
    outs = [torch.empty(inputs.cell.rows, width, dtype=torch.bfloat16, device="cuda") for _ in inputs.sets]
    calls = [
        lambda t=t, o=o: _launch(t["x"], t["w"], o, shape, dependent) for t, o in zip(inputs.sets, outs, strict=True)
    ]
    return Arm(
        calls, lambda: {"out": outs[0]}, pdl=dependent, note=f"plain Triton, best of {len(_SHAPES)} block shapes",
        facts={"block": list(shape)},
    )  # fmt: skip
