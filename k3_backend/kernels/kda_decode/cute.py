"""KDA decode for T tokens per request, fully fused, as a stream of states through shared memory.

An item is one head of one request, or, in a cluster, a part of its value rows; each block owns 128 / cluster rows of
the head's [V, K] fp32 state and may walk them in slices, so that the first rows are updated and stored while the last
ones still come. Blocks are persistent: each takes a run of items, head-major, so that the constants of a head are
loaded once per run. Three roles work on different items at the same time, since one item takes several times
as long as its bytes:

    producer warp   per item: slot ids, then bulk copies of the state's slices into one ring and of the conv window and
                    the request's projection pieces into another; a slice's place is free again once it is in registers
    helper warps    prepare item i + 1: conv + SiLU + l2 norm (a warp each for q, k, v); forget gate F_b f_a by
                    mma.m16n8k16 (tokens are the n8 columns) and the decay. Then finish item i: gated RMSNorm, new conv
                    state
    state warps     per slice and token, with the state in registers and eight lanes per row:
                    u = beta (v - (S a) k); o = (S a) q + u (k.q); S = S a + u k^T; S to the slot of the token; sums of
                    o^2 to all blocks of the cluster

q, k, decay and beta are computed by every block of a cluster for itself: a few KB of L2 reads against a barrier before
the recurrence. Before the dependency wait: F_b, conv weights and gate constants of the first item's head, all constant;
and a prefetch of the first slot ids into L2, since everything else waits for them.
Floor: 64 KB of state per head read, 64 KB per head and token written; the rest of an item is below 40 KB, from L2.

Order of memory.
    pieces   a place is freed by the helpers when they have finished its item, which is after the state warps have.
    values   q, k, v, decay of item i are written when item i - 2 is finished, hence used; o of item i is written when
             all helpers have prepared item i, hence finished i - 2.
    sums     have four places: a block sends those of item i when its helpers have prepared item i, hence finished
             i - 2, hence received sums of i - 2 from all peers, which sent them when they had finished i - 4. A place
             expects its bytes anew for each item; bytes may come first.
    windows  conv rows are written when the sums of all blocks have been received: peers then have their copies of the
             same q and k rows. State rows belong to one lane.
A block ends when it has received all that is sent to it. Maths: `ops/kda_decode/reference.py`; conv and recurrence
outputs stay fp32 here.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from kernels.common.cute_ring import arrive, expect, init_barrier, peer, store_f32, wait, wait_cluster
from kernels.common.cute_vector import send_f32
from kernels.kda_decode.finish import gated_norm, write_window, write_zeros
from kernels.kda_decode.plan import BETAS, CONVOLVERS, GATES, HEAD, HELPERS, SUMS, VALUES, Plan
from kernels.kda_decode.produce import announce_slots, load_slots, prefetch_slots, produce_pieces, produce_slices
from kernels.kda_decode.steps import compute_decay, convolve, load_head_constants, load_rows, recur, sigmoid, store_rows

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
    """Blocks of a cluster take parts of the same items."""
    heads, width, tokens, cluster, stages = plan.heads, plan.width, plan.tokens, plan.cluster, plan.stages
    slices = plan.slices

    tid, _, _ = cute.arch.thread_idx()
    rank, worker, _ = cute.arch.block_idx()
    _, workers, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    first_row = rank * plan.value_rows
    items = heads * requests
    begin, end = worker * items // workers, (worker + 1) * items // workers
    request, head = begin % requests, begin // requests  # of the item; items are head-major

    memory = cute.arch.get_dyn_smem(Float32, alignment=128)
    base = memory.toint()
    state_full = base + plan.barriers_at
    state_empty = state_full + 8 * stages
    pieces_full = base + plan.pieces_barriers_at
    pieces_empty = pieces_full + 8 * plan.pieces_stages
    prepared = base + plan.values_barriers_at
    used = prepared + 8 * VALUES
    summed = base + plan.sums_barriers_at
    helper = warp - plan.warps
    if helper == plan.helpers:
        prefetch_slots(slots, accepted, request, lane, plan=plan)
    if tid == 0:
        for s in cutlass.range_constexpr(stages):
            init_barrier(state_full + 8 * s, Int32(1))
            init_barrier(state_empty + 8 * s, Int32(plan.warps))
        for s in cutlass.range_constexpr(plan.pieces_stages):
            init_barrier(pieces_full + 8 * s, Int32(1))
            init_barrier(pieces_empty + 8 * s, Int32(plan.helpers))
        for s in cutlass.range_constexpr(VALUES):
            init_barrier(prepared + 8 * s, Int32(plan.helpers))
            init_barrier(used + 8 * s, Int32(plan.warps))
        for s in cutlass.range_constexpr(SUMS):
            init_barrier(summed + 8 * s, Int32(1))
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if cutlass.const_expr(cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # the barriers of all blocks exist
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(plan.moved_registers > 0):
        if helper >= 0:
            cute.arch.setmaxregister_decrease(plan.launch_registers - plan.moved_registers)
        else:
            cute.arch.setmaxregister_increase(plan.launch_registers + plan.moved_registers)

    if helper == plan.helpers:  # the producer
        cute.arch.griddepcontrol_wait()
        slot, kept = load_slots(slots, accepted, request, lane, plan=plan)
        for item in cutlass.range(begin, end, unroll=1):
            turn = item - begin
            next_request, next_head = following(request, head, requests)
            p = turn % plan.pieces_stages
            place = base + plan.pieces_at + p * plan.pieces_stride
            if turn >= plan.pieces_stages:
                wait(pieces_empty + 8 * p, (turn // plan.pieces_stages - 1) & 1)
            conv_slot, read_slot = announce_slots(slot, kept, place, lane, plan=plan)
            taken = kept
            slot, kept = load_slots(slots, accepted, next_request, lane, plan=plan)
            fresh = (turn + 1) * slices <= stages
            if fresh:  # a slice first: state takes longer
                produce_slices(
                    state, read_slot, head, first_row, turn, base, state_full, state_empty, lane, 0, 1, plan=plan
                )
            produce_pieces(
                proj, conv_state, taps, conv_slot, taken, request, head, first_row, place, pieces_full + 8 * p, lane,
                plan=plan,
            )  # fmt: skip
            if fresh:
                produce_slices(
                    state, read_slot, head, first_row, turn, base, state_full, state_empty, lane, 1, plan.slices,
                    plan=plan,
                )  # fmt: skip
            else:
                produce_slices(
                    state, read_slot, head, first_row, turn, base, state_full, state_empty, lane, 0, plan.slices,
                    plan=plan,
                )  # fmt: skip
            request, head = next_request, next_head
    elif helper >= 0:
        tid -= 32 * plan.warps
        out_pairs = cute.recast_ptr(out, dtype=Int32)
        norms = cute.make_rmem_tensor(2 * plan.pair_rounds, Float32)
        for i in cutlass.range_constexpr(plan.pair_rounds):
            column = first_row + 2 * ((tid + plan.helper_threads * i) % plan.pairs)
            norms[2 * i], norms[2 * i + 1] = o_norm[column].to(Float32), o_norm[column + 1].to(Float32)
        conv, bias = cute.make_rmem_tensor(16, Int32), cute.make_rmem_tensor(2 * plan.gate_tiles, Float32)
        conv.fill(0)
        bias.fill(0.0)
        last_request, last_head = request, head
        slope = load_head_constants(
            conv, bias, base + plan.f_b_at, conv_w, f_b, a_log, dt_bias, head, first_row, helper, lane, plan=plan
        )
        gate = helper - plan.first_gate
        cute.arch.griddepcontrol_wait()
        for item in cutlass.range(begin, end + 1, unroll=1):
            turn = item - begin
            # --- prepare this item --------------------------------------------------------------------------------
            if item < end:
                if head != last_head:
                    cute.arch.barrier(barrier_id=HELPERS, number_of_threads=plan.helper_threads)
                    slope = load_head_constants(
                        conv, bias, base + plan.f_b_at, conv_w, f_b, a_log, dt_bias, head, first_row, helper, lane,
                        plan=plan,
                    )  # fmt: skip
                if cutlass.const_expr(cluster > 1):  # noqa: SIM102 - decided when compiled
                    if tid == 0:
                        expect(summed + 8 * (turn % SUMS), Int32(4 * tokens * plan.parts))
                p = turn % plan.pieces_stages
                wait(pieces_full + 8 * p, (turn // plan.pieces_stages) & 1)
                place = plan.pieces_at + p * plan.pieces_stride
                pieces = memory + place // 4
                values = memory + (plan.values_at // 4 + turn % VALUES * plan.values_floats)
                if cute.recast_ptr(pieces + plan.slots_at // 4, dtype=Int32)[0] > 0:
                    if helper < CONVOLVERS:
                        window_s = cute.recast_ptr(pieces, dtype=BFloat16)
                        convolve(window_s, conv, values, helper, lane, l2_eps, plan=plan)
                    if (gate >= 0) & (gate < GATES):
                        compute_decay(
                            base + plan.f_b_at, base + place + plan.f_a_at, values + 2 * tokens * HEAD, bias, slope,
                            lower_bound, gate, lane, plan=plan,
                        )  # fmt: skip
                cute.arch.sync_warp()
                if lane == 0:
                    arrive(prepared + 8 * (turn % VALUES))
            # --- finish the one before ----------------------------------------------------------------------------
            if turn > 0:
                last = turn - 1
                p = last % plan.pieces_stages
                place = plan.pieces_at + p * plan.pieces_stride
                pieces = memory + place // 4
                conv_slot = cute.recast_ptr(pieces + plan.slots_at // 4, dtype=Int32)[0]
                out_base = (last_request * tokens * width + last_head * HEAD + first_row) // 2
                wait(used + 8 * (last % VALUES), (last // VALUES) & 1)
                if cutlass.const_expr(cluster > 1):
                    wait_cluster(summed + 8 * (last % SUMS), (last // SUMS) & 1)
                if conv_slot > 0:
                    o_s = memory + (plan.values_at // 4 + last % VALUES * plan.values_floats + plan.o_from)
                    sums_s = memory + (plan.sums_at // 4 + last % SUMS * (tokens * plan.parts))
                    g_out_s = cute.recast_ptr(pieces + plan.g_out_at // 4, dtype=Int32)
                    gated_norm(out_pairs + out_base, o_s, sums_s, g_out_s, norms, eps, tid, plan=plan)
                    write_window(
                        conv_state + Int64(conv_slot) * taps * (3 * width), base + place, last_head, first_row, rank,
                        tid, plan=plan,
                    )  # fmt: skip
                else:
                    write_zeros(out_pairs + out_base, tid, plan=plan)
                cute.arch.sync_warp()
                if lane == 0:
                    arrive(pieces_empty + 8 * p)
            last_request, last_head = request, head
            request, head = following(request, head, requests)
    else:
        local_row, piece = warp * (plan.slice_rows // plan.warps) + (lane // 8), lane % 8
        cute.arch.griddepcontrol_wait()
        for item in cutlass.range(begin, end, unroll=1):
            turn = item - begin
            p = turn % plan.pieces_stages
            wait(pieces_full + 8 * p, (turn // plan.pieces_stages) & 1)
            pieces = memory + (plan.pieces_at + p * plan.pieces_stride) // 4
            ids = cute.recast_ptr(pieces + plan.slots_at // 4, dtype=Int32)
            values = memory + (plan.values_at // 4 + turn % VALUES * plan.values_floats)
            sums_s = memory + (
                plan.sums_at // 4 + turn % SUMS * (tokens * plan.parts) + rank * slices * plan.warps + warp
            )
            for h in cutlass.range(slices, unroll=1):
                g = turn * slices + h
                s = g % stages
                row_base = h * plan.slice_rows + local_row
                sums_h = sums_s + h * plan.warps
                if ids[0] > 0:
                    betas = cute.recast_ptr(pieces + plan.beta_at // 4, dtype=BFloat16)
                    wait(state_full + 8 * s, (g // stages) & 1)
                    state_s = memory + (s * plan.state_bytes // 4 + local_row * HEAD + 4 * piece)
                    rows = cute.make_rmem_tensor(16 * plan.groups, Float32)
                    load_rows(rows, state_s, plan=plan)
                    cute.arch.sync_warp()
                    if lane == 0:
                        arrive(state_empty + 8 * s)
                    wait(prepared + 8 * (turn % VALUES), (turn // VALUES) & 1)
                    for t in cutlass.range(tokens, unroll=1):
                        beta = sigmoid(betas[t * BETAS + head].to(Float32))
                        square = recur(rows, values, beta, t, row_base, piece, plan=plan)
                        send_square(sums_h + t * plan.parts, square, summed + 8 * (turn % SUMS), lane, plan=plan)
                        target = ids[t]
                        if target > 0:
                            slot_row = (Int64(target) * heads + head) * HEAD + first_row + row_base
                            new = state + slot_row * HEAD + 4 * piece
                            store_rows(rows, new, plan=plan)
                else:
                    wait(state_full + 8 * s, (g // stages) & 1)  # announced without bytes
                    if lane == 0:
                        arrive(state_empty + 8 * s)
                    wait(prepared + 8 * (turn % VALUES), (turn // VALUES) & 1)
                    for t in cutlass.range(tokens, unroll=1):  # the peers count these bytes
                        send_square(sums_h + t * plan.parts, Float32(0.0), summed + 8 * (turn % SUMS), lane, plan=plan)
            cute.arch.sync_warp()
            if lane == 0:
                arrive(used + 8 * (turn % VALUES))
            request, head = following(request, head, requests)


@cute.jit
def following(request: Int32, head: Int32, requests: Int32) -> tuple:
    """(request, head) of the next item."""
    request += 1
    if request == requests:
        request = Int32(0)
        head += 1
    return request, head


@cute.jit
def send_square(sums_s: cute.Pointer, square: Float32, summed: Int32, lane: Int32, *,
                plan: cutlass.Constexpr) -> None:  # fmt: skip
    """A state warp's sum of o^2 to its place in every block of the cluster."""
    if lane < plan.cluster:
        if cutlass.const_expr(plan.cluster > 1):
            send_f32(peer(sums_s.toint(), lane), square, peer(summed, lane))
        else:
            store_f32(sums_s.toint(), square)


def variant(c: Choices) -> Variant:
    """One launch of persistent blocks, or clusters of them."""
    g = c.geometry
    plan = Plan(
        g.heads,
        g.kda_proj_rows,
        c["T"],
        c["cluster"],
        c["warps"],
        c["helpers"],
        c["stages"],
        c["slices"],
        c["streamed"] == 1,
    )
    launch = Launch(
        name="kda_decode",
        kernel=kda_decode,
        arguments=(
            "proj", "conv_w", "f_b", "a_log", "dt_bias", "o_norm", "slots", "accepted", "conv_state", "state", "out",
            "B", "taps", "gate_lower_bound", "eps", "l2_eps",
        ),
        grid=(plan.cluster, f"min(H * B, max(1, (sms - {c['idle']}) * {c['ctas']} // {plan.cluster}))", 1),
        block=plan.threads,
        constants={"plan": plan},
        cluster=plan.cluster,
        shared=plan.shared_bytes,
        min_ctas_per_sm=c["residents"],
        expects=("tensor_core", "bulk_copy", "async_copy", *(("cluster",) if plan.cluster > 1 else ())),
    )  # fmt: skip
    return Variant((launch,), requires=("taps >= T + 2",))
