"""Brings a range of constants into L2 ahead of its use, for a side stream: one-warp blocks that issue bulk prefetches.

The range is cut into pieces of `piece` bytes; block b of G asks for pieces b, b + G, b + 2 G, ..., so that all blocks
together walk the range in order of use. One thread per block issues: a bulk prefetch of 16 KiB costs one instruction
and no register or shared memory, and the number of blocks sets the pace, since each multiprocessor's copy unit serves
its requests one after another. A block ends when its requests are issued, not when they are served; nothing may depend
on their having arrived, and a kernel that reads the range is correct and merely slower without it.

Only constants may be prefetched: their bytes never change, so that neither order nor visibility matters and the kernel
needs no dependency wait. The whole L2 (50 MB on H200, 126 MB on GB300) is shared with what runs beside it; how much of
the next weights to ask for, and when, is the plan's decision.
"""

import cutlass
from cutlass import Int32, Int64, cute

__all__ = ["PIECE_BYTES", "prefetch_range"]

PIECE_BYTES = 16 * 1024
"""Bytes per request; larger requests hold the copy unit longer without fetching faster."""


@cute.jit
def prefetch_range(
    constants: cute.Pointer, count: Int32, rank: Int32, ranks: Int32, piece: cutlass.Constexpr = PIECE_BYTES
) -> None:
    """One thread's share of a range.

    Args:
        constants: start of the range, a multiple of 16 bytes.
        count: bytes of the range; what lies behind the last multiple of 16 is left out.
        rank: of the issuing block, 0 .. ranks - 1.
        ranks: blocks that share the range.
        piece: bytes per request, a multiple of 16.
    """
    pieces = (count + piece - 1) // piece
    for index in cutlass.range(rank, pieces, ranks, unroll=1):
        at = index * piece
        size = cutlass.min(piece, count - at) // 16 * 16
        if size > 0:
            cute.arch.inline_ptx(
                "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
                read_only_args=[constants.toint() + Int64(at), size],
            )
