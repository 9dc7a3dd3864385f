"""Dense SiTU MLP of layer 0: out = bf16(W_down bf16(f(bf16(W_g x), bf16(W_u x)))); gate rows first."""

from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec

SPEC = OpSpec(
    name="dense_mlp",
    summary="SiTU MLP of the dense first layer",
    sizes=lambda g: {"D": g.hidden, "I": g.dense_width, "I2": 2 * g.dense_width},
    tensors=(
        TensorSpec("x", ("M", "D"), "bf16", "activation"),
        TensorSpec("w_gate_up", ("I2", "D"), "bf16", "constant"),
        TensorSpec("w_down", ("D", "I"), "bf16", "constant"),
        TensorSpec("out", ("M", "D"), "bf16", "output"),
    ),
    attrs=(
        AttrSpec("beta", "float", "SiTU beta"),
        AttrSpec("linear_beta", "float", "SiTU linear beta; <= 0 leaves u unbounded"),
    ),
)
