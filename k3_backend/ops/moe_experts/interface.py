"""Routed latent experts, latent norm and up projection, plus the shared expert.

f(g, u) = beta * tanh(g / beta) * sigmoid(g) * lin * tanh(u / lin)   (SiTU)
E_e(z) = W2_e bf16(f(bf16(W1_e z), bf16(W3_e z)));  r = bf16(sum over slots of w * E), fp32 accumulation in slot order
shared = W_sd bf16(f(bf16(W_sg x), bf16(W_su x)));  out = bf16(bf16(W_up rms(r; latent_norm)) + bf16(shared))

`w13` rows are gate (w1) then up (w3). Expert weights come in bf16, or in MXFP4 (`expert_format` = 1: E2M1 pairs, even
element in the low nibble, one UE8M0 scale byte per 32 along K; activations stay bf16). The unused set is null.
"""

from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec

SPEC = OpSpec(
    name="moe_experts",
    summary="SiTU latent MoE with shared expert",
    sizes=lambda g: {
        "D": g.hidden,
        "L": g.latent,
        "E": g.experts,
        "k": g.top_k,
        "I": g.expert_width,
        "I2": 2 * g.expert_width,
        "S": g.shared_width,
        "S2": 2 * g.shared_width,
        "L_half": g.latent // 2,
        "L_scales": g.latent // 32,
        "I_half": g.expert_width // 2,
        "I_scales": g.expert_width // 32,
    },
    tensors=(
        TensorSpec("x", ("M", "D"), "bf16", "activation"),
        TensorSpec("latent", ("M", "L"), "bf16", "activation"),
        TensorSpec("topk_ids", ("M", "k"), "i32", "activation"),
        TensorSpec("topk_weights", ("M", "k"), "f32", "activation"),
        TensorSpec("w13", ("E", "I2", "L"), "bf16", "constant", optional=True),
        TensorSpec("w2", ("E", "L", "I"), "bf16", "constant", optional=True),
        TensorSpec("w13_packed", ("E", "I2", "L_half"), "u8", "constant", optional=True),
        TensorSpec("w13_scale", ("E", "I2", "L_scales"), "u8", "constant", optional=True),
        TensorSpec("w2_packed", ("E", "L", "I_half"), "u8", "constant", optional=True),
        TensorSpec("w2_scale", ("E", "L", "I_scales"), "u8", "constant", optional=True),
        TensorSpec("latent_norm", ("L",), "bf16", "constant"),
        TensorSpec("w_up", ("D", "L"), "bf16", "constant"),
        TensorSpec("shared_gate_up", ("S2", "D"), "bf16", "constant"),
        TensorSpec("shared_down", ("D", "S"), "bf16", "constant"),
        TensorSpec("out", ("M", "D"), "bf16", "output"),
    ),
    attrs=(
        AttrSpec("expert_format", "int", "0: bf16 experts, 1: MXFP4 experts"),
        AttrSpec("eps", "float", "RMSNorm epsilon"),
        AttrSpec("beta", "float", "SiTU beta"),
        AttrSpec("linear_beta", "float", "SiTU linear beta; <= 0 leaves u unbounded"),
    ),
)
