"""MLA query path and cache insert as stock serving runs it on a GPU: cuBLAS products, plain torch around them.

Can be captured in a CUDA graph: nothing reads a value on the host. A row without a target rewrites cache row 0, which
lies in null page 0, with what it holds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Writes kv_cache rows in place, returns query [M, H, ROW] bf16.

    Args:
        t: tensors of the op's interface, on a GPU.
        a: eps.
    """
    proj, cache, w_uk_t = need(t, "proj"), need(t, "kv_cache"), need(t, "w_uk_t")
    q_norm, kv_norm, row = need(t, "q_norm"), need(t, "kv_norm"), cache.shape[-1]
    q_lora, kv_lora = q_norm.shape[0], kv_norm.shape[0]
    heads, nope, _ = w_uk_t.shape
    rows = proj.shape[0]

    c = functional.rms_norm(proj[:, :q_lora], (q_lora,), q_norm, a["eps"])
    q = functional.linear(c, need(t, "w_qb")).view(rows, heads, -1)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), w_uk_t).transpose(0, 1)
    query = torch.cat([absorbed, q[..., nope:]], -1)

    latent = functional.rms_norm(proj[:, q_lora : q_lora + kv_lora], (kv_lora,), kv_norm, a["eps"])
    new = torch.cat([latent, proj[:, q_lora + kv_lora : q_lora + row]], -1)
    flat, target = cache.view(-1, row), need(t, "slot_mapping")
    place = target.clamp(min=0)
    flat.index_copy_(0, place, torch.where((target >= 0).unsqueeze(1), new, flat[:1]))
    return {"query": query}
