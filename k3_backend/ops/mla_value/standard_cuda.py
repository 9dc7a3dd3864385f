"""Value up-projection and gate as stock serving runs them on a GPU: cuBLAS, then one plain fused Triton kernel.

Several shards are merged first, in eager torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need
from k3_backend.ops.mla_value.standard import standard as eager

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Returns out [M, H*V] bf16.

    Args:
        t: partial [shards, M, H, KL] bf16, lse [shards, M, H] f32, proj [M, P] bf16, w_uv [H, V, KL] bf16, on a GPU.
        a: gate_offset.
    """
    partial, proj, w_uv = need(t, "partial"), need(t, "proj"), need(t, "w_uv")
    if partial.shape[0] > 1:
        return eager(t, a)
    heads, v_dim, _ = w_uv.shape
    rows = proj.shape[0]
    v = torch.bmm(partial[0].transpose(0, 1), w_uv.transpose(1, 2))
    out = torch.empty(rows, heads * v_dim, dtype=torch.bfloat16, device=proj.device)
    _gate[(rows, heads)](
        v, need(t, "lse"), proj, out, proj.shape[1], rows, OFFSET=int(a["gate_offset"]), HEADS=heads, V=v_dim,
        num_warps=1,
    )  # fmt: skip
    return {"out": out}


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    v, lse, proj, out, width, rows, OFFSET: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr
):
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, V)
    known = tl.load(lse + row * HEADS + head)
    value = tl.load(v + (head * rows + row) * V + column).to(tl.float32)
    gate = tl.load(proj + row * width + OFFSET + head * V + column).to(tl.float32)
    # A row that saw nothing is zero, whatever its gate holds.
    gated = tl.where(tl.abs(known) < float("inf"), value * tl.sigmoid(gate), 0.0)
    tl.store(out + (row * HEADS + head) * V + column, gated.to(tl.bfloat16))
