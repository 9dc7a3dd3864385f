"""Gated MLA query path and cache insert (absorbed form).

c = rms(q_a); q = bf16(W_qb c) per head (nope | pe); q_lat = bf16(W_UK^T q_nope); query row = (q_lat | pe), unrotated.
Cache row = (rms(kv_a[:kv_lora]) | kv_a[kv_lora:]) written to flat cache row `slot_mapping[m]`; a negative mapping
writes nothing. `proj` rows are q_a | kv_a | gate | padding.

The cache holds bf16 rows, or (`cache_format` = 1) rows of E4M3 bytes: E4M3(element / `k_scale`) of the bf16 row, to
nearest even, saturated at 448; layout as in `mla_decode`. The unused cache is null.
"""

from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec

SPEC = OpSpec(
    name="mla_query",
    summary="q_a norm, q_b, W_UK absorption; kv_a norm and latent cache insert",
    sizes=lambda g: {
        "P": g.mla_proj_rows,
        "H": g.heads,
        "QL": g.q_lora,
        "KL": g.kv_lora,
        "QB": g.heads * (g.nope + g.pe),
        "NOPE": g.nope,
        "ROW": g.mla_row,
    },
    tensors=(
        TensorSpec("proj", ("M", "P"), "bf16", "activation"),
        TensorSpec("q_norm", ("QL",), "bf16", "constant"),
        TensorSpec("kv_norm", ("KL",), "bf16", "constant"),
        TensorSpec("w_qb", ("QB", "QL"), "bf16", "constant"),
        TensorSpec("w_uk_t", ("H", "NOPE", "KL"), "bf16", "constant"),
        TensorSpec("slot_mapping", ("M",), "i64", "metadata"),
        TensorSpec("query", ("M", "H", "ROW"), "bf16", "output"),
        TensorSpec("kv_cache", ("pages", "page", "ROW"), "bf16", "state", optional=True),
        TensorSpec("kv_cache_e4m3", ("pages", "page", "ROW"), "e4m3", "state", optional=True),
    ),
    attrs=(
        AttrSpec("eps", "float", "RMSNorm epsilon"),
        AttrSpec("cache_format", "int", "0: bf16 rows in kv_cache, 1: E4M3 rows in kv_cache_e4m3"),
        AttrSpec("k_scale", "float", "what an E4M3 byte's value is multiplied by; 1 with bf16"),
    ),
)
