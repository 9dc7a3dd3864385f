"""MLA query path and cache insert: a cluster per head, its weights in registers before the wait.

Decomposition. The CTAs of a cluster share a head. Each owns 1/cluster of the head's rows of W_qb (nope and pe alike)
over all of K, and 1/cluster of the head's latents of W_UK. Within a CTA the warps split K of W_qb; a warp's lanes load
their slice of the CTA's rows straight into MMA fragments (k permuted alike on both operands, see `common/cute_mma.py`):
the weights stay in registers for all tokens and never pass through shared memory. W_UK^T is needed with its k
transposed; its slice goes to shared memory (cp.async) and is read by ldmatrix. Tokens come in tiles of 8 or 16 as the
MMA's M.

Per tile (`steps.py`):
    q_a       of the tile to the warps, by one of three forms (`plan.py`): loaded by the lanes; copied to shared memory
              once per cluster, multicast; or the same with rows that a launch before this one has normalised
    norm      squares over each warp's k, CTA barrier, c = bf16(q_a w / rms) in registers (not in the third form)
    multiply  c with the W_qb slice; partial sums over K to shared memory, CTA barrier
    finish    sums over the warps in fixed order, rounded: pe rows to `query`, nope rows to every CTA of the cluster
              (st.async, completes bytes on an mbarrier of the receiver)
    absorb    product of the head's nope rows with the W_UK slice, to `query`
In loops tile i - 1 is absorbed between multiply and finish of tile i, which hides the exchange. One more cluster, or
the launch before, normalises latent rows and inserts them into the cache.

Bytes (tp8): W_qb 7.08 MB and W_UK 1.57 MB, read once: 1.9 us at 4.6 TB/s. All of it is requested before the wait;
nothing else is. Behind the wait small calls are latency (q_a from L2, two CTA barriers, one exchange); many tokens are
bound by the MMAs, 96 CTAs x 36 x 8 warps per 16 tokens. Multicast matters from some 8 tokens on: 96 CTAs that each read
16 rows of q_a move 4.7 MB out of L2, more than half of the weights' bytes.

Synchronisation of loops. E = 3 exchange buffers, S stages of q_a, partial sums twice in the third form.
    exchange  A CTA pushes tile i + 1 after its wait for exchange i, in which every peer takes part behind its second
              CTA barrier of tile i: all the peer's warps have left iteration i - 1 and with it absorb(i - 2), the last
              reader of the buffer.
    q_a       Exchange i - 1 complete means that all warps of all peers have passed the second barrier of tile i - 1 and
              read its q_a; then its stage is filled with tile i - 1 + S.
    mbarriers Thread 0 expects the bytes of a barrier's next phase when it has seen the last one complete. Bytes may
              arrive first: the phase cannot end before the expectation, its one pending arrival.
    partial   Written between the barriers of a tile or, without the first, alternately: tile i + 2 is written behind
              the barrier of tile i + 1, which all readers of tile i have reached.
Peers' mbarriers are initialised before the cluster barrier that precedes all remote accesses. A CTA leaves when the
last exchange is complete, after which nobody writes to it.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from kernels.common.cute_mma import load_weight_16b
from kernels.mla_query.plan import DIRECT, NORMED, SHARED, Plan
from kernels.mla_query.rows import insert_rows, norm_rows
from kernels.mla_query.steps import (
    absorb,
    absorption_weights,
    copy_16b,
    finish_rows,
    fragments,
    load_norm,
    load_pieces,
    multicast_tile,
    multiply,
    normalise,
    place,
    share_squares,
    shared_pieces,
)

from k3_backend.aot.cuda.contract import Choices, Launch, Value, Variant, Workspace

NORM_WARPS = 4
"""Warps per CTA of the norm's own launch, each with a row."""


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
    """The whole op: clusters 0 .. heads - 1 make query rows of one head each, the last one inserts latent rows."""
    block, _, _ = cute.arch.block_idx()
    head, rank = block // plan.cluster, block % plan.cluster
    if head < plan.heads:
        norm = load_norm(q_norm, plan)
        _query_rows(proj, norm, w_qb, w_uk_t, query, rows, tiles, eps, head, rank, plan)
    else:
        first = rank * plan.warps + cute.arch.warp_idx()
        insert_rows(proj, kv_norm, slot_mapping, kv_cache, rows, eps, first, plan.cluster * plan.warps, plan)


