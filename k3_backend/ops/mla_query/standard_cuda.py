"""MLA query path and cache insert as stock serving runs it on a GPU: cuBLAS products, a fused norm-and-insert kernel.

Can be captured in a CUDA graph: nothing reads a value on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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
    rows, width = proj.shape

    c = functional.rms_norm(proj[:, :q_lora], (q_lora,), q_norm, a["eps"])
    q = functional.linear(c, need(t, "w_qb")).view(rows, heads, -1)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), w_uk_t).transpose(0, 1)
    query = torch.cat([absorbed, q[..., nope:]], -1)
    _insert[(rows,)](
        proj, kv_norm, need(t, "slot_mapping"), cache, width, float(a["eps"]), FIRST=q_lora, KL=kv_lora,
        PE=row - kv_lora, num_warps=4,
    )  # fmt: skip
    return {"query": query}


@triton.jit  # type: ignore[untyped-decorator]
def _insert(  # type: ignore[no-untyped-def]
    proj, kv_norm, slot_mapping, cache, width, eps, FIRST: tl.constexpr, KL: tl.constexpr, PE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(slot_mapping + row)
    if target >= 0:
        latent, rope = tl.arange(0, KL), tl.arange(0, PE)
        value = tl.load(proj + row * width + FIRST + latent).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / KL + eps)
        normed = value * scale * tl.load(kv_norm + latent).to(tl.float32)
        place = cache + target * (KL + PE)
        tl.store(place + latent, normed.to(tl.bfloat16))
        tl.store(place + KL + rope, tl.load(proj + row * width + FIRST + KL + rope))
