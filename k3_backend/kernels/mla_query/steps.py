"""The steps of a tile, as a CTA's warps carry them out. Who waits for whom is decided in `cute.py`.

Lanes are (g, t) = (lane / 4, lane % 4); fragments and the order of k within a chunk as in `common/cute_mma.py`.
"""

import cutlass
from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import (
    load_shared_8b,
    load_shared_16b,
    matrix_transposed_x4,
    matrix_x4,
    mma_m16n8k16,
    pack_bf16x2,
    store_shared_8b,
    unpack_bf16x2,
    warp_sum,
)

__all__ = [
    "absorb", "absorption_weights", "copy_16b", "finish_rows", "fragments", "load_16b", "load_tile", "multicast_tile",
    "multiply", "normalise", "normed_fragments", "place", "share_squares", "store_4b", "store_16b", "sum_of_squares",
    "tile_values",
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


def _with_idle_half(halves: list) -> list:
    """Token rows g + 8 of an A fragment are zero in tiles of 8."""
    return halves if len(halves) == 2 else [halves[0], [Int32(0)] * 4]


@cute.jit
def load_tile(proj: cute.Pointer, rows: Int32, my_k: Int32, plan: cutlass.Constexpr) -> list:
    """q_a of the lane's tokens and k from global memory: [half][chunk], 8 values each.

    Rows past the end repeat the last one; nothing that comes of them is stored.
    """
    g = cute.arch.lane_idx() // 4
    q_a = []
    for half in plan.halves:
        token = cutlass.min(g + 8 * half, rows - 1)
        source = proj + (token * plan.proj_row + my_k)
        q_a.append([load_16b(source + 32 * chunk) for chunk in range(plan.chunks)])
    return q_a


@cute.jit
def multicast_tile(
    shared: Int32, source: cute.Pointer, pitch: cutlass.Constexpr, rows: Int32, tile: Int32, rank: Int32,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """This CTA's share of a tile's rows, as in `load_tile`, into all CTAs of the cluster, one copy per lane and token.

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


@cute.jit
def tile_values(shared: Int32, tile: Int32, my_k: Int32, plan: cutlass.Constexpr) -> list:
    """The lane's tokens and k of a tile in shared memory, as `load_tile` gives them."""
    g = cute.arch.lane_idx() // 4
    start = shared + plan.tokens_at + (tile % plan.stages * plan.tile + g) * plan.token_pitch + 2 * my_k
    return [
        [load_shared_16b(start + 8 * half * plan.token_pitch + 64 * chunk) for chunk in range(plan.chunks)]
        for half in plan.halves
    ]


@cute.jit
def normed_fragments(shared: Int32, tile: Int32, plan: cutlass.Constexpr) -> list:
    """A fragments of c over the warp's k: [MMA of 16 k]; the launch before has put k into the fragments' order.

    Rows 8 to 15 repeat rows 0 to 7 in tiles of 8; their products are dropped.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    token = (lane % 8 + 8 * (lane // 8 % 2)) % plan.tile
    start = shared + plan.tokens_at + (tile % plan.stages * plan.tile + token) * plan.token_pitch + lane // 16 * 16
    return [matrix_x4(start + 64 * warp * plan.chunks + 32 * i) for i in range(2 * plan.chunks)]


@cute.jit
def fragments(c: list, plan: cutlass.Constexpr) -> list:
    """A fragments from the lane's c by [half][chunk]: [MMA of 16 k]."""
    out = []
    for i in cutlass.range_constexpr(2 * plan.chunks):
        x = _with_idle_half([c[half][i // 2] for half in plan.halves])
        at = i % 2 * 2
        out.append((x[0][at], x[1][at], x[0][at + 1], x[1][at + 1]))
    return out


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
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for half in plan.halves:
        parts = [Float32(0.0), Float32(0.0)]
        for chunk in cutlass.range_constexpr(plan.chunks):
            parts[chunk % 2] = sum_of_squares(parts[chunk % 2], q_a[half][chunk])
        squares = warp_sum(parts[0] + parts[1], 4)
        if lane % 4 == 0:
            address = shared + plan.squares_at + 4 * (warp * plan.tile + lane // 4 + 8 * half)
            cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, squares])


@cute.jit
def _scale(shared: Int32, token: Int32, eps: Float32, plan: cutlass.Constexpr) -> tuple:
    """1 / rms of a token of the tile: two bf16 pairs (high, rest), each with equal halves."""
    total = Float32(0.0)
    for warp in cutlass.range_constexpr(plan.warps):
        address = shared + plan.squares_at + 4 * (warp * plan.tile + token)
        total = total + cute.arch.inline_ptx(
            "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
        )
    scale = cute.math.rsqrt(total * (1.0 / plan.q_lora) + eps)
    high = pack_bf16x2(scale, scale)
    rounded, _ = unpack_bf16x2(high)
    rest = scale - rounded
    return high, pack_bf16x2(rest, rest)


@cute.jit
def _scaled(pair: Int32, weight: Int32, high: Int32, rest: Int32) -> Int32:
    """bf16(x w s) for two x, with s = high + rest: one rounding but for 2^-16 of the value.

    x w is exact as product + remainder; packed operations are half as many as on Float32.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 p, n, r; mul.rn.bf16x2 p, {$r0}, {$r1}; neg.bf16x2 n, p; fma.rn.bf16x2 r, {$r0}, {$r1}, n; "
        "mul.rn.bf16x2 r, r, {$r2}; fma.rn.bf16x2 r, p, {$r3}, r; fma.rn.bf16x2 {$w0}, p, {$r2}, r; }",
        write_only_types=[Int32],
        read_only_args=[pair, weight, high, rest],
    )


@cute.jit
def normalise(shared: Int32, q_a: list, my_k: Int32, eps: Float32, plan: cutlass.Constexpr) -> list:
    """The lane's part of c = bf16(q_a w / rms); all warps' squares are in shared memory."""
    g = cute.arch.lane_idx() // 4
    scales = [_scale(shared, g + 8 * half, eps, plan) for half in plan.halves]
    norm = [load_shared_16b(shared + plan.norm_at + 2 * my_k + 64 * chunk) for chunk in range(plan.chunks)]
    return [
        [
            [_scaled(q_a[half][chunk][i], norm[chunk][i], *scales[half]) for i in range(4)]
            for chunk in range(plan.chunks)
        ]
        for half in plan.halves
    ]


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
        line = ((buffer * plan.warps + warp) * plan.tile + lane // 4 + 8 * half) * (8 * plan.octets) + 2 * (lane % 4)
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

    Four lanes per token and octet, two rows of W_qb each; an octet's lanes fill whole warps.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    t = lane % 4
    partial = tile % plan.partials * plan.warps
    buffer = tile % plan.exchanges
    for step in cutlass.range_constexpr(-(-plan.tile * plan.octets * 4 // plan.threads)):
        unit = thread + plan.threads * step
        token, octet = unit // 4 % plan.tile, cute.arch.make_warp_uniform(unit // (4 * plan.tile))
        if octet < plan.octets:
            low, high = Float32(0.0), Float32(0.0)
            for warp in cutlass.range_constexpr(plan.warps):
                line = ((partial + warp) * plan.tile + token) * (8 * plan.octets) + 8 * octet + 2 * t
                x, y = load_shared_8b(shared + plan.partial_at + 4 * line)
                low, high = low + x, high + y
            pair = pack_bf16x2(low, high)
            if octet < plan.nope_octets:
                values = [cute.arch.shuffle_sync(pair, (lane & 28) + i) for i in range(4)]
                at = plan.exchange_at + (buffer * plan.tile + token) * plan.nope_pitch
                target = shared + at + 16 * (rank * plan.nope_octets + octet)
                barrier = shared + plan.exchanged_at + 8 * buffer
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
            out = [_zero(), _zero()]
            for i in cutlass.range_constexpr(plan.nope // 16):
                a = matrix_x4(shared + source + 32 * i)
                b = weights[step][i // 2]
                out[i % 2] = mma_m16n8k16(out[i % 2], a, (b[i % 2 * 2], b[i % 2 * 2 + 1]))
            for half in plan.halves:
                token = tile * plan.tile + g + 8 * half
                if token < rows:
                    at = (token * plan.heads + head) * plan.row + rank * plan.latents + 8 * group + 2 * t
                    low, high = (out[0][2 * half + i] + out[1][2 * half + i] for i in range(2))
                    store_4b(query + at, pack_bf16x2(low, high))