@cute.kernel
def mla_query_norm(
    proj: cute.Pointer,
    q_norm: cute.Pointer,
    kv_norm: cute.Pointer,
    slot_mapping: cute.Pointer,
    kv_cache: cute.Pointer,
    c: cute.Pointer,
    rows: Int32,
    eps: Float32,
    *,
    plan: cutlass.Constexpr,
) -> None:
    """Row work alone: even blocks normalise q_a into `c`, odd blocks insert latent rows."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    first, step = block // 2 * NORM_WARPS + cute.arch.warp_idx(), blocks // 2 * NORM_WARPS
    if block % 2 == 0:
        norm_rows(proj, q_norm, c, rows, eps, first, step, plan)
    else:
        insert_rows(proj, kv_norm, slot_mapping, kv_cache, rows, eps, first, step, plan)


@cute.kernel
def mla_query_products(
    c: cute.Pointer,
    w_qb: cute.Pointer,
    w_uk_t: cute.Pointer,
    query: cute.Pointer,
    rows: Int32,
    tiles: Int32,
    *,
    plan: cutlass.Constexpr,
) -> None:
    """Query rows from normalised q_a, a head per cluster."""
    block, _, _ = cute.arch.block_idx()
    head, rank = block // plan.cluster, block % plan.cluster
    _query_rows(c, (), w_qb, w_uk_t, query, rows, tiles, Float32(0.0), head, rank, plan)


@cute.jit
def _query_rows(
    source: cute.Pointer,
    norm: tuple,
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
    """`source` is `proj` and `norm` the norm's weights for the lane; in the form NORMED c and nothing."""
    thread, _, _ = cute.arch.thread_idx()
    barriers = cute.arch.get_dyn_smem(Int64, alignment=128)
    exchanged = barriers + plan.stages
    shared = barriers.toint()
    if thread == 0:
        for i in cutlass.range_constexpr(plan.stages + plan.exchanges):
            cute.arch.mbarrier_init(barriers + i, 1)
            expected = plan.tile_bytes if i < plan.stages else plan.exchange_bytes
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + i, expected)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()

    my_k = cute.arch.warp_idx() * (32 * plan.chunks) + 8 * (cute.arch.lane_idx() % 4)
    weights = _request_weights(shared, w_qb, w_uk_t, head, rank, my_k, plan)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()

    pitch = plan.q_lora if plan.form == NORMED else plan.proj_row
    first_warp = cute.arch.warp_idx() == 0
    if cutlass.const_expr(plan.form == DIRECT):
        _normalise_tile(shared, load_pieces(source, rows, plan), norm, Int32(0), eps, plan)
    elif first_warp:
        for i in cutlass.range_constexpr(plan.stages):
            if i < tiles:
                multicast_tile(shared, source, pitch, rows, Int32(i), rank, plan)
    if cutlass.const_expr(not plan.looped):
        if cutlass.const_expr(plan.form != DIRECT):
            _await_tile(shared, barriers, norm, Int32(0), eps, plan)
        multiply(shared, fragments(shared, Int32(0), plan), weights, Int32(0), plan)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        finish_rows(shared, query, rows, Int32(0), head, rank, plan)
        _absorb_tile(shared, exchanged, query, rows, Int32(0), head, rank, plan)
    else:
        for tile in cutlass.range(tiles, unroll=1):
            _await_tile(shared, barriers, norm, tile, eps, plan)
            multiply(shared, fragments(shared, tile, plan), weights, tile % plan.partials, plan)
            if cutlass.const_expr(plan.form == SHARED):
                cute.arch.fence_proxy("async.shared", space="cta")  # c is overwritten by a bulk copy
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if tile > 0:
                _absorb_tile(shared, exchanged, query, rows, tile - 1, head, rank, plan)
                if first_warp and tile - 1 + plan.stages < tiles:
                    multicast_tile(shared, source, pitch, rows, tile - 1 + plan.stages, rank, plan)
            finish_rows(shared, query, rows, tile, head, rank, plan)
        _absorb_tile(shared, exchanged, query, rows, tiles - 1, head, rank, plan)


