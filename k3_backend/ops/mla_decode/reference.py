"""MLA decode core in plain maths: per query row, softmax over the positions that it may see on this shard."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need, rounding_to_bf16

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """Attention over cached latent rows, value = first KL columns, base-2 log-sum-exp of the scaled scores.

    Args:
        t: query [B*T, H, ROW], kv_cache or kv_cache_e4m3 [pages, page, ROW], block_table [B, max_pages], seq_lens [B].
        a: tokens, scale, dcp_rank, dcp_size, interleave, kv_lora, cache_format, k_scale.
        dtype: type of the computation and of the results.
        rounding: round `out` to bf16.

    Returns:
        out [B*T, H, KL] and lse [B*T, H]; a row that sees no position has out 0 and lse -inf.
    """
    bf16 = rounding_to_bf16(rounding)
    query, cache = need(t, "query").to(dtype), need(t, ("kv_cache", "kv_cache_e4m3")[int(a["cache_format"])])
    tokens, value_width, interleave, ranks = (int(a[n]) for n in ("tokens", "kv_lora", "interleave", "dcp_size"))
    flat, page_size = cache.view(-1, cache.shape[-1]), cache.shape[1]
    out = torch.zeros(*query.shape[:2], value_width, dtype=dtype)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=dtype)

    for b, length in enumerate(need(t, "seq_lens").tolist()):
        for i in range(tokens):
            position = torch.arange(max(0, length - tokens + i + 1))
            position = position[(position // interleave) % ranks == a["dcp_rank"]]
            if not position.numel():
                continue
            local = position // (interleave * ranks) * interleave + position % interleave
            page = need(t, "block_table")[b, local // page_size]
            rows = flat[page.long() * page_size + local % page_size].to(dtype) * a["k_scale"]

            m = b * tokens + i
            score = query[m] @ rows.T * a["scale"]
            lse[m] = torch.logsumexp(score, -1) / math.log(2)
            out[m] = bf16(torch.softmax(score, -1) @ rows[:, :value_width])
    return {"out": out, "lse": lse}
