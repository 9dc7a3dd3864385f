"""The consumer warps' main loop: scores, softmax and values of a run of chunks."""

import cutlass
from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import matrix_transposed_x4, matrix_x4
from kernels.common.cute_ring import arrive, load_f32x2, store_b32, store_f32, wait
from kernels.mla_decode.operands import f16_of_bf16, f16_of_e4m3, multiply, pack_p
from kernels.mla_decode.plan import (
    CHUNK,
    K_STEPS,
    NEG_INF,
    P_PITCH,
    PITCH,
    ROW,
    S_PITCH,
    SLICES,
    TILE,
    WARP_COLUMNS,
)
from kernels.mla_decode.steps import consumer_barrier, exp2, finite_base, warp_max

__all__ = ["attend", "load_query"]


@cute.jit
def load_query(query: cute.Pointer, valid: Int32, q: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """B fragments of this warp's slice of Q.

    Args:
        query: bf16 [valid, ROW] of the segment's request and group.
        valid: query rows; what stands in for others reaches only results that nobody reads.
        q: see `attend`.
        plan: sizes.
    """
    lane = cute.arch.lane_idx()
    k_slice = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % SLICES
    for n in cutlass.range_constexpr(plan.tiles):
        row = cutlass.min(8 * n + lane // 4, valid - 1)
        source = query + (row * ROW + 16 * K_STEPS * k_slice + 2 * (lane % 4))
        for step in cutlass.range_constexpr(K_STEPS):
            for i in cutlass.range_constexpr(2):
                pair = _load_4b(source + (16 * step + 8 * i))
                if cutlass.const_expr(plan.e4m3):
                    pair = f16_of_bf16(pair)
                q[i, n, step] = pair


@cute.jit
def _load_4b(pointer: cute.Pointer) -> Int32:
    """Four bytes of an activation."""
    return cute.arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[pointer])


@cute.jit
def _convert(base: Int32, slot: Int32, chunk: Int32, plan: cutlass.Constexpr) -> None:
    """Half a chunk of the tile from E4M3 in the ring to f16; even warps take the first 8 rows, odd ones the others."""
    lane = cute.arch.lane_idx()
    first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 2 * (CHUNK // 2)
    source = base + plan.ring + plan.slot * slot + plan.pitch * first
    target = base + plan.tile + PITCH * (CHUNK * chunk + first)
    for step in cutlass.range_constexpr(CHUNK // 2 * ROW // 256):
        piece = 32 * step + lane  # of 8 elements, so that lanes store side by side
        words = _load_8b(source + 8 * piece)
        pairs = (*f16_of_e4m3(words[0]), *f16_of_e4m3(words[1]))
        _store_16b(target + PITCH * (piece // (ROW // 8)) + 16 * (piece % (ROW // 8)), pairs)


@cute.jit
def _load_8b(address: Int32) -> tuple:
    """8 bytes of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[address]
    )


@cute.jit
def _store_16b(address: Int32, words: tuple) -> None:
    """16 bytes to shared memory."""
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


@cute.jit
def _release(base: Int32, first: Int32, count: Int32, plan: cutlass.Constexpr) -> None:
    """This warp has read the tile's slots."""
    lane = cute.arch.lane_idx()
    cute.arch.sync_warp()
    if lane < count:
        slot = first + lane
        if slot >= plan.slots:
            slot -= plan.slots
        arrive(base + plan.barriers + 8 * (plan.slots + slot))


@cute.jit
def attend(
    base: Int32,
    q: cute.Tensor,
    limit: cute.Tensor,
    chunk: Int32,
    end: Int32,
    scale: Float32,
    state: cute.Tensor,
    o: cute.Tensor,
    highest: cute.Tensor,
    total: cute.Tensor,
    plan: cutlass.Constexpr,
) -> None:
    """Attend chunks [chunk, end) of a request, 4 at a time.

    Args:
        base: shared memory.
        q: B fragments of this warp's slice of Q, [K_STEPS, n8 tiles, 2].
        limit: rows that each owned query row sees.
        chunk: first chunk of the request to attend; chunks arrive in the ring in this order.
        end: behind the last.
        scale: of the scores, times log2(e).
        state: slot and parity of the next chunk in the ring.
        o: C fragments of O^T, [m16 tiles, n8 tiles, 4]; results add up here and in the next two.
        highest: of the owned query rows' scores so far.
        total: this lane's share of the sum of exponentials.
        plan: sizes.
    """
    tiles, owned = plan.tiles, plan.owned
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    g, t = lane // 4, lane % 4
    k_slice, half = warp % SLICES, warp // SLICES
    k_at = PITCH * (lane % 16) + 16 * (lane // 16) + 2 * 16 * K_STEPS * k_slice
    v_at = PITCH * (lane % 8 + 8 * (lane // 16)) + 16 * (lane // 8 % 2) + 2 * WARP_COLUMNS * warp
    p_at = base + plan.p + P_PITCH * (lane % 8) + 16 * (lane // 8)
    while chunk < end:
        # Where the chunks lie. A missing one is played by the first: its scores are masked, its P is 0.
        count = cutlass.min(end - chunk, TILE)
        slots, parities = [], []
        for j in cutlass.range_constexpr(TILE):
            slot, parity = state[0], state[1]
            if j < count:
                slot += j
            if slot >= plan.slots:
                slot -= plan.slots
                parity ^= 1
            slots.append(slot)
            parities.append(parity)
        rows_at = [base + plan.ring + plan.slot * slot for slot in slots]
        if cutlass.const_expr(plan.e4m3):
            consumer_barrier()  # all have read the last tile
            mine, slot, parity = warp // 2, slots[0], parities[0]
            for j in cutlass.range_constexpr(1, TILE):
                if mine == j:
                    slot, parity = slots[j], parities[j]
            if mine < count:
                wait(base + plan.barriers + 8 * slot, parity)
                _convert(base, slot, mine, plan)
            _release(base, state[0], count, plan)
            consumer_barrier()
            rows_at = [base + plan.tile + CHUNK * PITCH * (j if j < count else 0) for j in range(TILE)]

        # Partial scores of two chunks over one slice of k.
        s = cute.make_rmem_tensor((4, tiles, 2), Float32)
        s.fill(0.0)
        k_base = []
        for j in cutlass.range_constexpr(2):
            at, slot, parity = rows_at[j], slots[j], parities[j]
            if half == 1:
                at, slot, parity = rows_at[j + 2], slots[j + 2], parities[j + 2]
            if cutlass.const_expr(not plan.e4m3):
                wait(base + plan.barriers + 8 * slot, parity)
            k_base.append(at + k_at)
        for step in cutlass.range_constexpr(K_STEPS):
            for j in cutlass.range_constexpr(2):
                k = matrix_x4(k_base[j] + 32 * step)
                for n in cutlass.range_constexpr(tiles):
                    acc = (s[0, n, j], s[1, n, j], s[2, n, j], s[3, n, j])
                    acc = multiply(acc, k, (q[0, n, step], q[1, n, step]), plan)
                    for i in cutlass.range_constexpr(4):
                        s[i, n, j] = acc[i]
        s_at = base + plan.scores + 4 * ((k_slice * plan.rows + 2 * t) * S_PITCH + 32 * half + g)
        for j in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(tiles):
                for i in cutlass.range_constexpr(4):
                    store_f32(s_at + 4 * ((8 * n + i % 2) * S_PITCH + 16 * j + 8 * (i // 2)), s[i, n, j])
        consumer_barrier()

        # Softmax of the owned query rows: lane i has cache rows 2i and 2i + 1 of the tile.
        row = CHUNK * chunk + 2 * lane
        for i in cutlass.range_constexpr(owned):
            mine = owned * warp + i
            x0, x1 = Float32(0.0), Float32(0.0)
            for part in cutlass.range_constexpr(SLICES):
                y = load_f32x2(base + plan.scores + 4 * ((part * plan.rows + mine) * S_PITCH + 2 * lane))
                x0, x1 = x0 + y[0], x1 + y[1]
            x0 = x0 * scale if row < limit[i] else Float32(NEG_INF)
            x1 = x1 * scale if row + 1 < limit[i] else Float32(NEG_INF)
            top = cute.arch.fmax(highest[i], warp_max(cute.arch.fmax(x0, x1)))
            shift = finite_base(top)
            p0, p1 = exp2(x0 - shift), exp2(x1 - shift)
            factor = exp2(highest[i] - shift)
            highest[i] = top
            total[i] = total[i] * factor + (p0 + p1)
            store_b32(base + plan.p + P_PITCH * mine + 4 * lane, pack_p(p0, p1, plan))
            if lane == 0:
                store_f32(base + plan.factors + 4 * mine, factor)
        consumer_barrier()

        # O^T = factor O^T + V^T P^T for this warp's columns.
        p = []
        for n in cutlass.range_constexpr(tiles):
            low, high = matrix_x4(p_at + 8 * P_PITCH * n), matrix_x4(p_at + 8 * P_PITCH * n + 64)
            p.append((low[0:2], low[2:4], high[0:2], high[2:4]))
            factor = load_f32x2(base + plan.factors + 4 * (8 * n + 2 * t))
            for m in cutlass.range_constexpr(WARP_COLUMNS // 16):
                for i in cutlass.range_constexpr(4):
                    o[i, n, m] *= factor[i % 2]
        for j in cutlass.range_constexpr(TILE):
            if cutlass.const_expr(not plan.e4m3):
                wait(base + plan.barriers + 8 * slots[j], parities[j])
            v_base = rows_at[j] + v_at
            for m in cutlass.range_constexpr(WARP_COLUMNS // 16):
                v = matrix_transposed_x4(v_base + 32 * m)
                for n in cutlass.range_constexpr(tiles):
                    acc = multiply((o[0, n, m], o[1, n, m], o[2, n, m], o[3, n, m]), v, p[n][j], plan)
                    for i in cutlass.range_constexpr(4):
                        o[i, n, m] = acc[i]
        if cutlass.const_expr(not plan.e4m3):
            _release(base, state[0], count, plan)
        state[0] += count
        if state[0] >= plan.slots:
            state[0] -= plan.slots
            state[1] ^= 1
        chunk += TILE
