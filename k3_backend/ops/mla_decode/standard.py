"""MLA decode core as stock serving runs it on a CPU: rows gathered from pages, then torch's fused attention.

`scaled_dot_product_attention` does not return the log-sum-exp that shards are merged by, so its CPU kernel is called
by its own name. An E4M3 cache is converted to bf16, which is exact, after gathering; its scale goes into the scores'
factor and the result. Against matrix products with a softmax between them it was faster at every shape tried.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["attend", "standard", "visible_rows"]

HEADS_AS_BATCH = 3
"""Up to this many query rows per request, attention runs them as heads; above, as rows of one shared head."""
GATHERED_ROWS = 16_384
"""Cache rows gathered at a time (19 MB at 576 wide): more costs fresh pages from the operating system each step."""


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Attention of B*T query rows over the shard's cached rows.

    Args:
        t: query [B*T, H, ROW] bf16, kv_cache [pages, page, ROW] bf16 or kv_cache_e4m3, block_table [B, max_pages]
            i32, seq_lens [B] i32.
        a: tokens, scale, dcp_rank, dcp_size, interleave, kv_lora, cache_format, k_scale.

    Returns:
        out [B*T, H, KL] bf16 and lse [B*T, H] f32, base 2; out 0 and lse -inf for rows that see nothing.
    """
    query, table, lengths = (need(t, n) for n in ("query", "block_table", "seq_lens"))
    cache = need(t, ("kv_cache", "kv_cache_e4m3")[int(a["cache_format"])])
    requests, tokens, kv_lora = lengths.shape[0], int(a["tokens"]), int(a["kv_lora"])
    heads = query.shape[1]
    page_size = cache.shape[1]

    position = torch.arange(1 - tokens, 1, device=lengths.device)
    visible = visible_rows(torch.where(lengths.unsqueeze(1) > 0, lengths.unsqueeze(1) + position, 0), a)
    width, full = table.shape[1] * page_size, False
    if not torch.compiler.is_compiling():
        # One host read saves reading pages that no request has reached and, if all lengths are equal, every mask.
        longest, shortest = int(visible.max()), int(visible.min())
        width, full = max(longest, 1), 0 < longest == shortest
    pages = -(-width // page_size)
    index = (table[:, :pages].unsqueeze(2) * page_size + torch.arange(page_size, device=table.device)).flatten(1)
    index = index[:, :width]

    out = torch.empty(requests, tokens, heads, kv_lora, dtype=torch.bfloat16, device=query.device)
    lse = torch.empty(requests, tokens, heads, dtype=torch.float32, device=query.device)
    step = max(1, GATHERED_ROWS // width)
    for first in range(0, requests, step):
        part = slice(first, first + step)
        rows = query[first * tokens : (first + step) * tokens]
        seen = None if full else visible[part]
        out[part], lse[part] = attend(rows, cache, index[part], seen, a["scale"] * a["k_scale"], kv_lora)
    if a["cache_format"]:
        out = (out.float() * a["k_scale"]).to(torch.bfloat16)
    return {"out": out.flatten(0, 1), "lse": lse.flatten(0, 1)}


def visible_rows(count: Tensor, a: Attributes) -> Tensor:
    """How many rows of this shard hold global positions below `count`; a shard holds them in order of position."""
    interleave, ranks = int(a["interleave"]), int(a["dcp_size"])
    if ranks == 1:
        return count.clamp(min=0)
    count = count.clamp(min=0)
    rounds = torch.div(count, interleave * ranks, rounding_mode="floor")
    rest = count - rounds * (interleave * ranks) - int(a["dcp_rank"]) * interleave
    return rounds * interleave + rest.clamp(0, interleave)


def attend(
    query: Tensor, cache: Tensor, index: Tensor, visible: Tensor | None, scale: float, kv_lora: int
) -> tuple[Tensor, Tensor]:
    """Attention of each request's T query rows over its gathered cache rows.

    Args:
        query: [B*T, H, ROW] bf16.
        cache: [pages, page, ROW] bf16 or e4m3.
        index: [B, L] flat cache rows in order of position; entries behind what a request sees may hold anything.
        visible: [B, T] number of leading rows that each query row sees; None if all see all L.
        scale: factor of the scores.
        kv_lora: KL, width of the value.

    Returns:
        out [B, T, H, KL] bf16 and lse [B, T, H] f32 (base 2).
    """
    requests, length = index.shape
    heads, row = query.shape[1:]
    tokens = query.shape[0] // requests
    mask = None
    if visible is not None:
        position = torch.arange(length, device=index.device)
        # A row that must not matter may be NaN, and 0 * NaN is NaN: gather the request's own first row instead.
        owned = position < visible.amax(1, keepdim=True)
        index = torch.where(owned, index, index[:, :1]).clamp(min=0)
        hidden = position >= visible.unsqueeze(2)
        mask = torch.zeros(hidden.shape, dtype=torch.bfloat16, device=index.device).masked_fill_(hidden, -torch.inf)

    rows = _gather(cache.view(-1, row), index.flatten()).view(requests, 1, length, row)
    if tokens * heads <= HEADS_AS_BATCH:
        rows = rows.expand(requests, tokens * heads, length, row)
        query = query.view(requests, tokens * heads, 1, row)
        mask = None if mask is None else _per_head(mask, heads).unsqueeze(2)
    else:
        query = query.view(requests, 1, tokens * heads, row)
        mask = None if mask is None else _per_head(mask, heads).unsqueeze(1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, rows, rows, 0.0, False, attn_mask=mask, scale=scale
    )
    out = out.view(requests, tokens, heads, row)[..., :kv_lora]
    lse = lse.view(requests, tokens, heads) / math.log(2)
    if visible is not None:
        some = (visible > 0).unsqueeze(2)
        out = torch.where(some.unsqueeze(3), out, 0.0)
        lse = torch.where(some, lse, -torch.inf)
    return out, lse


def _gather(flat: Tensor, index: Tensor) -> Tensor:
    """Rows of [rows, ROW] bf16 or e4m3, as bf16."""
    if flat.dtype == torch.bfloat16:
        return flat.index_select(0, index)
    return flat.view(torch.uint8).index_select(0, index).view(torch.float8_e4m3fn).to(torch.bfloat16)


def _per_head(mask: Tensor, heads: int) -> Tensor:
    """[B, T, L] -> [B, T*H, L]."""
    requests, tokens, length = mask.shape
    return mask.unsqueeze(2).expand(requests, tokens, heads, length).reshape(requests, tokens * heads, length)
