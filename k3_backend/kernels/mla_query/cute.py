"""MLA query path and cache insert in one launch: a cluster of CTAs per head, weights in registers before the wait.

Decomposition. The CTAs of a cluster share a head. W_qb is split among them by rows or by K (`by_rows.py`, `by_k.py`);
either way a warp's lanes load their part straight into MMA fragments, where it stays for all tokens: these weights
never pass through shared memory. W_UK is split by latents; it is needed with its k transposed, so that its slice goes
to shared memory (cp.async) and is read by ldmatrix. Tokens come in tiles as the MMA's M. One more cluster normalises
latent rows and inserts them into the cache.

                by rows, up to 16 tokens                  by K, from some 8 tokens on
    norm        all of q_a in every CTA, squares          a part of K in every CTA; the cluster exchanges
                exchanged among warps                     sums of squares
    multiply    warps split K; partial sums through       warps split rows; partial sums to the CTA that
                shared memory                             finishes the rows (distributed shared memory)
    finish      sums in fixed order, rounded: pe rows to `query`, nope rows to every CTA of the cluster
    absorb      product of the head's nope rows with the CTA's slice of W_UK, to `query`

Exchanges within the cluster are pushed (st.async), completing bytes on an mbarrier of the receiver.

Bytes (tp8): W_qb 7.08 MB and W_UK 1.57 MB, read once: 1.9 us at 4.6 TB/s. All of it is requested before the wait, and
nothing else is. Behind the wait a call of one tile is latency: q_a from L2, one exchange by rows, three by K. Every
further 16 tokens cost 1.2 us on H200 (M = 1, 16, 64, 512: 3.4, 5.0, 8.9, 43 us), four times what the 88 MMAs per SM
sub-partition should take; the partial sums, 12 KB per CTA through distributed shared memory, are the suspect.

Synchronisation of loops (by K; two buffers of everything; sums of squares S, partial sums P, nope rows X). Iteration i:
multiply i and push P(i); push S(i + 1); wait X(i - 1), absorb; wait P(i), finish and push X(i); wait S(i + 1),
normalise; CTA barrier.
    P     A CTA pushes P(i + 2) after its wait for S(i + 2), in which every warp of every peer takes part in iteration
          i + 1, behind its finish of i, the last read of that buffer.
    X, S  A CTA pushes X(i + 2) and S(i + 3) after its wait for P(i + 2) or P(i + 1), for which one warp of every peer
          has passed the CTA barrier of iteration i + 1 or i: all its warps have absorbed X(i) and read S(i + 1).
    c     is written for i + 1 while others may still multiply i, hence twice; the CTA barrier does the rest.
    mbarriers  Thread 0 expects the bytes of the next phase when it has seen the last one complete. Bytes may arrive
          first: a phase cannot end before the expectation, its one pending arrival.
Peers' mbarriers are initialised before the cluster barrier that precedes all remote accesses. A CTA leaves when the
last exchange is complete, after which nobody writes to it.
"""

import cutlass
from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import load_weight_16b, pack_bf16x2, unpack_bf16x2, warp_sum
from kernels.common.cute_vector import load_4xb32, store_4xb32
from kernels.mla_query import by_k, by_rows
from kernels.mla_query.plan import BY_ROWS, Plan
from kernels.mla_query.steps import sum_of_squares

from k3_backend.aot.cuda.contract import Choices, Launch, Value, Variant


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
    k_scale: Float32,
    *,
    plan: cutlass.Constexpr,
) -> None:
    """Clusters make query rows, those of a head side by side; the last one inserts latent rows."""
    cute.arch.griddepcontrol_launch_dependents()
    block, _, _ = cute.arch.block_idx()
    cluster, rank = block // plan.cluster, block % plan.cluster
    if cluster < plan.heads * plan.groups:
        head, group = cluster // plan.groups, cluster % plan.groups
        if cutlass.const_expr(plan.form == BY_ROWS):
            by_rows.query_rows(proj, q_norm, w_qb, w_uk_t, query, rows, eps, head, rank, plan)
        else:
            by_k.query_rows(proj, q_norm, w_qb, w_uk_t, query, rows, tiles, eps, head, group, rank, plan)
    else:
        _insert_rows(proj, kv_norm, slot_mapping, kv_cache, rows, eps, k_scale, rank, plan)


