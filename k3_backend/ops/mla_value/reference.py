"""Merge of decode-context-parallel shards, value up-projection and gate in plain maths."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need, rounding_to_bf16

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """Out = bf16(bf16(W_UV lat) * sigmoid(gate)), lat the log-sum-exp weighted mean of the shards' rows.

    Args:
        t: partial [shards, M, H, KL], lse [shards, M, H], proj [M, P], w_uv [H, V, KL].
        a: gate_offset.
        dtype: type of the computation and of the result.
        rounding: apply the bf16 roundings of the definition.

    Returns:
        out [M, H*V]; zero where no shard has a finite lse, whatever the gate holds.
    """
    bf16 = rounding_to_bf16(rounding)
    partial, w_uv = need(t, "partial").to(dtype), need(t, "w_uv").to(dtype)
    lse = need(t, "lse").to(dtype).unsqueeze(-1)
    heads, v_dim, _ = w_uv.shape
    gate_offset = int(a["gate_offset"])
    gate = need(t, "proj")[:, gate_offset : gate_offset + heads * v_dim].to(dtype).view(-1, heads, v_dim)

    valid = torch.isfinite(lse)
    largest = torch.where(valid, lse, -torch.inf).amax(0)
    weight = torch.where(valid, torch.exp2(lse - largest), 0.0)
    # A source of weight 0 may hold anything, NaN included, so it is left out rather than multiplied by 0.
    total = torch.where(valid, weight * partial, 0.0).sum(0)
    some = valid.any(0)
    latent = bf16(torch.where(some, total / torch.where(some, weight.sum(0), 1.0), 0.0))

    v = bf16(torch.einsum("mhl,hvl->mhv", latent, w_uv))
    out = torch.where(some, bf16(v * torch.sigmoid(gate)), 0.0)
    return {"out": out.flatten(1)}