@cute.jit
def _request_weights(
    shared: Int32,
    w_qb: cute.Pointer,
    w_uk_t: cute.Pointer,
    head: Int32,
    rank: Int32,
    my_k: Int32,
    plan: cutlass.Constexpr,
) -> list:
    """The CTA's weights: W_qb to registers ([octet][chunk] fragments), W_UK to shared memory by cp.async, committed."""
    thread, _, _ = cute.arch.thread_idx()
    weights = []
    for octet in cutlass.range_constexpr(plan.octets):
        if cutlass.const_expr(octet < plan.nope_octets):
            row = 8 * (rank * plan.nope_octets + octet)
        else:
            row = plan.nope + 8 * (rank * plan.pe_octets + octet - plan.nope_octets)
        row += head * (plan.nope + plan.pe) + cute.arch.lane_idx() // 4
        source = w_qb + (row * plan.q_lora + my_k)
        weights.append([load_weight_16b(source + 32 * chunk) for chunk in range(plan.chunks)])
    pieces = plan.latents // 8
    absorption = w_uk_t + (head * plan.nope * plan.kv_lora + rank * plan.latents)
    for step in cutlass.range_constexpr(-(-plan.nope * pieces // plan.threads)):
        index = thread + plan.threads * step
        n, piece = index // pieces, index % pieces
        if n < plan.nope:
            target = shared + plan.absorb_at + n * (2 * plan.latents) + 16 * place(n, piece)
            copy_16b(target, absorption + (n * plan.kv_lora + 8 * piece))
    cute.arch.cp_async_commit_group()
    return weights


@cute.jit
def _await_tile(
    shared: Int32, barriers: cute.Pointer, norm: tuple, tile: Int32, eps: Float32, plan: cutlass.Constexpr
) -> None:
    """Waits for the tile's q_a or c in shared memory, and normalises what is not yet."""
    thread, _, _ = cute.arch.thread_idx()
    full = barriers + tile % plan.stages
    cute.arch.mbarrier_wait(full, tile // plan.stages % 2)
    if cutlass.const_expr(plan.looped) and thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, plan.tile_bytes)
    if cutlass.const_expr(plan.form == SHARED):
        _normalise_tile(shared, shared_pieces(shared, tile, plan), norm, tile, eps, plan)


@cute.jit
def _normalise_tile(shared: Int32, q_a: list, norm: tuple, tile: Int32, eps: Float32, plan: cutlass.Constexpr) -> None:
    """Puts the warp's k of c into the tile's stage; a warp reads back what it wrote itself."""
    share_squares(shared, q_a, plan)
    cute.arch.sync_threads()
    normalise(shared, q_a, norm, tile, eps, plan)
    cute.arch.sync_warp()


@cute.jit
def _absorb_tile(
    shared: Int32,
    exchanged: cute.Pointer,
    query: cute.Pointer,
    rows: Int32,
    tile: Int32,
    head: Int32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Waits for the tile's exchange and absorbs it."""
    thread, _, _ = cute.arch.thread_idx()
    weights = absorption_weights(shared, plan)
    barrier = exchanged + tile % plan.exchanges
    cute.arch.mbarrier_wait(barrier, tile // plan.exchanges % 2)
    if cutlass.const_expr(plan.looped) and thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, plan.exchange_bytes)
    absorb(shared, query, weights, rows, tile, head, rank, plan)


def variant(choices: Choices) -> Variant:
    """One launch, or two with c [M, q_lora] between them."""
    g = choices.geometry
    form = choices["form"]
    plan = Plan(
        heads=g.heads, proj_row=g.mla_proj_rows, q_lora=g.q_lora, kv_lora=g.kv_lora, nope=g.nope, pe=g.pe, form=form,
        tile=choices["tile"], warps=choices["warps"], cluster=choices["cluster"],
        stages=1 if form == DIRECT else choices["stages"],
    )  # fmt: skip
    tiles = Value("tiles", f"ceil_div(M, {plan.tile})")
    common = {
        "block": plan.threads, "constants": {"plan": plan}, "cluster": plan.cluster, "shared": plan.shared_bytes,
        "min_ctas_per_sm": choices["occupancy"],
    }  # fmt: skip
    expects = ("tensor_core", "cluster", "async_copy") + (("bulk_copy",) if form != DIRECT else ())
    requires = () if plan.looped else (f"M <= {plan.tile}",)
    if form != NORMED:
        launch = Launch(
            name="mla_query",
            kernel=mla_query,
            arguments=(
                "proj", "q_norm", "kv_norm", "w_qb", "w_uk_t", "slot_mapping", "query", "kv_cache", "M", tiles, "eps",
            ),
            grid=(f"(H + 1) * {plan.cluster}", 1, 1),
            expects=expects,
            **common,
        )  # fmt: skip
        return Variant((launch,), requires=requires)
    norm = Launch(
        name="mla_query_norm",
        kernel=mla_query_norm,
        arguments=("proj", "q_norm", "kv_norm", "slot_mapping", "kv_cache", "c", "M", "eps"),
        grid=(f"2 * ceil_div(M, {NORM_WARPS})", 1, 1),
        block=32 * NORM_WARPS,
        constants={"plan": plan},
    )
    products = Launch(
        name="mla_query_products",
        kernel=mla_query_products,
        arguments=("c", "w_qb", "w_uk_t", "query", "M", tiles),
        grid=(f"H * {plan.cluster}", 1, 1),
        expects=expects,
        **common,
    )
    return Variant((norm, products), workspaces=(Workspace("c", "bf16", f"M * {plan.q_lora}"),), requires=requires)
