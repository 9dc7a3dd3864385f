"""More tokens: a CTA has a part of K of all the head's rows, and with it only that part of the tokens' q_a.

Per token a CTA moves 384 bytes of q_a and, through distributed shared memory, 672 bytes of partial sums each way; with
rows split it would be 3072 bytes of q_a, and the norm would be computed by all eight CTAs.

Warp w multiplies the rows that CTA w finishes, so that a warp's partial sums have one receiver, and sends them as they
lie in its accumulators.
"""

import cutlass
from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import matrix_x4, mma_m16n8k16, pack_bf16x2, warp_sum
from kernels.common.cute_ring import peer
from kernels.common.cute_vector import copy_16b_async, load_4xb32, load_shared_4xb32, send_f32
from kernels.mla_query.plan import Plan
from kernels.mla_query.steps import (
    absorb,
    arm,
    commit_absorption,
    load_rows_of_w_qb,
    negative,
    push_16b,
    scaled,
    share_nope,
    split_scale,
    start_barriers,
    store_4b,
    sum_of_squares,
    zero,
)

__all__ = ["query_rows"]


@cute.jit
def query_rows(
    proj: cute.Pointer,
    q_norm: cute.Pointer,
    w_qb: cute.Pointer,
    w_uk_t: cute.Pointer,
    query: cute.Pointer,
    rows: Int32,
    tiles: Int32,
    eps: Float32,
    head: Int32,
    group: Int32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Query rows of tiles group, group + groups, ..., one head."""
    thread, _, _ = cute.arch.thread_idx()
    n = plan.buffers
    barriers = start_barriers((plan.squares_bytes,) * n + (plan.partial_bytes,) * n + (plan.nope_bytes,) * n)
    squares, partials, nopes = barriers, barriers + n, barriers + 2 * n
    shared = barriers.toint()
    my_k = rank * (32 * plan.chunks)
    weights = load_rows_of_w_qb(w_qb, head, cute.arch.warp_idx(), my_k + 8 * (cute.arch.lane_idx() % 4), plan)
    if thread < plan.pieces:
        copy_16b_async(shared + plan.norm_at + 16 * thread, q_norm + my_k + 8 * thread)
    commit_absorption(shared, w_uk_t, head, rank, plan)
    cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()

    q_a = _load_q_a(proj, rows, group, my_k, plan)
    _share_squares(shared, q_a, Int32(0), rank, plan)
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    _normalise(shared, q_a, squares, Int32(0), Int32(0), eps, plan)
    cute.arch.sync_threads()
    if cutlass.const_expr(not plan.looped):
        _multiply(shared, weights, Int32(0), rank, plan)
        _finish(shared, query, partials, Int32(0), Int32(0), rows, group, head, rank, plan)
        absorb(shared, query, nopes, Int32(0), rows, group, Int32(0), head, rank, plan)
    else:
        turns = (tiles - group + plan.groups - 1) // plan.groups
        for i in cutlass.range(turns, unroll=1):
            tile = group + i * plan.groups
            buffer, phase = i % 2, i // 2 % 2
            more = i + 1 < turns
            q_a = _load_q_a(proj, rows, tile + plan.groups, my_k, plan)
            _multiply(shared, weights, buffer, rank, plan)
            if more:
                _share_squares(shared, q_a, 1 - buffer, rank, plan)
            if i > 0:
                before, its_phase = 1 - buffer, (i - 1) // 2 % 2
                absorb(shared, query, nopes + before, its_phase, rows, tile - plan.groups, before, head, rank, plan)
            _finish(shared, query, partials + buffer, phase, buffer, rows, tile, head, rank, plan)
            if more:
                _normalise(shared, q_a, squares + (1 - buffer), (i + 1) // 2 % 2, 1 - buffer, eps, plan)
            cute.arch.sync_threads()
        last = turns - 1
        tile = group + last * plan.groups
        absorb(shared, query, nopes + last % 2, last // 2 % 2, rows, tile, last % 2, head, rank, plan)


def _lane_token(plan: Plan) -> Int32:
    """The token of a tile whose pieces lane % token_lanes + i * token_lanes the lane normalises."""
    return (cute.arch.warp_idx() * 32 + cute.arch.lane_idx()) // plan.token_lanes


def _piece(step: int, plan: Plan) -> Int32:
    """The lane's piece of the CTA's k; lanes beyond the pieces repeat the last one."""
    return cutlass.min(cute.arch.lane_idx() % plan.token_lanes + step * plan.token_lanes, plan.pieces - 1)


@cute.jit
def _load_q_a(proj: cute.Pointer, rows: Int32, tile: Int32, my_k: Int32, plan: cutlass.Constexpr) -> list:
    """The lane's pieces of q_a. Rows past the end repeat the last one; nothing that comes of them is stored."""
    row = cutlass.min(tile * plan.tile + _lane_token(plan), rows - 1)
    source = proj + (row * plan.proj_row + my_k)
    return [load_4xb32(source + 8 * _piece(step, plan)) for step in range(plan.norm_steps)]


@cute.jit
def _share_squares(shared: Int32, q_a: list, buffer: Int32, rank: Int32, plan: cutlass.Constexpr) -> None:
    """The CTA's sum of squares of each token to every CTA of the cluster. All warps take part."""
    at = cute.arch.lane_idx() % plan.token_lanes
    total = Float32(0.0)
    for step in cutlass.range_constexpr(plan.norm_steps):
        squares = sum_of_squares(Float32(0.0), q_a[step])
        if cutlass.const_expr((step + 1) * plan.token_lanes > plan.pieces):
            squares = squares if at + step * plan.token_lanes < plan.pieces else Float32(0.0)
        total = total + squares
    total = warp_sum(total, plan.token_lanes)
    address = shared + plan.squares_at + 4 * ((buffer * plan.tile + _lane_token(plan)) * plan.cluster + rank)
    for i in cutlass.range_constexpr(-(-plan.cluster // plan.token_lanes)):
        owner = at + i * plan.token_lanes
        if owner < plan.cluster:
            send_f32(peer(address, owner), total, peer(shared + 8 * buffer, owner))


@cute.jit
def _normalise(
    shared: Int32,
    q_a: list,
    barrier: cute.Pointer,
    phase: Int32,
    buffer: Int32,
    eps: Float32,
    plan: cutlass.Constexpr,
) -> None:
    """Waits for the sums of squares; the lane's pieces of c = bf16(q_a w / rms) to shared memory."""
    cute.arch.mbarrier_wait(barrier, phase)
    arm(barrier, plan.squares_bytes, plan)
    token = buffer * plan.tile + _lane_token(plan)
    total = Float32(0.0)
    for four in cutlass.range_constexpr(plan.cluster // 4):
        squares = cute.arch.inline_ptx(
            "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[shared + plan.squares_at + 4 * (token * plan.cluster + 4 * four)],
        )
        total = total + ((squares[0] + squares[1]) + (squares[2] + squares[3]))
    scale = split_scale(cute.math.rsqrt(total * (1.0 / plan.q_lora) + eps))
    for step in cutlass.range_constexpr(plan.norm_steps):
        piece = _piece(step, plan)
        norm = load_shared_4xb32(shared + plan.norm_at + 16 * piece)
        address = shared + plan.c_at + token * plan.c_pitch + 16 * piece - 12 * (piece % 4)
        for j in cutlass.range_constexpr(4):
            c = scaled(q_a[step][j], norm[j], negative(norm[j]), *scale)
            cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address + 16 * j, c])


@cute.jit
def _multiply(shared: Int32, weights: list, buffer: Int32, rank: Int32, plan: cutlass.Constexpr) -> None:
    """Product of the tile's c and the warp's rows over the CTA's k, to the CTA that finishes these rows."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    start = shared + plan.c_at + (buffer * plan.tile + lane % 16) * plan.c_pitch + lane // 16 * 16
    barrier = peer(shared + 8 * (plan.buffers + buffer), warp)
    target = peer(shared + plan.partial_at + _fragment(buffer, rank, 0, 0, plan) + 16 * lane, warp)
    together = min(2, plan.blocks)  # blocks of 16 tokens; two hide the latency of dependent MMAs
    for first in cutlass.range_constexpr(0, plan.blocks, together):
        acc = [[zero()] * plan.octets for _ in range(together)]
        for i in cutlass.range_constexpr(2 * plan.chunks):
            a = [matrix_x4(start + 16 * (first + b) * plan.c_pitch + 32 * i) for b in range(together)]
            for octet in cutlass.range_constexpr(plan.octets):
                w = weights[octet][i // 2]
                for b in cutlass.range_constexpr(together):
                    acc[b][octet] = mma_m16n8k16(acc[b][octet], a[b], (w[i % 2 * 2], w[i % 2 * 2 + 1]))
        for b in cutlass.range_constexpr(together):
            for octet in cutlass.range_constexpr(plan.octets):
                push_16b(target + 512 * ((first + b) * plan.octets + octet), acc[b][octet], barrier)


def _fragment(buffer: Int32, part: Int32, block: Int32, octet: Int32, plan: Plan) -> Int32:
    """Offset of an accumulator, 16 bytes per lane, among the partial sums."""
    return 512 * (((buffer * plan.cluster + part) * plan.blocks + block) * plan.octets + octet)


@cute.jit
def _finish(
    shared: Int32,
    query: cute.Pointer,
    barrier: cute.Pointer,
    phase: Int32,
    buffer: Int32,
    rows: Int32,
    tile: Int32,
    head: Int32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Sums over the parts of K in fixed order, rounded: pe rows to `query`, nope rows to every CTA of the cluster."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    cute.arch.mbarrier_wait(barrier, phase)
    arm(barrier, plan.partial_bytes, plan)
    for step in cutlass.range_constexpr(-(-plan.blocks * plan.octets // plan.warps)):
        unit = warp + plan.warps * step
        block, octet = unit // plan.octets, unit % plan.octets
        if block < plan.blocks:
            sums = zero()
            for part in cutlass.range_constexpr(plan.cluster):
                address = shared + plan.partial_at + _fragment(buffer, part, block, octet, plan) + 16 * lane
                values = cute.arch.inline_ptx(
                    "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                    write_only_types=[Float32] * 4,
                    read_only_args=[address],
                )
                sums = [sums[i] + values[i] for i in range(4)]
            for half in cutlass.range_constexpr(2):
                pair = pack_bf16x2(sums[2 * half], sums[2 * half + 1])
                token = 16 * block + 8 * half + lane // 4
                if octet < plan.nope_octets:
                    ready = shared + 8 * (2 * plan.buffers + buffer)
                    share_nope(shared, pair, token, octet, buffer, ready, rank, plan)
                elif tile * plan.tile + token < rows:
                    pe_row = 8 * (rank * plan.pe_octets + octet - plan.nope_octets) + lane % 4 * 2
                    at = ((tile * plan.tile + token) * plan.heads + head) * plan.row + plan.kv_lora + pe_row
                    store_4b(query + at, pair)
