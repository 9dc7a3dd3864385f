"""MLA decode core as stock serving runs it on a GPU: a plain split-KV Triton kernel over the paged cache, and a merge.

torch has no attention kernel that reads 576-wide pages and returns the log-sum-exp, so this one is written here, in the
way that serving stacks write theirs: one program per request, group of query rows and split of the context; tiles of
cache rows through two tensor-core products with a running softmax; a second kernel merges the splits. Grids follow from
shapes only, so that a captured graph serves every batch content.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]

QUERY_ROWS = 16
"""Query rows (tokens x heads) per program: the least that a tensor-core product takes."""
TILE = 32
"""Cache rows per step."""
WAVES = 2
"""Programs per multiprocessor that the splits aim at."""
LOG2_E = 1.4426950408889634


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Attention of B*T query rows over the cached rows.

    Args:
        t: query [B*T, H, ROW] bf16, kv_cache [pages, page, ROW] bf16, block_table [B, max_pages] i32, seq_lens [B] i32,
            on a GPU.
        a: tokens, scale, dcp_size, kv_lora.

    Returns:
        out [B*T, H, KL] bf16 and lse [B*T, H] f32, base 2; out 0 and lse -inf for rows that see nothing.

    Raises:
        ValueError: a DCP shard.
    """
    query, cache, table, lengths = (need(t, n) for n in ("query", "kv_cache", "block_table", "seq_lens"))
    if a["dcp_size"] != 1:
        raise ValueError(
            f"mla_decode: dcp_size is {a['dcp_size']}; the standard path on a GPU takes 1; next: measure without DCP"
        )
    requests, tokens, kv_lora = lengths.shape[0], int(a["tokens"]), int(a["kv_lora"])
    rows, heads, row = query.shape
    page = cache.shape[1]
    groups = triton.cdiv(tokens * heads, QUERY_ROWS)
    tiles = triton.cdiv(table.shape[1] * page, TILE)
    sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    splits = max(1, min(tiles, WAVES * sms // (requests * groups)))
    partial = torch.empty(splits, rows, heads, kv_lora, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=query.device)
    _attend[(splits, groups, requests)](
        query, cache, table, lengths, partial, partial_lse, float(a["scale"]) * LOG2_E, table.shape[1], rows,
        splits, TOKENS=tokens, HEADS=heads, ROW=row, KL=kv_lora, PE=row - kv_lora, PAGE=page,
        QUERY_ROWS=QUERY_ROWS, TILE=TILE, num_warps=4, num_stages=2,
    )  # fmt: skip
    out = torch.empty(rows, heads, kv_lora, dtype=torch.bfloat16, device=query.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
    _merge[(rows * heads,)](
        partial, partial_lse, out, lse, rows * heads, splits, KL=kv_lora, PADDED=triton.next_power_of_2(splits),
        num_warps=4,
    )  # fmt: skip
    return {"out": out, "lse": lse}


@triton.jit(do_not_specialize=["max_pages", "rows", "splits"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, cache, table, lengths, partial, partial_lse, scale, max_pages, rows, splits,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, ROW: tl.constexpr, KL: tl.constexpr, PE: tl.constexpr,
    PAGE: tl.constexpr, QUERY_ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    split, group, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    pair = group * QUERY_ROWS + tl.arange(0, QUERY_ROWS)
    token, head = pair // HEADS, pair % HEADS
    real = pair < TOKENS * HEADS
    line = (request * TOKENS + token) * HEADS + head
    latent, rope = tl.arange(0, KL), tl.arange(0, PE)
    q = tl.load(query + line[:, None] * ROW + latent[None, :], mask=real[:, None], other=0.0)
    q_pe = tl.load(query + line[:, None] * ROW + KL + rope[None, :], mask=real[:, None], other=0.0)
    sees = tl.where(length > 0, length - TOKENS + token + 1, 0)

    each = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    first = split * each
    end = tl.minimum(first + each, length)
    top = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    acc = tl.zeros([QUERY_ROWS, KL], tl.float32)
    for start in range(first, end, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < end
        number = tl.load(table + request * max_pages + position // PAGE, mask=inside, other=0)
        place = (number.to(tl.int64) * PAGE + position % PAGE) * ROW
        k = tl.load(cache + place[:, None] + latent[None, :], mask=inside[:, None], other=0.0)
        k_pe = tl.load(cache + place[:, None] + KL + rope[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k)) + tl.dot(q_pe, tl.trans(k_pe))
        visible = inside[None, :] & (position[None, :] < sees[:, None])
        score = tl.where(visible, score * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        # A row that sees nothing yet has the maximum -inf; with 0 in its place no infinities are subtracted.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(tl.bfloat16), k)
        top = higher
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    at = split.to(tl.int64) * rows * HEADS + line
    tl.store(partial + at[:, None] * KL + latent[None, :], acc, mask=real[:, None])
    tl.store(partial_lse + at, lse, mask=real)


@triton.jit(do_not_specialize=["lines", "splits"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    partial, partial_lse, out, lse, lines, splits, KL: tl.constexpr, PADDED: tl.constexpr
):
    line = tl.program_id(0)
    split = tl.arange(0, PADDED)
    known = tl.load(partial_lse + split * lines + line, mask=split < splits, other=float("-inf"))
    top = tl.max(known, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(known - base), 0)
    latent = tl.arange(0, KL)
    acc = tl.zeros([KL], tl.float32)
    place = partial + line.to(tl.int64) * KL + latent
    for at in range(splits):
        weight = tl.exp2(tl.load(partial_lse + at * lines + line) - base)
        acc += weight * tl.load(place)
        place += lines * KL
    scaled = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + line.to(tl.int64) * KL + latent, scaled.to(tl.bfloat16))
    tl.store(lse + line, tl.where(total > 0, base + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf")))
