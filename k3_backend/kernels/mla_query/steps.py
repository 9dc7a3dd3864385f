"""The steps of a tile, as a CTA's warps carry them out. Who waits for whom is decided in `cute.py`.

Lanes are (g, t) = (lane / 4, lane % 4); fragments and the order of k within a chunk as in `common/cute_mma.py`.
"""

import cutlass
from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import (
    load_shared_8b,
    load_shared_16b,
    load_weight_16b,
    matrix_transposed_x4,
    matrix_x4,
    mma_m16n8k16,
    pack_bf16x2,
    store_shared_8b,
    unpack_bf16x2,
    warp_sum,
)
from kernels.mla_query.plan import Plan

__all__ = [
    "absorb", "absorption_weights", "copy_16b", "finish_rows", "fragments", "load_16b", "load_norm", "load_pieces",
    "multicast_tile", "multiply", "normalise", "place", "share_squares", "shared_pieces", "store_4b", "store_16b",
    "sum_of_squares",
]  # fmt: skip


@cute.jit
def load_16b(pointer: cute.Pointer) -> tuple:
    """16 bytes of an activation as four Int32."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer],
    )


@cute.jit
def store_16b(pointer: cute.Pointer, values: tuple) -> None:
    """16 bytes to global memory from four Int32."""
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *values])


@cute.jit
def store_4b(pointer: cute.Pointer, value: Int32) -> None:
    """4 bytes to global memory."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[pointer, value])


