"""L2 weight prefetch: asks for weights of a coming stage while the present one leaves memory bandwidth idle.

`weights` is any range of constants that the coming stage reads, as rows of 16 KiB in order of use; callers pass a view
and round down, since nothing depends on the last bytes. The op has no result: a call is right if it changes nothing,
and useful if what reads the range next is faster. It runs on a side stream beside a step, never inside one.
"""

from k3_backend.ops.interface import OpSpec, TensorSpec

PIECE_BYTES = 16 * 1024
"""A row of the range. A larger request holds the copy unit longer without fetching faster."""

SPEC = OpSpec(
    name="l2_prefetch",
    summary="bring a range of weights into L2 ahead of its use, on a side stream",
    sizes=lambda _: {"PIECE": PIECE_BYTES},
    tensors=(TensorSpec("weights", ("M", "PIECE"), "u8", "constant"),),
)
