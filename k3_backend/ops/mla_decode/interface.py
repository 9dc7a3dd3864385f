"""MLA decode core over the paged latent cache, with log-sum-exp output.

Row (b, t) attends global positions x <= seq_lens[b] - T + t that live on this DCP shard: (x // interleave) % dcp_size
== dcp_rank, stored at local position (x // (interleave * dcp_size)) * interleave + x % interleave of the request's
block table. `seq_lens` counts the T tokens of this step (global length). `lse` is the base-2 log-sum-exp of the scaled
scores (log2 domain); an empty shard or seq_len 0 gives out = 0 and lse = -inf. Content of cache rows that the request
does not own must not matter, NaN included.

The cache holds bf16 rows, or (`cache_format` = 1) rows of E4M3 bytes, ROW of them per token with nothing between, that
stand for byte * `k_scale`; one scale per layer, for latent and position part alike. The query is bf16 either way. The
unused cache is null.
"""

from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec

SPEC = OpSpec(
    name="mla_decode",
    summary="softmax(<query, row> * scale) over the shard's cached rows, value = row[:kv_lora]; base-2 LSE",
    sizes=lambda g: {"H": g.heads, "ROW": g.mla_row, "KL": g.kv_lora},
    tensors=(
        TensorSpec("query", ("M", "H", "ROW"), "bf16", "activation"),
        TensorSpec("kv_cache", ("pages", "page", "ROW"), "bf16", "activation", optional=True),
        TensorSpec("kv_cache_e4m3", ("pages", "page", "ROW"), "e4m3", "activation", optional=True),
        TensorSpec("block_table", ("B", "max_pages"), "i32", "metadata"),
        TensorSpec("seq_lens", ("B",), "i32", "metadata"),
        TensorSpec("out", ("M", "H", "KL"), "bf16", "output"),
        TensorSpec("lse", ("M", "H"), "f32", "output"),
    ),
    attrs=(
        AttrSpec("tokens", "int", "T, query tokens per request, causal among themselves"),
        AttrSpec("scale", "float", "(nope + pe) ** -0.5"),
        AttrSpec("dcp_rank", "int", "this shard's rank"),
        AttrSpec("dcp_size", "int", "number of shards; 1 without DCP"),
        AttrSpec("interleave", "int", "consecutive positions per shard, 1 by default"),
        AttrSpec("kv_lora", "int", "KL, width of the value part of a row; no input tensor tells it"),
        AttrSpec("cache_format", "int", "0: bf16 rows in kv_cache, 1: E4M3 rows in kv_cache_e4m3"),
        AttrSpec("k_scale", "float", "what an E4M3 byte's value is multiplied by; 1 with bf16"),
    ),
)
