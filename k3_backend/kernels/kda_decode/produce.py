"""Loads of the producer warp: slot ids, pieces and states of items."""

import cutlass
from cutlass import Int32, Int64, cute
from kernels.common.cute_ring import arrive, bulk_copy, bulk_copy_once, expect, store_b32, wait
from kernels.kda_decode.plan import BETAS, HEAD

__all__ = ["announce_slots", "load_slots", "prefetch_slots", "produce_pieces", "produce_slices"]


@cute.jit
def load_slots(slots: cute.Pointer, accepted: cute.Pointer, request: Int32, lane: Int32, *,
               plan: cutlass.Constexpr) -> tuple:  # fmt: skip
    """(slot id of the lane's token, accepted tokens) of a request."""
    slot = Int32(0)
    if lane < plan.tokens:
        slot = slots[request * plan.tokens + lane]
    kept = Int32(1)
    if cutlass.const_expr(plan.tokens > 1):
        kept = accepted[request]
    return slot, kept


@cute.jit
def prefetch_slots(slots: cute.Pointer, accepted: cute.Pointer, request: Int32, lane: Int32, *,
                   plan: cutlass.Constexpr) -> None:  # fmt: skip
    """Bring a request's slot ids into L2, by one warp: no value is read, so an earlier kernel may still write them."""
    if lane == 0:
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[slots + request * plan.tokens])
        if cutlass.const_expr(plan.tokens > 1):
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[accepted + request])


@cute.jit
def announce_slots(slot: Int32, kept: Int32, place: Int32, lane: Int32, *, plan: cutlass.Constexpr) -> tuple:
    """Slot ids of a request to a place of the pieces' ring, by one warp.

    Returns (slot of the conv state, slot of the state to read); both are 0 for a null request.
    """
    conv_slot = cute.arch.shuffle_sync(slot, offset=0)
    read_slot = conv_slot
    if cutlass.const_expr(plan.tokens > 1):
        read_slot = cute.arch.shuffle_sync(slot, offset=kept - 1)
    live = ((conv_slot > 0) & (read_slot > 0)).to(Int32)
    if lane < plan.tokens:
        store_b32(place + plan.slots_at + 4 * lane, slot * live)
    return conv_slot * live, read_slot * live


@cute.jit
def produce_pieces(
    proj: cute.Pointer, conv_state: cute.Pointer, taps: Int32, conv_slot: Int32, kept: Int32, request: Int32,
    head: Int32, first_row: Int32, place: Int32, full: Int32, lane: Int32, *, plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Conv window and projection pieces of an item, by one warp; a null request is announced without copies."""
    width, tokens, value_rows, channels = plan.width, plan.tokens, plan.value_rows, plan.channels
    cute.arch.sync_warp()  # the slot ids of all lanes come before the announcement
    if lane == 0:
        if conv_slot > 0:
            expect(full, Int32(plan.pieces_bytes))
        else:
            arrive(full)
    if conv_slot > 0:
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


@cute.jit
def produce_state(state: cute.Pointer, slot: Int32, head: Int32, first_row: Int32, place: Int32, full: Int32, *,
                  plan: cutlass.Constexpr) -> None:  # fmt: skip
    """A slice of a head's state; nothing for a null request. One thread."""
    if slot > 0:
        expect(full, Int32(plan.state_bytes))
        source = state + ((Int64(slot) * plan.heads + head) * HEAD + first_row) * HEAD
        if cutlass.const_expr(plan.streamed):
            bulk_copy_once(place, source, Int32(plan.state_bytes), full)
        else:
            bulk_copy(place, source, Int32(plan.state_bytes), full)
    else:
        arrive(full)


@cute.jit
def produce_slices(state: cute.Pointer, slot: Int32, head: Int32, first_row: Int32, turn: Int32, base: Int32,
                   full: Int32, empty: Int32, lane: Int32, first: cutlass.Constexpr, last: cutlass.Constexpr, *,
                   plan: cutlass.Constexpr) -> None:  # fmt: skip
    """Slices first .. last - 1 of an item, by one warp, each as soon as its place is free."""
    for h in cutlass.range_constexpr(first, last):
        g = turn * plan.slices + h
        s = g % plan.stages
        if g >= plan.stages:
            wait(empty + 8 * s, (g // plan.stages - 1) & 1)
        if lane == 0:
            produce_state(
                state, slot, head, first_row + h * plan.slice_rows, base + s * plan.state_bytes, full + 8 * s, plan=plan
            )
