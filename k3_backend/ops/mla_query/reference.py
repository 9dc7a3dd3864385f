"""MLA query path and cache insert in plain maths."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.e4m3 import E4M3_MAX, round_e4m3
from k3_backend.ops.maths import Attributes, Tensors, need, rms_norm, rounding_to_bf16

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """Query rows (absorbed) and latent cache rows; no rotation on either side.

    Args:
        t: proj [M, P] (q_a | kv_a | gate | padding), q_norm [QL], kv_norm [KL], w_qb [H*(NOPE+PE), QL],
            w_uk_t [H, NOPE, KL], slot_mapping [M], kv_cache or kv_cache_e4m3 [pages, page, ROW].
        a: eps, cache_format, k_scale.
        dtype: type of the computation and of the results.
        rounding: apply the bf16 roundings of the definition.

    Returns:
        query [M, H, ROW]; kv_cache, the new value of the whole pool, or kv_cache_e4m3, the values of its bytes.
    """
    bf16 = rounding_to_bf16(rounding)
    proj, q_norm, kv_norm, w_qb, w_uk_t = (
        need(t, n).to(dtype) for n in ("proj", "q_norm", "kv_norm", "w_qb", "w_uk_t")
    )
    name = ("kv_cache", "kv_cache_e4m3")[int(a["cache_format"])]
    cache = need(t, name).to(dtype, copy=True)
    q_lora, kv_lora, row = q_norm.numel(), kv_norm.numel(), cache.shape[-1]
    heads, nope, _ = w_uk_t.shape
    q_a, latent, pe = torch.split(proj[:, : q_lora + row], [q_lora, kv_lora, row - kv_lora], -1)

    c = bf16(rms_norm(q_a, q_norm, a["eps"]))
    q = bf16(c @ w_qb.T).view(proj.shape[0], heads, -1)
    q_latent = bf16(torch.einsum("mhn,hnl->mhl", q[..., :nope], w_uk_t))
    query = torch.cat([q_latent, q[..., nope:]], -1)

    rows = torch.cat([bf16(rms_norm(latent, kv_norm, a["eps"])), pe], -1)
    if a["cache_format"]:
        rows = round_e4m3(rows / a["k_scale"]) if rounding else (rows / a["k_scale"]).clamp(-E4M3_MAX, E4M3_MAX)
    flat = cache.view(-1, row)
    for m, target in enumerate(need(t, "slot_mapping").tolist()):
        if target >= 0:
            flat[target] = rows[m]
    return {"query": query, name: cache}
