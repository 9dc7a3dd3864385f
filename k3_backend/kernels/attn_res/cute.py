"""AttnRes site: prefix update, block write, softmax mix over saved rows, RMSNorm of the mix; each row is read once.

A cluster of `cluster` blocks handles one token. Every thread owns `vectors` pieces of 8 columns and keeps them of all
rows (prefix and saved rows) in registers, packed, from the scores to the mix.

    before the wait   rows asked for in L2 (`ahead.py`); constants: res_norm, res_proj to registers, out_norm to shared
                      memory; mbarriers
    after it          all rows at once, 16 bytes per lane and row; then key = res_norm * res_proj as fp32;
                      p = bf16(p + delta), stored to prefix and saved row
    exchange 1        per row sum(v * key) and sum(v^2): lanes by shuffles, warps through shared memory, then blocks
    every warp        scores, softmax, its columns of the mix
    exchange 2        sum(mix^2)
    end               out = bf16(mix * rsqrt(mean(mix^2) + eps) * out_norm)

In an exchange every block sends its partial sums to every block of the cluster (`common/cute_cluster.py`), and each
warp adds them in the same order: all threads of a token hold identical sums, and replays give identical bits. A cluster
of one block has its warps' sums in shared memory and needs no exchange.

Floor: rows read (sources + prefix + delta) and written (prefix, saved row, out), 2 D bytes each; at D = 7168 and eight
sources 172 KB per token, so that time is latency up to about 64 tokens: one DRAM read, two exchanges, one write. The
number of sources is fixed at compile time: as a run-time number it cost 0.2 us of 1.6 us at four sources (H200, M = 1).

Order of memory: a prefix element is read and written by one thread. The saved row written by this call is read by
nobody in it, since `p` stands for it in registers. Before the wait constants are read, and nothing waits for them
there: a launch that begins late has them and its rows under way together.
"""

import math
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from kernels.attn_res.ahead import ask_for_rows
from kernels.attn_res.sums import chained_sum, scatter_sums, scattered
from kernels.common.cute_cluster import cluster_barrier, open_exchange, wait_exchange
from kernels.common.cute_mma import load_weight_16b, warp_sum
from kernels.common.cute_registers import load_16b_if, pack, unpack
from kernels.common.cute_ring import peer
from kernels.common.cute_vector import copy_16b_async, load_4xb32, load_shared_4xb32, send_f32, store_4xb32

from k3_backend.aot.cuda.contract import Choices, Launch, Variant

LOG2_E = 1.4426950408889634
VECTOR = 8
"""Columns of one 16-byte access."""


class SharedLayout(NamedTuple):
    """Byte offsets of a block's shared memory. The parked pieces of out_norm lie at 0."""

    square: int
    """[warp of the token] sum(mix^2)."""
    barriers: int
    """Two mbarriers, 8 bytes each."""
    warp_sums: int
    """[warp of the block][row] (dot, square)."""
    sums: int
    """[block of the cluster][row] (dot, square)."""
    bytes: int


