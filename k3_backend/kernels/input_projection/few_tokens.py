"""Input projection of at most 16 tokens at once: fragments of the activations stay in registers of single warps.

Activations stay in registers, weights stream past them. A cluster of `split` blocks shares k (split-K): each block owns
a slab of k, and of it every consumer warp owns two boxes (128 k) per chunk, whose activation fragments it loads once.

    producer   one thread: TMA boxes [rows, 64 k] of the weights of one row tile and chunk into a ring of `stages` slots
    consumer   7 warps; with k permuted equally on both operands (`cute_mma`), a 16-byte piece of a row is fragment
               registers of two MMAs. Lane t takes pieces 2t and 2t + 1, which the 128-byte swizzle spreads over banks
    row tile   sums of the warps through shared memory, then of the blocks through distributed shared memory: block b
               owns rows / split rows, receives them from all blocks (st.async) and adds them in the order of the blocks
    clusters   take row tiles in turns; a tile's sums are finished while the next tile is multiplied

A warp's slot holds 1792 bytes of every row and the blocks of a cluster read whole rows at about the same time: DRAM
pages are read in long pieces, whatever the number of tokens. Before the dependency wait the producer fills the ring
with weights, which are constant. Floor: n * k * 2 bytes of weights; x and out are below 2 % of it for M <= 64.
Rows beyond N and tokens beyond M read as zero or as a neighbour and are not stored.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from kernels.common.cute_mma import mma_m16n8k16
from kernels.common.cute_ring import arrive, expect, init_barrier, peer, wait, wait_cluster
from kernels.common.cute_vector import copy_box, load_4xb32, load_shared_4xb32, send_f32

from k3_backend.aot.cuda.contract import Launch, TensorMap

BOX = 64
"""k of a box: 128 bytes of each row."""
ROW = 2 * BOX
WARPS = 7
"""Consumer warps: 7168 = 7 * 2^10."""
CHUNK = 2 * WARPS
"""Boxes of a slot, two for each consumer warp."""
CONSUMERS = 1
"""Id of the named barrier of the consumer warps."""
PAD = 4
"""Floats between columns of partial sums, so that a warp's fragment stores hit 32 different banks."""


