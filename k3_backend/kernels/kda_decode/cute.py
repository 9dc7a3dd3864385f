"""KDA decode for T tokens per request, fully fused, as a stream of states through shared memory.

An item is one head of one request, or, in a cluster, a slice of its value rows; each block owns 128 / cluster rows of
the head's [V, K] fp32 state. Blocks are persistent: each takes a run of items, head-major, so that the constants of a
head are loaded once per run.

    producer warp   per item: slot ids, then bulk copies of the conv window and the request's projection pieces into one
                    ring and of the state slice into another; a state's place is free again as soon as it is in
                    registers, so that state reads follow each other without a gap
    consumers       conv + SiLU + l2 norm (warps 0 .. 2: q, k, v); forget gate F_b f_a by mma.m16n8k16 (tokens are the
                    n8 columns) and the decay; then, per token, with the state in registers and eight lanes per row:
                    u = beta (v - (S a) k); o = (S a) q + u (k.q); S = S a + u k^T; S to the slot of the token
    end of an item  gated RMSNorm (sums of o^2 of the cluster through distributed shared memory), new conv state

q, k, decay and beta are computed by every block of a cluster for itself: a few KB of L2 reads against a barrier before
the recurrence. Before the dependency wait: F_b, conv weights and gate constants of the first item's head, all constant.
Floor: 64 KB of state per head read, 64 KB per head and token written; the rest of an item is below 40 KB, from L2.

Order of memory: a block sends its sums when its copies of the conv window have landed, and conv rows are written when
the sums of all blocks have been received, since blocks of a cluster read the same q and k windows. State rows belong to
one lane. A block ends when it has received all that is sent to it. Maths: `ops/kda_decode/reference.py`; conv and
recurrence outputs stay fp32 here.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from kernels.common.cute_ring import arrive, expect, init_barrier, peer, wait, wait_cluster
from kernels.common.cute_vector import load_shared_4xf32, send_f32, store_4xf32
from kernels.kda_decode.finish import gated_norm, sum_of_squares, write_window, write_zeros
from kernels.kda_decode.plan import BETAS, CONSUMERS, HEAD, Plan
from kernels.kda_decode.produce import load_head_constants, produce_pieces, produce_state
from kernels.kda_decode.steps import compute_decay, convolve, exp, recur, sigmoid

from k3_backend.aot.cuda.contract import Choices, Launch, Variant


@cute.kernel
def kda_decode(
    proj: cute.Pointer,
    conv_w: cute.Pointer,
    f_b: cute.Pointer,
    a_log: cute.Pointer,
    dt_bias: cute.Pointer,
    o_norm: cute.Pointer,
    slots: cute.Pointer,
    accepted: cute.Pointer,
    conv_state: cute.Pointer,
    state: cute.Pointer,
    out: cute.Pointer,
    requests: Int32,
    taps: Int32,
    lower_bound: Float32,
    eps: Float32,
    l2_eps: Float32,
    *,
    plan: cutlass.Constexpr,
):
    """Blocks of a cluster take the slices of the same items."""
    heads, width, tokens, cluster, stages = plan.heads, plan.width, plan.tokens, plan.cluster, plan.stages
    value_rows, groups = plan.value_rows, plan.groups
    threads = 32 * plan.warps  # of the consumers

    tid, _, _ = cute.arch.thread_idx()
    rank, worker, _ = cute.arch.block_idx()
    _, workers, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    first_row = rank * value_rows
    items = heads * requests
    begin, end = worker * items // workers, (worker + 1) * items // workers

    memory = cute.arch.get_dyn_smem(Float32, alignment=128)
    ring = memory.toint()
    state_full = ring + plan.barriers_at
    state_empty = state_full + 8 * stages
    pieces_full = state_empty + 8 * stages
    pieces_empty = pieces_full + 8 * plan.pieces_stages
    sums = pieces_empty + 8 * plan.pieces_stages
    if tid == 0:
        for s in cutlass.range_constexpr(stages):
            init_barrier(state_full + 8 * s, Int32(1))
            init_barrier(state_empty + 8 * s, Int32(plan.warps))
        for s in cutlass.range_constexpr(plan.pieces_stages):
            init_barrier(pieces_full + 8 * s, Int32(1))
            init_barrier(pieces_empty + 8 * s, Int32(plan.warps))
        init_barrier(sums, Int32(1))
    cute.arch.mbarrier_init_fence()
    if warp < plan.warps:
        load_head_constants(f_b, conv_w, memory, begin // requests, first_row, tid, plan=plan)
    cute.arch.sync_threads()
    if cutlass.const_expr(cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # the barriers of all blocks exist
    cute.arch.griddepcontrol_launch_dependents()

    if warp == plan.warps:
        cute.arch.griddepcontrol_wait()
        for item in cutlass.range(begin, end, unroll=1):
            turn = item - begin
            request, head = item % requests, item // requests
            p = turn % plan.pieces_stages
            if turn >= plan.pieces_stages:
                wait(pieces_empty + 8 * p, (turn // plan.pieces_stages - 1) & 1)
            read_slot = produce_pieces(
                proj, slots, accepted, conv_state, taps, request, head, first_row,
                ring + plan.pieces_at + p * plan.pieces_stride, pieces_full + 8 * p, lane, plan=plan,
            )  # fmt: skip
            s = turn % stages
            if turn >= stages:
                wait(state_empty + 8 * s, (turn // stages - 1) & 1)
            if lane == 0:
                place = ring + s * plan.state_bytes
                produce_state(state, read_slot, head, first_row, place, state_full + 8 * s, plan=plan)
    else:
        values = memory + plan.values_at // 4
        o_s = values + tokens * (3 * HEAD + value_rows)
        sums_s = o_s + tokens * value_rows  # [2, T, cluster]
        out_pairs = cute.recast_ptr(out, dtype=Int32)
        norms = cute.make_rmem_tensor(2 * plan.pair_rounds, Float32)
        for i in cutlass.range_constexpr(plan.pair_rounds):
            column = first_row + 2 * ((tid + threads * i) % plan.pairs)
            norms[2 * i], norms[2 * i + 1] = o_norm[column].to(Float32), o_norm[column + 1].to(Float32)
        bias = cute.make_rmem_tensor(2 * plan.gate_tiles, Float32)
        slope = Float32(0.0)
        row_base, piece = warp * (value_rows // plan.warps) + (lane // 8), lane % 8
        current = begin // requests - 1  # no head's gate constants are loaded yet
        exchanges = Int32(0)
        cute.arch.griddepcontrol_wait()
        for item in cutlass.range(begin, end, unroll=1):
            turn = item - begin
            request, head = item % requests, item // requests
            if head != current:
                if turn > 0:
                    load_head_constants(f_b, conv_w, memory, head, first_row, tid, plan=plan)
                for tile in cutlass.range_constexpr(plan.gate_tiles):
                    at = cutlass.min((warp * plan.gate_tiles + tile) * 16, HEAD - 16) + lane // 4
                    bias[2 * tile] = dt_bias[head * HEAD + at]
                    bias[2 * tile + 1] = dt_bias[head * HEAD + at + 8]
                slope = exp(a_log[head])
                current = head
                cute.arch.cp_async_wait_group(0)
                cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=threads)
            p = turn % plan.pieces_stages
            window_at = plan.pieces_at + p * plan.pieces_stride
            wait(pieces_full + 8 * p, (turn // plan.pieces_stages) & 1)
            pieces = memory + window_at // 4
            conv_slot = cute.recast_ptr(pieces + plan.pieces_bytes // 4, dtype=Int32)[0]
            s = turn % stages
            out_base = (request * tokens * width + head * HEAD + first_row) // 2
            if conv_slot <= 0:
                write_zeros(out_pairs + out_base, tid, plan=plan)
                if lane == 0:
                    arrive(state_empty + 8 * s)
            else:
                if warp < 3:
                    window_s = cute.recast_ptr(pieces, dtype=BFloat16)
                    convolve(window_s, memory + plan.conv_w_at // 4, values, warp, lane, l2_eps, plan=plan)
                if warp * plan.gate_tiles * 16 < HEAD:
                    compute_decay(
                        ring + plan.f_b_at, ring + window_at + plan.f_a_at, values + 2 * tokens * HEAD, bias, slope,
                        lower_bound, warp, lane, plan=plan,
                    )  # fmt: skip
                wait(state_full + 8 * s, (turn // stages) & 1)
                state_s = memory + (s * plan.state_bytes // 4 + row_base * HEAD + 4 * piece)
                rows = cute.make_rmem_tensor(16 * groups, Float32)
                for n in cutlass.range_constexpr(groups):
                    for j in cutlass.range_constexpr(4):
                        four = load_shared_4xf32((state_s + (4 * n * HEAD + 32 * j)).toint())
                        for i in cutlass.range_constexpr(4):
                            rows[16 * n + 4 * j + i] = four[i]
                cute.arch.sync_warp()
                if lane == 0:
                    arrive(state_empty + 8 * s)
                cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=threads)
                betas = cute.recast_ptr(pieces + plan.beta_at // 4, dtype=BFloat16)
                for t in cutlass.range(tokens, unroll=1):
                    beta = sigmoid(betas[t * BETAS + head].to(Float32))
                    recur(rows, values, beta, t, row_base, piece, plan=plan)
                    target = conv_slot
                    if cutlass.const_expr(tokens > 1):
                        target = slots[request * tokens + t]
                    if target > 0:
                        new = state + ((Int64(target) * heads + head) * HEAD + first_row + row_base) * HEAD + 4 * piece
                        for n in cutlass.range_constexpr(groups):
                            for j in cutlass.range_constexpr(4):
                                at = 16 * n + 4 * j
                                four = (rows[at], rows[at + 1], rows[at + 2], rows[at + 3])
                                store_4xf32(new + (4 * n * HEAD + 32 * j), four)
                cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=threads)

                # --- gated norm ---------------------------------------------------------------------------------------
                half = (exchanges & 1) * (tokens * cluster)
                if cutlass.const_expr(cluster > 1):
                    if tid == 0:
                        expect(sums, Int32(4 * tokens * cluster))
                    for i in cutlass.range_constexpr((tokens + plan.warps - 1) // plan.warps):
                        t = i * plan.warps + warp
                        if t < tokens:
                            square = sum_of_squares(o_s + t * value_rows, lane, plan=plan)
                            if lane < cluster:
                                place = (sums_s + (half + t * cluster + rank)).toint()
                                send_f32(peer(place, lane), square, peer(sums, lane))
                    wait_cluster(sums, exchanges & 1)
                exchanges += 1
                g_out_s = cute.recast_ptr(pieces + plan.g_out_at // 4, dtype=Int32)
                gated_norm(out_pairs + out_base, o_s, sums_s + half, g_out_s, norms, eps, tid, plan=plan)
                write_window(
                    conv_state + Int64(conv_slot) * taps * (3 * width), ring + window_at, head, first_row, rank,
                    tid, plan=plan,
                )  # fmt: skip
            cute.arch.sync_warp()
            if lane == 0:
                arrive(pieces_empty + 8 * p)


def variant(c: Choices) -> Variant:
    """One launch of persistent blocks, or clusters of them."""
    g = c.geometry
    plan = Plan(g.heads, g.kda_proj_rows, c["T"], c["cluster"], c["warps"], c["stages"])
    if plan.groups < 1:
        raise ValueError(f"{plan.value_rows} value rows do not divide over {plan.warps} warps, four at once")
    launch = Launch(
        name="kda_decode",
        kernel=kda_decode,
        arguments=(
            "proj", "conv_w", "f_b", "a_log", "dt_bias", "o_norm", "slots", "accepted", "conv_state", "state", "out",
            "B", "taps", "gate_lower_bound", "eps", "l2_eps",
        ),
        grid=(plan.cluster, f"min(H * B, max(1, sms * {c['ctas']} // {plan.cluster}))", 1),
        block=plan.threads,
        constants={"plan": plan},
        cluster=plan.cluster,
        shared=plan.shared_bytes,
        min_ctas_per_sm=c["residents"],
        expects=("tensor_core", "bulk_copy", "async_copy", *(("cluster",) if plan.cluster > 1 else ())),
    )  # fmt: skip
    return Variant((launch,), requires=("taps >= T + 2",))
