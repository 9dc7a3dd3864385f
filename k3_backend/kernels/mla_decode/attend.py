"""The consumer warps' main loop: scores, softmax and values of a run of chunks."""

import cutlass
from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import matrix_transposed_x4, matrix_x4, mma_m16n8k16, pack_bf16x2
from kernels.common.cute_ring import arrive, load_f32x2, store_b32, store_f32, wait
from kernels.mla_decode.plan import (
    CHUNK,
    K_STEPS,
    NEG_INF,
    P_PITCH,
    PITCH,
    S_PITCH,
    SLICES,
    SLOT,
    TILE,
    WARP_COLUMNS,
)
from kernels.mla_decode.steps import consumer_barrier, exp2, finite_base, warp_max

__all__ = ["attend", "load_query"]


@cute.jit
def load_query(base: Int32, state: cute.Tensor, q: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """B fragments of this warp's slice of Q from the ring's next slots. `state`, `q` as in `attend`."""
    lane = cute.arch.lane_idx()
    k_slice = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % SLICES
    at = PITCH * (lane % 8 + 8 * (lane // 16)) + 16 * (lane // 8 % 2) + 2 * 16 * K_STEPS * k_slice
    for chunk in cutlass.range_constexpr(plan.query_chunks):
        full = base + plan.barriers + 8 * state[0]
        wait(full, state[1])
        for step in cutlass.range_constexpr(K_STEPS):
            pair = matrix_x4(base + plan.ring + SLOT * state[0] + at + 32 * step)
            for n in cutlass.range_constexpr(min(2, plan.tiles - 2 * chunk)):
                q[0, 2 * chunk + n, step] = pair[2 * n]
                q[1, 2 * chunk + n, step] = pair[2 * n + 1]
        cute.arch.sync_warp()
        if lane == 0:
            arrive(full + 8 * plan.slots)
        state[0] += 1
        if state[0] >= plan.slots:
            state[0] -= plan.slots
            state[1] ^= 1


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

        # Partial scores of two chunks over one slice of k.
        s = cute.make_rmem_tensor((4, tiles, 2), Float32)
        s.fill(0.0)
        k_base = []
        for j in cutlass.range_constexpr(2):
            slot, parity = slots[j], parities[j]
            if half == 1:
                slot, parity = slots[j + 2], parities[j + 2]
            wait(base + plan.barriers + 8 * slot, parity)
            k_base.append(base + plan.ring + SLOT * slot + k_at)
        for step in cutlass.range_constexpr(K_STEPS):
            for j in cutlass.range_constexpr(2):
                k = matrix_x4(k_base[j] + 32 * step)
                for n in cutlass.range_constexpr(tiles):
                    acc = (s[0, n, j], s[1, n, j], s[2, n, j], s[3, n, j])
                    acc = mma_m16n8k16(acc, k, (q[0, n, step], q[1, n, step]))
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
            store_b32(base + plan.p + P_PITCH * mine + 4 * lane, pack_bf16x2(p0, p1))
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
            wait(base + plan.barriers + 8 * slots[j], parities[j])
            v_base = base + plan.ring + SLOT * slots[j] + v_at
            for m in cutlass.range_constexpr(WARP_COLUMNS // 16):
                v = matrix_transposed_x4(v_base + 32 * m)
                for n in cutlass.range_constexpr(tiles):
                    acc = mma_m16n8k16((o[0, n, m], o[1, n, m], o[2, n, m], o[3, n, m]), v, p[n][j])
                    for i in cutlass.range_constexpr(4):
                        o[i, n, m] = acc[i]
        cute.arch.sync_warp()
        if lane < count:
            slot = state[0] + lane
            if slot >= plan.slots:
                slot -= plan.slots
            arrive(base + plan.barriers + 8 * (plan.slots + slot))

        state[0] += count
        if state[0] >= plan.slots:
            state[0] -= plan.slots
            state[1] ^= 1
        chunk += TILE
