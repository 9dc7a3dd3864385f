"""MLA query path and cache insert as one launch: a cluster per head, weights in registers before the wait.

Work decomposition. `cluster` CTAs share a head. Each owns 1/cluster of the head's rows of W_qb (nope and pe alike) over
all of K, and 1/cluster of the head's latents of W_UK. Within a CTA the warps split K of W_qb; a warp's lanes load their
slice of all its rows straight into MMA fragments (k permuted alike on both operands, see `common/cute_mma.py`), so that
the weights neither pass through shared memory nor are read twice. W_UK^T is needed with its k transposed: its slice
goes to shared memory (cp.async) and is read by ldmatrix. One more cluster normalises latent rows and inserts them.

Per tile of `tile` tokens:
    1  a lane loads its k of the tile's q_a, sums squares; the warps exchange the sums (CTA barrier);
    2  c = bf16(q_a rstd w), product with the W_qb slice; partial sums over K to shared memory (CTA barrier);
    3  sums over warps in fixed order, rounded to bf16: pe rows to `query`, nope rows to every CTA of the cluster
       (st.async on an mbarrier of the receiver);
    4  product of the head's nope row with the W_UK slice, to `query`.

Bytes (tp8): W_qb 7.08 MB + W_UK 1.57 MB read once, 1.9 us at 4.6 TB/s; all of it is requested before the wait. What is
left behind the wait is latency: q_a from L2, two CTA barriers, one exchange through distributed shared memory.

Synchronisation of the exchange. Buffer and mbarrier b = tile % 2. A CTA pushes tile i + 2 into a peer's buffer b after
it has seen tile i + 1 complete, hence after that peer has pushed tile i + 1, hence (CTA barrier of step 1) after all
warps of that peer have read tile i from buffer b. The peer's mbarrier b has left tile i's phase by then for the same
reason. No CTA leaves before the last tile has reached it, after which nobody writes to it. Before the first push a
cluster barrier makes sure that all peers run and have initialised their mbarriers.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute
from kernels.common.cute_mma import (
    load_shared_8b,
    load_shared_16b,
    load_weight_16b,
    matrix_transposed_x4,
    mma_m16n8k16,
    pack_bf16x2,
    store_shared_8b,
    unpack_bf16x2,
    warp_sum,
)

from k3_backend.aot.cuda.contract import Choices, Launch, Value, Variant


@dataclass(frozen=True)
class _Plan:
    """Shapes and tiling of one compiled kernel; byte offsets are into dynamic shared memory."""

    heads: int
    proj_row: int
    q_lora: int
    kv_lora: int
    nope: int
    pe: int
    cluster: int
    warps: int
    tile: int
    single: bool
    """The call has one tile."""

    @property
    def row(self) -> int:
        return self.kv_lora + self.pe

    @property
    def chunks(self) -> int:
        """Chunks of 32 k that a warp owns."""
        return self.q_lora // (32 * self.warps)

    @property
    def nope_octets(self) -> int:
        """Groups of 8 nope rows of W_qb per CTA; an octet is the n of one MMA."""
        return self.nope // (8 * self.cluster)

    @property
    def octets(self) -> int:
        return (self.nope + self.pe) // (8 * self.cluster)

    @property
    def pe_octets(self) -> int:
        return self.octets - self.nope_octets

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def latents(self) -> int:
        """Latents of W_UK per CTA."""
        return self.kv_lora // self.cluster

    @property
    def nope_pitch(self) -> int:
        """Bytes between tokens of the exchange buffer; 64 mod 128, so that two tokens' 64 bytes share no bank."""
        return 2 * self.nope + 64

    @property
    def squares_at(self) -> int:
        """f32 [warps, tile]: sums of squares over each warp's k."""
        return 16

    @property
    def partial_at(self) -> int:
        """f32 [warps, tile, 8 * octets]: products over each warp's k."""
        return self.squares_at + 4 * self.warps * self.tile

    @property
    def exchange_at(self) -> int:
        """bf16 [2, tile, nope] with pitch: the head's rounded nope rows."""
        return self.partial_at + 4 * self.warps * self.tile * 8 * self.octets

    @property
    def absorb_at(self) -> int:
        """bf16 [nope, latents]: the W_UK slice, 16-byte pieces of a row permuted (`_place`)."""
        return -(-(self.exchange_at + 2 * self.tile * self.nope_pitch) // 128) * 128

    @property
    def norm_at(self) -> int:
        """bf16 [q_lora]: q_norm."""
        return self.absorb_at + 2 * self.nope * self.latents

    @property
    def shared_bytes(self) -> int:
        return self.norm_at + 2 * self.q_lora


@cute.jit
def _load_activation_16b(pointer: cute.Pointer) -> tuple:
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer],
    )


