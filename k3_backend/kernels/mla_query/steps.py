"""What both forms of the kernel do alike. Lanes are (g, t) = (lane / 4, lane % 4), fragments as in `cute_mma.py`.

c keeps its k in the fragments' order: within a chunk of 32 k, pair 8t + 2j lies at 8j + 2t, so that ldmatrix hands lane
t the k for which it has loaded weights.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from kernels.common.cute_mma import (
    load_weight_16b,
    matrix_transposed_x4,
    matrix_x4,
    mma_m16n8k16,
    pack_bf16x2,
    unpack_bf16x2,
)
from kernels.common.cute_ring import peer
from kernels.common.cute_vector import copy_16b_async

__all__ = [
    "absorb", "arm", "commit_absorption", "load_rows_of_w_qb", "negative", "push_16b", "scaled",
    "share_nope", "split_scale", "start_barriers", "store_4b", "sum_of_squares", "zero",
]  # fmt: skip


@cute.jit
def store_4b(pointer: cute.Pointer, value: Int32) -> None:
    """4 bytes to global memory."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[pointer, value])


@cute.jit
def push_16b(address: Int32, values: tuple, barrier: Int32) -> None:
    """16 bytes to a peer; completes as many on the peer's mbarrier."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )


def zero() -> tuple:
    """An empty accumulator."""
    return (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))


def arm(barrier: cute.Pointer, expected: int, plan: object) -> None:
    """Expect the bytes of a barrier's next phase, by the one thread that has seen the last one complete."""
    if plan.looped:
        _arm(barrier, expected)


@cute.jit
def _arm(barrier: cute.Pointer, expected: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)


@cute.jit
def start_barriers(expected: cutlass.Constexpr) -> cute.Pointer:
    """Mbarriers at the start of shared memory, each expecting its first bytes; the cluster barrier is under way."""
    thread, _, _ = cute.arch.thread_idx()
    barriers = cute.arch.get_dyn_smem(Int64, alignment=128)
    if thread == 0:
        for i in cutlass.range_constexpr(len(expected)):
            cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + i, expected[i])
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    return barriers


@cute.jit
def load_rows_of_w_qb(w_qb: cute.Pointer, head: Int32, owner: Int32, my_k: Int32, plan: cutlass.Constexpr) -> list:
    """Fragments [octet][chunk] of the rows of a head that CTA `owner` finishes, k from `my_k` (the lane's first)."""
    weights = []
    for octet in cutlass.range_constexpr(plan.octets):
        if cutlass.const_expr(octet < plan.nope_octets):
            row = 8 * (owner * plan.nope_octets + octet)
        else:
            row = plan.nope + 8 * (owner * plan.pe_octets + octet - plan.nope_octets)
        row += head * (plan.nope + plan.pe) + cute.arch.lane_idx() // 4
        source = w_qb + (row * plan.q_lora + my_k)
        weights.append([load_weight_16b(source + 32 * chunk) for chunk in range(plan.chunks)])
    return weights


