"""MLA value step: log-sum-exp merge of the shards' latents, W_UV per head on tensor cores, sigmoid gate.

A block owns `rows` value rows of one head and walks over groups of 8 * `tiles` tokens. Its warps divide the 512 latent
columns into `split` parts and the rows into warps / split bands and compute v^T = W_UV lat^T: value rows are the m16
side of the MMA, tokens the n8 side. A lane's 16-byte load of a latent row is a B fragment as it stands
(`common/cute_mma.py`), so that latents go from memory to the tensor cores through registers.

    before the wait   the block's part of W_UV as A fragments in registers (constant)
    after it          latents and lse of the first group, gates
    merge             shards = 1: lse only says whether the row counts; else the mean weighted with 2^(lse - max), in
                      fp32, one rounding to bf16
    products          2 MMAs per chunk of 32 columns, partial sums of all parts to shared memory; the next group's
                      latents are under way meanwhile
    end of a group    sum over the parts in fixed order, bf16, times sigmoid(gate), bf16

Floor: 131 KB of W_UV per head, read before the wait; after it 1 KB per shard, token and head, and 2 * 256 B of gate
and output. Every block of a head reads the latents anew (128 / rows times, from L2); the grid has no more blocks than
fit on the device at once, so that weights are read once per block however many tokens there are.

Order of memory: nothing but W_UV is read before the wait; an output element is written by one thread. Partial sums are
read between two block barriers, the second of which precedes their overwriting. Rows whose sources all lack a finite
lse are zeros; the garbage that such sources may hold is replaced before any arithmetic.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from kernels.common.cute_mma import load_weight_16b, mma_m16n8k16, pack_bf16x2, unpack_bf16x2
from kernels.common.cute_registers import load_4b_if, load_16b_if

from k3_backend.aot.cuda.contract import Choices, Launch, Variant

LOG2_E = 1.4426950408889634
LATENT = 512
VALUE = 128
MAX_SHARDS = 16
PAD = 4
"""Floats between the partial sums of two tokens, so that the C fragments of a warp fall into 32 banks."""


@cute.jit
def is_finite(x: Float32):
    """Neither infinite nor NaN."""
    return (x.bitcast(Int32) & 0x7F800000) != 0x7F800000


@cute.jit
def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x); 0 and 1 at the ends without NaN."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(-x * LOG2_E, fastmath=True))


def paired_sum(values) -> Float32:
    """Sum of a power of two of values, by pairs of neighbours."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def products(weights, latents):
    """[16 rows] x [8 tokens] accumulators per group of 16 rows, from the fragments of a warp's chunks.

    Args:
        weights: [group of rows][chunk] of (row g, row g + 8), four registers each.
        latents: [chunk] of four registers.
    """
    sums = []
    for group in weights:
        chains = [(Float32(0.0),) * 4] * 2  # two, since an MMA takes several times as long as it occupies its unit
        for (low, high), x in zip(group, latents, strict=True):
            chains[0] = mma_m16n8k16(chains[0], (low[0], high[0], low[1], high[1]), (x[0], x[1]))
            chains[1] = mma_m16n8k16(chains[1], (low[2], high[2], low[3], high[3]), (x[2], x[3]))
        sums.append([a + b for a, b in zip(*chains, strict=True)])
    return sums


@cute.jit
def publish(
    own_s: cute.Pointer, alive_s: cute.Pointer, sums, alive: Int32, warp: Int32, lane: Int32, stride: cutlass.Constexpr
) -> None:
    """A warp's C fragments of eight tokens to its part of shared memory, and which of these tokens have a source."""
    quad, member = lane // 4, lane % 4
    for group in cutlass.range_constexpr(len(sums)):
        at = own_s + (2 * member * stride + 16 * group + quad)
        at[0] = sums[group][0]
        at[stride] = sums[group][1]
        at[8] = sums[group][2]
        at[stride + 8] = sums[group][3]
    if (warp == 0) & (member == 0):
        alive_s[quad] = alive