@cute.jit
def _sum_of_squares(total: Float32, packed: tuple) -> Float32:
    for pair in packed:
        low, high = unpack_bf16x2(pair)
        total = total + low * low
        total = total + high * high
    return total


@cute.jit
def _scaled(pair: Int32, weight: Int32, scale_high: Int32, scale_low: Int32) -> Int32:
    """bf16(x w s) for two x, with s = scale_high + scale_low (bf16 pairs): one rounding but for 2^-16 of the value.

    x w is exact as product + rest; five packed operations instead of nine on Float32.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 p, n, r; mul.rn.bf16x2 p, {$r0}, {$r1}; neg.bf16x2 n, p; fma.rn.bf16x2 r, {$r0}, {$r1}, n; "
        "mul.rn.bf16x2 r, r, {$r2}; fma.rn.bf16x2 r, p, {$r3}, r; fma.rn.bf16x2 {$w0}, p, {$r2}, r; }",
        write_only_types=[Int32],
        read_only_args=[pair, weight, scale_high, scale_low],
    )


@cute.jit
def _split_scale(value: Float32) -> tuple:
    """A Float32 as two bf16 pairs (high, rest), each with equal halves."""
    high = pack_bf16x2(value, value)
    rounded, _ = unpack_bf16x2(high)
    rest = value - rounded
    return high, pack_bf16x2(rest, rest)


@cute.jit
def _in_peer(address: Int32, rank: Int32) -> Int32:
    """The address that names, in the shared memory of another CTA of the cluster, what `address` names in this one."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