@cute.jit
def commit_absorption(shared: Int32, w_uk_t: cute.Pointer, head: Int32, rank: Int32, plan: cutlass.Constexpr) -> None:
    """Asks for the CTA's slice of W_UK by cp.async and commits the group."""
    thread, _, _ = cute.arch.thread_idx()
    pieces = plan.latents // 8
    source = w_uk_t + (head * plan.nope * plan.kv_lora + rank * plan.latents)
    for step in cutlass.range_constexpr(-(-plan.nope * pieces // plan.threads)):
        index = thread + plan.threads * step
        n, piece = index // pieces, index % pieces
        if n < plan.nope:
            target = shared + plan.absorb_at + n * (2 * plan.latents) + 16 * place(n, piece)
            copy_16b_async(target, source + (n * plan.kv_lora + 8 * piece))
    cute.arch.cp_async_commit_group()


def place(n: Int32, piece: Int32) -> Int32:
    """Where 16-byte piece `piece` of row n of the W_UK slice lies in its row: ldmatrix reads 8 rows of one piece."""
    return piece ^ (n & 7)


@cute.jit
def sum_of_squares(total: Float32, packed: tuple) -> Float32:
    """Total + squares of the bf16 values in the registers `packed`."""
    for pair in packed:
        low, high = unpack_bf16x2(pair)
        total = total + low * low
        total = total + high * high
    return total


@cute.jit
def negative(pair: Int32) -> Int32:
    """-x of both halves."""
    return cute.arch.inline_ptx("xor.b32 {$w0}, {$r0}, 0x80008000;", write_only_types=[Int32], read_only_args=[pair])


@cute.jit
def split_scale(scale: Float32) -> tuple:
    """A Float32 as bf16 pairs (high, rest, -high), each with equal halves."""
    high = pack_bf16x2(scale, scale)
    rounded, _ = unpack_bf16x2(high)
    rest = scale - rounded
    return high, pack_bf16x2(rest, rest), negative(high)


@cute.jit
def scaled(pair: Int32, weight: Int32, minus_weight: Int32, high: Int32, rest: Int32, minus_high: Int32) -> Int32:
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
def share_nope(
    shared: Int32, pair: Int32, token: Int32, octet: Int32, buffer: Int32, barrier: Int32, rank: Int32,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """A token's octet of nope rows, two per lane of a quad, to every CTA of the cluster; whole warps come here."""
    lane = cute.arch.lane_idx()
    values = [cute.arch.shuffle_sync(pair, (lane & 28) + i) for i in range(4)]
    at = plan.nope_at + (buffer * plan.tile + token) * plan.nope_pitch + 16 * (rank * plan.nope_octets + octet)
    if token < plan.tile:
        for i in cutlass.range_constexpr(plan.cluster // 4):
            owner = lane % 4 * (plan.cluster // 4) + i
            push_16b(peer(shared + at, owner), values, peer(barrier, owner))


@cute.jit
def absorb(
    shared: Int32, query: cute.Pointer, barrier: cute.Pointer, phase: Int32, rows: Int32, tile: Int32, buffer: Int32,
    head: Int32, rank: Int32, plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Waits for the tile's nope rows and multiplies them with the W_UK slice, to `query`; 8 latents per warp and turn.

    Token rows that an A fragment has and the tile lacks repeat others; their products are dropped.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    groups = plan.latents // 8
    turns = -(-groups // plan.warps)
    weights = []
    for turn in cutlass.range_constexpr(turns):
        group = cutlass.min(warp + plan.warps * turn, groups - 1)
        start = shared + plan.absorb_at + lane * (2 * plan.latents) + 16 * place(lane, group)
        weights.append([matrix_transposed_x4(start + 64 * plan.latents * i) for i in range(plan.nope // 32)])
    cute.arch.mbarrier_wait(barrier, phase)
    arm(barrier, plan.nope_bytes, plan)
    first = (lane % 8 + 8 * (lane // 8 % 2)) % plan.tile
    source = shared + plan.nope_at + (buffer * plan.tile + first) * plan.nope_pitch + lane // 16 * 16
    for turn in cutlass.range_constexpr(turns):
        group = warp + plan.warps * turn
        if group < groups:
            for block in cutlass.range_constexpr(plan.blocks):
                out = [zero()] * 4
                for i in cutlass.range_constexpr(plan.nope // 16):
                    a = matrix_x4(source + 16 * block * plan.nope_pitch + 32 * i)
                    b = weights[turn][i // 2]
                    out[i % 4] = mma_m16n8k16(out[i % 4], a, (b[i % 2 * 2], b[i % 2 * 2 + 1]))
                sums = [(out[0][i] + out[1][i]) + (out[2][i] + out[3][i]) for i in range(4)]
                for half in cutlass.range_constexpr(min(2, -(-plan.tile // 8))):
                    token = tile * plan.tile + 16 * block + 8 * half + lane // 4
                    if token < rows:
                        latent = rank * plan.latents + 8 * group + lane % 4 * 2
                        at = (token * plan.heads + head) * plan.row + latent
                        store_4b(query + at, pack_bf16x2(sums[2 * half], sums[2 * half + 1]))
