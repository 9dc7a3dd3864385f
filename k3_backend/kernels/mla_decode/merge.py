"""Sums of partial results: fragments of O^T with the maxima and sums of their query rows, always in the same order."""

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from kernels.common.cute_mma import pack_bf16x2
from kernels.common.cute_vector import load_shared_4xf32, store_4xf32
from kernels.mla_decode.plan import MERGE_DEPTH, NEG_INF, VALUE, WARP_COLUMNS, WARPS
from kernels.mla_decode.steps import exp2, finite_base, log2

__all__ = [
    "add_parts", "add_units", "clear_sum", "finish", "inbox_parts", "make_sum", "merge", "place_of", "unit_of",
    "unit_parts", "write_fragment",
]  # fmt: skip


@cute.jit
def load_4xf32_l2(pointer: cute.Pointer, wanted: Boolean) -> tuple:
    """Four consecutive Float32 that another CTA has written: past L1; zeros, and no access, where not wanted."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; "
        "mov.f32 {$w0}, 0f00000000; mov.f32 {$w1}, 0f00000000; mov.f32 {$w2}, 0f00000000; mov.f32 {$w3}, 0f00000000; "
        "@p ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Float32] * 4,
        read_only_args=[pointer, Int32(wanted)],
    )


@cute.jit
def make_sum() -> tuple:
    """Registers for a fragment of O^T, and for maxima and sums of its two query rows in this lane."""
    return cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)


@cute.jit
def clear_sum(o: cute.Tensor, tops: cute.Tensor, totals: cute.Tensor) -> None:
    """Nothing seen yet."""
    o.fill(0.0)
    tops.fill(NEG_INF)
    totals.fill(0.0)


@cute.jit
def add_parts(o: cute.Tensor, tops: cute.Tensor, totals: cute.Tensor, parts: tuple) -> None:
    """Add parts of a softmax, in the order given, to a fragment and the maxima and sums of its two query rows.

    `parts`: (maximum, sum, maximum, sum) of the two rows, then the fragment, of each.
    """
    for row in cutlass.range_constexpr(2):
        top = tops[row]
        for stats, _ in parts:
            top = cute.arch.fmax(top, stats[2 * row])
        shift = finite_base(top)
        weight = exp2(tops[row] - shift)
        total, low, high = weight * totals[row], weight * o[row], weight * o[row + 2]
        for stats, values in parts:
            weight = exp2(stats[2 * row] - shift)
            total += weight * stats[2 * row + 1]
            low += weight * values[row]
            high += weight * values[row + 2]
        tops[row], totals[row], o[row], o[row + 2] = top, total, low, high


@cute.jit
def write_fragment(
    out: cute.Pointer,
    lse: cute.Pointer,
    row: Int32,
    column: Int32,
    valid: Int32,
    o: cute.Tensor,
    tops: cute.Tensor,
    totals: cute.Tensor,
    gain: Float32,
    plan: cutlass.Constexpr,
) -> None:
    """Write a finished fragment: 16 value columns from `column`, 8 query rows from `row`.

    Lanes g and g + 1 hold neighbouring columns of rows 2t and 2t + 1; they swap, and each writes pairs of one row.
    Who has the first columns also writes the log-sum-exp. `gain` is what E4M3 values are multiplied by.
    """
    lane = cute.arch.lane_idx()
    g, odd = lane // 4, lane // 4 % 2
    scaled = []
    for i in cutlass.range_constexpr(4):
        inverse = cute.arch.rcp_approx(totals[i % 2])
        if totals[i % 2] == 0.0:  # the row sees nothing: 0, not 0 * inf
            inverse = Float32(0.0)
        if cutlass.const_expr(plan.e4m3):
            inverse *= gain
        scaled.append(o[i] * inverse)
    top, total = tops[0], totals[0]
    mine_low, mine_high, given_low, given_high = scaled[0], scaled[2], scaled[1], scaled[3]
    if odd == 1:
        top, total = tops[1], totals[1]
        mine_low, mine_high, given_low, given_high = scaled[1], scaled[3], scaled[0], scaled[2]
    got_low = cute.arch.shuffle_sync_bfly(given_low, offset=4)
    got_high = cute.arch.shuffle_sync_bfly(given_high, offset=4)
    low, high = pack_bf16x2(mine_low, got_low), pack_bf16x2(mine_high, got_high)
    if odd == 1:
        low, high = pack_bf16x2(got_low, mine_low), pack_bf16x2(got_high, mine_high)
    row += 2 * (lane % 4) + odd
    if row < valid:
        pair = cute.recast_ptr(out + row * VALUE + column + g - odd, dtype=Int32)
        pair[0] = low
        pair[4] = high
        if column + g - odd == 0:
            lse[row] = top + log2(total)


@cute.jit
def place_of(fragment: Int32, rank: Int32, plan: cutlass.Constexpr) -> tuple:
    """(first query row, first value column) of a fragment of this CTA's columns."""
    warp = rank * (WARPS // plan.cluster) + fragment // plan.warp_fragments
    within = fragment % plan.warp_fragments
    return 8 * (within // (WARP_COLUMNS // 16)), WARP_COLUMNS * warp + 16 * (within % (WARP_COLUMNS // 16))


@cute.jit
def unit_of(unit: Int32, cluster: Int32, start: Int32, share: Int32) -> Int32:
    """Where a cluster's partial of the request that starts at chunk `start` lies: first segment's place or last's."""
    which = Int32(1) if start > share * cluster else Int32(0)
    return unit + 2 * cluster + which


@cute.jit
def inbox_parts(base: Int32, fragment: Int32, rank: Int32, plan: cutlass.Constexpr) -> tuple:
    """What the CTAs of the cluster have sent of a fragment, in order of rank."""
    lane = cute.arch.lane_idx()
    row, _ = place_of(fragment, rank, plan)
    parts = []
    for r in cutlass.range_constexpr(plan.cluster):
        stats = load_shared_4xf32(base + plan.stats + 8 * (r * plan.rows + row + 2 * (lane % 4)))
        values = load_shared_4xf32(base + plan.inbox + 16 * ((r * plan.slice_fragments + fragment) * 32 + lane))
        parts.append((stats, values))
    return tuple(parts)


@cute.jit
def finish(
    o: cute.Tensor,
    tops: cute.Tensor,
    totals: cute.Tensor,
    fragment: Int32,
    out: cute.Pointer,
    lse: cute.Pointer,
    partial: cute.Pointer,
    partial_stats: cute.Pointer,
    place: Int32,
    sharing: Int32,
    rank: Int32,
    valid: Int32,
    gain: Float32,
    plan: cutlass.Constexpr,
) -> None:
    """Write a fragment of the cluster's sum: to the output if no other cluster shares the request, else as partial."""
    lane = cute.arch.lane_idx()
    row, column = place_of(fragment, rank, plan)
    if sharing == 1:
        write_fragment(out, lse, row, column, valid, o, tops, totals, gain, plan)
    else:
        store_4xf32(partial + 4 * ((place * plan.slice_fragments + fragment) * 32 + lane), (o[0], o[1], o[2], o[3]))
        if (column % plan.columns == 0) & (lane < 4):
            stats = (tops[0], totals[0], tops[1], totals[1])
            store_4xf32(partial_stats + 2 * (place * plan.rows + row + 2 * lane), stats)


@cute.jit
def unit_parts(
    fragment: Int32,
    rank: Int32,
    partials: tuple,
    units: tuple,
    begin: Int32,
    step: cutlass.Constexpr,
    depth: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> tuple:
    """Load a fragment's partials of `depth` clusters that share a request: the `begin`th and every `step`th behind it.

    Args:
        fragment: of the columns of CTA `rank` of the cluster.
        rank: see above.
        partials: fp32 [unit, cluster rank, fragment, lane, 4], a unit being (group, cluster, its first segment or its
            last), and their statistics [unit, cluster rank, rows, 2].
        units: first cluster that shares the request, how many do, the request's first chunk, chunks per cluster, the
            group's first unit.
        begin: see above.
        step: see above.
        depth: see above.
        plan: sizes.

    Returns:
        As `add_parts` takes them; those behind the last are empty.
    """
    partial, partial_stats = partials
    first, count, start, share, unit = units
    lane = cute.arch.lane_idx()
    row, _ = place_of(fragment, rank, plan)
    parts = []
    for k in cutlass.range_constexpr(depth):
        there = begin + step * k < count
        at = unit_of(unit, first + cutlass.min(begin + step * k, count - 1), start, share) * plan.cluster + rank
        stats = load_4xf32_l2(partial_stats + 2 * (at * plan.rows + row + 2 * (lane % 4)), there)
        tops = [stats[0], stats[2]]
        if begin + step * k >= count:
            tops = [Float32(NEG_INF), Float32(NEG_INF)]
        values = load_4xf32_l2(partial + 4 * ((at * plan.slice_fragments + fragment) * 32 + lane), there)
        parts.append(((tops[0], stats[1], tops[1], stats[3]), values))
    return tuple(parts)


@cute.jit
def add_units(
    added: tuple,
    fragment: Int32,
    rank: Int32,
    partials: tuple,
    units: tuple,
    begin: Int32,
    step: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Add a fragment's partials of every `step`th cluster from the `begin`th on; arguments as in `unit_parts`."""
    i = begin
    while i < units[1]:
        add_parts(*added, unit_parts(fragment, rank, partials, units, i, step, MERGE_DEPTH, plan))
        i += MERGE_DEPTH * step


@cute.jit
def merge(
    out: cute.Pointer,
    lse: cute.Pointer,
    partials: tuple,
    units: tuple,
    rank: Int32,
    valid: Int32,
    gain: Float32,
    plan: cutlass.Constexpr,
) -> None:
    """Add all partials of a request for this CTA's columns, and write the result.

    Args:
        out: the request's first output row of the group.
        lse: likewise.
        partials: as in `unit_parts`.
        units: as in `unit_parts`.
        rank: of the CTA in its cluster: which columns.
        valid: query rows of the group.
        gain: see `write_fragment`.
        plan: sizes.
    """
    fragment = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    added = []
    for _ in cutlass.range_constexpr(plan.merge_fragments):
        added.append(make_sum())
    while fragment < plan.slice_fragments:
        for f in cutlass.range_constexpr(plan.merge_fragments):
            clear_sum(*added[f])
        i = Int32(0)
        while i < units[1]:
            parts = []
            for f in cutlass.range_constexpr(plan.merge_fragments):
                parts.append(unit_parts(fragment + WARPS * f, rank, partials, units, i, 1, plan.merge_depth, plan))
            for f in cutlass.range_constexpr(plan.merge_fragments):
                add_parts(*added[f], parts[f])
            i += plan.merge_depth
        for f in cutlass.range_constexpr(plan.merge_fragments):
            row, column = place_of(fragment + WARPS * f, rank, plan)
            write_fragment(out, lse, row, column, valid, *added[f], gain, plan)
        fragment += WARPS * plan.merge_fragments