@cute.jit
def _insert_rows(
    proj: cute.Pointer,
    kv_norm: cute.Pointer,
    slot_mapping: cute.Pointer,
    kv_cache: cute.Pointer,
    rows: Int32,
    eps: Float32,
    k_scale: Float32,
    rank: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """A warp per token: the latent normalised, pe as it is, to the token's slot if it has one."""
    lane = cute.arch.lane_idx()
    parts = plan.kv_lora // 256
    norm = [load_weight_16b(kv_norm + (256 * part + 8 * lane)) for part in range(parts)]
    cute.arch.griddepcontrol_wait()
    slots = cute.make_tensor(slot_mapping, cute.make_layout(rows))
    first = rank * plan.warps + cute.arch.warp_idx()
    for token in cutlass.range(first, rows, plan.cluster * plan.warps, unroll=1):
        slot = slots[token]
        source = proj + (token * plan.proj_row + plan.q_lora + 8 * lane)
        latent = [load_4xb32(source + 256 * part) for part in range(parts)]
        total = Float32(0.0)
        for part in cutlass.range_constexpr(parts):
            total = sum_of_squares(total, latent[part])
        scale = cute.math.rsqrt(warp_sum(total) * (1.0 / plan.kv_lora) + eps)
        if slot >= 0:
            target = kv_cache + (slot * plan.row + 8 * lane)
            for part in cutlass.range_constexpr(parts):
                values = []
                for i in cutlass.range_constexpr(4):
                    x, y = unpack_bf16x2(latent[part][i])
                    v, w = unpack_bf16x2(norm[part][i])
                    values.append(pack_bf16x2(x * scale * v, y * scale * w))
                _store_row(target + 256 * part, values, k_scale, plan)
            if lane < plan.pe // 8:
                _store_row(target + plan.kv_lora, load_4xb32(source + plan.kv_lora), k_scale, plan)


@cute.jit
def _store_row(target: cute.Pointer, pairs: list, k_scale: Float32, plan: cutlass.Constexpr) -> None:
    """Eight elements of a cache row, given as bf16 pairs."""
    if cutlass.const_expr(plan.e4m3):
        words = []
        for i in cutlass.range_constexpr(2):
            x, y = unpack_bf16x2(pairs[2 * i])
            v, w = unpack_bf16x2(pairs[2 * i + 1])
            words.append(_pack_4xe4m3((x / k_scale, y / k_scale, v / k_scale, w / k_scale)))
        cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[target, *words])
    else:
        store_4xb32(target, pairs)


@cute.jit
def _pack_4xe4m3(values: tuple) -> Int32:
    """Four Float32 as E4M3 bytes in one register, to nearest even, saturated; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 y, {$r3}, {$r2}; mov.b32 {$w0}, {x, y}; }",
        write_only_types=[Int32],
        read_only_args=[*values],
    )


def variant(choices: Choices) -> Variant:
    """One launch for all sizes."""
    g = choices.geometry
    form = choices["form"]
    plan = Plan(
        heads=g.heads, proj_row=g.mla_proj_rows, q_lora=g.q_lora, kv_lora=g.kv_lora, nope=g.nope, pe=g.pe, form=form,
        tile=choices["tile"], looped=choices["looped"] == 1, groups=choices["groups"], warps=choices["warps"],
        cluster=choices["cluster"], e4m3=choices["cache_format"] == 1,
    )  # fmt: skip
    launch = Launch(
        name="mla_query",
        kernel=mla_query,
        arguments=(
            "proj", "q_norm", "kv_norm", "w_qb", "w_uk_t", "slot_mapping", "query",
            "kv_cache_e4m3" if plan.e4m3 else "kv_cache", "M",
            Value("tiles", f"ceil_div(M, {plan.tile})"), "eps", "k_scale",
        ),
        grid=(f"(H * {plan.groups} + 1) * {plan.cluster}", 1, 1),
        block=plan.threads,
        constants={"plan": plan},
        cluster=plan.cluster,
        shared=plan.shared_bytes,
        min_ctas_per_sm=choices["occupancy"],
        expects=("tensor_core", "cluster", "async_copy"),
    )  # fmt: skip
    # Every cluster must have a tile, and without a loop only one.
    requires = [f"ceil_div(M, {plan.tile}) >= {plan.groups}"]
    if not plan.looped:
        requires.append(f"M <= {plan.tile * plan.groups}")
    return Variant((launch,), requires=tuple(requires))
