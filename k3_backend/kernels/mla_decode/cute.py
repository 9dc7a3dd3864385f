"""MLA decode core: flash-decoding over the paged latent cache, split over the GPU by cached rows, merged in the kernel.

The rows that all requests must read are cut into chunks of 16, the chunks of all requests form one sequence, and each
cluster of CTAs takes an equal contiguous part of it, found from `seq_lens` at run time: every CTA has the same work,
whatever the lengths. A part is a few *segments*, each of one request; the CTAs of a cluster share a segment by chunks.

    4 producer warps  Q, then block table -> one bulk copy of 1152 bytes per cache row, into a ring of chunk slots
    8 warps, S        S^T = K Q^T by mma.m16n8k16, 64 rows at a time: 4 slices of k x 2 halves of rows, Q in registers
    8 warps, softmax  a warp owns query rows: adds the 4 slices, running maximum and sum in fp32, base 2, P in bf16
    8 warps, P V      O^T += V^T P^T: 64 value columns per warp, V transposed by ldmatrix, O in fp32 registers
    end of segment    each CTA sends its O to the CTAs of the cluster by columns; each adds up 512 / cluster columns
    request done      by this cluster alone: normalised to `out`; else partial to the workspace, and the last cluster
                      to arrive adds all partials of the request in the order of the sequence

A call with more than `rows` query rows (T tokens x H heads) is cut into groups along the grid's y; all groups read the
same cache rows at about the same time, so that all but the first find them in L2.

Floor: 1152 bytes per cached row, plus 2 * 512 * 4 bytes of L2 traffic per query row and cluster that shares a request.
Per SM and clock of H200 that is 20 bytes at full HBM speed: a chunk takes 930 clocks, in which the tensor cores need
about 220 for 16 query rows. Nine slots of 18,688 bytes keep 90 KB and more in flight.

Nothing is read before the dependency wait: no argument is constant.

Synchronisation.
Ring: `full` completes by a producer's arrival and the copies' bytes, `empty` by one arrival per consumer warp. Rows of
a chunk behind the request's end are zeroed by the producer (0 * NaN would be NaN), ordered before later copies into
the slot by a proxy fence. What stands in Q's slot behind the last query row reaches only results that nobody reads.
Scores: two consumer barriers per tile. Partial scores are written before the first and read between both, P and the
rescaling factors are written between both and read behind the second. A warp writes its next partial scores behind the
second barrier, when all reads of the old ones are done, and its next P behind the next first barrier, which no warp
passes before all have finished their P V.
Cluster: O, maximum and sum travel as asynchronous stores that complete on the receiver's `inbox`, which is armed for
the bytes of the whole cluster. Before a CTA sends again, every CTA has arrived at its `free`, behind the consumer
barrier that follows its last read of the inbox. A CTA may exit once its own inbox has completed: nothing else comes.
Workspace: partials, CTA barrier, then one acq_rel atomic per CTA at the counter of (request, column slice): each CTA
needs the same slice of other clusters only. Whoever finds all others' arrivals acquires their partials, reads them past
L1 and resets the counter, which nobody else touches any more in this launch. The order of every sum is fixed.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from kernels.common.cute_mma import matrix_transposed_x4, matrix_x4, mma_m16n8k16, pack_bf16x2, warp_sum
from kernels.common.cute_ring import (
    arrive,
    arrive_peer,
    bulk_copy,
    expect,
    init_barrier,
    load_f32x2,
    order_generic_before_bulk,
    peer,
    send_f32x2,
    send_f32x4,
    store_b32,
    store_f32,
    store_f32x2,
    store_zero_16b,
    wait,
    wait_cluster,
)
from kernels.common.cute_vector import load_shared_4xf32, store_4xf32

from k3_backend.aot.cuda.contract import Choices, Launch, Variant, Workspace

ROW, VALUE = 576, 512
"""Columns of a cache row, and those of them that are the value."""
ROW_BYTES = 2 * ROW
PITCH = ROW_BYTES + 16
"""Bytes between rows of a slot: eight rows of an ldmatrix then lie in different banks."""
CHUNK = 16
"""Cache rows per ring slot: one m16 tile of K, one k16 step of V."""
SLOT = CHUNK * PITCH
TILE = 4
"""Chunks between two exchanges of scores."""
SLICES, K_STEPS = 4, 9
"""S sums 576 columns in 4 slices of 9 k16 steps."""
WARPS, PRODUCERS = 8, 4
"""Consumer and producer warps. A bulk copy takes uniform registers, so a warp issues its lanes' copies one by one."""
CONSUMERS = 32 * WARPS
PRODUCER_STEP = CHUNK * PRODUCERS
TABLE_DEPTH = 4
"""Chunks for which a producer warp holds block table entries, and as many are on their way."""
WARP_COLUMNS = VALUE // WARPS
S_PITCH = CHUNK * TILE + 4
"""Floats between query rows of partial scores: C fragments are then stored without bank conflicts."""
P_PITCH = 2 * CHUNK * TILE + 16
"""Bytes between query rows of P, likewise."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Of 168 that 384 threads get at launch, moved between the roles."""
MAX_BATCH = 128
MERGE_DEPTH = 8
"""Partials of a request that a thread loads at once."""
SHARED_LIMIT = 226 * 1024
"""227 KB less what the compiler reserves."""
LOG2_E = 1.4426950408889634
NEG_INF = float("-inf")


