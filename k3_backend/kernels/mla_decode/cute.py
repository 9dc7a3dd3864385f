"""MLA decode core: flash-decoding over the paged latent cache, split over the GPU by cached rows.

The rows that all requests must read are cut into chunks of 16, the chunks of all requests form one sequence, and each
cluster of CTAs takes an equal contiguous part of it, found from `seq_lens` at run time: every CTA has the same work,
whatever the lengths. A part is a few *segments*, each of one request; the CTAs of a cluster share a segment by chunks.
Where requests are about equally long, parts begin with requests, so that each is one segment: a second one would cost
a CTA an exchange and an empty ring, and the workspace a partial result.

    4 producer warps  block table -> one bulk copy per cache row, into a ring of chunk slots
    8 warps, E4M3     a tile of 64 rows from the ring to f16, if the cache holds bytes; the slots are free then
    8 warps, S        S^T = K Q^T by mma.m16n8k16, 64 rows at a time: 4 slices of k x 2 halves of rows, Q in registers
    8 warps, softmax  a warp owns query rows: adds the 4 slices, running maximum and sum in fp32, base 2, P in bf16
    8 warps, P V      O^T += V^T P^T: 64 value columns per warp, V transposed by ldmatrix, O in fp32 registers
    end of segment    each CTA sends its O to the CTAs of the cluster by columns; each adds up 512 / cluster columns
    request done      by this cluster alone: normalised to `out`; else partial to the workspace
    merge             `merge` = 0: the last cluster to arrive adds all partials of the request in the order of the
                      sequence. Else by a second launch, which spreads that over the whole GPU (`combine.py`)

A call with more than `rows` query rows (T tokens x H heads) is cut into groups along the grid's y; all groups read the
same cache rows at about the same time, so that all but the first find them in L2.

Floor: 1152 bytes per cached row (576 of E4M3), plus 2 * 512 * 4 bytes of L2 traffic per query row and cluster that
shares a request. Per SM and clock of H200 that is 20 bytes at full HBM speed: a chunk takes 930 clocks, in which the
tensor cores need about 220 for 16 query rows.

Nothing is read before the dependency wait: no argument is constant.

Synchronisation.
Ring: `full` completes by a producer's arrival and the copies' bytes, `empty` by one arrival per consumer warp. Rows of
a chunk behind the request's end are zeroed by the producer (0 * NaN would be NaN), ordered before later copies into
the slot by a proxy fence.
Tile of E4M3 rows: one consumer barrier before it is written, when all have finished the last P V, and one behind.
Scores: two consumer barriers per tile. Partial scores are written before the first and read between both, P and the
rescaling factors are written between both and read behind the second. A warp writes its next partial scores behind the
second barrier, when all reads of the old ones are done, and its next P behind the next first barrier, which no warp
passes before all have finished their P V.
Cluster: O, maximum and sum travel as asynchronous stores that complete on the receiver's `inbox`, which is armed for
the bytes of the whole cluster. Before a CTA sends again, every CTA has arrived at its `free`, behind the consumer
barrier that follows its last read of the inbox. A CTA may exit once its own inbox has completed: nothing else comes.
Workspace, one launch: partials, CTA barrier, then one acq_rel atomic per CTA at the counter of (request, column slice):
each CTA needs the same slice of other clusters only. Whoever finds all others' arrivals acquires their partials, reads
them past L1 and resets the counter, which nobody else touches any more in this launch. Two launches: the second waits
for the first as a whole. The order of every sum is fixed.
"""

import cutlass
from cutlass import Float32, Int32, Uint8, cute
from kernels.common.cute_ring import expect, init_barrier
from kernels.mla_decode.combine import mla_decode_merge
from kernels.mla_decode.consume import consume, write_nothing
from kernels.mla_decode.operands import P_SCALE
from kernels.mla_decode.plan import (
    CHUNK,
    CONSUMER_REGISTERS,
    CONSUMERS,
    LOG2_E,
    MAX_BATCH,
    PRODUCER_REGISTERS,
    PRODUCERS,
    SHARE,
    STOPS,
    VALUE,
    WARPS,
    Plan,
    cut,
)
from kernels.mla_decode.produce import produce
from kernels.mla_decode.work import find_request, plan_work

