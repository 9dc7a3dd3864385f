"""Attention output projection, sum over tensor-parallel ranks, and the prefix update that follows.

partial_r = bf16(x_r W_r^T); y = bf16(sum_r partial_r in rank order, fp32); prefix = y if restart else bf16(prefix + y).
On one process the ranks are the leading dimension (1 without tensor parallelism).
"""

from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec

SPEC = OpSpec(
    name="oproj_allreduce",
    summary="row-parallel output projection with residual (prefix) update",
    sizes=lambda g: {"D": g.hidden},
    tensors=(
        TensorSpec("x", ("ranks", "M", "KL"), "bf16", "activation"),
        TensorSpec("w", ("ranks", "D", "KL"), "bf16", "constant"),
        TensorSpec("prefix", ("M", "D"), "bf16", "state"),
    ),
    attrs=(AttrSpec("restart", "int", "1 on block-write layers: the prefix is replaced instead of added to"),),
)
