"""Attention input projection: one packed bf16 matrix product, fp32 accumulation, one rounding."""

from k3_backend.ops.interface import OpSpec, TensorSpec

SPEC = OpSpec(
    name="input_projection",
    summary="out[m, n] = bf16(sum_d x[m, d] * w[n, d]); rows packed as q|k|v|g|f_a|beta (KDA) or q_a|kv_a|gate (MLA)",
    sizes=lambda g: {"D": g.hidden},
    tensors=(
        TensorSpec("x", ("M", "D"), "bf16", "activation"),
        TensorSpec("w", ("N", "D"), "bf16", "constant"),
        TensorSpec("out", ("M", "N"), "bf16", "output"),
    ),
)
