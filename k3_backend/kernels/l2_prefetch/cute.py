"""L2 weight prefetch: one-warp blocks whose first thread issues bulk prefetches of 16 KiB.

Block b of G asks for pieces b, b + G, b + 2 G, ..., so that all blocks together walk the range in order of use. A
request costs one instruction and neither registers nor shared memory; each multiprocessor's copy unit serves its
requests one after another, so the number of blocks sets the pace. A block ends when its requests are issued, not when
they are served: nothing may depend on their arrival.

Only constants may be prefetched. Their bytes never change, so neither order nor visibility matters, and there is no
dependency to wait for: the launch is an ordinary one, on a stream of its own. It prefers the largest carve-out, as the
stage's kernels have it: a multiprocessor that would have to change its carve-out takes no block until it has drained.
"""

import cutlass
from cutlass import Int32, cute

from k3_backend.aot.cuda.contract import Choices, Launch, Variant

PIECE_BYTES = 16 * 1024


@cute.kernel
def l2_prefetch(weights: cute.Pointer, pieces: Int32):
    """`weights`: [pieces, 16384] bytes."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    if cute.arch.lane_idx() == 0:
        for piece in cutlass.range(block, pieces, blocks, unroll=1):
            cute.arch.inline_ptx(
                f"cp.async.bulk.prefetch.L2.global [{{$r0}}], {PIECE_BYTES};",
                read_only_args=[weights + cutlass.Int64(piece) * PIECE_BYTES],
            )


def variant(choices: Choices) -> Variant:
    """One launch."""
    launch = Launch(
        name="l2_prefetch",
        kernel=l2_prefetch,
        arguments=("weights", "M"),
        grid=(f"min(M, {choices['blocks']})", 1, 1),
        block=32,
        pdl=False,
        urgent=choices["urgent"] == 1,
        carveout=100,
        expects=("prefetch",),
    )
    return Variant((launch,))
