"""MoE front: router scores, top-k selection and the latent input projection.

logits = W_gate x (fp32, not rounded); s = sigmoid(logits); chosen = k largest of s + bias, ties to the lower id, NaN
last, ordered by descending s + bias; w_e = scale * s_e / (sum of chosen s + 1e-20): the bias selects, it never enters
w. latent = bf16(W_down x).
"""

from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec

SPEC = OpSpec(
    name="moe_front",
    summary="router logits, sigmoid top-k with selection-only bias, latent down projection",
    sizes=lambda g: {"D": g.hidden, "E": g.experts, "k": g.top_k, "L": g.latent},
    tensors=(
        TensorSpec("x", ("M", "D"), "bf16", "activation"),
        TensorSpec("w_gate", ("E", "D"), "bf16", "constant"),
        TensorSpec("bias", ("E",), "f32", "constant"),
        TensorSpec("w_down", ("L", "D"), "bf16", "constant"),
        TensorSpec("topk_ids", ("M", "k"), "i32", "output"),
        TensorSpec("topk_weights", ("M", "k"), "f32", "output"),
        TensorSpec("latent", ("M", "L"), "bf16", "output"),
    ),
    attrs=(
        AttrSpec("scale", "float", "routed_scaling_factor"),
        AttrSpec("top_k", "int", "k, experts per token; no input tensor tells it"),
    ),
)
