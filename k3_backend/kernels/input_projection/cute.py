"""Attention input projection out[m, n] = bf16(sum_k x[m, k] w[n, k]) for few rows m: a stream over the weights.

x bf16 [M, K] activation, w bf16 [N, K] constant, out bf16 [M, N]; fp32 sums, one rounding, sums in a fixed order.
The forms differ in what stays: activations in registers of warps (0, 2), or a whole row tile's sums (1).
"""

from kernels.input_projection import few_tokens, many_tokens, one_tile

from k3_backend.aot.cuda.contract import Choices, Variant

FEW, ONE_TILE, MANY = 0, 1, 2
"""Values of `form`."""


def variant(c: Choices) -> Variant:
    """One launch."""
    depth, columns, rows, stages = c.geometry.hidden, c["N"], c["rows"], c["stages"]
    if c["form"] == FEW:
        few = few_tokens.Shape(depth, columns, rows, c["token_tiles"], c["split"], stages, c["ctas"])
        return Variant((few_tokens.launch(few),), requires=("M <= 512",))
    if c["ctas"] != 1:
        raise ValueError("forms 1 and 2 have ctas = 1")
    if c["form"] == ONE_TILE:
        if c.blackwell:
            raise ValueError("form 1 needs wgmma, which only sm_90a has")
        one = one_tile.Shape(depth, columns, rows, c["token_tiles"], c["split"], stages)
        return Variant((one_tile.launch(one),), requires=("M <= 512",))
    if (c["token_tiles"], c["split"]) != (8, 8):
        raise ValueError("form 2 has token_tiles = 8, split = 8")
    return Variant((many_tokens.launch(many_tokens.Shape(depth, columns, rows, stages)),), requires=("M <= 512",))