@cute.jit
def merged(
    partial: cute.Pointer, lse: cute.Pointer, place: Int64, step: Int64, column: Int32, shards: Int32, inside,
    flight: cutlass.Constexpr, chunks: cutlass.Constexpr,
) -> tuple:  # fmt: skip
    """A lane's pieces of one token's merged latent: the mean of the shards' rows weighted with 2^lse.

    `flight` shards at a time are loaded together with their lse; from the second time on, the sums so far are scaled
    to the new maximum. `place` is the row of the token and head in a shard of `step` rows. Returns [chunk] of four
    packed registers, and 1 if any source has a finite lse, else 0 (and zeros).
    """
    mean = cute.make_rmem_tensor(8 * chunks, Float32)
    mean.fill(0.0)
    total, top = Float32(0.0), -Float32.inf
    for first in cutlass.range(0, shards, flight, unroll=1):
        known, words = [], []
        for i in cutlass.range_constexpr(flight):
            row = place + (first + i) * step
            wanted = inside & (first + i < shards)
            value = load_4b_if(lse + row, wanted).bitcast(Float32)
            known.append((value, wanted))
            words.append([load_16b_if(partial + (row * LATENT + column + 32 * c), wanted) for c in range(chunks)])
        known = [Float32(cutlass.select_(w & is_finite(x), x, -Float32.inf)) for x, w in known]
        before = top
        for i in cutlass.range_constexpr(flight):
            top = cute.arch.fmax(top, known[i])
        origin = Float32(cutlass.select_(top > -Float32.inf, top, Float32(0.0)))
        scale = cute.math.exp2(before - origin, fastmath=True)
        total *= scale
        for k in cutlass.range_constexpr(8 * chunks):
            mean[k] *= scale
        for i in cutlass.range_constexpr(flight):
            weight = cute.math.exp2(known[i] - origin, fastmath=True)
            total += weight
            mask = -Int32(known[i] > -Float32.inf)
            for k in cutlass.range_constexpr(4 * chunks):
                low, high = unpack_bf16x2(words[i][k // 4][k % 4] & mask)
                mean[2 * k] += weight * low
                mean[2 * k + 1] += weight * high
    alive = Int32(top > -Float32.inf)
    share = Float32(cutlass.select_(alive != 0, cute.arch.rcp_approx(total), Float32(0.0)))
    packed = [pack_bf16x2(mean[2 * k] * share, mean[2 * k + 1] * share) for k in range(4 * chunks)]
    return [packed[4 * c : 4 * c + 4] for c in range(chunks)], alive


@cute.kernel
def mla_value(
    partial: cute.Pointer,
    lse: cute.Pointer,
    proj: cute.Pointer,
    w_uv: cute.Pointer,
    out: cute.Pointer,
    shards: Int32,
    count: Int32,
    gate_offset: Int32,
    *,
    heads: cutlass.Constexpr,
    proj_width: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    split: cutlass.Constexpr,
):
    """See the module; grid (128 / rows, heads, blocks that share the token groups)."""
    chunks = LATENT // (32 * split)  # of 32 columns, per warp
    warp_rows = rows * split // warps
    threads = 32 * warps
    tokens = 8 * tiles  # of a group
    stride = rows + PAD  # floats per token of the partial sums
    flight = 8 // chunks  # shards whose latents are in flight together: 32 registers

    tid, _, _ = cute.arch.thread_idx()
    row_tile, head, first_group = cute.arch.block_idx()
    _, _, group_step = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    quad, member = lane // 4, lane % 4
    first_row = row_tile * rows
    part, band = warp % split, warp // split  # of the columns and of the block's rows
    column = part * (32 * chunks) + 8 * member
    groups = (count + tokens - 1) // tokens
    gate_at = gate_offset + head * VALUE + first_row
    out_at = head * VALUE + first_row

    shared = cute.arch.get_dyn_smem(Float32, alignment=16)
    sums_s = shared  # [part][token][row]
    alive_s = cute.recast_ptr(sums_s + split * tokens * stride, dtype=Int32)  # [token]
    own_s = sums_s + (part * tokens * stride + band * warp_rows)

    # --- constants ------------------------------------------------------------------------------------------------
    cute.arch.griddepcontrol_launch_dependents()
    weights = []
    for i in cutlass.range_constexpr(warp_rows // 16):
        row = w_uv + ((head * VALUE + first_row + band * warp_rows + 16 * i + quad) * LATENT + column)
        weights.append(
            [(load_weight_16b(row + 32 * c), load_weight_16b(row + (8 * LATENT + 32 * c))) for c in range(chunks)]
        )
    cute.arch.griddepcontrol_wait()

    # Before the branch, although one side of it has no use for the latents: the compiler puts moves of the weights, and
    # with them a wait for their arrival, in front of the branch.
    latents = cute.make_rmem_tensor(4 * tiles * chunks, Int32)  # of the next group
    known = cute.make_rmem_tensor(tiles, Int32)
    gates = cute.make_rmem_tensor(-(-tokens * rows // (2 * threads)), Int32)  # of the next group, two per register
    fetch(latents, known, partial, lse, first_group * tokens + quad, head, column, count, heads, chunks)
    load_gates(gates, proj + gate_at, first_group * tokens, tid, count, proj_width, tokens, rows, threads)
    if shards == 1:
        for group in cutlass.range(first_group, groups, group_step, unroll=1):
            for n in cutlass.range_constexpr(tiles):
                alive = Int32(is_finite(known[n].bitcast(Float32)))
                latent = [[latents[4 * (n * chunks + c) + k] & -alive for k in range(4)] for c in range(chunks)]
                publish(own_s + 8 * n * stride, alive_s + 8 * n, products(weights, latent), alive, warp, lane, stride)
            next_token = (group + group_step) * tokens + quad
            fetch(latents, known, partial, lse, next_token, head, column, count, heads, chunks)
            cute.arch.sync_threads()
            finish(
                out + out_at, sums_s, alive_s, gates, group * tokens, tid, count, heads * VALUE, tokens, rows, threads,
                split,
            )  # fmt: skip
            if group + group_step < groups:
                next_first = (group + group_step) * tokens
                load_gates(gates, proj + gate_at, next_first, tid, count, proj_width, tokens, rows, threads)
                cute.arch.sync_threads()
    else:
        for group in cutlass.range(first_group, groups, group_step, unroll=1):
            for n in cutlass.range(tiles, unroll=1):
                token = group * tokens + 8 * n + quad
                place = Int64(token) * heads + head
                step = Int64(count) * heads
                latent, alive = merged(partial, lse, place, step, column, shards, token < count, flight, chunks)
                publish(own_s + 8 * n * stride, alive_s + 8 * n, products(weights, latent), alive, warp, lane, stride)
            cute.arch.sync_threads()
            finish(
                out + out_at, sums_s, alive_s, gates, group * tokens, tid, count, heads * VALUE, tokens, rows, threads,
                split,
            )  # fmt: skip
            if group + group_step < groups:
                next_first = (group + group_step) * tokens
                load_gates(gates, proj + gate_at, next_first, tid, count, proj_width, tokens, rows, threads)
                cute.arch.sync_threads()


@cute.jit
def load_gates(
    gates: cute.Tensor, gate: cute.Pointer, first: Int32, tid: Int32, count: Int32, width: cutlass.Constexpr,
    tokens: cutlass.Constexpr, rows: cutlass.Constexpr, threads: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Gates of the outputs that `finish` leaves to this thread."""
    for i in cutlass.range_constexpr(cute.size(gates)):
        item = tid + threads * i
        at = item // (rows // 2)
        place = Int64(first + at) * width + 2 * (item % (rows // 2))
        gates[i] = load_4b_if(gate + place, (at < tokens) & (first + at < count))


@cute.jit
def finish(
    out: cute.Pointer, sums_s: cute.Pointer, alive_s: cute.Pointer, gates: cute.Tensor, first: Int32, tid: Int32,
    count: Int32, width: cutlass.Constexpr, tokens: cutlass.Constexpr, rows: cutlass.Constexpr,
    threads: cutlass.Constexpr, split: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Sum over the parts of the columns, rounding, gate, store: two value rows of a token at a time."""
    out_pairs = cute.recast_ptr(out, dtype=Int32)
    for i in cutlass.range_constexpr(cute.size(gates)):
        item = tid + threads * i
        at, pair = item // (rows // 2), item % (rows // 2)
        if (at < tokens) & (first + at < count):
            sums = [sums_s + ((w * tokens + at) * (rows + PAD) + 2 * pair) for w in range(split)]
            low, high = paired_sum([s[0] for s in sums]), paired_sum([s[1] for s in sums])
            low, high = unpack_bf16x2(pack_bf16x2(low, high))
            gate_low, gate_high = unpack_bf16x2(gates[i])
            gated = pack_bf16x2(low * sigmoid(gate_low), high * sigmoid(gate_high))
            out_pairs[Int64(first + at) * (width // 2) + pair] = gated & -alive_s[at]


@cute.jit
def fetch(
    latents: cute.Tensor, known: cute.Tensor, partial: cute.Pointer, lse: cute.Pointer, token: Int32, head: Int32,
    column: Int32, count: Int32, heads: cutlass.Constexpr, chunks: cutlass.Constexpr,
) -> None:  # fmt: skip
    """A lane's pieces of the latents of one shard, tokens `token`, `token` + 8, ..., and their lse."""
    for n in cutlass.range_constexpr(cute.size(known)):
        place = Int64(token + 8 * n) * heads + head
        known[n] = load_4b_if(lse + place, token + 8 * n < count)
        for c in cutlass.range_constexpr(chunks):
            words = load_16b_if(partial + (place * LATENT + column + 32 * c), token + 8 * n < count)
            for k in cutlass.range_constexpr(4):
                latents[4 * (n * chunks + c) + k] = words[k]


def variant(choices: Choices) -> Variant:
    """One launch: 128 / rows blocks per head, times as many as there are token groups and room for."""
    g = choices.geometry
    rows, tiles, warps, split, ctas = (choices[name] for name in ("rows", "tiles", "warps", "split", "ctas"))
    row_tiles = VALUE // rows
    return Variant(
        launches=(
            Launch(
                name="mla_value",
                kernel=mla_value,
                arguments=("partial", "lse", "proj", "w_uv", "out", "shards", "M", "gate_offset"),
                grid=(
                    row_tiles, g.heads,
                    f"min(ceil_div(M, {8 * tiles}), max(1, {ctas} * sms // {row_tiles * g.heads}))",
                ),
                block=32 * warps,
                constants={
                    "heads": g.heads, "proj_width": g.mla_proj_rows, "rows": rows, "tiles": tiles, "warps": warps,
                    "split": split,
                },
                shared=8 * tiles * (split * (rows + PAD) + 1) * 4,
                min_ctas_per_sm=ctas,
                expects=("tensor_core",),
            ),
        ),
        requires=(f"shards <= {MAX_SHARDS}",),
    )  # fmt: skip
