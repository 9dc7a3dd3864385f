"""Inputs of the MLA ops: query and cache insert, decode core over the paged cache, value merge."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.e4m3 import to_e4m3
from verify.evaluator.inputs.draw import ACTIVATION_KINDS, Draw
from verify.evaluator.inputs.masks import Attrs, Inputs, Masks, Tensors, whole

__all__ = [
    "MLA_DECODE_KINDS", "MLA_QUERY_KINDS", "MLA_VALUE_KINDS", "mla_decode", "mla_decode_masks", "mla_query",
    "mla_query_masks", "mla_value", "mla_value_masks",
]  # fmt: skip

MLA_QUERY_KINDS = (*ACTIVATION_KINDS, "padding", "e4m3")
MLA_DECODE_KINDS = ("gaussian", "wide", "equal", "ragged", "peaked", "late", "sharded", "long", "e4m3")
MLA_VALUE_KINDS = (*ACTIVATION_KINDS, "shards", "empty", "far_lse", "saturated")

_K_SCALES = (2.0**-8, 0.013, 0.37, 1.0, 64.0)
"""Of E4M3 caches with elements of about 1: some saturate at the first scale and most are subnormal at the last."""
_LONG_CONTEXTS = ((4, 262_144), (16, 65_536), (64, 16_384))
"""(largest batch, cached tokens) of class `long` where the geometry is a rank's of the real model: judged on GPUs."""
_RANK_HIDDEN = 1024
"""Hidden size beyond which a geometry is such a rank's; the others are judged on processors."""
_TOKEN_BUDGET = 12_288
"""Cached tokens per case, over all requests: bounds the fp64 reference's time and memory."""


