"""The second launch: partial results of requests that several clusters share, added up by the whole GPU."""

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from kernels.common.cute_vector import load_shared_4xf32
from kernels.mla_decode.merge import add_parts, add_units, clear_sum, make_sum, place_of, write_fragment
from kernels.mla_decode.operands import P_SCALE
from kernels.mla_decode.plan import MAX_BATCH, VALUE

__all__ = ["mla_decode_merge"]


@cute.jit
def _park(address: Int32, values: tuple) -> None:
    """Four Float32 to shared memory."""
    cute.arch.inline_ptx("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


@cute.kernel
def mla_decode_merge(
    out: cute.Pointer,
    lse: cute.Pointer,
    partial: cute.Pointer,
    partial_stats: cute.Pointer,
    split: cute.Pointer,
    clusters: Int32,
    k_scale: Float32,
    *,
    plan: cutlass.Constexpr,
) -> None:
    """A warp adds one share of a fragment's partials, the first warp of a fragment adds up the shares.

    Block (request, group, part of the fragments). `split`: first chunk of each request in the sequence of all chunks,
    the chunks behind their last, chunks per cluster; as the first launch has found them.
    """
    request, group, part = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    shared = cute.arch.get_dyn_smem(Uint8, alignment=128)
    base = shared.toint()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    start = cute.arch.load(split + request, Int32)
    stop = cute.arch.load(split + (MAX_BATCH + request), Int32)
    share = cute.arch.load(split + 2 * MAX_BATCH, Int32)
    first = start // share
    count = (stop - 1) // share - first + 1
    if (stop > start) & (count > 1):
        at = part * (plan.merge_warps // plan.merge_split) + warp // plan.merge_split
        fragment, rank = at % plan.slice_fragments, at // plan.slice_fragments
        added = make_sum()
        clear_sum(*added)
        units = (first, count, start, share, group * clusters * 2)
        add_units(
            added, fragment, rank, (partial, partial_stats), units, warp % plan.merge_split, plan.merge_split, plan
        )
        o, tops, totals = added
        if cutlass.const_expr(plan.merge_split > 1):
            mine = base + 32 * (32 * warp + lane)
            _park(mine, (o[0], o[1], o[2], o[3]))
            _park(mine + 16, (tops[0], totals[0], tops[1], totals[1]))
            cute.arch.sync_threads()
            clear_sum(*added)
            shares = []
            for k in cutlass.range_constexpr(plan.merge_split):
                there = mine + 1024 * (k - warp % plan.merge_split)
                shares.append((load_shared_4xf32(there + 16), load_shared_4xf32(there)))
            if warp % plan.merge_split == 0:
                add_parts(*added, tuple(shares))
        if warp % plan.merge_split == 0:
            row, column = place_of(fragment, rank, plan)
            request_row = request * plan.all_rows + group * plan.rows
            valid = cutlass.min(plan.all_rows - group * plan.rows, plan.rows)
            out_at, lse_at, gain = out + Int64(request_row) * VALUE, lse + request_row, k_scale / P_SCALE
            write_fragment(out_at, lse_at, row, column, valid, *added, gain, plan)
