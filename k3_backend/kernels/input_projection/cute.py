"""Attention input projection out[m, n] = bf16(sum_k x[m, k] w[n, k]) for few rows m: a stream over the weights.

x bf16 [M, K] activation, w bf16 [N, K] constant, out bf16 [M, N]; fp32 sums, one rounding, sums in a fixed order.
All forms keep activations in registers and let weights stream past them; they differ in who holds which activations.
"""

from kernels.input_projection import few_tokens, many_tokens, one_tile

from k3_backend.aot.cuda.contract import Choices, Variant

FEW, WARP_GROUP, WARPS, ONE_TILE = 0, 1, 2, 3
"""Values of `form`."""


def variant(c: Choices) -> Variant:
    """One launch."""
    if c["form"] == FEW:
        few = few_tokens.Shape(
            depth=c.geometry.hidden, columns=c["N"], rows=c["rows"], token_tiles=c["token_tiles"], split=c["split"],
            stages=c["stages"], ctas=c["ctas"],
        )  # fmt: skip
        return Variant((few_tokens.launch(few),), requires=("M <= 512",))
    if c["form"] == ONE_TILE:
        if c.blackwell:
            raise ValueError("form 3 needs wgmma, which only sm_90a has")
        one = one_tile.Shape(
            depth=c.geometry.hidden, columns=c["N"], rows=c["rows"], token_tiles=c["token_tiles"], split=c["split"],
            stages=c["stages"], boxes=c["ctas"],
        )  # fmt: skip
        return Variant((one_tile.launch(one),), requires=("M <= 512",))
    if (c["token_tiles"], c["split"], c["ctas"]) != (8, 8, 1):
        raise ValueError("forms 1 and 2 have token_tiles = 8, split = 8, ctas = 1")
    if c["form"] == WARP_GROUP and c.blackwell:
        raise ValueError("form 1 needs wgmma, which only sm_90a has")
    many = many_tokens.Shape(
        depth=c.geometry.hidden, columns=c["N"], rows=c["rows"], stages=c["stages"],
        warp_group=c["form"] == WARP_GROUP,
    )  # fmt: skip
    return Variant((many_tokens.launch(many),), requires=("M <= 512",))
