"""Shard merge, value up-projection and gate as stock serving runs them, in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Returns out [M, H*V] bf16.

    Args:
        t: partial [shards, M, H, KL] bf16, lse [shards, M, H] f32, proj [M, P] bf16, w_uv [H, V, KL] bf16.
        a: gate_offset.
    """
    partial, lse, w_uv = need(t, "partial"), need(t, "lse"), need(t, "w_uv")
    heads, v_dim, _ = w_uv.shape
    gate_offset = int(a["gate_offset"])
    gate = need(t, "proj")[:, gate_offset : gate_offset + heads * v_dim]

    valid = torch.isfinite(lse)
    latent = partial[0] if partial.shape[0] == 1 else _merge(partial, lse, valid)
    v = torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
    out = v.float() * gate.float().sigmoid_().view(-1, heads, v_dim)
    out = torch.where(valid.any(0).unsqueeze(-1), out, 0.0)
    return {"out": out.to(torch.bfloat16).view(-1, heads * v_dim)}


def _merge(partial: Tensor, lse: Tensor, valid: Tensor) -> Tensor:
    """Log-sum-exp weighted mean over shards; sources without a finite lse are left out."""
    known = torch.where(valid, lse, -torch.inf)
    weight = torch.where(valid, torch.exp2(known - known.amax(0)), 0.0).unsqueeze(-1)
    total = torch.where(valid.unsqueeze(-1), weight * partial, 0.0).sum(0)
    return (total / weight.sum(0)).to(torch.bfloat16)
