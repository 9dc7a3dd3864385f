"""AttnRes as stock serving runs it on a GPU: one plain fused Triton kernel, a program per row.

In eager torch the site is a dozen launches and five times as long. fla has a fused kernel of the mix and its norm, too,
of about this speed; it takes every saved row as a tensor of its own and tunes itself on first use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Updates prefix and blocks in place, returns out [M, D] bf16.

    Args:
        t: prefix [M, D], delta [M, D] or None, blocks [M, NB, D], res_norm, res_proj, out_norm [D], all bf16, on a GPU.
        a: add_delta, write_block, sources, round_mix, eps.
    """
    prefix, blocks = need(t, "prefix"), need(t, "blocks")
    rows, width = prefix.shape
    out = torch.empty_like(prefix)
    _mix[(rows,)](
        prefix, need(t, "delta") if a["add_delta"] else prefix, blocks, need(t, "res_norm"), need(t, "res_proj"),
        need(t, "out_norm"), out, float(a["eps"]), WIDTH=width, PADDED=triton.next_power_of_2(width),
        SAVED=blocks.shape[1], ADD=int(a["add_delta"]), WRITE=int(a["write_block"]), SOURCES=int(a["sources"]),
        ROUND=int(a["round_mix"]), num_warps=8,
    )  # fmt: skip
    return {"out": out}


@triton.jit  # type: ignore[untyped-decorator]
def _mix(  # type: ignore[no-untyped-def]
    prefix, delta, blocks, res_norm, res_proj, out_norm, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SAVED: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr, SOURCES: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    real = column < WIDTH
    own = tl.load(prefix + row * WIDTH + column, mask=real, other=0.0).to(tl.float32)
    if ADD:
        own += tl.load(delta + row * WIDTH + column, mask=real, other=0.0).to(tl.float32)
        own = own.to(tl.bfloat16).to(tl.float32)
        tl.store(prefix + row * WIDTH + column, own.to(tl.bfloat16), mask=real)
    if WRITE >= 0:
        tl.store(blocks + (row * SAVED + WRITE) * WIDTH + column, own.to(tl.bfloat16), mask=real)
    mix = own
    if SOURCES > 0:
        key = tl.load(res_norm + column, mask=real, other=0.0).to(tl.float32)
        key *= tl.load(res_proj + column, mask=real, other=0.0).to(tl.float32)
        top = tl.sum(own * key, 0) * tl.rsqrt(tl.sum(own * own, 0) / WIDTH + eps)
        total = 1.0
        for source in tl.static_range(SOURCES):
            if source == WRITE:
                saved = own
            else:
                saved = tl.load(blocks + (row * SAVED + source) * WIDTH + column, mask=real, other=0.0).to(tl.float32)
            score = tl.sum(saved * key, 0) * tl.rsqrt(tl.sum(saved * saved, 0) / WIDTH + eps)
            higher = tl.maximum(top, score)
            shrink, weight = tl.exp(top - higher), tl.exp(score - higher)
            total = total * shrink + weight
            mix = mix * shrink + weight * saved
            top = higher
        mix /= total
    if ROUND:
        mix = mix.to(tl.bfloat16).to(tl.float32)
    scale = tl.rsqrt(tl.sum(mix * mix, 0) / WIDTH + eps)
    weight_out = tl.load(out_norm + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (mix * scale * weight_out).to(tl.bfloat16), mask=real)
