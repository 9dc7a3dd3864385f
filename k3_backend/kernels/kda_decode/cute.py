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

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from kernels.common.cute_mma import mma_m16n8k16, pack_bf16x2, unpack_bf16x2, warp_sum
from kernels.common.cute_ring import arrive, bulk_copy, expect, init_barrier, peer, wait, wait_cluster
from kernels.common.cute_vector import (
    copy_16b_async,
    load_shared_4xb32,
    load_shared_4xf32,
    send_f32,
    store_4xb32,
    store_4xf32,
)

from k3_backend.aot.cuda.contract import Choices, Launch, Variant

HEAD = 128
"""Key and value width of a head, and rank of the forget gate."""
LOG2_E = 1.4426950408889634
BETAS = 16
"""Columns of the projection row that hold beta and the padding behind it."""
CONSUMERS = 1
"""Id of the named barrier of the consumer warps."""


@dataclass(frozen=True)
class Shape:
    """Sizes that are fixed when the kernel is compiled, and the layout of shared memory in bytes."""

    heads: int
    row_width: int
    tokens: int
    cluster: int
    warps: int
    """Consumer warps."""
    stages: int

    @property
    def width(self) -> int:
        return self.heads * HEAD

    @property
    def value_rows(self) -> int:
        """Value rows of one block."""
        return HEAD // self.cluster

    @property
    def channels(self) -> int:
        """Conv channels that a block computes: q and k of the head, v of its rows."""
        return 2 * HEAD + self.value_rows

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def groups(self) -> int:
        """Value rows per lane: a warp handles four at once."""
        return self.value_rows // self.warps // 4

    @property
    def gate_tiles(self) -> int:
        """Tiles of 16 gate channels per warp; with 16 warps, half of them have one."""
        return max(1, HEAD // 16 // self.warps)

    @property
    def pairs(self) -> int:
        """Pairs of output columns per token."""
        return self.value_rows // 2

    @property
    def pair_rounds(self) -> int:
        """Pairs of all tokens per consumer thread."""
        return -(-self.tokens * self.pairs // (32 * self.warps))

    @property
    def state_bytes(self) -> int:
        """A place of the state ring: the block's rows of a head's state."""
        return 4 * self.value_rows * HEAD

    # A place of the pieces' ring: the conv window [T + 3, channels] bf16, then pieces of the projection rows.
    @property
    def f_a_at(self) -> int:
        """[T, HEAD] bf16."""
        return 2 * (self.tokens + 3) * self.channels

    @property
    def g_out_at(self) -> int:
        """[T, value rows] bf16."""
        return self.f_a_at + 2 * self.tokens * HEAD

    @property
    def beta_at(self) -> int:
        """[T, BETAS] bf16."""
        return self.g_out_at + 2 * self.tokens * self.value_rows

    @property
    def pieces_bytes(self) -> int:
        return self.beta_at + 2 * self.tokens * BETAS

    @property
    def pieces_stride(self) -> int:
        """From place to place: pieces, then 16 bytes with the conv slot's id (<= 0: a null request)."""
        return -(-(self.pieces_bytes + 16) // 128) * 128

    @property
    def pieces_stages(self) -> int:
        """Places of the pieces' ring: those of the states, and the item that is computed."""
        return self.stages + 1

    @property
    def pieces_at(self) -> int:
        return self.stages * self.state_bytes

    # Behind the ring: constants of the head, then values of the current item.
    @property
    def f_b_at(self) -> int:
        return self.pieces_at + self.pieces_stages * self.pieces_stride

    @property
    def conv_w_at(self) -> int:
        """[channels, 4] fp32."""
        return self.f_b_at + 2 * HEAD * HEAD

    @property
    def values_at(self) -> int:
        """q, k, decay [T, HEAD], v, o [T, value rows], sums of o^2 [2, T, cluster], all fp32."""
        return self.conv_w_at + 16 * self.channels

    @property
    def barriers_at(self) -> int:
        """Full and empty of every state, full and empty of every piece, then `sums`."""
        floats = self.tokens * (3 * HEAD + 2 * self.value_rows + 2 * self.cluster)
        return -(-(self.values_at + 4 * floats) // 8) * 8

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * (self.stages + self.pieces_stages) + 8


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
def swizzle(row: Int32, chunk: Int32) -> Int32:
    """Place of a 16-byte chunk in its row of F_b: rows of a pair use different halves of the banks."""
    return chunk ^ ((row & 1) * 4)


@cute.jit
def channel_of(at: Int32, head_base: Int32, width: cutlass.Constexpr, first_row: Int32) -> Int32:
    """Conv channel, or projection column, of a block's channel: q and k of the head, then v of the block's rows."""
    section = cutlass.min(at // HEAD, 2)
    return section * width + head_base + (at - section * HEAD) + (section // 2) * first_row


@cute.jit
def load_head_constants(
    f_b: cute.Pointer, conv_w: cute.Pointer, memory: cute.Pointer, head: Int32, first_row: Int32, tid: Int32, *,
    shape: cutlass.Constexpr,
) -> None:  # fmt: skip
    """F_b rows and conv weights of a head to shared memory, by the consumer threads; one async group."""
    threads = 32 * shape.warps
    f_b_s = cute.recast_ptr(memory, dtype=BFloat16) + shape.f_b_at // 2
    conv_w_s = memory + shape.conv_w_at // 4
    for i in cutlass.range_constexpr(HEAD * HEAD // 8 // threads):
        item = tid + threads * i
        row, chunk = item // 16, item % 16
        copy_16b_async(
            (f_b_s + 8 * (row * 16 + swizzle(row, chunk))).toint(), f_b + 8 * ((head * HEAD + row) * 16 + chunk)
        )
    for i in cutlass.range_constexpr((shape.channels + threads - 1) // threads):
        item = tid + threads * i
        if item < shape.channels:
            channel = channel_of(item, head * HEAD, shape.width, first_row)
            copy_16b_async((conv_w_s + 4 * item).toint(), conv_w + 4 * channel)
    cute.arch.cp_async_commit_group()


@cute.jit
def produce_pieces(
    proj: cute.Pointer, slots: cute.Pointer, accepted: cute.Pointer, conv_state: cute.Pointer, taps: Int32,
    request: Int32, head: Int32, first_row: Int32, place: Int32, full: Int32, lane: Int32, *,
    shape: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """Conv window and projection pieces of an item, by one warp. Returns the slot id of the state to read, 0 for a null
    request, which is announced without copies.
    """
    width, tokens, value_rows, channels = shape.width, shape.tokens, shape.value_rows, shape.channels
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
            read_only_args=[place + shape.pieces_bytes, cutlass.max(Int32(0), conv_slot) * live.to(Int32)],
        )
        if live:
            expect(full, Int32(shape.pieces_bytes))
        else:
            arrive(full)
    if live:
        rows = proj + Int64(request * tokens) * shape.row_width
        if lane < tokens + 3:
            window = conv_state + ((Int64(conv_slot) * taps + kept - 1 + lane) * (3 * width) + head * HEAD)
            if lane >= 3:
                window = rows + ((lane - 3) * shape.row_width + head * HEAD)
            target = place + 2 * channels * lane
            bulk_copy(target, window, Int32(2 * HEAD), full)
            bulk_copy(target + 2 * HEAD, window + width, Int32(2 * HEAD), full)
            bulk_copy(target + 4 * HEAD, window + (2 * width + first_row), Int32(2 * value_rows), full)
        if lane < tokens:
            row = rows + lane * shape.row_width
            bulk_copy(place + shape.f_a_at + 2 * HEAD * lane, row + 4 * width, Int32(2 * HEAD), full)
            target = place + shape.g_out_at + 2 * value_rows * lane
            bulk_copy(target, row + (3 * width + head * HEAD + first_row), Int32(2 * value_rows), full)
            bulk_copy(place + shape.beta_at + 2 * BETAS * lane, row + (4 * width + HEAD), Int32(2 * BETAS), full)
    return read_slot * live.to(Int32)


@cute.jit
def produce_state(state: cute.Pointer, slot: Int32, head: Int32, first_row: Int32, place: Int32, full: Int32, *,
                  shape: cutlass.Constexpr) -> None:  # fmt: skip
    """The block's rows of a head's state; nothing for a null request. One thread."""
    if slot > 0:
        expect(full, Int32(shape.state_bytes))
        source = state + ((Int64(slot) * shape.heads + head) * HEAD + first_row) * HEAD
        bulk_copy(place, source, Int32(shape.state_bytes), full)
    else:
        arrive(full)


@cute.jit
def convolve(window_s: cute.Pointer, conv_w_s: cute.Pointer, values: cute.Pointer, warp: Int32, lane: Int32,
             l2_eps: Float32, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Conv, SiLU and l2 norm of one section (q, k or v) of all tokens, by one warp: channels lane, lane + 32, ..."""
    tokens, value_rows, channels = shape.tokens, shape.value_rows, shape.channels
    q_s, k_s = values, values + tokens * HEAD
    v_s = values + 3 * tokens * HEAD
    for t in cutlass.range(tokens, unroll=1):
        y = cute.make_rmem_tensor(4, Float32)
        y.fill(0.0)
        for c in cutlass.range_constexpr(4):
            at = warp * HEAD + 32 * c + lane
            if at < channels:
                total = Float32(0.0)
                weights = load_shared_4xf32((conv_w_s + 4 * at).toint())
                for j in cutlass.range_constexpr(4):
                    total += weights[j] * window_s[(t + j) * channels + at].to(Float32)
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
                  lower_bound: Float32, warp: Int32, lane: Int32, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """exp(bound * sigmoid(slope * (bf16(F_b f_a) + bias))): MMA rows are gate channels, columns are tokens."""
    quad_row, quad_lane = lane // 4, lane % 4
    for tile in cutlass.range_constexpr(shape.gate_tiles):
        first = (warp * shape.gate_tiles + tile) * 16 + quad_row
        g = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        for chunk in cutlass.range_constexpr(4):
            place = f_b_s + 16 * (first * 16 + swizzle(first, 4 * chunk + quad_lane))
            low, high = load_shared_4xb32(place), load_shared_4xb32(place + 16 * HEAD)
            x = cute.make_rmem_tensor(4, Int32)
            x.fill(0)
            if quad_row < shape.tokens:
                x[0], x[1], x[2], x[3] = load_shared_4xb32(f_a_s + 2 * (quad_row * HEAD + 32 * chunk + 8 * quad_lane))
            g = mma_m16n8k16(g, (low[0], high[0], low[1], high[1]), (x[0], x[1]))
            g = mma_m16n8k16(g, (low[2], high[2], low[3], high[3]), (x[2], x[3]))
        for i in cutlass.range_constexpr(4):
            token = 2 * quad_lane + i % 2
            if token < shape.tokens:
                gate = g[i].to(BFloat16).to(Float32) + bias[2 * tile + i // 2]
                decay_s[token * HEAD + first + 8 * (i // 2)] = exp(lower_bound * sigmoid(slope * gate))


@cute.jit
def recur(s: cute.Tensor, values: cute.Pointer, beta: Float32, t: Int32, row_base: Int32, piece: Int32, *,
          shape: cutlass.Constexpr) -> None:  # fmt: skip
    """One token: the lane's state pieces s [groups, 4, 4] become those after the token; o to shared memory."""
    tokens, value_rows, groups = shape.tokens, shape.value_rows, shape.groups
    q_s, k_s, decay_s = values, values + tokens * HEAD, values + 2 * tokens * HEAD
    v_s, o_s = values + 3 * tokens * HEAD, values + tokens * (3 * HEAD + value_rows)
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
        if piece == 0:
            o_s[at] = o
    for j in cutlass.range_constexpr(4):
        k = load_shared_4xf32((k_s + (t * HEAD + 32 * j + 4 * piece)).toint())
        for n in cutlass.range_constexpr(groups):
            for i in cutlass.range_constexpr(4):
                s[16 * n + 4 * j + i] += sk[n] * k[i]


@cute.jit
def sum_of_squares(o_s: cute.Pointer, lane: Int32, *, shape: cutlass.Constexpr) -> Float32:
    """Over the block's value rows of one token, by one warp."""
    square = Float32(0.0)
    for c in cutlass.range_constexpr((shape.value_rows + 31) // 32):
        if 32 * c + lane < shape.value_rows:
            o = o_s[32 * c + lane]
            square += o * o
    return warp_sum(square)


@cute.jit
def write_zeros(out_pairs: cute.Pointer, tid: Int32, *, shape: cutlass.Constexpr) -> None:
    """Outputs of a null request."""
    for i in cutlass.range_constexpr(shape.pair_rounds):
        at = tid + 32 * shape.warps * i
        if at < shape.tokens * shape.pairs:
            out_pairs[(at // shape.pairs) * (shape.width // 2) + at % shape.pairs] = Int32(0)


@cute.jit
def gated_norm(out_pairs: cute.Pointer, o_s: cute.Pointer, sums_s: cute.Pointer, g_out_s: cute.Pointer,
               norms: cute.Tensor, eps: Float32, tid: Int32, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """O * rsqrt(mean o^2 + eps) * o_norm * sigmoid(g_out) of the block's columns; a thread per pair."""
    for i in cutlass.range_constexpr(shape.pair_rounds):
        at = tid + 32 * shape.warps * i
        token, pair = at // shape.pairs, at % shape.pairs
        mean = Float32(0.0)
        if cutlass.const_expr(shape.cluster == 1):  # the pairs of a warp belong to one token
            mean = sum_of_squares(o_s + cutlass.min(token, shape.tokens - 1) * shape.value_rows, tid % 32, shape=shape)
        if at < shape.tokens * shape.pairs:
            if cutlass.const_expr(shape.cluster > 1):
                for block in cutlass.range_constexpr(shape.cluster):
                    mean += sums_s[token * shape.cluster + block]
            scale = rsqrt(mean * (1.0 / HEAD) + eps)
            gates = unpack_bf16x2(g_out_s[at])
            even = o_s[2 * at] * scale * norms[2 * i] * sigmoid(gates[0])
            odd = o_s[2 * at + 1] * scale * norms[2 * i + 1] * sigmoid(gates[1])
            out_pairs[token * (shape.width // 2) + pair] = pack_bf16x2(even, odd)


@cute.jit
def write_window(target: cute.Pointer, window_s: Int32, head: Int32, first_row: Int32, rank: Int32, tid: Int32, *,
                 shape: cutlass.Constexpr) -> None:  # fmt: skip
    """New conv rows: two that stay, then the new inputs; q and k rows by one block of the cluster."""
    pieces, threads = shape.channels // 8, 32 * shape.warps
    for i in cutlass.range_constexpr(((shape.tokens + 2) * pieces + threads - 1) // threads):
        at = tid + threads * i
        if at < (shape.tokens + 2) * pieces:
            row, chunk = at // pieces, at % pieces
            if (rank == 0) | (chunk >= 2 * HEAD // 8):
                words = load_shared_4xb32(window_s + 2 * (8 * at + shape.channels))
                column = channel_of(8 * chunk, head * HEAD, shape.width, first_row)
                store_4xb32(target + (row * (3 * shape.width) + column), words)


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
    shape: cutlass.Constexpr,
):
    """Blocks of a cluster take the slices of the same items."""
    heads, width, tokens, cluster, stages = shape.heads, shape.width, shape.tokens, shape.cluster, shape.stages
    value_rows, groups = shape.value_rows, shape.groups
    threads = 32 * shape.warps  # of the consumers

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
    state_full = ring + shape.barriers_at
    state_empty = state_full + 8 * stages
    pieces_full = state_empty + 8 * stages
    pieces_empty = pieces_full + 8 * shape.pieces_stages
    sums = pieces_empty + 8 * shape.pieces_stages
    if tid == 0:
        for s in cutlass.range_constexpr(stages):
            init_barrier(state_full + 8 * s, Int32(1))
            init_barrier(state_empty + 8 * s, Int32(shape.warps))
        for s in cutlass.range_constexpr(shape.pieces_stages):
            init_barrier(pieces_full + 8 * s, Int32(1))
            init_barrier(pieces_empty + 8 * s, Int32(shape.warps))
        init_barrier(sums, Int32(1))
    cute.arch.mbarrier_init_fence()
    if warp < shape.warps:
        load_head_constants(f_b, conv_w, memory, begin // requests, first_row, tid, shape=shape)
    cute.arch.sync_threads()
    if cutlass.const_expr(cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # the barriers of all blocks exist
    cute.arch.griddepcontrol_launch_dependents()

    if warp == shape.warps:
        cute.arch.griddepcontrol_wait()
        for item in cutlass.range(begin, end, unroll=1):
            turn = item - begin
            request, head = item % requests, item // requests
            p = turn % shape.pieces_stages
            if turn >= shape.pieces_stages:
                wait(pieces_empty + 8 * p, (turn // shape.pieces_stages - 1) & 1)
            read_slot = produce_pieces(
                proj, slots, accepted, conv_state, taps, request, head, first_row,
                ring + shape.pieces_at + p * shape.pieces_stride, pieces_full + 8 * p, lane, shape=shape,
            )  # fmt: skip
            s = turn % stages
            if turn >= stages:
                wait(state_empty + 8 * s, (turn // stages - 1) & 1)
            if lane == 0:
                place = ring + s * shape.state_bytes
                produce_state(state, read_slot, head, first_row, place, state_full + 8 * s, shape=shape)
    else:
        values = memory + shape.values_at // 4
        o_s = values + tokens * (3 * HEAD + value_rows)
        sums_s = o_s + tokens * value_rows  # [2, T, cluster]
        out_pairs = cute.recast_ptr(out, dtype=Int32)
        norms = cute.make_rmem_tensor(2 * shape.pair_rounds, Float32)
        for i in cutlass.range_constexpr(shape.pair_rounds):
            column = first_row + 2 * ((tid + threads * i) % shape.pairs)
            norms[2 * i], norms[2 * i + 1] = o_norm[column].to(Float32), o_norm[column + 1].to(Float32)
        bias = cute.make_rmem_tensor(2 * shape.gate_tiles, Float32)
        slope = Float32(0.0)
        row_base, piece = warp * (value_rows // shape.warps) + (lane // 8), lane % 8
        current = begin // requests - 1  # no head's gate constants are loaded yet
        exchanges = Int32(0)
        cute.arch.griddepcontrol_wait()
        for item in cutlass.range(begin, end, unroll=1):
            turn = item - begin
            request, head = item % requests, item // requests
            if head != current:
                if turn > 0:
                    load_head_constants(f_b, conv_w, memory, head, first_row, tid, shape=shape)
                for tile in cutlass.range_constexpr(shape.gate_tiles):
                    at = cutlass.min((warp * shape.gate_tiles + tile) * 16, HEAD - 16) + lane // 4
                    bias[2 * tile] = dt_bias[head * HEAD + at]
                    bias[2 * tile + 1] = dt_bias[head * HEAD + at + 8]
                slope = exp(a_log[head])
                current = head
                cute.arch.cp_async_wait_group(0)
                cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=threads)
            p = turn % shape.pieces_stages
            window_at = shape.pieces_at + p * shape.pieces_stride
            wait(pieces_full + 8 * p, (turn // shape.pieces_stages) & 1)
            pieces = memory + window_at // 4
            conv_slot = cute.recast_ptr(pieces + shape.pieces_bytes // 4, dtype=Int32)[0]
            s = turn % stages
            out_base = (request * tokens * width + head * HEAD + first_row) // 2
            if conv_slot <= 0:
                write_zeros(out_pairs + out_base, tid, shape=shape)
                if lane == 0:
                    arrive(state_empty + 8 * s)
            else:
                if warp < 3:
                    window_s = cute.recast_ptr(pieces, dtype=BFloat16)
                    convolve(window_s, memory + shape.conv_w_at // 4, values, warp, lane, l2_eps, shape=shape)
                if warp * shape.gate_tiles * 16 < HEAD:
                    compute_decay(
                        ring + shape.f_b_at, ring + window_at + shape.f_a_at, values + 2 * tokens * HEAD, bias, slope,
                        lower_bound, warp, lane, shape=shape,
                    )  # fmt: skip
                wait(state_full + 8 * s, (turn // stages) & 1)
                state_s = memory + (s * shape.state_bytes // 4 + row_base * HEAD + 4 * piece)
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
                betas = cute.recast_ptr(pieces + shape.beta_at // 4, dtype=BFloat16)
                for t in cutlass.range(tokens, unroll=1):
                    beta = sigmoid(betas[t * BETAS + head].to(Float32))
                    recur(rows, values, beta, t, row_base, piece, shape=shape)
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
                    for i in cutlass.range_constexpr((tokens + shape.warps - 1) // shape.warps):
                        t = i * shape.warps + warp
                        if t < tokens:
                            square = sum_of_squares(o_s + t * value_rows, lane, shape=shape)
                            if lane < cluster:
                                place = (sums_s + (half + t * cluster + rank)).toint()
                                send_f32(peer(place, lane), square, peer(sums, lane))
                    wait_cluster(sums, exchanges & 1)
                exchanges += 1
                g_out_s = cute.recast_ptr(pieces + shape.g_out_at // 4, dtype=Int32)
                gated_norm(out_pairs + out_base, o_s, sums_s + half, g_out_s, norms, eps, tid, shape=shape)
                write_window(
                    conv_state + Int64(conv_slot) * taps * (3 * width), ring + window_at, head, first_row, rank,
                    tid, shape=shape,
                )  # fmt: skip
            cute.arch.sync_warp()
            if lane == 0:
                arrive(pieces_empty + 8 * p)


def variant(c: Choices) -> Variant:
    """One launch of persistent blocks, or clusters of them."""
    g = c.geometry
    shape = Shape(g.heads, g.kda_proj_rows, c["T"], c["cluster"], c["warps"], c["stages"])
    if shape.groups < 1:
        raise ValueError(f"{shape.value_rows} value rows do not divide over {shape.warps} warps, four at once")
    launch = Launch(
        name="kda_decode",
        kernel=kda_decode,
        arguments=(
            "proj", "conv_w", "f_b", "a_log", "dt_bias", "o_norm", "slots", "accepted", "conv_state", "state", "out",
            "B", "taps", "gate_lower_bound", "eps", "l2_eps",
        ),
        grid=(shape.cluster, f"min(H * B, max(1, sms * {c['ctas']} // {shape.cluster}))", 1),
        block=shape.threads,
        constants={"shape": shape},
        cluster=shape.cluster,
        shared=shape.shared_bytes,
        min_ctas_per_sm=c["residents"],
        expects=("tensor_core", "bulk_copy", "async_copy", *(("cluster",) if shape.cluster > 1 else ())),
    )  # fmt: skip
    return Variant((launch,), requires=("taps >= T + 2",))
