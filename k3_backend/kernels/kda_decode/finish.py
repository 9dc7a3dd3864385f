"""The end of an item: gated RMSNorm of its outputs, zeros of null requests, the new conv window."""

import cutlass
from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import pack_bf16x2, unpack_bf16x2
from kernels.common.cute_vector import load_shared_4xb32, load_shared_4xf32, store_4xb32
from kernels.kda_decode.plan import HEAD
from kernels.kda_decode.steps import channel_of, rsqrt, sigmoid

__all__ = ["gated_norm", "write_window", "write_zeros"]


@cute.jit
def write_zeros(out_pairs: cute.Pointer, tid: Int32, *, plan: cutlass.Constexpr) -> None:
    """Outputs of a null request."""
    for i in cutlass.range_constexpr(plan.pair_rounds):
        at = tid + plan.helper_threads * i
        if at < plan.tokens * plan.pairs:
            out_pairs[(at // plan.pairs) * (plan.width // 2) + at % plan.pairs] = Int32(0)


@cute.jit
def gated_norm(out_pairs: cute.Pointer, o_s: cute.Pointer, sums_s: cute.Pointer, g_out_s: cute.Pointer,
               norms: cute.Tensor, eps: Float32, tid: Int32, *, plan: cutlass.Constexpr) -> None:  # fmt: skip
    """O * rsqrt(mean o^2 + eps) * o_norm * sigmoid(g_out) of the block's columns; a thread per pair."""
    for i in cutlass.range_constexpr(plan.pair_rounds):
        at = tid + plan.helper_threads * i
        if at < plan.tokens * plan.pairs:
            token, pair = at // plan.pairs, at % plan.pairs
            total = Float32(0.0)
            for part in cutlass.range_constexpr(plan.parts // 4):
                four = load_shared_4xf32((sums_s + (token * plan.parts + 4 * part)).toint())
                total += (four[0] + four[1]) + (four[2] + four[3])
            scale = rsqrt(total * (1.0 / HEAD) + eps)
            gates = unpack_bf16x2(g_out_s[at])
            even = o_s[2 * at] * scale * norms[2 * i] * sigmoid(gates[0])
            odd = o_s[2 * at + 1] * scale * norms[2 * i + 1] * sigmoid(gates[1])
            out_pairs[token * (plan.width // 2) + pair] = pack_bf16x2(even, odd)


@cute.jit
def write_window(target: cute.Pointer, window_s: Int32, head: Int32, first_row: Int32, rank: Int32, tid: Int32, *,
                 plan: cutlass.Constexpr) -> None:  # fmt: skip
    """New conv rows: two that stay, then the new inputs; q and k rows by one block of the cluster."""
    pieces, threads = plan.channels // 8, plan.helper_threads
    for i in cutlass.range_constexpr(((plan.tokens + 2) * pieces + threads - 1) // threads):
        at = tid + threads * i
        if at < (plan.tokens + 2) * pieces:
            row, chunk = at // pieces, at % pieces
            if (rank == 0) | (chunk >= 2 * HEAD // 8):
                words = load_shared_4xb32(window_s + 2 * (8 * at + plan.channels))
                column = channel_of(8 * chunk, head * HEAD, plan.width, first_row)
                store_4xb32(target + (row * (3 * plan.width) + column), words)
