"""Which cache rows a CTA attends, found by each from `seq_lens`."""

import cutlass
from cutlass import Int32, cute
from kernels.mla_decode.plan import CHUNK, MAX_BATCH, SHARE, STOPS

__all__ = ["find_request", "plan_work", "shard_rows"]


@cute.jit
def shard_rows(count: Int32, rank: Int32, size: Int32, interleave: Int32) -> Int32:
    """How many of the first `count` global positions live on this shard."""
    count = cutlass.max(count, 0)
    if size > 1:
        cycle = interleave * size
        rounds = count // cycle
        rest = count - rounds * cycle - rank * interleave
        count = rounds * interleave + cutlass.min(cutlass.max(rest, 0), interleave)
    return count


@cute.jit
def find_request(starts: cute.Pointer, batch: Int32, chunk: Int32) -> Int32:
    """The request that holds a chunk of the sequence; requests without chunks hold none. The whole warp asks."""
    lane = cute.arch.lane_idx()
    found = Int32(0)
    base = Int32(0)
    while base < batch:
        before = (base + lane < batch) & (starts[cutlass.min(base + lane, batch - 1) + 1] <= chunk)
        found += cute.arch.popc(cute.arch.vote_ballot_sync(before))
        base += 32
    return found


@cute.jit
def plan_work(
    seq_lens: cute.Pointer,
    starts: cute.Pointer,
    lengths: cute.Pointer,
    batch: Int32,
    clusters: Int32,
    shard: tuple,
    plan: cutlass.Constexpr,
) -> None:
    """One warp: lengths of all requests, where their chunks lie in the sequence, and each cluster's share of it.

    Requests of about the same length get the same number of clusters each, if that makes no share more than an eighth
    larger: no cluster then has parts of two requests. Between requests the sequence has chunks that do not exist.
    """
    lane = cute.arch.lane_idx()
    seen = []
    for part in cutlass.range_constexpr(MAX_BATCH // 32):
        length = Int32(0)
        if 32 * part + lane < batch:
            length = cute.arch.load(seq_lens + 32 * part + lane, Int32)
        seen.append(length)
    each = clusters // batch
    if lane == 0:
        starts[0] = Int32(0)
    total, longest = Int32(0), Int32(0)
    counts = []
    for part in cutlass.range_constexpr(MAX_BATCH // 32):
        count = Int32(0)
        if 32 * part < batch:
            count = (shard_rows(seen[part], *shard) + (CHUNK - 1)) // CHUNK
            ends = count
            for step in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(ends, offset=1 << step)
                if lane >= 1 << step:
                    ends += lower
            starts[32 * part + lane + 1] = total + ends
            lengths[32 * part + lane] = seen[part]
            starts[STOPS + 32 * part + lane] = total + ends
            total += cute.arch.shuffle_sync(ends, offset=31)
        counts.append(count)
        longest = cutlass.max(longest, count)
    least = plan.min_chunks * plan.cluster
    share = cutlass.max((total + clusters - 1) // clusters, least)
    if (each > 0) & (share > least):
        for step in cutlass.range_constexpr(5):
            longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, offset=1 << step))
        even = cutlass.max((longest + each - 1) // each, least)
        if 8 * even <= 9 * share:
            share = even
            for part in cutlass.range_constexpr(MAX_BATCH // 32):
                if 32 * part < batch:
                    start = (32 * part + lane) * each * share
                    starts[32 * part + lane + 1] = start + each * share
                    starts[STOPS + 32 * part + lane] = start + counts[part]
    if lane == 0:
        starts[SHARE] = share
