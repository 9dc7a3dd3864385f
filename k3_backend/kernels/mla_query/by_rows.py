"""Few tokens: a CTA has rows of W_qb over all of K. Its warps split K, and each normalises its own part of q_a."""

import cutlass
from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import (
    load_shared_8b,
    load_weight_16b,
    matrix_x4,
    mma_m16n8k16,
    pack_bf16x2,
    store_shared_8b,
    warp_sum,
)
from kernels.common.cute_vector import load_4xb32
from kernels.mla_query.plan import Plan
from kernels.mla_query.steps import (
    absorb,
    commit_absorption,
    load_rows_of_w_qb,
    negative,
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
    eps: Float32,
    head: Int32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Query rows of the call's only tile, one head."""
    barriers = start_barriers((plan.nope_bytes,))
    shared = barriers.toint()
    _, piece = _lane_place(plan)
    norm = load_weight_16b(q_norm + 8 * piece)
    my_k = cute.arch.warp_idx() * (32 * plan.chunks) + 8 * (cute.arch.lane_idx() % 4)
    weights = load_rows_of_w_qb(w_qb, head, rank, my_k, plan)
    commit_absorption(shared, w_uk_t, head, rank, plan)
    cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()

    q_a = _load_q_a(proj, rows, plan)
    _share_squares(shared, q_a, plan)
    cute.arch.sync_threads()
    _normalise(shared, q_a, norm, eps, plan)
    cute.arch.sync_warp()
    _multiply(shared, weights, plan)
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    _finish(shared, query, rows, head, rank, plan)
    absorb(shared, query, barriers, Int32(0), rows, Int32(0), Int32(0), head, rank, plan)


def _lane_place(plan: Plan) -> tuple:
    """(token of a pass, piece of q_a) that the lane normalises; lanes beyond the warp's pieces repeat the last one."""
    lane = cute.arch.lane_idx()
    piece = cutlass.min(lane % plan.token_lanes, plan.pieces - 1)
    return lane // plan.token_lanes, cute.arch.warp_idx() * plan.pieces + piece


def _token(step: int, plan: Plan) -> Int32:
    """The lane's token in a pass; passes beyond the tile repeat its last one."""
    token, _ = _lane_place(plan)
    return cutlass.min(token + step * (32 // plan.token_lanes), plan.tile - 1)


@cute.jit
def _load_q_a(proj: cute.Pointer, rows: Int32, plan: cutlass.Constexpr) -> list:
    """The lane's piece of a token's q_a per pass. Rows past the end repeat the last one; nothing of them is stored."""
    _, piece = _lane_place(plan)
    q_a = []
    for step in cutlass.range_constexpr(plan.norm_steps):
        row = cutlass.min(_token(step, plan), rows - 1)
        q_a.append(load_4xb32(proj + (row * plan.proj_row + 8 * piece)))
    return q_a


@cute.jit
def _share_squares(shared: Int32, q_a: list, plan: cutlass.Constexpr) -> None:
    """The warp's sum of squares of each token to shared memory."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(plan.norm_steps):
        squares = sum_of_squares(Float32(0.0), q_a[step])
        if cutlass.const_expr(plan.pieces < plan.token_lanes):
            squares = squares if lane % plan.token_lanes < plan.pieces else Float32(0.0)
        squares = warp_sum(squares, plan.token_lanes)
        if lane % plan.token_lanes == 0:
            address = shared + plan.squares_at + 4 * (_token(step, plan) * plan.warps + cute.arch.warp_idx())
            cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, squares])


@cute.jit
def _scale(shared: Int32, token: Int32, eps: Float32, plan: cutlass.Constexpr) -> tuple:
    """1 / rms of a token, split."""
    total = Float32(0.0)
    for four in cutlass.range_constexpr(plan.warps // 4):
        squares = cute.arch.inline_ptx(
            "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[shared + plan.squares_at + 4 * (token * plan.warps + 4 * four)],
        )
        total = total + ((squares[0] + squares[1]) + (squares[2] + squares[3]))
    return split_scale(cute.math.rsqrt(total * (1.0 / plan.q_lora) + eps))


@cute.jit
def _normalise(shared: Int32, q_a: list, norm: tuple, eps: Float32, plan: cutlass.Constexpr) -> None:
    """The lane's pieces of c = bf16(q_a w / rms) to shared memory; a warp reads back only what it wrote itself."""
    _, piece = _lane_place(plan)
    scales = _scale(shared, cute.arch.lane_idx() % plan.tile, eps, plan)
    minus = [negative(pair) for pair in norm]
    start = shared + plan.c_at + 16 * piece - 12 * (piece % 4)
    for step in cutlass.range_constexpr(plan.norm_steps):
        token = _token(step, plan)
        scale = [cute.arch.shuffle_sync(part, token) for part in scales] if plan.tile > 1 else scales
        for j in cutlass.range_constexpr(4):
            c = scaled(q_a[step][j], norm[j], minus[j], *scale)
            address = start + token * plan.c_pitch + 16 * j
            cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, c])


@cute.jit
def _multiply(shared: Int32, weights: list, plan: cutlass.Constexpr) -> None:
    """Product of c and the CTA's rows over the warp's k, to the partial sums in shared memory."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    token = (lane % 8 + 8 * (lane // 8 % 2)) % plan.tile  # rows that the tile lacks repeat others; nobody reads them
    start = shared + plan.c_at + token * plan.c_pitch + lane // 16 * 16 + 16 * warp * plan.pieces
    acc = [zero()] * plan.octets
    for i in cutlass.range_constexpr(2 * plan.chunks):
        a = matrix_x4(start + 32 * i)
        for octet in cutlass.range_constexpr(plan.octets):
            b = weights[octet][i // 2]
            acc[octet] = mma_m16n8k16(acc[octet], a, (b[i % 2 * 2], b[i % 2 * 2 + 1]))
    for half in cutlass.range_constexpr(-(-plan.tile // 8)):
        token = lane // 4 + 8 * half
        line = (warp * plan.tile + token) * (8 * plan.octets) + 2 * (lane % 4)
        if token < plan.tile:
            for octet in cutlass.range_constexpr(plan.octets):
                address = shared + plan.partial_at + 4 * line + 32 * octet
                store_shared_8b(address, acc[octet][2 * half], acc[octet][2 * half + 1])


@cute.jit
def _finish(shared: Int32, query: cute.Pointer, rows: Int32, head: Int32, rank: Int32, plan: cutlass.Constexpr) -> None:
    """Sums over the warps in fixed order, rounded: pe rows to `query`, nope rows to every CTA of the cluster.

    A warp takes 8 tokens of an octet of rows, four lanes per token and two rows each; the last warps come first,
    because the first ones absorb.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    groups = -(-plan.tile // 8)
    for step in cutlass.range_constexpr(-(-plan.octets * groups // plan.warps)):
        unit = plan.warps - 1 - warp + plan.warps * step
        octet, token = unit // groups, unit % groups * 8 + lane // 4
        if octet < plan.octets:
            sums = [Float32(0.0)] * 4
            for other in cutlass.range_constexpr(plan.warps):
                line = (other * plan.tile + token % plan.tile) * (8 * plan.octets) + 8 * octet + lane % 4 * 2
                x, y = load_shared_8b(shared + plan.partial_at + 4 * line)
                at = other % 2 * 2
                sums[at], sums[at + 1] = sums[at] + x, sums[at + 1] + y
            pair = pack_bf16x2(sums[0] + sums[2], sums[1] + sums[3])
            if octet < plan.nope_octets:
                share_nope(shared, pair, token, octet, Int32(0), shared, rank, plan)
            elif token < rows:
                pe_row = 8 * (rank * plan.pe_octets + octet - plan.nope_octets) + lane % 4 * 2
                store_4b(query + ((token * plan.heads + head) * plan.row + plan.kv_lora + pe_row), pair)
