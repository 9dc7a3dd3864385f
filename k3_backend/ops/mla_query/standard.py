"""MLA query path and cache insert as stock serving runs it, in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.e4m3 import to_e4m3
from k3_backend.ops.eager import holds_for_all, linear, rms_norm
from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Writes rows of the cache in place, returns query [M, H, ROW] bf16.

    Args:
        t: tensors of the op's interface.
        a: eps, cache_format, k_scale.
    """
    proj, w_uk_t = need(t, "proj"), need(t, "w_uk_t")
    cache = need(t, ("kv_cache", "kv_cache_e4m3")[int(a["cache_format"])])
    q_lora, kv_lora, row = need(t, "q_norm").shape[0], need(t, "kv_norm").shape[0], cache.shape[-1]
    heads, nope, _ = w_uk_t.shape
    rows = proj.shape[0]

    c = rms_norm(proj[:, :q_lora], need(t, "q_norm"), a["eps"])
    q = linear(c, need(t, "w_qb")).view(rows, heads, -1)
    query = torch.empty(rows, heads, row, dtype=torch.bfloat16, device=proj.device)
    query[..., :kv_lora] = torch.bmm(q[..., :nope].transpose(0, 1), w_uk_t).transpose(0, 1)
    query[..., kv_lora:] = q[..., nope:]

    latent = rms_norm(proj[:, q_lora : q_lora + kv_lora], need(t, "kv_norm"), a["eps"])
    new = torch.cat([latent, proj[:, q_lora + kv_lora : q_lora + row]], -1)
    if a["cache_format"]:  # as bytes: torch does not index E4M3 tensors
        new, cache = to_e4m3(new.float() / a["k_scale"]).view(torch.uint8), cache.view(torch.uint8)
    _insert(cache.view(-1, row), need(t, "slot_mapping"), new)
    return {"query": query}


def _insert(flat: Tensor, target: Tensor, new: Tensor) -> None:
    """flat[target] = new where target >= 0."""
    written = target >= 0
    if not holds_for_all(written):
        # Rows without a target repeat the write of one that has a target, or rewrite row 0 with what it holds.
        some = written.to(torch.int32).argmax(0, keepdim=True)
        stand_in = torch.where(written[some].unsqueeze(1), new[some], flat[:1])
        new = torch.where(written.unsqueeze(1), new, stand_in)
        target = torch.where(written, target, target[some].clamp(min=0))
    flat.index_copy_(0, target, new)