def shared_layout(rows: int, pieces: int, warps: int, cluster: int) -> SharedLayout:
    """For `rows` rows of a token and `pieces` 16-byte pieces of out_norm, `warps` warps in each of `cluster` blocks."""
    square = 16 * pieces
    barriers = square + 16 * -(-warps * cluster // 4)
    warp_sums = barriers + 16
    sums = warp_sums + 8 * warps * rows
    return SharedLayout(square, barriers, warp_sums, sums, sums + 8 * cluster * rows)


@cute.jit
def rsqrt(x: Float32) -> Float32:
    """x^-1/2 by rsqrt.approx: 2^-22 relative."""
    return cute.arch.inline_ptx("rsqrt.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.kernel
def attn_res(
    prefix: cute.Pointer,
    delta: cute.Pointer,
    blocks: cute.Pointer,
    res_norm: cute.Pointer,
    res_proj: cute.Pointer,
    out_norm: cute.Pointer,
    out: cute.Pointer,
    add_delta: Int32,
    write_block: Int32,
    round_mix: Int32,
    eps: Float32,
    *,
    width: cutlass.Constexpr,
    saved: cutlass.Constexpr,
    sources: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
    vectors: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
):
    """See the module; grid (cluster * tokens)."""
    warps = width // (32 * VECTOR * vectors * cluster)  # of this block
    threads = 32 * warps
    rows = sources + 1

    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token, rank = block // cluster, block % cluster
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    part = rank * warps + warp
    column = [(part * vectors + v) * (32 * VECTOR) + lane * VECTOR for v in range(vectors)]

    shared = cute.arch.get_dyn_smem(Float32, alignment=16)
    layout = shared_layout(rows, vectors * threads, warps, cluster)
    gain_s = shared  # [vector][thread], four words each: private to the thread
    square_s = shared + layout.square // 4
    warp_sums_s = shared + layout.warp_sums // 4
    sums_s = shared + layout.sums // 4
    barriers = cute.recast_ptr(shared + layout.barriers // 4, dtype=Int64)

    # --- constants, and everything that needs no input ------------------------------------------------------------
    cute.arch.griddepcontrol_launch_dependents()
    row_at = Int64(token) * width
    token_prefix, token_delta, token_out = prefix + row_at, delta + row_at, out + row_at
    token_blocks = blocks + row_at * saved
    if cutlass.const_expr(ahead > 0):
        warp_at = part * vectors * (32 * VECTOR)
        ask_for_rows(
            token_blocks + warp_at, token_prefix + warp_at, token_delta + warp_at, add_delta,
            lane=lane, width=width, columns=vectors * 32 * VECTOR, sources=sources, with_delta=ahead > 1,
        )  # fmt: skip
    norm, proj = [], []
    for v in cutlass.range_constexpr(vectors):
        norm += load_weight_16b(res_norm + column[v])
        proj += load_weight_16b(res_proj + column[v])
        copy_16b_async((gain_s + (v * threads + tid) * 4).toint(), out_norm + column[v])
    cute.arch.cp_async_commit_group()
    index, first = scattered(2 * rows, lane)
    if cutlass.const_expr(cluster > 1):
        if tid == 0:
            open_exchange(barriers, cluster * rows * 8)
            open_exchange(barriers + 1, cluster * warps * 4)
        cluster_barrier()
    cute.arch.griddepcontrol_wait()

    # --- all rows -------------------------------------------------------------------------------------------------
    p, d, row = [], [], []
    for v in cutlass.range_constexpr(vectors):
        p += load_4xb32(token_prefix + column[v])
        d += load_16b_if(token_delta + column[v], add_delta)
    for s in cutlass.range_constexpr(sources):
        row.append([])
        for v in cutlass.range_constexpr(vectors):
            row[s] += load_4xb32(token_blocks + (s * width + column[v]))
    key = [a * b for a, b in zip(unpack(norm), unpack(proj), strict=True)]
    moved = pack([a + b for a, b in zip(unpack(p), unpack(d), strict=True)])
    p = [Int32(cutlass.select_(add_delta != 0, new, old)) for new, old in zip(moved, p, strict=True)]
    for v in cutlass.range_constexpr(vectors):
        piece = p[4 * v : 4 * v + 4]
        if add_delta != 0:
            store_4xb32(token_prefix + column[v], piece)
        if write_block >= 0:
            store_4xb32(token_blocks + (write_block * width + column[v]), piece)
    row.append(p)

    mix = unpack(p)
    if cutlass.const_expr(sources > 0):
        # --- scores -----------------------------------------------------------------------------------------------
        sums = []
        for s in cutlass.range_constexpr(rows):
            dot, square = Float32(0.0), Float32(0.0)
            for x, k in zip(unpack(row[s]), key, strict=True):
                dot += x * k
                square += x * x
            sums += [dot, square]
        mine = scatter_sums(sums, lane)
        if first != 0:
            warp_sums_s[warp * (2 * rows) + index] = mine
        cute.arch.sync_threads()
        if cutlass.const_expr(cluster > 1):
            # One value for one block per thread; the exchange is complete when all have arrived.
            for i in cutlass.range_constexpr(-(-2 * rows * cluster // threads)):
                item = tid + i * threads
                if item < 2 * rows * cluster:
                    value = item % (2 * rows)
                    total = chained_sum([warp_sums_s[w * (2 * rows) + value] for w in range(warps)])
                    peer_s = peer(shared.toint(), item // (2 * rows))
                    send_f32(peer_s + (layout.sums + (rank * (2 * rows) + value) * 4), total, peer_s + layout.barriers)
            wait_exchange(barriers)
        table = sums_s if cluster > 1 else warp_sums_s
        place = 2 * cutlass.min(lane, sources)
        parts = [table + (q * 2 * rows + place) for q in range(cluster if cluster > 1 else warps)]
        dot, square = chained_sum([q[0] for q in parts]), chained_sum([q[1] for q in parts])
        score = dot * rsqrt(square * (1.0 / width) + eps) * LOG2_E
        scores = [cute.arch.shuffle_sync(score, s) for s in range(rows)]
        top = scores[0]
        for s in cutlass.range_constexpr(1, rows):
            top = cute.arch.fmax(top, scores[s])
        weight = [cute.math.exp2(s - top, fastmath=True) for s in scores]
        share = cute.arch.rcp_approx(chained_sum(weight))

        # --- mix --------------------------------------------------------------------------------------------------
        mix = [Float32(0.0)] * (VECTOR * vectors)
        for s in cutlass.range_constexpr(rows):
            w = weight[s] * share
            mix = [m + w * x for m, x in zip(mix, unpack(row[s]), strict=True)]
    if round_mix != 0:
        mix = unpack(pack(mix))

    # --- norm -----------------------------------------------------------------------------------------------------
    square = warp_sum(chained_sum([m * m for m in mix]))
    cute.arch.cp_async_wait_group(0)
    gain = [load_shared_4xb32((gain_s + (v * threads + tid) * 4).toint()) for v in range(vectors)]
    if cutlass.const_expr(cluster > 1):
        if lane < cluster:
            peer_s = peer(shared.toint(), lane)
            send_f32(peer_s + (layout.square + part * 4), square, peer_s + (layout.barriers + 8))
        wait_exchange(barriers + 1)
        square = chained_sum([square_s[q] for q in range(cluster * warps)])
    elif cutlass.const_expr(warps > 1):
        if lane == 0:
            square_s[warp] = square
        cute.arch.sync_threads()
        square = chained_sum([square_s[q] for q in range(warps)])
    scale = rsqrt(square * (1.0 / width) + eps)
    for v in cutlass.range_constexpr(vectors):
        piece = mix[VECTOR * v : VECTOR * (v + 1)]
        gains = unpack(gain[v])
        store_4xb32(token_out + column[v], pack([m * scale * g for m, g in zip(piece, gains, strict=True)]))


def variant(choices: Choices) -> Variant:
    """One launch: `cluster` blocks per token, or as many as the token's warps allow."""
    g, sources = choices.geometry, choices["sources"]
    if sources > g.attn_res_blocks:
        return Variant(launches=(), requires=("sources <= NB",))
    vectors = choices["vectors"] if g.hidden % (32 * VECTOR * choices["vectors"]) == 0 else 1
    warps = g.hidden // (32 * VECTOR * vectors)  # of the token
    cluster = math.gcd(choices["cluster"], warps)
    threads = 32 * warps // cluster
    return Variant(
        launches=(
            Launch(
                name="attn_res",
                kernel=attn_res,
                arguments=(
                    "prefix", "delta", "blocks", "res_norm", "res_proj", "out_norm", "out",
                    "add_delta", "write_block", "round_mix", "eps",
                ),
                grid=(f"M * {cluster}", 1, 1),
                block=threads,
                constants={
                    "width": g.hidden, "saved": g.attn_res_blocks, "sources": sources, "cluster": cluster,
                    "vectors": vectors, "ahead": choices["ahead"],
                },
                cluster=cluster,
                shared=shared_layout(sources + 1, vectors * threads, warps // cluster, cluster).bytes,
                min_ctas_per_sm=choices["ctas"],
                expects=(*(("cluster",) if cluster > 1 else ()), *(("prefetch",) if choices["ahead"] else ())),
            ),
        ),
        # Saved rows of the mix are read as they were before the call.
        requires=("write_block < 0 or write_block >= sources",),
    )  # fmt: skip
