"""A plain Triton MLA decode: split the cache rows of a request over programs, then merge the parts.

All heads of a request share its cache rows, so a program reads each row once. Base-2 log-sum-exp beside the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from verify.bench.gpu.arm import Arm, Inputs, Missing
from verify.bench.gpu.cells import PAGE
from verify.bench.gpu.graphs import quick_us

__all__ = ["arm"]

HEADS = 16
"""Rows of the tensor-core tile; heads beyond the call's are masked."""
LOG2E = 1.4426950408889634
_PROGRAMS = 132 * 2


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, cache, table, lengths, part_out, part_lse, heads, pages, splits, per_split, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, VALUE: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """One split of one request; ROWS is the page size, so a step reads one page."""
    gdc_launch_dependents()
    gdc_wait()
    b, split = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + b)
    h, r, c, e = tl.arange(0, HEADS), tl.arange(0, ROWS), tl.arange(0, VALUE), tl.arange(0, ROPE)
    row = VALUE + ROPE
    at = query + (b * heads + h[:, None]) * row
    inside = (h < heads)[:, None]
    q = tl.load(at + c[None, :], mask=inside, other=0.0)
    q_rope = tl.load(at + VALUE + e[None, :], mask=inside, other=0.0)
    top = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((HEADS,), dtype=tl.float32)
    total = tl.zeros((HEADS, VALUE), dtype=tl.float32)
    first = split * per_split
    for page in range(first, tl.minimum(first + per_split, tl.cdiv(length, ROWS))):
        rows = cache + (tl.load(table + b * pages + page).to(tl.int64) * ROWS + r)[:, None] * row
        held = page * ROWS + r < length
        latent = tl.load(rows + c[None, :], mask=held[:, None], other=0.0)
        rope = tl.load(rows + VALUE + e[None, :], mask=held[:, None], other=0.0)
        score = tl.dot(q_rope, tl.trans(rope), tl.dot(q, tl.trans(latent)))
        score = tl.where(held[None, :], score * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(score - new_top[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        total = tl.dot(p.to(latent.dtype), latent, total * shrink[:, None])
        top = new_top
    some = weight > 0
    out = tl.where(some[:, None], total / tl.where(some, weight, 1.0)[:, None], 0.0)
    lse = tl.where(some, top + tl.log2(weight), float("-inf"))
    to = (b * splits + split) * HEADS + h
    tl.store(part_out + to[:, None] * VALUE + c[None, :], out)
    tl.store(part_lse + to, lse)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    part_out, part_lse, out, lse, heads, splits, HEADS: tl.constexpr, VALUE: tl.constexpr
):
    """One head of one request over all splits, weighted by their log-sum-exp."""
    gdc_launch_dependents()
    gdc_wait()
    b, h = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, VALUE)
    top = -float("inf")
    for split in range(splits):
        top = tl.maximum(top, tl.load(part_lse + (b * splits + split) * HEADS + h))
    weight = 0.0
    total = tl.zeros((VALUE,), dtype=tl.float32)
    for split in range(splits):
        at = (b * splits + split) * HEADS + h
        share = tl.exp2(tl.load(part_lse + at) - top)
        weight += share
        total += share * tl.load(part_out + at * VALUE + c)
    to = b * heads + h
    tl.store(out + to * VALUE + c, (total / weight).to(tl.bfloat16))
    tl.store(lse + to, top + tl.log2(weight))


def arm(inputs: Inputs) -> Arm:
    """Splits chosen so that about two programs per multiprocessor work.

    Raises:
        Missing: a verify step.
    """
    if inputs.cell.tokens > 1:
        raise Missing("only one query token per request is compared")
    cell, g = inputs.cell, inputs.geometry
    assert cell.context is not None
    pages = -(-cell.context // PAGE)
    splits = max(1, min(pages, _PROGRAMS // cell.batch))
    per_split = -(-pages // splits)
    splits = -(-pages // per_split)
    part_out = torch.empty(cell.batch, splits, HEADS, g.kv_lora, dtype=torch.float32, device="cuda")
    part_lse = torch.empty(cell.batch, splits, HEADS, dtype=torch.float32, device="cuda")
    outs = [torch.empty(cell.batch, g.heads, g.kv_lora, dtype=torch.bfloat16, device="cuda") for _ in inputs.sets]
    sums = [torch.empty(cell.batch, g.heads, dtype=torch.float32, device="cuda") for _ in inputs.sets]
    scale = float(inputs.attrs["scale"]) * LOG2E

    def launch(t: Mapping[str, Tensor], out: Tensor, lse: Tensor, dependent: bool) -> None:
        _attend[cell.batch, splits](
            t["query"], t["kv_cache"], t["block_table"], t["seq_lens"], part_out, part_lse, g.heads, pages, splits,
            per_split, scale, HEADS=HEADS, ROWS=PAGE, VALUE=g.kv_lora, ROPE=g.pe, num_warps=8, num_stages=2,
            launch_pdl=dependent,
        )  # fmt: skip
        _merge[cell.batch, g.heads](
            part_out,
            part_lse,
            out,
            lse,
            g.heads,
            splits,
            HEADS=HEADS,
            VALUE=g.kv_lora,
            num_warps=4,
            launch_pdl=dependent,
        )

    def results() -> Mapping[str, Tensor]:
        return {"out": outs[0], "lse": sums[0]}

    def calls(dependent: bool) -> list[Callable[[], None]]:
        return [partial(launch, t, o, s, dependent) for t, o, s in zip(inputs.sets, outs, sums, strict=True)]

    dependent = quick_us(calls(dependent=True)) < quick_us(calls(dependent=False))
    note = "plain Triton, split and merge; launched dependently where that is faster"
    return Arm(calls(dependent), results, dependent, note, facts={"splits": splits})