@cute.jit
def _push_16b(address: Int32, values: tuple, barrier: Int32) -> None:
    """16 bytes to a peer; completes as many on the peer's mbarrier."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )


@cute.jit
def _copy_16b(target: Int32, source: cute.Pointer) -> None:
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source])


@cute.jit
def _store_global_4b(pointer: cute.Pointer, value: Int32) -> None:
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[pointer, value])


@cute.jit
def _store_global_16b(pointer: cute.Pointer, values: tuple) -> None:
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *values])


def _zero() -> tuple:
    return (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))


def _place(n: Int32, piece: Int32) -> Int32:
    """Where 16-byte piece `piece` of row n of the W_UK slice lies in its row.

    One ldmatrix reads rows {0, 1, 8, 9, 16, 17, 24, 25} + 2j of a column of pieces; they fall into different banks.
    """
    return piece ^ ((n & 1) | ((n >> 2) & 6))


@cute.kernel
def mla_query(
    proj: cute.Pointer,
    q_norm: cute.Pointer,
    kv_norm: cute.Pointer,
    w_qb: cute.Pointer,
    w_uk_t: cute.Pointer,
    slot_mapping: cute.Pointer,
    query: cute.Pointer,
    kv_cache: cute.Pointer,
    rows: Int32,
    tiles: Int32,
    eps: Float32,
    *,
    plan: cutlass.Constexpr,
) -> None:
    """Clusters 0 .. heads - 1 make query rows of one head each; the last one inserts latent rows."""
    block, _, _ = cute.arch.block_idx()
    head = block // plan.cluster
    rank = block % plan.cluster
    if head < plan.heads:
        _query_rows(proj, q_norm, w_qb, w_uk_t, query, rows, tiles, eps, head, rank, plan)
    else:
        _cache_rows(proj, kv_norm, slot_mapping, kv_cache, rows, eps, rank, plan)


@cute.jit
def _query_rows(
    proj: cute.Pointer,
    q_norm: cute.Pointer,
    w_qb: cute.Pointer,
    w_uk_t: cute.Pointer,
    query: cute.Pointer,
    rows: Int32,
    tiles: Int32,
    eps: Float32,
    head: Int32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    g, t = lane // 4, lane % 4
    barriers = cute.arch.get_dyn_smem(Int64, alignment=128)
    shared = barriers.toint()

    if thread == 0:
        for b in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(barriers + b, 1)
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + b, plan.tile * plan.nope * 2)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()

    # Weights: everything that this CTA will need, requested before the wait.
    my_k = warp * (32 * plan.chunks) + 8 * t
    first_row = head * (plan.nope + plan.pe)
    weights = []
    for octet in cutlass.range_constexpr(plan.octets):
        if cutlass.const_expr(octet < plan.nope_octets):
            octet_row = 8 * (rank * plan.nope_octets + octet)
        else:
            octet_row = plan.nope + 8 * (rank * plan.pe_octets + octet - plan.nope_octets)
        source = w_qb + ((first_row + octet_row + g) * plan.q_lora + my_k)
        weights.append([load_weight_16b(source + 32 * chunk) for chunk in range(plan.chunks)])
    if thread < plan.q_lora // 8:
        _copy_16b(shared + plan.norm_at + 16 * thread, q_norm + 8 * thread)
    pieces = plan.latents // 8
    slice_start = w_uk_t + (head * plan.nope * plan.kv_lora + rank * plan.latents)
    for step in cutlass.range_constexpr(plan.nope * pieces // (plan.threads)):
        index = thread + plan.threads * step
        n, piece = index // pieces, index % pieces
        target = shared + plan.absorb_at + n * (2 * plan.latents) + 16 * _place(n, piece)
        source = slice_start + (n * plan.kv_lora + 8 * piece)
        _copy_16b(target, source)
    cute.arch.cp_async_commit_group()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()

    if cutlass.const_expr(plan.single):
        _tile(shared, barriers, proj, query, weights, rows, Int32(0), my_k, eps, head, rank, plan)
    else:
        for tile in cutlass.range(tiles, unroll=1):
            _tile(shared, barriers, proj, query, weights, rows, tile, my_k, eps, head, rank, plan)
            if thread == 0:
                # This thread has seen the phase complete; nothing arrives for the next before tile + 1 is complete.
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + tile % 2, plan.tile * plan.nope * 2)


@cute.jit
def _tile(
    shared: Int32,
    barriers: cute.Pointer,
    proj: cute.Pointer,
    query: cute.Pointer,
    weights: list,
    rows: Int32,
    tile: Int32,
    my_k: Int32,
    eps: Float32,
    head: Int32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    first, buffer = tile * plan.tile, tile % 2
    q_a = _load_q_a(proj, rows, first, my_k, plan)
    _share_squares(shared, q_a, plan)
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    _multiply(shared, q_a, weights, my_k, eps, plan)
    cute.arch.sync_threads()
    _finish_rows(shared, query, rows, first, buffer, head, rank, plan)
    _absorb(shared, barriers + buffer, query, rows, tile, head, rank, plan)


def _halves(plan: _Plan) -> range:
    """Of the MMA's 16 token rows, lane (g, t) works on row g and, in tiles of 16, on row g + 8."""
    return range(plan.tile // 8)


@cute.jit
def _load_q_a(proj: cute.Pointer, rows: Int32, first: Int32, my_k: Int32, plan: cutlass.Constexpr) -> list:
    """q_a of the lane's tokens and k: [half][chunk], 8 values each.

    Rows past the end repeat the last one; nothing that comes of them is stored.
    """
    g = cute.arch.lane_idx() // 4
    q_a = []
    for half in _halves(plan):
        token = cutlass.min(first + g + 8 * half, rows - 1)
        source = proj + (token * plan.proj_row + my_k)
        q_a.append([_load_activation_16b(source + 32 * chunk) for chunk in range(plan.chunks)])
    return q_a


@cute.jit
def _share_squares(shared: Int32, q_a: list, plan: cutlass.Constexpr) -> None:
    """Step 1: the warp's sum of squares of each token to shared memory."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for half in _halves(plan):
        parts = [Float32(0.0), Float32(0.0)]
        for chunk in cutlass.range_constexpr(plan.chunks):
            parts[chunk % 2] = _sum_of_squares(parts[chunk % 2], q_a[half][chunk])
        squares = warp_sum(parts[0] + parts[1], 4)
        if lane % 4 == 0:
            address = shared + plan.squares_at + 4 * (warp * plan.tile + lane // 4 + 8 * half)
            cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, squares])


@cute.jit
def _scale(shared: Int32, token: Int32, eps: Float32, plan: cutlass.Constexpr) -> tuple:
    """1 / rms of a token of the tile, as two bf16 pairs."""
    total = Float32(0.0)
    for warp in cutlass.range_constexpr(plan.warps):
        address = shared + plan.squares_at + 4 * (warp * plan.tile + token)
        total = total + cute.arch.inline_ptx(
            "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
        )
    return _split_scale(cute.math.rsqrt(total * (1.0 / plan.q_lora) + eps))


@cute.jit
def _multiply(shared: Int32, q_a: list, weights: list, my_k: Int32, eps: Float32, plan: cutlass.Constexpr) -> None:
    """Step 2: norm and product over the warp's k; two accumulators per octet shorten the chains of dependent MMAs."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    g, t = lane // 4, lane % 4
    scales = [_scale(shared, g + 8 * half, eps, plan) for half in _halves(plan)]
    acc = [_zero()] * plan.octets
    for chunk in cutlass.range_constexpr(plan.chunks):
        norm = load_shared_16b(shared + plan.norm_at + 2 * my_k + 64 * chunk)
        c = [[_scaled(q_a[half][chunk][i], norm[i], *scales[half]) for i in range(4)] for half in _halves(plan)]
        c = c if len(c) == 2 else [c[0], [Int32(0)] * 4]
        for step in cutlass.range_constexpr(2):
            a = (c[0][2 * step], c[1][2 * step], c[0][2 * step + 1], c[1][2 * step + 1])
            for octet in cutlass.range_constexpr(plan.octets):
                b = weights[octet][chunk]
                acc[octet] = mma_m16n8k16(acc[octet], a, (b[2 * step], b[2 * step + 1]))
    for half in _halves(plan):
        line = (warp * plan.tile + g + 8 * half) * (8 * plan.octets) + 2 * t
        for octet in cutlass.range_constexpr(plan.octets):
            address = shared + plan.partial_at + 4 * line + 32 * octet
            store_shared_8b(address, acc[octet][2 * half], acc[octet][2 * half + 1])


@cute.jit
def _finish_rows(
    shared: Int32,
    query: cute.Pointer,
    rows: Int32,
    first: Int32,
    buffer: Int32,
    head: Int32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Step 3: four lanes per token and octet, two rows of W_qb each; an octet's lanes fill whole warps."""
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    t = lane % 4
    units = plan.tile * plan.octets * 4
    for step in cutlass.range_constexpr(-(-units // plan.threads)):
        unit = thread + plan.threads * step
        token, octet = unit // 4 % plan.tile, cute.arch.make_warp_uniform(unit // (4 * plan.tile))
        if octet < plan.octets:
            low, high = Float32(0.0), Float32(0.0)
            for warp in cutlass.range_constexpr(plan.warps):
                line = (warp * plan.tile + token) * (8 * plan.octets) + 8 * octet + 2 * t
                x, y = load_shared_8b(shared + plan.partial_at + 4 * line)
                low, high = low + x, high + y
            pair = pack_bf16x2(low, high)
            if octet < plan.nope_octets:
                values = [cute.arch.shuffle_sync(pair, (lane & 28) + i) for i in range(4)]
                at = plan.exchange_at + (buffer * plan.tile + token) * plan.nope_pitch
                target = shared + at + 16 * (rank * plan.nope_octets + octet)
                for i in cutlass.range_constexpr(plan.cluster // 4):
                    peer = t * (plan.cluster // 4) + i
                    _push_16b(_in_peer(target, peer), values, _in_peer(shared + 8 * buffer, peer))
            elif first + token < rows:
                pe_row = 8 * (rank * plan.pe_octets + octet - plan.nope_octets) + 2 * t
                at = ((first + token) * plan.heads + head) * plan.row + plan.kv_lora + pe_row
                _store_global_4b(query + at, pair)


@cute.jit
def _absorb(
    shared: Int32,
    barrier: cute.Pointer,
    query: cute.Pointer,
    rows: Int32,
    tile: Int32,
    head: Int32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Step 4: a warp takes 8 latents at a time; k = nope in the same permuted order as in step 2."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    g, t = lane // 4, lane % 4
    pieces = plan.latents // 8
    for step in cutlass.range_constexpr(-(-pieces // plan.warps)):
        piece = warp + plan.warps * step
        if piece < pieces:
            absorb = []
            for chunk in cutlass.range_constexpr(plan.nope // 32):
                n = 32 * chunk + 8 * (lane % 8 // 2) + 2 * (lane // 8) + lane % 2
                at = plan.absorb_at + n * (2 * plan.latents) + 16 * _place(n, piece)
                absorb.append(matrix_transposed_x4(shared + at))
            cute.arch.mbarrier_wait(barrier, tile // 2 % 2)
            out = [_zero(), _zero()]
            for chunk in cutlass.range_constexpr(plan.nope // 32):
                at = plan.exchange_at + (tile % 2 * plan.tile + g) * plan.nope_pitch + 64 * chunk + 16 * t
                x = [load_shared_16b(shared + at + 8 * half * plan.nope_pitch) for half in _halves(plan)]
                x = x if len(x) == 2 else [x[0], [Int32(0)] * 4]
                for i in cutlass.range_constexpr(2):
                    a = (x[0][2 * i], x[1][2 * i], x[0][2 * i + 1], x[1][2 * i + 1])
                    out[i] = mma_m16n8k16(out[i], a, (absorb[chunk][2 * i], absorb[chunk][2 * i + 1]))
            for half in _halves(plan):
                token = tile * plan.tile + g + 8 * half
                if token < rows:
                    at = (token * plan.heads + head) * plan.row + rank * plan.latents + 8 * piece + 2 * t
                    low, high = (out[0][2 * half + i] + out[1][2 * half + i] for i in range(2))
                    _store_global_4b(query + at, pack_bf16x2(low, high))


@cute.jit
def _cache_rows(
    proj: cute.Pointer,
    kv_norm: cute.Pointer,
    slot_mapping: cute.Pointer,
    kv_cache: cute.Pointer,
    rows: Int32,
    eps: Float32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """A warp per token: norm of the latent, pe as it is, to the row's slot."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    parts = plan.kv_lora // 256
    norm = [load_weight_16b(kv_norm + (256 * part + 8 * lane)) for part in range(parts)]
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    slots = cute.make_tensor(slot_mapping, cute.make_layout(rows))
    for token in cutlass.range(rank * plan.warps + warp, rows, plan.cluster * plan.warps, unroll=1):
        slot = slots[token]
        source = proj + (token * plan.proj_row + plan.q_lora + 8 * lane)
        latent = [_load_activation_16b(source + 256 * part) for part in range(parts)]
        total = Float32(0.0)
        for part in cutlass.range_constexpr(parts):
            total = _sum_of_squares(total, latent[part])
        rstd = cute.math.rsqrt(warp_sum(total) * (1.0 / plan.kv_lora) + eps)
        if slot >= 0:
            target = kv_cache + (slot * plan.row + 8 * lane)
            for part in cutlass.range_constexpr(parts):
                values = []
                for i in cutlass.range_constexpr(4):
                    x, y = unpack_bf16x2(latent[part][i])
                    v, w = unpack_bf16x2(norm[part][i])
                    values.append(pack_bf16x2(x * rstd * v, y * rstd * w))
                _store_global_16b(target + 256 * part, values)
            if lane < plan.pe // 8:
                _store_global_16b(target + plan.kv_lora, _load_activation_16b(source + plan.kv_lora))


def variant(choices: Choices) -> Variant:
    """One launch: a cluster per head and one for the cache rows."""
    g = choices.geometry
    plan = _Plan(
        heads=g.heads, proj_row=g.mla_proj_rows, q_lora=g.q_lora, kv_lora=g.kv_lora, nope=g.nope, pe=g.pe,
        cluster=choices["cluster"], warps=choices["warps"], tile=choices["tile"],
        single=choices["single"] == 1,
    )  # fmt: skip
    launch = Launch(
        name="mla_query",
        kernel=mla_query,
        arguments=(
            "proj", "q_norm", "kv_norm", "w_qb", "w_uk_t", "slot_mapping", "query", "kv_cache", "M",
            Value("tiles", f"ceil_div(M, {plan.tile})"), "eps",
        ),
        grid=(f"(H + 1) * {plan.cluster}", 1, 1),
        block=plan.threads,
        constants={"plan": plan},
        cluster=plan.cluster,
        shared=plan.shared_bytes,
        min_ctas_per_sm=choices["occupancy"],
        expects=("tensor_core", "async_copy", "cluster"),
    )  # fmt: skip
    return Variant((launch,), requires=(f"M <= {plan.tile}",) if plan.single else ())
