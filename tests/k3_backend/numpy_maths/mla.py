"""Gated MLA in fp64 numpy: the three absorbed decode ops, and full causal attention without absorption.

`mla_attention` is the textbook form: every cached position is expanded to per-head keys and values. It shares only
RMSNorm and the sigmoid with the absorbed ops.
"""

from __future__ import annotations

import numpy as np

from numpy_maths.common import Array, Attributes, Inputs, Outputs, given, rms_norm, sigmoid


def e4m3_values() -> Array:
    """Values of the codes 0 to 126 of OCP E4M3, ascending; 127 is NaN."""
    code = np.arange(127)
    exponent, mantissa = code // 8, code % 8
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def nearest_e4m3(x: Array) -> Array:
    """The nearest value, of two the one with the even code; what is too large becomes 448."""
    values = e4m3_values()
    distance = np.abs(np.abs(x)[..., None] - values)
    best = np.where(distance == distance.min(-1, keepdims=True), np.arange(127) % 2, 2).argmin(-1)
    return np.sign(x) * values[best]


def mla_query(t: Inputs, a: Attributes) -> Outputs:
    """Absorbed query rows, and latent cache rows written through the slot mapping."""
    q_norm, kv_norm, w_qb, w_uk_t = (given(t, name) for name in ("q_norm", "kv_norm", "w_qb", "w_uk_t"))
    proj, mapping = given(t, "proj"), given(t, "slot_mapping")
    name = "kv_cache_e4m3" if a["cache_format"] else "kv_cache"
    kv_cache = given(t, name).copy()
    page = kv_cache.shape[1]
    q_lora, kv_lora = q_norm.size, kv_norm.size
    heads, nope, _ = w_uk_t.shape
    row_width = kv_cache.shape[2]
    per_head = w_qb.shape[0] // heads
    query = np.zeros((proj.shape[0], heads, row_width))
    for m, row in enumerate(proj):
        q = w_qb @ rms_norm(row[:q_lora], q_norm, float(a["eps"]))
        for head in range(heads):
            own = q[head * per_head : (head + 1) * per_head]
            query[m, head, :kv_lora] = w_uk_t[head].T @ own[:nope]
            query[m, head, kv_lora:] = own[nope:]
        if mapping[m] >= 0:
            kv_a = row[q_lora : q_lora + row_width]
            cached = np.concatenate([rms_norm(kv_a[:kv_lora], kv_norm, float(a["eps"])), kv_a[kv_lora:]])
            if a["cache_format"]:
                cached = nearest_e4m3(cached / float(a["k_scale"]))
            kv_cache[mapping[m] // page, mapping[m] % page] = cached
    return {"query": query, name: kv_cache}


def mla_decode(t: Inputs, a: Attributes) -> Outputs:
    """Softmax attention of absorbed queries over one shard's cached rows, and its base-2 log-sum-exp."""
    query, table, lens = (given(t, name) for name in ("query", "block_table", "seq_lens"))
    cache = given(t, "kv_cache_e4m3" if a["cache_format"] else "kv_cache") * float(a["k_scale"])
    tokens, kv_lora = int(a["tokens"]), int(a["kv_lora"])
    ranks, rank, interleave = int(a["dcp_size"]), int(a["dcp_rank"]), int(a["interleave"])
    page = cache.shape[1]
    out = np.zeros((*query.shape[:2], kv_lora))
    lse = np.full(query.shape[:2], -np.inf)
    for b in range(lens.size):
        for i in range(tokens):
            rows = []
            for x in range(int(lens[b]) - tokens + i + 1):
                if (x // interleave) % ranks == rank:
                    local = x // (interleave * ranks) * interleave + x % interleave
                    rows.append(cache[table[b, local // page], local % page])
            if not rows:
                continue
            for head in range(query.shape[1]):
                m = b * tokens + i
                scores = np.array([float(query[m, head] @ row) for row in rows]) * float(a["scale"])
                weights = np.exp(scores - scores.max())
                lse[m, head] = scores.max() / np.log(2.0) + np.log2(weights.sum())
                for weight, row in zip(weights / weights.sum(), rows, strict=True):
                    out[m, head] += weight * row[:kv_lora]
    return {"out": out, "lse": lse}


def mla_value(t: Inputs, a: Attributes) -> Outputs:
    """Shards merged by their log-sum-exp, value up-projection, sigmoid gate."""
    partial, lse, proj, w_uv = (given(t, name) for name in ("partial", "lse", "proj", "w_uv"))
    shards, tokens, heads, _ = partial.shape
    v_dim = w_uv.shape[1]
    out = np.zeros((tokens, heads * v_dim))
    for m in range(tokens):
        for head in range(heads):
            sources = [d for d in range(shards) if np.isfinite(lse[d, m, head])]
            if not sources:
                continue
            top = max(lse[d, m, head] for d in sources)
            weights = {d: 2.0 ** (lse[d, m, head] - top) for d in sources}
            merged = sum((w * partial[d, m, head] for d, w in weights.items()), np.zeros(partial.shape[3]))
            own = slice(head * v_dim, (head + 1) * v_dim)
            gate = proj[m, int(a["gate_offset"]) :][own]
            out[m, own] = w_uv[head] @ (merged / sum(weights.values())) * sigmoid(gate)
    return {"out": out}


def expanded(t: Inputs, a: Attributes) -> tuple[Array, Array, Array, Array]:
    """Per-head queries, keys [H, L, nope + pe], values and gates [H, L, v] of one sequence, nothing absorbed.

    Args:
        t: `proj` [L, P], q_norm, kv_norm, w_qb, w_uk_t, w_uv.
        a: eps.
    """
    q_norm, kv_norm, w_qb, w_uk_t, w_uv = (given(t, n) for n in ("q_norm", "kv_norm", "w_qb", "w_uk_t", "w_uv"))
    heads, nope, kv_lora = w_uk_t.shape
    width = w_qb.shape[0] // heads
    v_dim = w_uv.shape[1]
    pe_end = q_norm.size + kv_lora + width - nope
    queries, keys, values, gates = [], [], [], []
    for row in given(t, "proj"):
        latent = rms_norm(row[q_norm.size : q_norm.size + kv_lora], kv_norm, float(a["eps"]))
        k_pe = row[q_norm.size + kv_lora : pe_end]
        queries.append((w_qb @ rms_norm(row[: q_norm.size], q_norm, float(a["eps"]))).reshape(heads, width))
        keys.append(np.stack([np.concatenate([w_uk_t[h] @ latent, k_pe]) for h in range(heads)]))
        values.append(np.stack([w_uv[h] @ latent for h in range(heads)]))
        gates.append(row[pe_end : pe_end + heads * v_dim].reshape(heads, v_dim))
    q, k, v, gate = (np.stack(part, axis=1) for part in (queries, keys, values, gates))
    return q, k, v, gate


def mla_attention(t: Inputs, a: Attributes) -> Array:
    """Full causal gated attention of one sequence: [L, H * v]; arguments as for `expanded`."""
    q, k, v, gate = expanded(t, a)
    heads, length, width = q.shape
    out = np.zeros((length, heads, v.shape[2]))
    for head in range(heads):
        for i in range(length):
            scores = k[head, : i + 1] @ q[head, i] * width**-0.5
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[head, : i + 1] / weights.sum() * sigmoid(gate[head, i])
    return out.reshape(length, -1)