from k3_backend.aot.cuda.contract import Choices, Launch, Value, Variant, Workspace


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
    split: cute.Pointer,
    batch: Int32,
    max_pages: Int32,
    page: Int32,
    scale: Float32,
    k_scale: Float32,
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
    cluster, rank = block // plan.cluster, block % plan.cluster
    shard = (dcp_rank, dcp_size, interleave)

    shared = cute.arch.get_dyn_smem(Uint8, alignment=128)
    base = shared.toint()
    starts = cute.recast_ptr(shared + plan.starts, dtype=Int32)
    lengths = cute.recast_ptr(shared + plan.lengths, dtype=Int32)
    inbox, free = base + plan.inbox_barrier, base + plan.free_barrier
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
        plan_work(seq_lens, starts, lengths, batch, blocks // plan.cluster, shard, plan)
    if cutlass.const_expr(plan.cluster > 1):
        cute.arch.cluster_wait()
    cute.arch.sync_threads()

    # This cluster's part of the sequence.
    chunks = starts[batch]
    clusters = blocks // plan.cluster
    share = starts[SHARE]
    position = share * cluster
    stop = cutlass.min(position + share, chunks)
    request = find_request(starts, batch, position)
    if position < chunks:  # noqa: SIM102 - no other request may be looked at behind the last
        if starts[STOPS + request] < starts[request + 1]:  # chunks that do not exist lie between
            stop = cutlass.min(stop, starts[STOPS + request])

    if cutlass.const_expr(plan.merge_split > 0):  # noqa: SIM102
        if (block + group == 0) & (tid < batch):
            split[tid] = starts[tid]
            split[MAX_BATCH + tid] = starts[STOPS + tid]
            split[2 * MAX_BATCH] = share
    part = (request, position, stop)
    if warp >= WARPS:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        produce(base, kv_cache, block_table, starts, lengths, part, rank, max_pages, page, shard, plan)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        verdict = cute.recast_ptr(shared + plan.verdict, dtype=Int32)
        results = (out, lse, partial, partial_stats, arrived)
        place = (group, clusters, cluster, rank)
        factor, gain = scale * LOG2_E, Float32(1.0)
        if cutlass.const_expr(plan.e4m3):
            factor, gain = factor * k_scale, k_scale / P_SCALE
        consume(base, verdict, query, starts, lengths, results, part, place, factor, gain, shard, plan)
        write_nothing(starts, out, lse, batch, group, plan)


def variant(choices: Choices) -> Variant:
    """Attention and, unless the last cluster merges, the merge; the first grid fills the GPU once."""
    heads, tokens, cluster = choices.geometry.heads, choices["tokens"], choices["cluster"]
    groups, rows = cut(heads * tokens, choices["rows"])
    plan = Plan(
        heads, tokens, rows, groups, cluster, choices["idle"], choices["min_rows"] // CHUNK, choices["merge"],
        choices["slots"], choices["cache_format"] == 1,
    )  # fmt: skip
    attention = Launch(
        "mla_decode",
        mla_decode,
        (
            "query", "kv_cache_e4m3" if plan.e4m3 else "kv_cache", "block_table", "seq_lens", "out", "lse", "partial",
            "partial_stats", "arrived", "split", "B", "max_pages", "page", "scale", "k_scale", "dcp_rank", "dcp_size",
            "interleave",
        ),
        (f"{plan.clusters} * {cluster}", groups, 1),
        CONSUMERS + 32 * PRODUCERS,
        {"plan": plan},
        cluster=cluster,
        shared=plan.shared,
        expects=("tensor_core", "bulk_copy", *(("cluster",) if cluster > 1 else ())),
    )  # fmt: skip
    launches = [attention]
    if plan.merge_split > 0:
        merge = Launch(
            "mla_decode_merge",
            mla_decode_merge,
            ("out", "lse", "partial", "partial_stats", "split", Value("clusters", plan.clusters), "k_scale"),
            ("B", groups, WARPS * plan.warp_fragments * plan.merge_split // plan.merge_warps),
            32 * plan.merge_warps,
            {"plan": plan},
            shared=1024 * plan.merge_warps,
        )
        launches.append(merge)
    units = f"{plan.clusters} * {2 * groups}"
    return Variant(
        tuple(launches),
        (
            Workspace("partial", "f32", f"{units} * {rows * VALUE}"),
            Workspace("partial_stats", "f32", f"{units} * {2 * cluster * rows}"),
            Workspace("arrived", "i32", f"B * {groups * cluster}", zeroed=True),
            Workspace("split", "i32", f"{2 * MAX_BATCH + 1}"),
        ),
        (f"B <= {MAX_BATCH}", "kv_lora == 512"),
    )