@dataclass(frozen=True)
class Plan:
    """What a variant fixes at compile time. Offsets are bytes of dynamic shared memory."""

    heads: int
    tokens: int
    rows: int
    """Query rows per group: a multiple of 8."""
    groups: int
    cluster: int
    idle: int
    min_chunks: int
    """A CTA's share of a segment is not cut finer than this."""

    @property
    def all_rows(self) -> int:
        """Query rows of a request."""
        return self.heads * self.tokens

    @property
    def clusters(self) -> str:
        """Clusters per group, as an expression over the launch's sizes."""
        return f"max(1, (sms - {self.idle}) // {self.groups * self.cluster})"

    @property
    def columns(self) -> int:
        """Value columns that a CTA of the cluster adds up."""
        return VALUE // self.cluster

    @property
    def tiles(self) -> int:
        """n8 tiles of query rows."""
        return self.rows // 8

    @property
    def owned(self) -> int:
        """Query rows whose softmax a warp does."""
        return self.rows // WARPS

    @property
    def query_chunks(self) -> int:
        """Ring slots that Q takes."""
        return -(-self.rows // CHUNK)

    @property
    def warp_fragments(self) -> int:
        """C fragments of O^T that a warp holds: of 16 value columns and 8 query rows each."""
        return WARP_COLUMNS // 16 * self.tiles

    @property
    def slice_fragments(self) -> int:
        """Fragments of the columns that a CTA of the cluster adds up."""
        return self.warp_fragments * WARPS // self.cluster

    @property
    def inbox_bytes(self) -> int:
        """What the cluster sends to each CTA per segment: fragments, maxima and sums."""
        return self.cluster * (512 * self.slice_fragments + 8 * self.rows)

    @property
    def barriers(self) -> int:
        """First of the mbarriers: full and empty of each slot, inbox, free."""
        return 0

    @property
    def starts(self) -> int:
        """First chunk of each request in the sequence, and the sequence's length."""
        return 512

    @property
    def lengths(self) -> int:
        """Sequence length of each request."""
        return self.starts + 4 * (MAX_BATCH + 1) + 12

    @property
    def stats(self) -> int:
        """Maximum and sum of each query row, by CTA of the cluster."""
        return self.lengths + 4 * MAX_BATCH

    @property
    def factors(self) -> int:
        """By which each query row's O shrinks in this tile; behind them a word for the merge."""
        return self.stats + 8 * self.rows * self.cluster

    @property
    def p(self) -> int:
        """P of a tile."""
        return self.factors + 4 * self.rows + 16

    @property
    def scores(self) -> int:
        """Partial scores of a tile."""
        return self.p + P_PITCH * self.rows

    @property
    def inbox(self) -> int:
        """Fragments from the cluster's CTAs."""
        return self.scores + 4 * SLICES * S_PITCH * self.rows

    @property
    def ring(self) -> int:
        """The slots."""
        end = self.inbox + (512 * self.slice_fragments * self.cluster if self.cluster > 1 else 0)
        return -(-end // 128) * 128

    @property
    def slots(self) -> int:
        """As many as fit."""
        return (SHARED_LIMIT - self.ring) // SLOT

    @property
    def shared(self) -> int:
        """Bytes in all."""
        return self.ring + self.slots * SLOT


@cute.jit
def shard_rows(count: Int32, rank: Int32, size: Int32, interleave: Int32) -> Int32:
    """How many of the first `count` global positions live on this shard."""
    count = cutlass.max(count, 0)
    if size > 1:
        cycle = interleave * size
        rounds = count // cycle
        rest = count - rounds * cycle - rank * interleave
        count = rounds * interleave + cutlass.min(cutlass.max(rest, 0), interleave)
    return count


@cute.jit
def exp2(x: Float32) -> Float32:
    """2^x by ex2.approx; 0 for -inf."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def log2(x: Float32) -> Float32:
    """lg2.approx; -inf for 0."""
    return cute.arch.inline_ptx("lg2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def finite_base(maximum: Float32) -> Float32:
    """What to subtract in the exponent: the maximum, or 0 where nothing has been seen (-inf - -inf is NaN)."""
    base = maximum
    if maximum == NEG_INF:
        base = Float32(0.0)
    return base


@cute.jit
def warp_max(value: Float32) -> Float32:
    """Maximum over a warp; every lane gets it."""
    for step in cutlass.range_constexpr(5):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1 << step))
    return value


@cute.jit
def load_4xf32_l2(pointer: cute.Pointer) -> tuple:
    """Four consecutive Float32 that another CTA has written in this launch: past L1."""
    return cute.arch.inline_ptx(
        "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[pointer],
    )


@cute.jit
def consumer_barrier() -> None:
    """All consumer warps."""
    cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)


@cute.jit
def find_request(starts: cute.Pointer, batch: Int32, chunk: Int32) -> Int32:
    """The request that holds a chunk of the sequence; requests without chunks hold none. The whole warp asks."""
    lane = cute.arch.lane_idx()
    found = Int32(0)
    base = Int32(0)
    while base < batch:
        before = (base + lane < batch) & (starts[cutlass.min(base + lane, batch - 1) + 1] <= chunk)
        found += cute.arch.popc(cute.arch.vote_ballot_sync(before))
        base += 32
    return found


@cute.jit
def plan_work(seq_lens: cute.Pointer, starts: cute.Pointer, lengths: cute.Pointer, batch: Int32, shard: tuple) -> None:
    """One warp: lengths of all requests, and where their chunks start in the sequence."""
    lane = cute.arch.lane_idx()
    seen = []
    for part in cutlass.range_constexpr(MAX_BATCH // 32):
        length = Int32(0)
        if 32 * part + lane < batch:
            length = cute.arch.load(seq_lens + 32 * part + lane, Int32)
        seen.append(length)
    if lane == 0:
        starts[0] = Int32(0)
    total = Int32(0)
    for part in cutlass.range_constexpr(MAX_BATCH // 32):
        if 32 * part < batch:
            ends = (shard_rows(seen[part], *shard) + (CHUNK - 1)) // CHUNK
            for step in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(ends, offset=1 << step)
                if lane >= 1 << step:
                    ends += lower
            starts[32 * part + lane + 1] = total + ends
            lengths[32 * part + lane] = seen[part]
            total += cute.arch.shuffle_sync(ends, offset=31)


@cute.jit
def fill_slot(
    base: Int32,
    state: cute.Tensor,
    source: cute.Pointer,
    count: Int32,
    zero: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Copy a chunk's first `count` rows, one per lane, into the next slot of this warp.

    Args:
        base: shared memory.
        state: slot, and parity to wait for there; moves on to the warp's next slot.
        source: the lane's row.
        count: rows that exist.
        zero: whether the others must be zero.
        plan: sizes.
    """
    lane = cute.arch.lane_idx()
    full = base + plan.barriers + 8 * state[0]
    target = base + plan.ring + SLOT * state[0] + PITCH * lane
    wait(full + 8 * plan.slots, state[1])
    if cutlass.const_expr(zero):
        if (lane >= count) & (lane < CHUNK):
            for piece in cutlass.range(ROW_BYTES // 16, unroll=1):
                store_zero_16b(target + 16 * piece)
            order_generic_before_bulk()
        cute.arch.sync_warp()
    if lane == 0:
        expect(full, ROW_BYTES * count)
    cute.arch.sync_warp()
    if lane < count:
        bulk_copy(target, source, ROW_BYTES, full)
    state[0] += PRODUCERS
    if state[0] >= plan.slots:
        state[0] -= plan.slots
        state[1] ^= 1


@cute.jit
def fill_rows(
    base: Int32,
    state: cute.Tensor,
    kv_cache: cute.Pointer,
    table: cute.Pointer,
    page: Int32,
    row: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Copy every fourth chunk of a request's rows [row, end) into the ring; `row` is a multiple of 16."""
    lane = cute.arch.lane_idx()
    entry = cute.make_rmem_tensor(TABLE_DEPTH, Int32)
    for u in cutlass.range_constexpr(TABLE_DEPTH):
        at = row + PRODUCER_STEP * u + lane % CHUNK
        entry[u] = Int32(0)
        if at < end:
            entry[u] = cute.arch.load(table + at // page, Int32)
    while row < end:
        coming = cute.make_rmem_tensor(TABLE_DEPTH, Int32)
        for u in cutlass.range_constexpr(TABLE_DEPTH):
            at = row + PRODUCER_STEP * (TABLE_DEPTH + u) + lane % CHUNK
            coming[u] = Int32(0)
            if at < end:
                coming[u] = cute.arch.load(table + at // page, Int32)
        for u in cutlass.range_constexpr(TABLE_DEPTH):
            begin = row + PRODUCER_STEP * u
            if begin < end:
                source = kv_cache + Int64(entry[u] * Int64(page) + (begin + lane % CHUNK) % page) * ROW
                fill_slot(base, state, source, cutlass.min(end - begin, CHUNK), True, plan)
        for u in cutlass.range_constexpr(TABLE_DEPTH):
            entry[u] = coming[u]
        row += PRODUCER_STEP * TABLE_DEPTH


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
) -> None:
    """Write a finished fragment: 16 value columns from `column`, 8 query rows from `row`.

    Lanes g and g + 1 hold neighbouring columns of rows 2t and 2t + 1; they swap, and each writes pairs of one row.
    Who has the first columns also writes the log-sum-exp.
    """
    lane = cute.arch.lane_idx()
    g, odd = lane // 4, lane // 4 % 2
    scaled = []
    for i in cutlass.range_constexpr(4):
        inverse = cute.arch.rcp_approx(totals[i % 2])
        if totals[i % 2] == 0.0:  # the row sees nothing: 0, not 0 * inf
            inverse = Float32(0.0)
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
    plan: cutlass.Constexpr,
) -> None:
    """Write a fragment of the cluster's sum: to the output if no other cluster shares the request, else as partial."""
    lane = cute.arch.lane_idx()
    row, column = place_of(fragment, rank, plan)
    if sharing == 1:
        write_fragment(out, lse, row, column, valid, o, tops, totals)
    else:
        store_4xf32(partial + 4 * ((place * plan.slice_fragments + fragment) * 32 + lane), (o[0], o[1], o[2], o[3]))
        if (column % plan.columns == 0) & (lane < 4):
            stats = (tops[0], totals[0], tops[1], totals[1])
            store_4xf32(partial_stats + 2 * (place * plan.rows + row + 2 * lane), stats)


@cute.jit
def merge(
    partial: cute.Pointer,
    partial_stats: cute.Pointer,
    out: cute.Pointer,
    lse: cute.Pointer,
    first: Int32,
    count: Int32,
    start: Int32,
    share: Int32,
    unit: Int32,
    rank: Int32,
    valid: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Add the partials of clusters [first, first + count) for this CTA's columns, and write the result.

    Args:
        partial: [unit, cluster rank, fragment, lane, 4], a unit being (group, cluster, its first segment or its last).
        partial_stats: [unit, cluster rank, rows, 2].
        out: the request's first output row of the group.
        lse: likewise.
        first: cluster that holds the request's first chunk.
        count: clusters that share the request.
        start: that chunk.
        share: chunks per cluster.
        unit: the group's first unit.
        rank: of the CTA in its cluster: which columns.
        valid: query rows of the group.
        plan: sizes.
    """
    lane = cute.arch.lane_idx()
    fragment = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    o, tops, totals = make_sum()
    while fragment < plan.slice_fragments:
        row, column = place_of(fragment, rank, plan)
        clear_sum(o, tops, totals)
        i = Int32(0)
        while i < count:
            parts = []
            for k in cutlass.range_constexpr(MERGE_DEPTH):
                at = unit_of(unit, first + cutlass.min(i + k, count - 1), start, share) * plan.cluster + rank
                stats = load_4xf32_l2(partial_stats + 2 * (at * plan.rows + row + 2 * (lane % 4)))
                tops_k = [stats[0], stats[2]]
                if i + k >= count:
                    tops_k = [Float32(NEG_INF), Float32(NEG_INF)]
                values = load_4xf32_l2(partial + 4 * ((at * plan.slice_fragments + fragment) * 32 + lane))
                parts.append(((tops_k[0], stats[1], tops_k[1], stats[3]), values))
            add_parts(o, tops, totals, tuple(parts))
            i += MERGE_DEPTH
        write_fragment(out, lse, row, column, valid, o, tops, totals)
        fragment += WARPS


@cute.kernel
def mla_decode(
    query: cute.Pointer,
    kv_cache: cute.Pointer,
    block_table: cute.Pointer,
    seq_lens: cute.Pointer,
    out: cute.Pointer,
    lse: cute.Pointer,
    partial: cute.Pointer,
    partial_stats: cute.Pointer,
    arrived: cute.Pointer,
    batch: Int32,
    max_pages: Int32,
    page: Int32,
    scale: Float32,
    dcp_rank: Int32,
    dcp_size: Int32,
    interleave: Int32,
    *,
    plan: cutlass.Constexpr,
):
    """One CTA: plan, then roles by warp. Arguments as in the op's interface, then workspaces and sizes."""
    tid, _, _ = cute.arch.thread_idx()
    block, group, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    cluster, rank = block // plan.cluster, block % plan.cluster
    shard = (dcp_rank, dcp_size, interleave)

    shared = cute.arch.get_dyn_smem(Uint8, alignment=128)
    base = shared.toint()
    starts = cute.recast_ptr(shared + plan.starts, dtype=Int32)
    lengths = cute.recast_ptr(shared + plan.lengths, dtype=Int32)
    inbox = base + plan.barriers + 16 * plan.slots
    free = inbox + 8
    if tid == 0:
        for slot in cutlass.range_constexpr(plan.slots):
            init_barrier(base + plan.barriers + 8 * slot, 1)
            init_barrier(base + plan.barriers + 8 * (plan.slots + slot), WARPS)
        init_barrier(inbox, 1)
        init_barrier(free, plan.cluster)
        cute.arch.mbarrier_init_fence()
        expect(inbox, plan.inbox_bytes)
    if cutlass.const_expr(plan.cluster > 1):
        cute.arch.cluster_arrive_relaxed()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    if warp == 0:
        plan_work(seq_lens, starts, lengths, batch, shard)
    if cutlass.const_expr(plan.cluster > 1):
        cute.arch.cluster_wait()
    cute.arch.sync_threads()

    # This cluster's part of the sequence.
    chunks = starts[batch]
    clusters = blocks // plan.cluster
    share = cutlass.max((chunks + clusters - 1) // clusters, plan.min_chunks * plan.cluster)
    position = share * cluster
    stop = cutlass.min(position + share, chunks)
    request = find_request(starts, batch, position)

    if warp >= WARPS:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        valid = cutlass.min(plan.all_rows - group * plan.rows, plan.rows)
        state = cute.make_rmem_tensor(2, Int32)
        state[0], state[1] = warp - WARPS, Int32(1)
        turn = warp - WARPS  # ring slots until this warp's next one
        while position < stop:
            start = starts[request]
            segment_stop = cutlass.min(starts[request + 1], stop)
            if segment_stop > position:
                size = segment_stop - position
                first = position - start + size * rank // plan.cluster
                end = position - start + size * (rank + 1) // plan.cluster
                if end > first:
                    if turn < plan.query_chunks:
                        row = CHUNK * turn + lane % CHUNK
                        source = query + (Int64(request * plan.all_rows + group * plan.rows) + row) * ROW
                        fill_slot(base, state, source, cutlass.min(valid - CHUNK * turn, CHUNK), False, plan)
                    turn = (turn - plan.query_chunks) & (PRODUCERS - 1)
                    fill_rows(
                        base, state, kv_cache, block_table + Int64(request) * max_pages, page, CHUNK * (first + turn),
                        cutlass.min(CHUNK * end, shard_rows(lengths[request], *shard)), plan,
                    )  # fmt: skip
                    turn = (turn - (end - first)) & (PRODUCERS - 1)
                position = segment_stop
            request += 1
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        valid = cutlass.min(plan.all_rows - group * plan.rows, plan.rows)
        state = cute.make_rmem_tensor(2, Int32)
        state[0], state[1] = Int32(0), Int32(0)
        q = cute.make_rmem_tensor((2, plan.tiles, K_STEPS), Int32)
        limit = cute.make_rmem_tensor(plan.owned, Int32)
        highest = cute.make_rmem_tensor(plan.owned, Float32)
        sums = cute.make_rmem_tensor(plan.owned, Float32)
        o = cute.make_rmem_tensor((4, plan.tiles, WARP_COLUMNS // 16), Float32)
        part = make_sum()
        verdict = cute.recast_ptr(shared + plan.factors + 4 * plan.rows, dtype=Int32)
        unit = group * clusters * 2
        segments = Int32(0)
        while position < stop:
            start = starts[request]
            request_stop = starts[request + 1]
            segment_stop = cutlass.min(request_stop, stop)
            if segment_stop > position:
                size = segment_stop - position
                first = position - start + size * rank // plan.cluster
                end = position - start + size * (rank + 1) // plan.cluster
                request_row = request * plan.all_rows + group * plan.rows
                length = lengths[request]
                for i in cutlass.range_constexpr(plan.owned):
                    token = (group * plan.rows + plan.owned * warp + i) // plan.heads
                    seen = shard_rows(length - plan.tokens + 1 + token, *shard)
                    if token >= plan.tokens:
                        seen = Int32(0)
                    limit[i] = cutlass.min(seen, CHUNK * end)
                    highest[i] = Float32(NEG_INF)
                    sums[i] = Float32(0.0)
                o.fill(0.0)
                if end > first:
                    load_query(base, state, q, plan)
                    attend(base, q, limit, first, end, scale * LOG2_E, state, o, highest, sums, plan)

                # Exchange: O by columns, maxima and sums to everyone.
                if cutlass.const_expr(plan.cluster > 1):
                    if segments > 0:
                        wait_cluster(free, (segments - 1) & 1)
                    receiver = warp // (WARPS // plan.cluster)
                    fragment = rank * plan.slice_fragments + warp % (WARPS // plan.cluster) * plan.warp_fragments
                    there = peer(base + plan.inbox + 16 * (32 * fragment + lane), receiver)
                    barrier = peer(inbox, receiver)
                    for n in cutlass.range_constexpr(plan.tiles):
                        for m in cutlass.range_constexpr(WARP_COLUMNS // 16):
                            send_f32x4(
                                there + 512 * (n * (WARP_COLUMNS // 16) + m),
                                (o[0, n, m], o[1, n, m], o[2, n, m], o[3, n, m]),
                                barrier,
                            )
                for i in cutlass.range_constexpr(plan.owned):
                    row_sum = warp_sum(sums[i])
                    at = base + plan.stats + 8 * (rank * plan.rows + plan.owned * warp + i)
                    if cutlass.const_expr(plan.cluster > 1):
                        if lane < plan.cluster:
                            send_f32x2(peer(at, lane), (highest[i], row_sum), peer(inbox, lane))
                    elif lane == 0:
                        store_f32x2(at, highest[i], row_sum)
                if cutlass.const_expr(plan.cluster > 1):
                    wait_cluster(inbox, segments & 1)
                else:
                    consumer_barrier()

                # Add up this CTA's columns.
                first_cluster = start // share
                sharing = (request_stop - 1) // share - first_cluster + 1
                place = unit_of(unit, cluster, start, share) * plan.cluster + rank
                out_at = out + Int64(request_row) * VALUE
                target = (out_at, lse + request_row, partial, partial_stats, place, sharing, rank, valid)
                if cutlass.const_expr(plan.cluster > 1):
                    fragment = warp
                    while fragment < plan.slice_fragments:
                        clear_sum(*part)
                        add_parts(*part, inbox_parts(base, fragment, rank, plan))
                        finish(*part, fragment, *target, plan)
                        fragment += WARPS
                else:
                    for n in cutlass.range_constexpr(plan.tiles):
                        stats = load_shared_4xf32(base + plan.stats + 8 * (8 * n + 2 * (lane % 4)))
                        for m in cutlass.range_constexpr(WARP_COLUMNS // 16):
                            clear_sum(*part)
                            add_parts(*part, ((stats, (o[0, n, m], o[1, n, m], o[2, n, m], o[3, n, m])),))
                            fragment = warp * plan.warp_fragments + n * (WARP_COLUMNS // 16) + m
                            finish(*part, fragment, *target, plan)
                consumer_barrier()
                position = segment_stop
                if cutlass.const_expr(plan.cluster > 1):  # noqa: SIM102 - decided when compiled
                    if position < stop:
                        if tid == 0:
                            expect(inbox, plan.inbox_bytes)
                        if tid < plan.cluster:
                            arrive_peer(peer(free, tid))
                if sharing > 1:
                    counter = arrived + (request * plan.groups + group) * plan.cluster + rank
                    if tid == 0:
                        verdict[0] = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
                    consumer_barrier()
                    if verdict[0] == sharing - 1:
                        merge(
                            partial, partial_stats, out_at, lse + request_row, first_cluster, sharing, start, share,
                            unit, rank, valid, plan,
                        )  # fmt: skip
                        if tid == 0:
                            counter[0] = Int32(0)
                segments += 1
            request += 1

        # Requests without rows on this shard.
        request = block
        while request < batch:
            if starts[request + 1] == starts[request]:
                row = request * plan.all_rows + group * plan.rows
                item = tid
                while item < valid * (VALUE // 8):
                    zeros_at = cute.recast_ptr(out + Int64(row) * VALUE + 8 * item, dtype=Float32)
                    store_4xf32(zeros_at, (Float32(0.0),) * 4)
                    item += CONSUMERS
                if tid < valid:
                    lse[row + tid] = Float32(NEG_INF)
            request += blocks


def variant(choices: Choices) -> Variant:
    """One launch; the grid fills the GPU once."""
    heads, tokens, cluster = choices.geometry.heads, choices["tokens"], choices["cluster"]
    groups = -(-heads * tokens // choices["rows"])
    rows = -(-heads * tokens // (8 * groups)) * 8
    plan = Plan(heads, tokens, rows, groups, cluster, choices["idle"], choices["min_rows"] // CHUNK)
    launch = Launch(
        "mla_decode",
        mla_decode,
        (
            "query", "kv_cache", "block_table", "seq_lens", "out", "lse", "partial", "partial_stats", "arrived", "B",
            "max_pages", "page", "scale", "dcp_rank", "dcp_size", "interleave",
        ),
        (f"{plan.clusters} * {cluster}", groups, 1),
        CONSUMERS + 32 * PRODUCERS,
        {"plan": plan},
        cluster=cluster,
        shared=plan.shared,
        expects=("tensor_core", "bulk_copy", *(("cluster",) if cluster > 1 else ())),
    )  # fmt: skip
    units = f"{plan.clusters} * {2 * groups}"
    return Variant(
        (launch,),
        (
            Workspace("partial", "f32", f"{units} * {rows * VALUE}"),
            Workspace("partial_stats", "f32", f"{units} * {2 * cluster * rows}"),
            Workspace("arrived", "i32", f"B * {groups * cluster}", zeroed=True),
        ),
        (f"B <= {MAX_BATCH}", "kv_lora == 512"),
    )
