"""The producer warps: cache rows into the ring, one bulk copy each."""

import cutlass
from cutlass import Int32, Int64, cute
from kernels.common.cute_ring import bulk_copy, expect, order_generic_before_bulk, store_zero_16b, wait
from kernels.mla_decode.plan import CHUNK, PRODUCER_STEP, PRODUCERS, ROW, STOPS, TABLE_DEPTH, WARPS
from kernels.mla_decode.work import shard_rows

__all__ = ["produce"]


@cute.jit
def produce(
    base: Int32,
    kv_cache: cute.Pointer,
    block_table: cute.Pointer,
    starts: cute.Pointer,
    lengths: cute.Pointer,
    part: tuple,
    rank: Int32,
    max_pages: Int32,
    page: Int32,
    shard: tuple,
    plan: cutlass.Constexpr,
) -> None:
    """What a producer warp does: this CTA's cache rows of each segment of the cluster's part.

    Args:
        base: shared memory.
        kv_cache: bf16 or E4M3 bytes [pages, page, ROW].
        block_table: int32 [requests, max_pages].
        starts: first chunk of each request in the sequence of all chunks, and the sequence's length.
        lengths: of each request.
        part: of the sequence: the request in which it starts, its first chunk, behind its last.
        rank: of this CTA in the cluster.
        max_pages: width of the table.
        page: rows.
        shard: as in `shard_rows`.
        plan: sizes.
    """
    request, position, stop = part
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    state = cute.make_rmem_tensor(2, Int32)
    state[0], state[1] = warp - WARPS, Int32(1)
    turn = warp - WARPS  # ring slots until this warp's next one
    while position < stop:
        start = starts[request]
        segment_stop = cutlass.min(starts[STOPS + request], stop)
        if segment_stop > position:
            size = segment_stop - position
            first = position - start + size * rank // plan.cluster
            end = position - start + size * (rank + 1) // plan.cluster
            if end > first:
                fill_rows(
                    base, state, kv_cache, block_table + Int64(request) * max_pages, page, CHUNK * (first + turn),
                    cutlass.min(CHUNK * end, shard_rows(lengths[request], *shard)), plan,
                )  # fmt: skip
                turn = (turn - (end - first)) & (PRODUCERS - 1)
            position = segment_stop
        request += 1


@cute.jit
def fill_slot(base: Int32, state: cute.Tensor, source: cute.Pointer, count: Int32, plan: cutlass.Constexpr) -> None:
    """Copy a chunk's first `count` rows, one per lane, into the next slot of this warp; the slot's others become zero.

    Args:
        base: shared memory.
        state: slot, and parity to wait for there; moves on to the warp's next slot.
        source: the lane's row.
        count: rows that exist.
        plan: sizes.
    """
    lane = cute.arch.lane_idx()
    full = base + plan.barriers + 8 * state[0]
    target = base + plan.ring + plan.slot * state[0] + plan.pitch * lane
    wait(full + 8 * plan.slots, state[1])
    if (lane >= count) & (lane < CHUNK):
        for piece in cutlass.range(plan.row_bytes // 16, unroll=1):
            store_zero_16b(target + 16 * piece)
        order_generic_before_bulk()
    cute.arch.sync_warp()
    if lane == 0:
        expect(full, plan.row_bytes * count)
    cute.arch.sync_warp()
    if lane < count:
        bulk_copy(target, source, plan.row_bytes, full)
    state[0] += PRODUCERS
    if state[0] >= plan.slots:
        state[0] -= plan.slots
        state[1] ^= 1


@cute.jit
def fill_rows(
    base: Int32,
    state: cute.Tensor,
    kv_cache: cute.Pointer,
    table: cute.Pointer,
    page: Int32,
    row: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Copy every fourth chunk of a request's rows [row, end) into the ring; `row` is a multiple of 16."""
    lane = cute.arch.lane_idx()
    entry = cute.make_rmem_tensor(TABLE_DEPTH, Int32)
    for u in cutlass.range_constexpr(TABLE_DEPTH):
        at = row + PRODUCER_STEP * u + lane % CHUNK
        entry[u] = Int32(0)
        if at < end:
            entry[u] = cute.arch.load(table + at // page, Int32)
    while row < end:
        coming = cute.make_rmem_tensor(TABLE_DEPTH, Int32)
        for u in cutlass.range_constexpr(TABLE_DEPTH):
            at = row + PRODUCER_STEP * (TABLE_DEPTH + u) + lane % CHUNK
            coming[u] = Int32(0)
            if at < end:
                coming[u] = cute.arch.load(table + at // page, Int32)
        for u in cutlass.range_constexpr(TABLE_DEPTH):
            begin = row + PRODUCER_STEP * u
            if begin < end:
                source = kv_cache + Int64(entry[u] * Int64(page) + (begin + lane % CHUNK) % page) * ROW
                fill_slot(base, state, source, cutlass.min(end - begin, CHUNK), plan)
        for u in cutlass.range_constexpr(TABLE_DEPTH):
            entry[u] = coming[u]
        row += PRODUCER_STEP * TABLE_DEPTH
