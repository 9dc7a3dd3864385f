"""Merge of DCP shards, value up-projection and sigmoid gate.

L = max_d lse_d; w_d = 2^(lse_d - L); lat = bf16(sum_d w_d row_d / sum_d w_d), fp32 merge; a source whose lse is -inf,
+inf or NaN has weight 0. v = bf16(W_UV lat) per head; out = bf16(v * sigmoid(gate)). A row whose sources all have
weight 0 outputs zero even if its gate is NaN. The gate is columns [gate_offset, gate_offset + H*V) of `proj`.
"""

from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec

SPEC = OpSpec(
    name="mla_value",
    summary="LSE merge of shards, W_UV, output gate",
    sizes=lambda g: {
        "P": g.mla_proj_rows,
        "H": g.heads,
        "KL": g.kv_lora,
        "V": g.v_dim,
        "W": g.mla_width,
    },
    tensors=(
        TensorSpec("partial", ("shards", "M", "H", "KL"), "bf16", "activation"),
        TensorSpec("lse", ("shards", "M", "H"), "f32", "activation"),
        TensorSpec("proj", ("M", "P"), "bf16", "activation"),
        TensorSpec("w_uv", ("H", "V", "KL"), "bf16", "constant"),
        TensorSpec("out", ("M", "W"), "bf16", "output"),
    ),
    attrs=(AttrSpec("gate_offset", "int", "first gate column of proj: q_lora + kv_lora + pe"),),
)
