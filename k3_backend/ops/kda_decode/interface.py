"""KDA decode, fully fused: conv + SiLU + l2norm + forget gate + delta-rule recurrence + gated RMSNorm.

Rows are request-major: row = b * T + t. `slots[b, t]` <= 0 is the null slot. The conv window lives in the conv
state of `slots[b, 0]`, `taps` = T + 2 rows for the T the pool was made for; with `acc = accepted[b]` (>= 1):

* read recurrent state from `slots[b, acc - 1]` (if that id or `slots[b, 0]` is <= 0, the whole request outputs zeros
  and writes nothing);
* after token t write it to `slots[b, t]` if that id is > 0;
* conv window of the first token: rows acc-1, acc, acc+1 of the old conv state; the new conv state is
  [c[acc], c[acc+1], x_0 .. x_{T-1}] (pre-conv bf16 inputs); rows from T + 2 on, where the pool has them, stay.

T = 1 has 3 taps and one slot, acc = 1. Source: KDA section of the Kimi K3 model notes (`docs/model.md`).
"""

from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec

SPEC = OpSpec(
    name="kda_decode",
    summary="one KDA layer's token mixing for T tokens per request, between input projection and output projection",
    sizes=lambda g: {
        "P": g.kda_proj_rows,
        "H": g.heads,
        "K": g.kda_head_dim,
        "W": g.kda_width,
        "W3": 3 * g.kda_width,
        "R": g.kda_gate_rank,
        "C": g.conv_width,
    },
    tensors=(
        TensorSpec("proj", ("M", "P"), "bf16", "activation"),
        TensorSpec("conv_w", ("W3", "C"), "f32", "constant"),
        TensorSpec("f_b", ("W", "R"), "bf16", "constant"),
        TensorSpec("a_log", ("H",), "f32", "constant"),
        TensorSpec("dt_bias", ("H", "K"), "f32", "constant"),
        TensorSpec("o_norm", ("K",), "bf16", "constant"),
        TensorSpec("slots", ("B", "T"), "i32", "metadata"),
        TensorSpec("accepted", ("B",), "i32", "metadata"),
        TensorSpec("conv_state", ("S", "taps", "W3"), "bf16", "state"),
        TensorSpec("state", ("S", "H", "K", "K"), "f32", "state"),  # [slot, head, V, K]
        TensorSpec("out", ("M", "W"), "bf16", "output"),
    ),
    attrs=(
        AttrSpec("gate_lower_bound", "float", "lower bound of the log decay, -5 in K3; in [-5, 0)"),
        AttrSpec("eps", "float", "RMSNorm epsilon of the gated norm"),
        AttrSpec("l2_eps", "float", "epsilon under the root of the q and k l2 norms"),
    ),
)
