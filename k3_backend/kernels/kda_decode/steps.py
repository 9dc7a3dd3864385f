"""The maths of one item up to its outputs: convolution, decay, recurrence; and its state rows to and from registers."""

import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from kernels.common.cute_mma import load_weight_16b, mma_m16n8k16, warp_sum
from kernels.common.cute_vector import (
    copy_16b_async,
    load_shared_4xb32,
    load_shared_4xf32,
    store_4xf32,
    store_4xf32_once,
)
from kernels.kda_decode.plan import CONVOLVERS, GATES, HEAD, HELPERS

__all__ = [
    "channel_of", "compute_decay", "convolve", "load_head_constants", "load_rows", "recur", "rsqrt", "sigmoid",
    "store_rows",
]  # fmt: skip

LOG2_E = 1.4426950408889634


@cute.jit
def exp(x: Float32) -> Float32:
    """e^x by ex2.approx: 2^-22 relative where it is used, for arguments of moderate size."""
    return cute.arch.exp2(x * LOG2_E)


@cute.jit
def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x); 0 and 1 at the ends without NaN."""
    return cute.arch.rcp_approx(1.0 + exp(-x))


@cute.jit
def rsqrt(x: Float32) -> Float32:
    """x^-1/2 by rsqrt.approx."""
    return cute.arch.inline_ptx("rsqrt.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def channel_of(at: Int32, head_base: Int32, width: cutlass.Constexpr, first_row: Int32) -> Int32:
    """Conv channel, or projection column, of a block's channel: q and k of the head, then v of the block's rows."""
    section = cutlass.min(at // HEAD, 2)
    return section * width + head_base + (at - section * HEAD) + (section // 2) * first_row


@cute.jit
def swizzle(row: Int32, chunk: Int32) -> Int32:
    """Place of a 16-byte chunk in its row of F_b: rows of a pair use different halves of the banks."""
    return chunk ^ ((row & 1) * 4)


@cute.jit
def load_head_constants(
    conv: cute.Tensor, bias: cute.Tensor, f_b_s: Int32, conv_w: cute.Pointer, f_b: cute.Pointer, a_log: cute.Pointer,
    dt_bias: cute.Pointer, head: Int32, first_row: Int32, helper: Int32, lane: Int32, *, plan: cutlass.Constexpr,
) -> Float32:  # fmt: skip
    """A head's constants, by the helper warps; Returns exp(a_log).

    F_b to shared memory; to registers what the warp needs: conv [4, 4] Int32, fp32 taps of the lane's channels of the
    section that it convolves; bias [gate_tiles, 2] of the gate channels whose decay it computes.
    """
    tid = 32 * helper + lane
    for item in cutlass.range(tid, HEAD * HEAD // 8, plan.helper_threads, unroll=2):
        row, chunk = item // 16, item % 16
        copy_16b_async(f_b_s + 16 * (row * 16 + swizzle(row, chunk)), f_b + (head * HEAD * HEAD + 8 * item))
    cute.arch.cp_async_commit_group()
    if helper < CONVOLVERS:
        for c in cutlass.range_constexpr(4):
            at = helper * HEAD + 32 * c + lane
            if at < plan.channels:
                taps = load_weight_16b(conv_w + 4 * channel_of(at, head * HEAD, plan.width, first_row))
                for j in cutlass.range_constexpr(4):
                    conv[4 * c + j] = taps[j]
    gate = helper - plan.first_gate
    if (gate >= 0) & (gate < GATES):
        for tile in cutlass.range_constexpr(plan.gate_tiles):
            row = head * HEAD + (gate * plan.gate_tiles + tile) * 16 + lane // 4
            bias[2 * tile], bias[2 * tile + 1] = dt_bias[row], dt_bias[row + 8]
    slope = exp(a_log[head])
    cute.arch.cp_async_wait_group(0)
    cute.arch.barrier(barrier_id=HELPERS, number_of_threads=plan.helper_threads)
    return slope


@cute.jit
def convolve(window_s: cute.Pointer, conv: cute.Tensor, values: cute.Pointer, warp: Int32, lane: Int32,
             l2_eps: Float32, *, plan: cutlass.Constexpr) -> None:  # fmt: skip
    """Conv, SiLU and l2 norm of one section (q, k or v) of all tokens, by one warp: channels lane, lane + 32, ..."""
    tokens, value_rows, channels = plan.tokens, plan.value_rows, plan.channels
    q_s, k_s, v_s = values, values + tokens * HEAD, values + plan.v_from
    for t in cutlass.range(tokens, unroll=1):
        y = cute.make_rmem_tensor(4, Float32)
        y.fill(0.0)
        for c in cutlass.range_constexpr(4):
            at = warp * HEAD + 32 * c + lane
            if at < channels:
                total = Float32(0.0)
                for j in cutlass.range_constexpr(4):
                    total += conv[4 * c + j].bitcast(Float32) * window_s[(t + j) * channels + at].to(Float32)
                y[c] = total * sigmoid(total)
        if warp < 2:
            scale = rsqrt(warp_sum(y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3]) + l2_eps)
            unit = k_s + t * HEAD
            if warp == 0:
                scale *= HEAD**-0.5
                unit = q_s + t * HEAD
            for c in cutlass.range_constexpr(4):
                unit[32 * c + lane] = y[c] * scale
        else:
            for c in cutlass.range_constexpr(4):
                if 32 * c + lane < value_rows:
                    v_s[t * value_rows + 32 * c + lane] = y[c]


@cute.jit
def compute_decay(f_b_s: Int32, f_a_s: Int32, decay_s: cute.Pointer, bias: cute.Tensor, slope: Float32,
                  lower_bound: Float32, gate: Int32, lane: Int32, *, plan: cutlass.Constexpr) -> None:  # fmt: skip
    """exp(bound * sigmoid(slope * (bf16(F_b f_a) + bias))): MMA rows are gate channels, columns are tokens."""
    quad_row, quad_lane = lane // 4, lane % 4
    x = cute.make_rmem_tensor(16, Int32)
    x.fill(0)
    if quad_row < plan.tokens:
        for chunk in cutlass.range_constexpr(4):
            words = load_shared_4xb32(f_a_s + 2 * (quad_row * HEAD + 32 * chunk + 8 * quad_lane))
            for j in cutlass.range_constexpr(4):
                x[4 * chunk + j] = words[j]
    for tile in cutlass.range_constexpr(plan.gate_tiles):
        first = (gate * plan.gate_tiles + tile) * 16 + quad_row
        g = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        for chunk in cutlass.range_constexpr(4):
            place = f_b_s + 16 * (first * 16 + swizzle(first, 4 * chunk + quad_lane))
            low, high = load_shared_4xb32(place), load_shared_4xb32(place + 16 * HEAD)
            g = mma_m16n8k16(g, (low[0], high[0], low[1], high[1]), (x[4 * chunk], x[4 * chunk + 1]))
            g = mma_m16n8k16(g, (low[2], high[2], low[3], high[3]), (x[4 * chunk + 2], x[4 * chunk + 3]))
        for i in cutlass.range_constexpr(4):
            token = 2 * quad_lane + i % 2
            if token < plan.tokens:
                value = g[i].to(BFloat16).to(Float32) + bias[2 * tile + i // 2]
                decay_s[token * HEAD + first + 8 * (i // 2)] = exp(lower_bound * sigmoid(slope * value))


@cute.jit
def recur(s: cute.Tensor, values: cute.Pointer, beta: Float32, t: Int32, row_base: Int32, piece: Int32, *,
          plan: cutlass.Constexpr) -> Float32:  # fmt: skip
    """One token: the lane's state pieces s [groups, 4, 4] become those after the token; o to shared memory.

    Returns the sum of o^2 over the warp's rows.
    """
    tokens, value_rows, groups = plan.tokens, plan.value_rows, plan.groups
    q_s, k_s, decay_s = values, values + tokens * HEAD, values + 2 * tokens * HEAD
    v_s, o_s = values + plan.v_from, values + plan.o_from
    square = Float32(0.0)
    kq = Float32(0.0)
    sk = cute.make_rmem_tensor(groups, Float32)
    sq = cute.make_rmem_tensor(groups, Float32)
    sk.fill(0.0)
    sq.fill(0.0)
    for j in cutlass.range_constexpr(4):
        column = t * HEAD + 32 * j + 4 * piece
        a, k, q = (load_shared_4xf32((values_s + column).toint()) for values_s in (decay_s, k_s, q_s))
        for i in cutlass.range_constexpr(4):
            kq += k[i] * q[i]
            for n in cutlass.range_constexpr(groups):
                decayed = s[16 * n + 4 * j + i] * a[i]
                s[16 * n + 4 * j + i] = decayed
                sk[n] += decayed * k[i]
                sq[n] += decayed * q[i]
    kq = warp_sum(kq, 8)
    for n in cutlass.range_constexpr(groups):
        at = t * value_rows + row_base + 4 * n
        u = beta * (v_s[at] - warp_sum(sk[n], 8))
        o = warp_sum(sq[n], 8) + u * kq
        sk[n] = u
        square += o * o
        if piece == 0:
            o_s[at] = o
    for j in cutlass.range_constexpr(4):
        k = load_shared_4xf32((k_s + (t * HEAD + 32 * j + 4 * piece)).toint())
        for n in cutlass.range_constexpr(groups):
            for i in cutlass.range_constexpr(4):
                s[16 * n + 4 * j + i] += sk[n] * k[i]
    square += cute.arch.shuffle_sync_bfly(square, offset=8)
    return square + cute.arch.shuffle_sync_bfly(square, offset=16)


@cute.jit
def load_rows(rows: cute.Tensor, state_s: cute.Pointer, *, plan: cutlass.Constexpr) -> None:
    """The lane's pieces [groups, 4, 4] of a slice in shared memory to registers; the pointer is the first one's."""
    for n in cutlass.range_constexpr(plan.groups):
        for j in cutlass.range_constexpr(4):
            four = load_shared_4xf32((state_s + (4 * n * HEAD + 32 * j)).toint())
            for i in cutlass.range_constexpr(4):
                rows[16 * n + 4 * j + i] = four[i]


@cute.jit
def store_rows(rows: cute.Tensor, new: cute.Pointer, *, plan: cutlass.Constexpr) -> None:
    """The lane's pieces from registers to a state; the pointer is the first one's."""
    for n in cutlass.range_constexpr(plan.groups):
        for j in cutlass.range_constexpr(4):
            at = 16 * n + 4 * j
            four = (rows[at], rows[at + 1], rows[at + 2], rows[at + 3])
            if cutlass.const_expr(plan.streamed):
                store_4xf32_once(new + (4 * n * HEAD + 32 * j), four)
            else:
                store_4xf32(new + (4 * n * HEAD + 32 * j), four)