@cute.jit
def copy_16b(target: Int32, source: cute.Pointer) -> None:
    """16 bytes from global to shared memory (cp.async); part of the group that is committed next."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source])


def place(n: Int32, piece: Int32) -> Int32:
    """Where 16-byte piece `piece` of row n of the W_UK slice lies in its row: ldmatrix reads 8 rows of one piece."""
    return piece ^ (n & 7)


def _zero() -> tuple:
    return (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))


def _norm_place(plan: Plan) -> tuple:
    """(token of a pass, piece) that the lane normalises; lanes beyond the pieces repeat the last one."""
    lane = cute.arch.lane_idx()
    return lane // plan.token_lanes, cutlass.min(lane % plan.token_lanes, plan.pieces - 1)


@cute.jit
def load_norm(q_norm: cute.Pointer, plan: cutlass.Constexpr) -> tuple:
    """The norm's weights for the lane's piece."""
    _, piece = _norm_place(plan)
    return load_weight_16b(q_norm + 8 * (cute.arch.warp_idx() * plan.pieces + piece))


@cute.jit
def load_pieces(proj: cute.Pointer, rows: Int32, plan: cutlass.Constexpr) -> list:
    """The lane's pieces of q_a of the call's only tile, from global memory: [pass], 8 values each.

    Tokens past the end repeat the last one; nothing that comes of them is stored.
    """
    token, piece = _norm_place(plan)
    k = 8 * (cute.arch.warp_idx() * plan.pieces + piece)
    q_a = []
    for step in cutlass.range_constexpr(plan.passes):
        row = cutlass.min(token + step * (32 // plan.token_lanes), rows - 1)
        q_a.append(load_16b(proj + (row * plan.proj_row + k)))
    return q_a


@cute.jit
def multicast_tile(
    shared: Int32, source: cute.Pointer, pitch: cutlass.Constexpr, rows: Int32, tile: Int32, rank: Int32,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """This CTA's share of a tile's rows into all CTAs of the cluster, one copy per lane and token, as in `load_pieces`.

    Completes bytes on the mbarrier of the tile's stage in every CTA.
    """
    lane = cute.arch.lane_idx()
    if lane < plan.tile // plan.cluster:
        token = rank + plan.cluster * lane
        stage = tile % plan.stages
        target = shared + plan.tokens_at + (stage * plan.tile + token) * plan.token_pitch
        row = cutlass.min(tile * plan.tile + token, rows - 1)
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
            read_only_args=[
                target, source + row * pitch, Int32(2 * plan.q_lora), shared + 8 * stage,
                cutlass.Int16((1 << plan.cluster) - 1),
            ],
        )  # fmt: skip


def _piece_at(tile: Int32, step: int, plan: Plan) -> Int32:
    """Offset of the lane's piece of a tile in shared memory."""
    token, piece = _norm_place(plan)
    token = cutlass.min(token + step * (32 // plan.token_lanes), plan.tile - 1)
    line = (tile % plan.stages * plan.tile + token) * plan.token_pitch
    return plan.tokens_at + line + 16 * (cute.arch.warp_idx() * plan.pieces + piece)


@cute.jit
def shared_pieces(shared: Int32, tile: Int32, plan: cutlass.Constexpr) -> list:
    """The lane's pieces of a tile in shared memory, as `load_pieces` gives them."""
    return [load_shared_16b(shared + _piece_at(tile, step, plan)) for step in range(plan.passes)]


@cute.jit
def fragments(shared: Int32, tile: Int32, plan: cutlass.Constexpr) -> list:
    """A fragments of c over the warp's k: [MMA of 16 k]. Rows that the tile lacks repeat others; nobody reads them."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    token = (lane % 8 + 8 * (lane // 8 % 2)) % plan.tile
    start = shared + plan.tokens_at + (tile % plan.stages * plan.tile + token) * plan.token_pitch + lane // 16 * 16
    return [matrix_x4(start + 16 * warp * plan.pieces + 32 * i) for i in range(2 * plan.chunks)]


@cute.jit
def sum_of_squares(total: Float32, packed: tuple) -> Float32:
    """Total + squares of the bf16 values in the registers `packed`."""
    for pair in packed:
        low, high = unpack_bf16x2(pair)
        total = total + low * low
        total = total + high * high
    return total


@cute.jit
def share_squares(shared: Int32, q_a: list, plan: cutlass.Constexpr) -> None:
    """The warp's sum of squares of each token to shared memory."""
    lane = cute.arch.lane_idx()
    token, _ = _norm_place(plan)
    for step in cutlass.range_constexpr(plan.passes):
        squares = sum_of_squares(Float32(0.0), q_a[step])
        if cutlass.const_expr(plan.pieces < plan.token_lanes):
            squares = squares if lane % plan.token_lanes < plan.pieces else Float32(0.0)
        squares = warp_sum(squares, plan.token_lanes)
        at = cutlass.min(token + step * (32 // plan.token_lanes), plan.tile - 1)
        if lane % plan.token_lanes == 0:
            address = shared + plan.squares_at + 4 * (at * plan.warps + cute.arch.warp_idx())
            cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, squares])


@cute.jit
def _scale(shared: Int32, token: Int32, eps: Float32, plan: cutlass.Constexpr) -> tuple:
    """1 / rms of a token of the tile: bf16 pairs (high, rest, -high), each with equal halves."""
    total = Float32(0.0)
    for four in cutlass.range_constexpr(plan.warps // 4):
        squares = cute.arch.inline_ptx(
            "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[shared + plan.squares_at + 4 * (token * plan.warps + 4 * four)],
        )
        total = total + ((squares[0] + squares[1]) + (squares[2] + squares[3]))
    scale = cute.math.rsqrt(total * (1.0 / plan.q_lora) + eps)
    high = pack_bf16x2(scale, scale)
    rounded, _ = unpack_bf16x2(high)
    rest = scale - rounded
    return high, pack_bf16x2(rest, rest), _negative(high)


@cute.jit
def _negative(pair: Int32) -> Int32:
    return cute.arch.inline_ptx("xor.b32 {$w0}, {$r0}, 0x80008000;", write_only_types=[Int32], read_only_args=[pair])


@cute.jit
def _scaled(pair: Int32, weight: Int32, minus_weight: Int32, high: Int32, rest: Int32, minus_high: Int32) -> Int32:
    """bf16(x w s) for two x, with s = high + rest: one rounding but for 2^-16 of the value.

    x w is exact as product - remainder; packed operations are half as many as on Float32.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 p, r; mul.rn.bf16x2 p, {$r0}, {$r1}; fma.rn.bf16x2 r, {$r0}, {$r2}, p; "
        "mul.rn.bf16x2 r, r, {$r5}; fma.rn.bf16x2 r, p, {$r4}, r; fma.rn.bf16x2 {$w0}, p, {$r3}, r; }",
        write_only_types=[Int32],
        read_only_args=[pair, weight, minus_weight, high, rest, minus_high],
    )


@cute.jit
def normalise(shared: Int32, q_a: list, norm: tuple, tile: Int32, eps: Float32, plan: cutlass.Constexpr) -> None:
    """The lane's pieces of c = bf16(q_a w / rms) into the tile's stage; all warps' squares are in shared memory.

    Within a chunk of 32 k, pair 8t + 2j lies at 8j + 2t: ldmatrix then hands lane t the k that its weights have.
    """
    token, piece = _norm_place(plan)
    scales = _scale(shared, cute.arch.lane_idx() % plan.tile, eps, plan)
    for step in cutlass.range_constexpr(plan.passes):
        at = cutlass.min(token + step * (32 // plan.token_lanes), plan.tile - 1)
        scale = [cute.arch.shuffle_sync(part, at) for part in scales] if plan.tile > 1 else scales
        target = shared + _piece_at(tile, step, plan) - 12 * (piece % 4)
        for j in cutlass.range_constexpr(4):
            c = _scaled(q_a[step][j], norm[j], _negative(norm[j]), *scale)
            cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[target + 16 * j, c])


@cute.jit
def multiply(shared: Int32, fragments: list, weights: list, buffer: Int32, plan: cutlass.Constexpr) -> None:
    """Product of c (A fragments) and the W_qb slice over the warp's k, to the partial sums in shared memory."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    acc = [_zero()] * plan.octets
    for i in cutlass.range_constexpr(2 * plan.chunks):
        for octet in cutlass.range_constexpr(plan.octets):
            b = weights[octet][i // 2]
            acc[octet] = mma_m16n8k16(acc[octet], fragments[i], (b[i % 2 * 2], b[i % 2 * 2 + 1]))
    for half in plan.halves:
        token = lane // 4 + 8 * half
        line = ((buffer * plan.warps + warp) * plan.tile + token) * (8 * plan.octets) + 2 * (lane % 4)
        if token < plan.tile:
            for octet in cutlass.range_constexpr(plan.octets):
                address = shared + plan.partial_at + 4 * line + 32 * octet
                store_shared_8b(address, acc[octet][2 * half], acc[octet][2 * half + 1])


@cute.jit
def _in_peer(address: Int32, rank: Int32) -> Int32:
    """The address that names, in the shared memory of another CTA of the cluster, what `address` names in this one."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


@cute.jit
def _push_16b(address: Int32, values: tuple, barrier: Int32) -> None:
    """16 bytes to a peer; completes as many on the peer's mbarrier."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )


@cute.jit
def finish_rows(
    shared: Int32, query: cute.Pointer, rows: Int32, tile: Int32, head: Int32, rank: Int32, plan: cutlass.Constexpr
) -> None:
    """Sums over the warps in fixed order, rounded: pe rows to `query`, nope rows to every CTA of the cluster.

    A warp takes 8 tokens of an octet of W_qb's rows, four lanes per token and two rows each; the last warps come
    first, because the first ones absorb.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    t = lane % 4
    partial = tile % plan.partials * plan.warps
    buffer = tile % plan.exchanges
    groups = len(plan.halves)
    for step in cutlass.range_constexpr(-(-plan.octets * groups // plan.warps)):
        unit = plan.warps - 1 - warp + plan.warps * step
        octet, token = unit // groups, unit % groups * 8 + lane // 4
        if octet < plan.octets:
            sums = [Float32(0.0)] * 4
            for other in cutlass.range_constexpr(plan.warps):
                line = ((partial + other) * plan.tile + token % plan.tile) * (8 * plan.octets) + 8 * octet + 2 * t
                x, y = load_shared_8b(shared + plan.partial_at + 4 * line)
                at = other % 2 * 2
                sums[at], sums[at + 1] = sums[at] + x, sums[at + 1] + y
            pair = pack_bf16x2(sums[0] + sums[2], sums[1] + sums[3])
            if octet < plan.nope_octets:
                values = [cute.arch.shuffle_sync(pair, (lane & 28) + i) for i in range(4)]
                at = plan.exchange_at + (buffer * plan.tile + token) * plan.nope_pitch
                target = shared + at + 16 * (rank * plan.nope_octets + octet)
                barrier = shared + plan.exchanged_at + 8 * buffer
                if token < plan.tile:
                    for i in cutlass.range_constexpr(plan.cluster // 4):
                        peer = t * (plan.cluster // 4) + i
                        _push_16b(_in_peer(target, peer), values, _in_peer(barrier, peer))
            elif tile * plan.tile + token < rows:
                pe_row = 8 * (rank * plan.pe_octets + octet - plan.nope_octets) + 2 * t
                at = ((tile * plan.tile + token) * plan.heads + head) * plan.row + plan.kv_lora + pe_row
                store_4b(query + at, pair)


@cute.jit
def absorption_weights(shared: Int32, plan: cutlass.Constexpr) -> list:
    """The warp's fragments of the W_UK slice: [group of 8 latents][chunk of 32 nope rows]."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    groups = plan.latents // 8
    weights = []
    for step in cutlass.range_constexpr(-(-groups // plan.warps)):
        group = cutlass.min(warp + plan.warps * step, groups - 1)
        fragments = []
        for chunk in cutlass.range_constexpr(plan.nope // 32):
            n = 32 * chunk + lane
            address = shared + plan.absorb_at + n * (2 * plan.latents) + 16 * place(n, group)
            fragments.append(matrix_transposed_x4(address))
        weights.append(fragments)
    return weights


@cute.jit
def absorb(
    shared: Int32,
    query: cute.Pointer,
    weights: list,
    rows: Int32,
    tile: Int32,
    head: Int32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Product of the head's nope rows with the W_UK slice, to `query`; the tile's exchange is complete."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    g, t = lane // 4, lane % 4
    # Rows 8 to 15 of an A fragment repeat rows 0 to 7 in tiles of 8; their products are dropped.
    token = (lane % 8 + 8 * (lane // 8 % 2)) % plan.tile
    source = plan.exchange_at + (tile % plan.exchanges * plan.tile + token) * plan.nope_pitch + lane // 16 * 16
    for step in cutlass.range_constexpr(len(weights)):
        group = warp + plan.warps * step
        if group < plan.latents // 8:
            out = [_zero()] * 4
            for i in cutlass.range_constexpr(plan.nope // 16):
                a = matrix_x4(shared + source + 32 * i)
                b = weights[step][i // 2]
                out[i % 4] = mma_m16n8k16(out[i % 4], a, (b[i % 2 * 2], b[i % 2 * 2 + 1]))
            out = [(out[0][i] + out[1][i]) + (out[2][i] + out[3][i]) for i in range(4)]
            for half in plan.halves:
                token = tile * plan.tile + g + 8 * half
                if token < rows:
                    at = (token * plan.heads + head) * plan.row + rank * plan.latents + 8 * group + 2 * t
                    store_4b(query + at, pack_bf16x2(out[2 * half], out[2 * half + 1]))