def mla_query(d: Draw) -> Inputs:
    """`padding` maps some rows to no cache row; `e4m3` inserts into an FP8 cache, with a scale at which some elements
    saturate and others are subnormal; all classes scatter rows over the whole cache in random order.
    """
    g, rows = d.geometry, d.case.rows
    page = d.fixed.choose(16, 32, 64)
    pages = 2 + -(-2 * rows // page)
    flat = (d.permutation((pages - 1) * page) + page)[:rows].to(torch.int64)
    if d.kind == "padding":
        order = d.permutation(rows)
        lost = d.chance(0.4, (rows,))
        lost[order[-1]], lost[order[0]] = False, True  # one of each where there are two
        flat[lost] = -1
    tensors: Tensors = {
        "proj": d.activation((rows, g.mla_proj_rows)),
        "q_norm": d.norm_weight(g.q_lora),
        "kv_norm": d.norm_weight(g.kv_lora),
        "w_qb": d.weight(g.heads * (g.nope + g.pe), g.q_lora),
        "w_uk_t": d.normal((g.heads, g.nope, g.kv_lora), g.nope**-0.5).to(torch.bfloat16),
        "slot_mapping": flat,
        "kv_cache": torch.zeros(pages, page, g.mla_row, dtype=torch.bfloat16),
        "kv_cache_e4m3": None,
    }
    attrs: Attrs = {"eps": g.eps, "cache_format": 0, "k_scale": 1.0}
    if d.kind == "e4m3":
        tensors["kv_cache"] = None
        tensors["kv_cache_e4m3"] = torch.zeros(pages, page, g.mla_row, dtype=torch.float8_e4m3fn)
        attrs |= {"cache_format": 1, "k_scale": _K_SCALES[d.fixed.integer(0, len(_K_SCALES) - 1)]}
    return tensors, attrs


def mla_query_masks(tensors: Tensors, attrs: Attrs) -> Masks:
    """Only mapped cache rows are written; no old cache content matters."""
    del attrs
    name, cache = _cache(tensors)
    mapping = tensors["slot_mapping"]
    assert mapping is not None
    written = torch.zeros(cache.shape[0] * cache.shape[1], dtype=torch.bool)
    written[mapping[mapping >= 0]] = True
    grid = written.reshape(cache.shape[:2])
    return Masks(written={name: grid}, free={name: torch.ones_like(grid)})


def mla_decode(d: Draw) -> Inputs:
    """Queries and a paged cache by class.

    `ragged`: lengths 0, T, and around page borders; `peaked`: one key, often the newest, takes nearly all weight;
    `late`: the value signal is in the last positions; `sharded`: one shard of DCP 2, 4 or 8 with interleave 1 or 4,
    empty shards included; `long`: one request as long as the case's budget allows; `e4m3`: an FP8 cache, lengths and
    shards as in `sharded`.
    """
    g, batch, tokens = d.geometry, d.case.batch, d.case.tokens
    page = d.fixed.choose(16, 32, 64)
    size = {"sharded": d.fixed.choose(2, 4, 8), "e4m3": d.fixed.choose(1, 2)}.get(d.kind, 1)
    interleave = d.fixed.choose(1, 4) if d.kind == "sharded" else 1
    rank = d.fixed.integer(0, size - 1)
    planned = _lengths(d, page)
    needed = [-(-_local_length(length, rank, size, interleave) // page) for length in planned]
    # Every replay of the bound call has its own lengths within the planned pages.
    lens = [max(tokens, length - d.integer(0, 3)) if length else 0 for length in planned]
    local = [_local_length(length, rank, size, interleave) for length in lens]
    pages = sum(needed) + 3
    order = (d.permutation(pages - 1) + 1).to(torch.int32)
    table = order[d.integers(0, pages - 2, (batch, max(1, *needed) + d.fixed.integer(0, 2)))]
    taken = 0
    for b, count in enumerate(needed):
        table[b, :count] = order[taken : taken + count]
        taken += count
    cache = d.normal((pages, page, g.mla_row))
    query = d.values((batch * tokens, g.heads, g.mla_row))
    if d.kind == "equal":
        cache = torch.full_like(cache, 0.5) + d.normal((pages, page, 1), 0.5)
    for b, count in enumerate(local):
        if count:
            _shape_keys(d, cache, query[b * tokens : (b + 1) * tokens], [int(p) for p in table[b, : needed[b]]], count)
    tensors: Tensors = {
        "query": query.to(torch.bfloat16),
        "kv_cache": cache.to(torch.bfloat16),
        "kv_cache_e4m3": None,
        "block_table": table.to(torch.int32),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
    }
    attrs: Attrs = {
        "tokens": tokens,
        "scale": (g.nope + g.pe) ** -0.5,
        "dcp_rank": rank,
        "dcp_size": size,
        "interleave": interleave,
        "kv_lora": g.kv_lora,
        "cache_format": 0,
        "k_scale": 1.0,
    }
    if d.kind == "e4m3":
        attrs |= {"cache_format": 1, "k_scale": _K_SCALES[d.fixed.integer(0, len(_K_SCALES) - 1)]}
        tensors["kv_cache"], tensors["kv_cache_e4m3"] = None, to_e4m3(cache / attrs["k_scale"])
    return tensors, attrs


def mla_decode_masks(tensors: Tensors, attrs: Attrs) -> Masks:
    """The content of every cache row that no request of the call owns must not matter."""
    name, cache = _cache(tensors)
    table, lens = tensors["block_table"], tensors["seq_lens"]
    assert table is not None
    assert lens is not None
    page = cache.shape[1]
    owned = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for b, length in enumerate(lens.tolist()):
        count = _local_length(length, int(attrs["dcp_rank"]), int(attrs["dcp_size"]), int(attrs["interleave"]))
        positions = torch.arange(count)
        owned[table[b].to(torch.int64)[positions // page], positions % page] = True
    return Masks(free={name: ~owned})


def _cache(tensors: Tensors) -> tuple[str, Tensor]:
    """The cache that a call has: its name and itself."""
    for name in ("kv_cache", "kv_cache_e4m3"):
        if (cache := tensors[name]) is not None:
            return name, cache
    raise ValueError("a call without a cache; expected kv_cache or kv_cache_e4m3")


def _lengths(d: Draw, page: int) -> list[int]:
    """Global lengths including this step's T tokens; 0 marks a padding request."""
    batch, tokens = d.case.batch, d.case.tokens
    longest = max(tokens, min(2_304, _TOKEN_BUDGET // batch))
    if d.kind == "long":
        top = 8_192 if batch <= 8 else 2_048
        if d.geometry.hidden > _RANK_HIDDEN:
            top = next(context for most, context in _LONG_CONTEXTS if batch <= most)
        top = max(tokens, top)
        lens = [min(top, tokens + d.fixed.integer(0, 31)) for _ in range(batch)]
        lens[d.fixed.integer(0, batch - 1)] = top - d.fixed.integer(0, 3)
        return [max(tokens, n) for n in lens]
    if d.kind in ("ragged", "sharded", "e4m3"):
        border = page * d.fixed.integer(1, max(1, longest // page))
        special = [0, tokens, border - 1, border, border + 1, longest, d.fixed.integer(tokens, longest)]
        lens = [special[(at + d.fixed.integer(0, 1)) % len(special)] for at in range(batch)]
        return [
            0 if n == 0 else max(tokens, min(n, longest)) for n in (lens[int(i)] for i in d.fixed.permutation(batch))
        ]
    return [d.fixed.integer(tokens, longest) for _ in range(batch)]


def _local_length(length: int, rank: int, size: int, interleave: int) -> int:
    """How many of the first `length` global positions live on the shard."""
    cycle = interleave * size
    return length // cycle * interleave + min(interleave, max(0, length % cycle - rank * interleave))


def _shape_keys(d: Draw, cache: Tensor, query: Tensor, pages: list[int], count: int) -> None:
    """Give one request's cached rows the structure of the case's class, in place (f32 cache and query)."""
    page, tokens = cache.shape[1], d.case.tokens
    if d.kind == "peaked":
        where = count - 1 if d.integer(0, 1) else d.integer(0, count - 1)
        key = cache[pages[where // page], where % page]
        query += key
    elif d.kind == "late":
        for position in range(max(0, count - 3 - tokens)):
            cache[pages[position // page], position % page] *= 0.02


def mla_value(d: Draw) -> Inputs:
    """`shards`: 2 to 8 partial results; `empty`: some or all sources of a row have lse -inf, +inf or NaN and garbage
    values, a wholly empty row has a NaN gate; `far_lse`: one shard outweighs the others by 2^40 and more;
    `saturated`: gates of +-30 and beyond.
    """
    g, rows = d.geometry, d.case.rows
    shards = 1 if d.kind in (*ACTIVATION_KINDS, "saturated") else d.fixed.integer(2, 8)
    lse = d.uniform(-12.0, 12.0, (shards, rows, g.heads))
    proj = d.activation((rows, g.mla_proj_rows))
    gate = slice(g.q_lora + g.mla_row, g.q_lora + g.mla_row + g.mla_width)
    if d.kind == "far_lse":
        lse += torch.where(d.chance(0.5, lse.shape), 60.0, -60.0)
    if d.kind == "saturated":
        proj[:, gate] = torch.where(d.chance(0.5, (rows, g.mla_width)), 30.0, -30.0) * d.uniform(1.0, 4.0, (rows, 1))
    if d.kind == "empty":
        void = torch.tensor([-torch.inf, torch.inf, torch.nan])[d.integers(0, 2, lse.shape)]
        lse = torch.where(d.chance(0.4, lse.shape), void, lse)
        dead = d.chance(0.3, (rows,))
        dead[d.integer(0, rows - 1)] = rows > 1 or d.chance(0.5, ()).item()
        lse[:, dead] = -torch.inf
        proj[dead, gate] = torch.nan
    tensors: Tensors = {
        "partial": d.normal((shards, rows, g.heads, g.kv_lora)).to(torch.bfloat16)
        if d.kind not in ACTIVATION_KINDS
        else d.activation((shards, rows, g.heads, g.kv_lora)),
        "lse": lse,
        "proj": proj,
        "w_uv": d.weight(g.v_dim, g.kv_lora, g.heads),
    }
    return tensors, {"gate_offset": gate.start}


def mla_value_masks(tensors: Tensors, attrs: Attrs) -> Masks:
    """Sources without weight may hold anything; of `proj` only the gate columns matter."""
    lse, proj, w_uv = tensors["lse"], tensors["proj"], tensors["w_uv"]
    assert lse is not None
    assert proj is not None
    assert w_uv is not None
    outside = whole(proj)
    start = int(attrs["gate_offset"])
    outside[:, start : start + w_uv.shape[0] * w_uv.shape[1]] = False
    return Masks(free={"partial": ~lse.isfinite(), "proj": outside})
