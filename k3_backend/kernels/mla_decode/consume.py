"""The consumer warps: attention over each segment, and its result to the cluster, the workspace and the output."""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from kernels.common.cute_mma import warp_sum
from kernels.common.cute_ring import (
    arrive_peer,
    expect,
    peer,
    send_f32x2,
    send_f32x4,
    store_f32x2,
    wait_cluster,
)
from kernels.common.cute_vector import load_shared_4xf32, store_4xf32
from kernels.mla_decode.attend import attend, load_query
from kernels.mla_decode.merge import add_parts, clear_sum, finish, inbox_parts, make_sum, merge, unit_of
from kernels.mla_decode.plan import CHUNK, CONSUMERS, K_STEPS, NEG_INF, ROW, SHARE, STOPS, VALUE, WARP_COLUMNS, WARPS
from kernels.mla_decode.steps import consumer_barrier
from kernels.mla_decode.work import shard_rows

__all__ = ["consume", "write_nothing"]


@cute.jit
def consume(
    base: Int32,
    verdict: cute.Pointer,
    query: cute.Pointer,
    starts: cute.Pointer,
    lengths: cute.Pointer,
    results: tuple,
    part: tuple,
    place: tuple,
    scale: Float32,
    gain: Float32,
    shard: tuple,
    plan: cutlass.Constexpr,
) -> None:
    """What a consumer warp does: for each segment of the cluster's part, attention, exchange and sums.

    Args:
        base: shared memory.
        verdict: a word of shared memory.
        query: bf16 [requests, all query rows, ROW].
        starts: first chunk of each request in the sequence of all chunks, and the sequence's length.
        lengths: of each request.
        results: out, lse, partial, partial_stats, arrived, as the kernel gets them.
        part: of the sequence: the request in which it starts, its first chunk, behind its last.
        place: group of query rows, clusters per group, cluster, rank in it.
        scale: of the scores, times log2(e).
        gain: of the values, see `write_fragment`.
        shard: as in `shard_rows`.
        plan: sizes.
    """
    out, lse, partial, partial_stats, arrived = results
    request, position, stop = part
    group, clusters, cluster, rank = place
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    inbox, free = base + plan.inbox_barrier, base + plan.free_barrier
    valid = cutlass.min(plan.all_rows - group * plan.rows, plan.rows)
    state = cute.make_rmem_tensor(2, Int32)
    state[0], state[1] = Int32(0), Int32(0)
    q = cute.make_rmem_tensor((2, plan.tiles, K_STEPS), Int32)
    limit = cute.make_rmem_tensor(plan.owned, Int32)
    highest = cute.make_rmem_tensor(plan.owned, Float32)
    sums = cute.make_rmem_tensor(plan.owned, Float32)
    o = cute.make_rmem_tensor((4, plan.tiles, WARP_COLUMNS // 16), Float32)
    unit = group * clusters * 2
    segments = Int32(0)
    while position < stop:
        start = starts[request]
        request_stop = starts[STOPS + request]
        segment_stop = cutlass.min(request_stop, stop)
        if segment_stop > position:
            size = segment_stop - position
            first = position - start + size * rank // plan.cluster
            end = position - start + size * (rank + 1) // plan.cluster
            request_row = request * plan.all_rows + group * plan.rows
            length = lengths[request]
            for i in cutlass.range_constexpr(plan.owned):
                token = (group * plan.rows + plan.owned * warp + i) // plan.heads
                seen = shard_rows(length - plan.tokens + 1 + token, *shard)
                if token >= plan.tokens:
                    seen = Int32(0)
                limit[i] = cutlass.min(seen, CHUNK * end)
                highest[i] = Float32(NEG_INF)
                sums[i] = Float32(0.0)
            o.fill(0.0)
            if end > first:
                load_query(query + Int64(request_row) * ROW, valid, q, plan)
                attend(base, q, limit, first, end, scale, state, o, highest, sums, plan)

            _exchange(base, segments, rank, o, highest, sums, plan)
            share = starts[SHARE]  # not kept in a register during `attend`
            first_cluster = start // share
            sharing = (request_stop - 1) // share - first_cluster + 1
            at = unit_of(unit, cluster, start, share) * plan.cluster + rank
            out_at = out + Int64(request_row) * VALUE
            _add_up(base, o, (out_at, lse + request_row, partial, partial_stats, at, sharing, rank, valid, gain), plan)
            consumer_barrier()
            position = segment_stop
            if cutlass.const_expr(plan.cluster > 1):  # noqa: SIM102 - decided when compiled
                if position < stop:
                    if tid == 0:
                        expect(inbox, plan.inbox_bytes)
                    if tid < plan.cluster:
                        arrive_peer(peer(free, tid))
            if cutlass.const_expr(plan.merge_split > 0):
                pass
            elif sharing > 1:
                counter = arrived + (request * plan.groups + group) * plan.cluster + rank
                if tid == 0:
                    verdict[0] = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
                consumer_barrier()
                if verdict[0] == sharing - 1:
                    units = (first_cluster, sharing, start, share, unit)
                    merge(out_at, lse + request_row, (partial, partial_stats), units, rank, valid, gain, plan)
                    if tid == 0:
                        counter[0] = Int32(0)
            segments += 1
        request += 1


@cute.jit
def _exchange(
    base: Int32,
    segments: Int32,
    rank: Int32,
    o: cute.Tensor,
    highest: cute.Tensor,
    sums: cute.Tensor,
    plan: cutlass.Constexpr,
) -> None:
    """O by columns, maxima and sums to every CTA of the cluster, and wait for theirs; the CTA's segment counts here."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    inbox, free = base + plan.inbox_barrier, base + plan.free_barrier
    if cutlass.const_expr(plan.cluster > 1):
        if segments > 0:
            wait_cluster(free, (segments - 1) & 1)
        receiver = warp // (WARPS // plan.cluster)
        fragment = rank * plan.slice_fragments + warp % (WARPS // plan.cluster) * plan.warp_fragments
        there = peer(base + plan.inbox + 16 * (32 * fragment + lane), receiver)
        barrier = peer(inbox, receiver)
        for n in cutlass.range_constexpr(plan.tiles):
            for m in cutlass.range_constexpr(WARP_COLUMNS // 16):
                send_f32x4(
                    there + 512 * (n * (WARP_COLUMNS // 16) + m),
                    (o[0, n, m], o[1, n, m], o[2, n, m], o[3, n, m]),
                    barrier,
                )
    for i in cutlass.range_constexpr(plan.owned):
        row_sum = warp_sum(sums[i])
        at = base + plan.stats + 8 * (rank * plan.rows + plan.owned * warp + i)
        if cutlass.const_expr(plan.cluster > 1):
            if lane < plan.cluster:
                send_f32x2(peer(at, lane), (highest[i], row_sum), peer(inbox, lane))
        elif lane == 0:
            store_f32x2(at, highest[i], row_sum)
    if cutlass.const_expr(plan.cluster > 1):
        wait_cluster(inbox, segments & 1)
    else:
        consumer_barrier()


@cute.jit
def _add_up(base: Int32, o: cute.Tensor, target: tuple, plan: cutlass.Constexpr) -> None:
    """The cluster's sum of this CTA's columns, to where `finish` puts it; `target` is what `finish` gets."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = target[6]
    part = make_sum()
    if cutlass.const_expr(plan.cluster > 1):
        fragment = warp
        while fragment < plan.slice_fragments:
            clear_sum(*part)
            add_parts(*part, inbox_parts(base, fragment, rank, plan))
            finish(*part, fragment, *target, plan)
            fragment += WARPS
    else:
        for n in cutlass.range_constexpr(plan.tiles):
            stats = load_shared_4xf32(base + plan.stats + 8 * (8 * n + 2 * (lane % 4)))
            o_part, tops, totals = part
            tops[0], totals[0], tops[1], totals[1] = stats
            for m in cutlass.range_constexpr(WARP_COLUMNS // 16):
                for i in cutlass.range_constexpr(4):
                    o_part[i] = o[i, n, m]
                fragment = warp * plan.warp_fragments + n * (WARP_COLUMNS // 16) + m
                finish(*part, fragment, *target, plan)


@cute.jit
def write_nothing(
    starts: cute.Pointer, out: cute.Pointer, lse: cute.Pointer, batch: Int32, group: Int32, plan: cutlass.Constexpr
) -> None:
    """Out 0 and lse -inf for the requests without rows on this shard; CTAs take turns at requests."""
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    valid = cutlass.min(plan.all_rows - group * plan.rows, plan.rows)
    request = block
    while request < batch:
        if starts[STOPS + request] == starts[request]:
            row = request * plan.all_rows + group * plan.rows
            item = tid
            while item < valid * (VALUE // 8):
                zeros_at = cute.recast_ptr(out + Int64(row) * VALUE + 8 * item, dtype=Float32)
                store_4xf32(zeros_at, (Float32(0.0),) * 4)
                item += CONSUMERS
            if tid < valid:
                lse[row + tid] = Float32(NEG_INF)
        request += blocks
