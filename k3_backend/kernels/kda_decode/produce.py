"""Loads: constants of a head by the consumer threads, pieces and states of items by the producer warp."""

import cutlass
from cutlass import BFloat16, Int32, Int64, cute
from kernels.common.cute_ring import arrive, bulk_copy, expect
from kernels.common.cute_vector import copy_16b_async
from kernels.kda_decode.plan import BETAS, HEAD
from kernels.kda_decode.steps import channel_of, swizzle

__all__ = ["load_head_constants", "produce_pieces", "produce_state"]


@cute.jit
def load_head_constants(
    f_b: cute.Pointer, conv_w: cute.Pointer, memory: cute.Pointer, head: Int32, first_row: Int32, tid: Int32, *,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """F_b rows and conv weights of a head to shared memory, by the consumer threads; one async group."""
    threads = 32 * plan.warps
    f_b_s = cute.recast_ptr(memory, dtype=BFloat16) + plan.f_b_at // 2
    conv_w_s = memory + plan.conv_w_at // 4
    for i in cutlass.range_constexpr(HEAD * HEAD // 8 // threads):
        item = tid + threads * i
        row, chunk = item // 16, item % 16
        copy_16b_async(
            (f_b_s + 8 * (row * 16 + swizzle(row, chunk))).toint(), f_b + 8 * ((head * HEAD + row) * 16 + chunk)
        )
    for i in cutlass.range_constexpr((plan.channels + threads - 1) // threads):
        item = tid + threads * i
        if item < plan.channels:
            channel = channel_of(item, head * HEAD, plan.width, first_row)
            copy_16b_async((conv_w_s + 4 * item).toint(), conv_w + 4 * channel)
    cute.arch.cp_async_commit_group()


@cute.jit
def produce_pieces(
    proj: cute.Pointer, slots: cute.Pointer, accepted: cute.Pointer, conv_state: cute.Pointer, taps: Int32,
    request: Int32, head: Int32, first_row: Int32, place: Int32, full: Int32, lane: Int32, *,
    plan: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """Conv window and projection pieces of an item, by one warp. Returns the slot id of the state to read, 0 for a null
    request, which is announced without copies.
    """
    width, tokens, value_rows, channels = plan.width, plan.tokens, plan.value_rows, plan.channels
    conv_slot = slots[request * tokens]
    kept = Int32(1)
    read_slot = conv_slot
    if cutlass.const_expr(tokens > 1):
        kept = accepted[request]
        read_slot = slots[request * tokens + kept - 1]
    live = (conv_slot > 0) & (read_slot > 0)
    if lane == 0:
        cute.arch.inline_ptx(
            "st.shared.b32 [{$r0}], {$r1};",
            read_only_args=[place + plan.pieces_bytes, cutlass.max(Int32(0), conv_slot) * live.to(Int32)],
        )
        if live:
            expect(full, Int32(plan.pieces_bytes))
        else:
            arrive(full)
    if live:
        rows = proj + Int64(request * tokens) * plan.row_width
        if lane < tokens + 3:
            window = conv_state + ((Int64(conv_slot) * taps + kept - 1 + lane) * (3 * width) + head * HEAD)
            if lane >= 3:
                window = rows + ((lane - 3) * plan.row_width + head * HEAD)
            target = place + 2 * channels * lane
            bulk_copy(target, window, Int32(2 * HEAD), full)
            bulk_copy(target + 2 * HEAD, window + width, Int32(2 * HEAD), full)
            bulk_copy(target + 4 * HEAD, window + (2 * width + first_row), Int32(2 * value_rows), full)
        if lane < tokens:
            row = rows + lane * plan.row_width
            bulk_copy(place + plan.f_a_at + 2 * HEAD * lane, row + 4 * width, Int32(2 * HEAD), full)
            target = place + plan.g_out_at + 2 * value_rows * lane
            bulk_copy(target, row + (3 * width + head * HEAD + first_row), Int32(2 * value_rows), full)
            bulk_copy(place + plan.beta_at + 2 * BETAS * lane, row + (4 * width + HEAD), Int32(2 * BETAS), full)
    return read_slot * live.to(Int32)


@cute.jit
def produce_state(state: cute.Pointer, slot: Int32, head: Int32, first_row: Int32, place: Int32, full: Int32, *,
                  plan: cutlass.Constexpr) -> None:  # fmt: skip
    """The block's rows of a head's state; nothing for a null request. One thread."""
    if slot > 0:
        expect(full, Int32(plan.state_bytes))
        source = state + ((Int64(slot) * plan.heads + head) * HEAD + first_row) * HEAD
        bulk_copy(place, source, Int32(plan.state_bytes), full)
    else:
        arrive(full)