@dataclass(frozen=True)
class Shape:
    """Sizes that are fixed when the kernel is compiled, and the layout of shared memory in bytes."""

    depth: int
    """K."""
    columns: int
    """N, weight rows in all."""
    rows: int
    """Weight rows of a tile; their sums are those of whole MMA tiles, of which rows beyond are not used."""
    token_tiles: int
    """Tiles of 8 activation rows."""
    split: int
    stages: int
    ctas: int
    """Blocks per multiprocessor."""

    @property
    def tiles(self) -> int:
        """MMA tiles of 16 rows."""
        return -(-self.rows // 16)

    @property
    def tokens(self) -> int:
        return 8 * self.token_tiles

    @property
    def chunks(self) -> int:
        """Slots per row tile."""
        return self.depth // (BOX * CHUNK * self.split)

    @property
    def row_tiles(self) -> int:
        return -(-self.columns // self.rows)

    @property
    def box(self) -> int:
        """Bytes from box to box, a multiple of the swizzle's 1024."""
        return 16 * self.tiles * ROW

    @property
    def slot(self) -> int:
        return CHUNK * self.box

    @property
    def column(self) -> int:
        """Floats from token to token of a warp's sums."""
        return 16 * self.tiles + PAD

    @property
    def share(self) -> int:
        """Rows of a tile that one block finishes."""
        return self.rows // self.split

    @property
    def sums(self) -> int:
        """Values that a block finishes per tile."""
        return self.share * self.tokens

    @property
    def partial_at(self) -> int:
        """Sums of the warps: [WARPS, tokens, 16 tiles + PAD] fp32."""
        return self.stages * self.slot

    @property
    def received_at(self) -> int:
        """Sums of the blocks, for two tiles: [2, split, tokens, share] fp32."""
        return self.partial_at + 4 * WARPS * self.tokens * self.column

    @property
    def barriers_at(self) -> int:
        """`full` and `empty` of every slot, then `received` of both halves."""
        return self.received_at + 8 * self.split * self.sums

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages + 16


@cute.jit
def produce(w_map: cute.Pointer, ring: Int32, full: Int32, tile: Int32, chunk: Int32, rank: Int32, *,
            shape: cutlass.Constexpr) -> None:  # fmt: skip
    """One slot of weights; one thread."""
    expect(full, Int32(CHUNK * shape.rows * ROW))
    for i in cutlass.range_constexpr(CHUNK):
        k = ((rank * shape.chunks + chunk) * CHUNK + i) * BOX
        copy_box(ring + i * shape.box, w_map, k, tile * shape.rows, full)


@cute.jit
def load_fragments(fragments: cute.Tensor, x: cute.Pointer, first_token: Int32, m: Int32, rank: Int32, warp: Int32,
                   lane: Int32, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """A warp's activations of all its boxes: [chunks, box, half, token_tiles, 4] packed bf16."""
    for n in cutlass.range_constexpr(shape.token_tiles):
        row = x + Int64(cutlass.min(first_token + 8 * n + lane // 4, m - 1)) * shape.depth
        for piece in cutlass.range_constexpr(4 * shape.chunks):
            box = (rank * shape.chunks + piece // 4) * CHUNK + 2 * warp + (piece // 2) % 2
            words = load_4xb32(row + (BOX * box + 8 * (2 * (lane % 4) + piece % 2)))
            for i in cutlass.range_constexpr(4):
                fragments[4 * (piece * shape.token_tiles + n) + i] = words[i]


@cute.jit
def store_partial(mine: cute.Pointer, acc: cute.Tensor, lane: Int32, *, shape: cutlass.Constexpr) -> None:
    """A warp's sums of a tile to shared memory, [token][row]."""
    for tile in cutlass.range_constexpr(shape.tiles):
        for n in cutlass.range_constexpr(shape.token_tiles):
            for i in cutlass.range_constexpr(4):
                token, row = 8 * n + 2 * (lane % 4) + i % 2, 16 * tile + lane // 4 + 8 * (i // 2)
                mine[token * shape.column + row] = acc[4 * (tile * shape.token_tiles + n) + i]


@cute.jit
def multiply(acc: cute.Tensor, x: cute.Tensor, at: cutlass.Constexpr, weights_s: Int32, *,
             shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Add a piece of 32 k: acc [tiles, token_tiles, 4]; x fragments of the piece begin at register `at`."""
    for tile in cutlass.range_constexpr(shape.tiles):
        low, high = load_shared_4xb32(weights_s + 16 * tile * ROW), load_shared_4xb32(weights_s + (16 * tile + 8) * ROW)
        for n in cutlass.range_constexpr(shape.token_tiles):
            i, b = 4 * (tile * shape.token_tiles + n), at + 4 * n
            c = (acc[i], acc[i + 1], acc[i + 2], acc[i + 3])
            c = mma_m16n8k16(c, (low[0], high[0], low[1], high[1]), (x[b], x[b + 1]))
            c = mma_m16n8k16(c, (low[2], high[2], low[3], high[3]), (x[b + 2], x[b + 3]))
            for j in cutlass.range_constexpr(4):
                acc[i + j] = c[j]


@cute.jit
def share_sums(memory: cute.Pointer, received: Int32, half: Int32, rank: Int32, tid: Int32, *,
               shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Add the warps' sums of a tile and send each to the block that owns its row; a thread per (token, row)."""
    partial = memory + shape.partial_at // 4
    for i in cutlass.range_constexpr((shape.tokens * shape.rows + 32 * WARPS - 1) // (32 * WARPS)):
        item = tid + 32 * WARPS * i
        if item < shape.tokens * shape.rows:
            token, row = item // shape.rows, item % shape.rows
            total = Float32(0.0)
            for warp in cutlass.range_constexpr(WARPS):
                total += partial[(warp * shape.tokens + token) * shape.column + row]
            owner, place = row // shape.share, token * shape.share + row % shape.share
            target = memory.toint() + shape.received_at + 4 * ((half * shape.split + rank) * shape.sums + place)
            send_f32(peer(target, owner), total, peer(received, owner))


@cute.jit
def finish(out: cute.Pointer, memory: cute.Pointer, half: Int32, tile: Int32, rank: Int32, first_token: Int32,
           m: Int32, tid: Int32, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Add the blocks' sums of this block's rows of a tile and store them."""
    sums = memory + shape.received_at // 4
    for i in cutlass.range_constexpr((shape.sums + 32 * WARPS - 1) // (32 * WARPS)):
        item = tid + 32 * WARPS * i
        if item < shape.sums:
            total = Float32(0.0)
            for block in cutlass.range_constexpr(shape.split):
                total += sums[(half * shape.split + block) * shape.sums + item]
            token = first_token + item // shape.share
            column = tile * shape.rows + rank * shape.share + item % shape.share
            if (token < m) & (column < shape.columns):
                out[Int64(token) * shape.columns + column] = total.to(BFloat16)


@cute.kernel
def input_projection(
    x: cute.Pointer, w_map: cute.Pointer, out: cute.Pointer, m: Int32, *, shape: cutlass.Constexpr
):  # fmt: skip
    """One cluster per worker; workers take row tiles in turns, token blocks are the grid's third dimension."""
    stages, split, chunks = shape.stages, shape.split, shape.chunks
    tid, _, _ = cute.arch.thread_idx()
    rank, worker, token_block = cute.arch.block_idx()
    _, workers, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    first_token = token_block * shape.tokens
    turns = (shape.row_tiles - worker + workers - 1) // workers

    memory = cute.arch.get_dyn_smem(Float32, alignment=1024)
    ring = memory.toint()
    full = ring + shape.barriers_at
    empty = full + 8 * stages
    received = empty + 8 * stages
    if tid == 32 * WARPS:
        for s in cutlass.range_constexpr(stages):
            init_barrier(full + 8 * s, Int32(1))
            init_barrier(empty + 8 * s, Int32(WARPS))
        for half in cutlass.range_constexpr(2):
            init_barrier(received + 8 * half, Int32(1))
        cute.arch.mbarrier_init_fence()
        for s in cutlass.range_constexpr(stages):
            if s < turns * chunks:
                tile = worker + (s // chunks) * workers
                produce(w_map, ring + s * shape.slot, full + 8 * s, tile, Int32(s % chunks), rank, shape=shape)
    cute.arch.sync_threads()
    if cutlass.const_expr(split > 1):
        cute.arch.cluster_arrive_relaxed(aligned=True)
        cute.arch.cluster_wait()  # the barriers of all blocks exist
    cute.arch.griddepcontrol_wait()

    if warp == WARPS:
        if lane == 0:
            for step in cutlass.range(stages, turns * chunks, unroll=1):
                s = step % stages
                wait(empty + 8 * s, (step // stages - 1) & 1)
                tile = worker + (step // chunks) * workers
                produce(w_map, ring + s * shape.slot, full + 8 * s, tile, step % chunks, rank, shape=shape)
        cute.arch.sync_warp()
        cute.arch.griddepcontrol_launch_dependents()
    else:
        quad_row, quad_lane = lane // 4, lane % 4
        fragments = cute.make_rmem_tensor(16 * shape.token_tiles * chunks, Int32)
        load_fragments(fragments, x, first_token, m, rank, warp, lane, shape=shape)
        mine = memory + (shape.partial_at // 4 + warp * shape.tokens * shape.column)
        for turn in cutlass.range(turns, unroll=1):
            acc = cute.make_rmem_tensor(4 * shape.tiles * shape.token_tiles, Float32)
            acc.fill(0.0)
            for chunk in cutlass.range_constexpr(chunks):
                step = turn * chunks + chunk
                s = step % stages
                wait(full + 8 * s, (step // stages) & 1)
                for piece in cutlass.range_constexpr(4):
                    box = ring + s * shape.slot + (2 * warp + piece // 2) * shape.box
                    weights_s = box + quad_row * ROW + 16 * ((2 * quad_lane + piece % 2) ^ quad_row)
                    at = 4 * (4 * chunk + piece) * shape.token_tiles
                    multiply(acc, fragments, at, weights_s, shape=shape)
                cute.arch.sync_warp()
                if lane == 0:
                    arrive(empty + 8 * s)
            half = turn & 1
            if turn > 0:
                wait_cluster(received + 8 * (1 - half), ((turn - 1) // 2) & 1)
                finish(out, memory, 1 - half, worker + (turn - 1) * workers, rank, first_token, m, tid, shape=shape)
            if tid == 0:
                expect(received + 8 * half, Int32(4 * split * shape.sums))
            # also: every warp has read the sums of two turns ago and the partial sums of the last turn
            cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=32 * WARPS)
            store_partial(mine, acc, lane, shape=shape)
            cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=32 * WARPS)
            share_sums(memory, received + 8 * half, half, rank, tid, shape=shape)
        if turns > 0:
            last = (turns - 1) & 1
            wait_cluster(received + 8 * last, ((turns - 1) // 2) & 1)
            finish(out, memory, last, worker + (turns - 1) * workers, rank, first_token, m, tid, shape=shape)


def launch(shape: Shape) -> Launch:
    """One launch of as many clusters as find room, at most `ctas` blocks per multiprocessor."""
    if shape.depth != BOX * CHUNK * shape.split * shape.chunks or shape.rows % shape.split:
        raise ValueError(f"K = {shape.depth} or the rows do not divide: {shape}")
    return Launch(
        name="input_projection",
        kernel=input_projection,
        arguments=("x", TensorMap("w", shape.rows, BOX), "out", "M"),
        grid=(
            shape.split,
            f"min({shape.row_tiles}, clusters, max(1, sms * {shape.ctas} // {shape.split}))",
            f"ceil_div(M, {shape.tokens})",
        ),
        block=32 * (WARPS + 1),
        constants={"shape": shape},
        cluster=shape.split,
        shared=shape.shared_bytes,
        min_ctas_per_sm=shape.ctas,
        expects=("tensor_core", "bulk_copy", *(("cluster",) if shape.split > 1 else ())),
    )
