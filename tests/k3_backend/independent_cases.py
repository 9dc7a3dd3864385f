"""Random arguments of every op for the comparison of two implementations: shapes from the interface, values from here.

Values are drawn so that a mistake shows: nothing is symmetric, nothing is 0 or 1 that need not be. What an op must not
read (unowned cache rows, unwritten AttnRes rows, projections and gates of padding) is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3_backend.geometry import Geometry
from k3_backend.ops import OPS

_DTYPES = {
    "bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Arguments of one op call."""

    op: str
    tensors: dict[str, Tensor | None]
    attrs: dict[str, int | float]


class Draw:
    """Seeded draws of whole argument sets."""

    def __init__(self, g: Geometry, seed: int) -> None:
        self.g = g
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64) * std + mean

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform in [low, high]."""
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def distinct(self, low: int, high: int, count: int) -> list[int]:
        """Distinct integers in [low, high], in random order."""
        return (torch.randperm(high - low + 1, generator=self.generator)[:count] + low).tolist()

    def tensors(self, op: str, **call: int) -> dict[str, Tensor | None]:
        """Standard normal activations and states, weights of gain 1, norms about 1; other integer arguments zero."""
        drawn: dict[str, Tensor | None] = {}
        shapes = OPS[op].shapes(self.g, call)
        for spec in OPS[op].tensors:
            shape, dtype = shapes[spec.name], _DTYPES[spec.dtype]
            if spec.role == "output":
                continue
            if not dtype.is_floating_point:
                drawn[spec.name] = torch.zeros(shape, dtype=dtype)
            elif spec.role == "constant" and len(shape) > 1:
                drawn[spec.name] = self.normal(*shape, std=shape[-1] ** -0.5).to(dtype)
            elif spec.role == "constant":
                drawn[spec.name] = self.normal(*shape, std=0.2, mean=1.0).to(dtype)
            else:
                drawn[spec.name] = self.normal(*shape).to(dtype)
        return drawn


def tensor(t: dict[str, Tensor | None], name: str) -> Tensor:
    """An argument that is present."""
    value = t[name]
    assert value is not None
    return value


def attn_res(d: Draw, rows: int, write_block: int, sources: int, add_delta: int, round_mix: int = 0) -> Case:
    """Rows that the site neither writes nor reads are NaN."""
    t = d.tensors("attn_res", M=rows)
    t["res_proj"] = d.normal(d.g.hidden, std=0.2).to(torch.bfloat16)
    if not add_delta:
        t["delta"] = None
    tensor(t, "blocks")[:, sources:] = NAN
    attrs = {"add_delta": add_delta, "write_block": write_block, "sources": sources, "round_mix": round_mix}
    return Case("attn_res", t, {**attrs, "eps": d.g.eps})


def input_projection(d: Draw, rows: int, width: int) -> Case:
    return Case("input_projection", d.tensors("input_projection", M=rows, N=width), {})


def oproj_allreduce(d: Draw, rows: int, ranks: int, width: int, restart: int) -> Case:
    return Case("oproj_allreduce", d.tensors("oproj_allreduce", M=rows, ranks=ranks, KL=width), {"restart": restart})


def dense_mlp(d: Draw, rows: int, linear_beta: float) -> Case:
    t = d.tensors("dense_mlp", M=rows)
    tensor(t, "x").mul_(4.0)  # far enough that both tanh saturate in places
    return Case("dense_mlp", t, {"beta": d.g.situ_beta, "linear_beta": linear_beta})


def kda_decode(d: Draw, requests: int, tokens: int, pool_tokens: int) -> Case:
    """Distinct slots per (request, token); beside ordinary requests, null slots in every place that has a meaning.

    Request 1 is padding (NaN projection), request 2 starts from a null slot, request 3 has no conv slot, request 4
    drops its last token's state.
    """
    pool = 1 + requests * tokens
    t = d.tensors("kda_decode", M=requests * tokens, B=requests, T=tokens, S=pool, taps=pool_tokens + 2)
    heads, head_dim = d.g.heads, d.g.kda_head_dim
    t["conv_w"] = d.normal(3 * d.g.kda_width, d.g.conv_width, std=0.5).float()
    t["a_log"] = (torch.rand(heads, generator=d.generator) * 15 + 1).log().float()
    t["dt_bias"] = d.normal(heads, head_dim).float()
    slots = torch.tensor(d.distinct(1, pool - 1, requests * tokens)).view(requests, tokens)
    accepted = d.integers(1, tokens, requests)
    if requests > 1:
        slots[1] = 0
        tensor(t, "proj")[tokens : 2 * tokens] = NAN
    if requests > 2:
        slots[2, accepted[2] - 1] = -1
    if requests > 3:
        slots[3, 0] = 0
    if requests > 4:
        accepted[4] = 1
        if tokens > 1:
            slots[4, -1] = 0
    t["slots"], t["accepted"] = slots.int(), accepted.int()
    for name in ("conv_state", "state"):
        tensor(t, name)[0] = NAN
    return Case("kda_decode", t, {"gate_lower_bound": d.g.gate_lower_bound, "eps": d.g.eps, "l2_eps": d.g.l2_eps})


def with_e4m3_cache(case: Case, k_scale: float) -> Case:
    """A case of mla_query or mla_decode with an FP8 cache; what was NaN stays NaN."""
    cache = tensor(case.tensors, "kv_cache").float() / k_scale
    t = {**case.tensors, "kv_cache": None, "kv_cache_e4m3": cache.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)}
    return Case(case.op, t, {**case.attrs, "cache_format": 1, "k_scale": k_scale})


BF16_CACHE = {"cache_format": 0, "k_scale": 1.0}


def mla_query(d: Draw, rows: int, page: int) -> Case:
    """Distinct cache rows; every third row of the batch writes nothing. The gate section is NaN: it is not read."""
    pages = 2 + rows // page
    t = d.tensors("mla_query", M=rows, pages=pages, page=page)
    mapping = torch.tensor(d.distinct(page, pages * page - 1, rows))
    mapping[1::3] = -1
    t["slot_mapping"] = mapping
    t["kv_cache_e4m3"] = None
    tensor(t, "proj")[:, d.g.q_lora + d.g.mla_row :] = NAN
    return Case("mla_query", t, {"eps": d.g.eps, **BF16_CACHE})


def shard_positions(length: int, rank: int, ranks: int, interleave: int) -> list[int]:
    """Global positions of one shard, in the order in which it stores them."""
    return [x for x in range(length) if x // interleave % ranks == rank]


def mla_decode(d: Draw, rows: list[Tensor], query: Tensor, tokens: int, page: int, dcp: tuple[int, int, int]) -> Case:
    """One shard's call; everything in its cache that no request owns is NaN.

    Args:
        d: source of the page order.
        rows: per request, its cache rows by global position, [length, ROW].
        query: [B*T, H, ROW].
        tokens: T.
        page: rows per page.
        dcp: rank, ranks, interleave.
    """
    rank, ranks, interleave = dcp
    owned = [r[shard_positions(len(r), *dcp)] for r in rows]
    max_pages = max(1, *(-(-len(o) // page) for o in owned))
    pages = 1 + len(rows) * max_pages
    cache = torch.full((pages, page, d.g.mla_row), NAN, dtype=torch.bfloat16)
    table = torch.zeros(len(rows), max_pages, dtype=torch.int32)
    free = d.distinct(1, pages - 1, pages - 1)
    for b, own in enumerate(owned):
        for local in range(len(own)):
            if local % page == 0:
                table[b, local // page] = free.pop()
            cache[table[b, local // page], local % page] = own[local]
    t: dict[str, Tensor | None] = {
        "query": query,
        "kv_cache": cache,
        "block_table": table,
        "seq_lens": torch.tensor([len(r) for r in rows], dtype=torch.int32),
    }
    attrs = {"tokens": tokens, "dcp_rank": rank, "dcp_size": ranks, "interleave": interleave, "kv_lora": d.g.kv_lora}
    return Case("mla_decode", t, {**attrs, **BF16_CACHE, "scale": (d.g.nope + d.g.pe) ** -0.5})


def mla_value(d: Draw, rows: int, shards: int) -> Case:
    """Row 0: no source, NaN gate. Others: sources of weight 0, of each kind, hold NaN; at least one is finite."""
    t = d.tensors("mla_value", M=rows, shards=shards)
    lse, partial, proj = tensor(t, "lse"), tensor(t, "partial"), tensor(t, "proj")
    lse.mul_(8.0)
    lse[:, 0] = -torch.inf
    for m in range(1, rows):
        for head in range(d.g.heads):
            for shard in d.distinct(0, shards - 1, shards - 1):
                lse[shard, m, head] = [float(lse[shard, m, head]), -torch.inf, torch.inf, NAN][(m + head + shard) % 4]
    partial[~torch.isfinite(lse)] = NAN
    gate_offset = d.g.q_lora + d.g.mla_row
    proj[0] = NAN
    proj[:, :gate_offset] = NAN
    return Case("mla_value", t, {"gate_offset": gate_offset})


def moe_front(d: Draw, rows: int, scale: float = 2.5) -> Case:
    t = d.tensors("moe_front", M=rows)
    t["bias"] = d.normal(d.g.experts, std=0.1).float()
    return Case("moe_front", t, {"scale": scale, "top_k": d.g.top_k})


def exact_logits(d: Draw, logits: Tensor, bias: Tensor) -> Case:
    """A router whose logits are these values exactly, whatever the order of summation: x is a row of the identity.

    Args:
        d: source of the latent projection.
        logits: [E], bf16 values.
        bias: [E] f32.
    """
    case = moe_front(d, 1, scale=1.0)
    x = torch.zeros(1, d.g.hidden, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    w_gate = torch.zeros(d.g.experts, d.g.hidden, dtype=torch.bfloat16)
    w_gate[:, 0] = logits
    case.tensors.update(x=x, w_gate=w_gate, bias=bias.float())
    return case


def moe_experts(d: Draw, rows: int, expert_format: int, linear_beta: float) -> Case:
    """Random bytes are valid MXFP4; scales span 2^-8 .. 2^-4. Experts that no row chose are NaN."""
    t = d.tensors("moe_experts", M=rows)
    chosen = [d.distinct(0, d.g.experts - 2, d.g.top_k) for _ in range(rows)]
    t["topk_ids"] = torch.tensor(chosen, dtype=torch.int32)
    t["topk_weights"] = torch.rand(rows, d.g.top_k, generator=d.generator)
    unused = sorted(set(range(d.g.experts)) - {e for ids in chosen for e in ids})
    for name in ("w13", "w2"):
        packed, scale, plain = tensor(t, f"{name}_packed"), tensor(t, f"{name}_scale"), tensor(t, name)
        if expert_format:
            t[name] = None
            t[f"{name}_packed"] = d.integers(0, 255, *packed.shape).to(torch.uint8)
            t[f"{name}_scale"] = d.integers(119, 123, *scale.shape).to(torch.uint8)
            tensor(t, f"{name}_scale")[unused] = 255
        else:
            plain[unused] = NAN
            t[f"{name}_packed"] = t[f"{name}_scale"] = None
    attrs = {"expert_format": expert_format, "eps": d.g.eps, "beta": d.g.situ_beta, "linear_beta": linear_beta}
    return Case("moe_experts", t, attrs)
