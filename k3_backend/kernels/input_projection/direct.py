"""Input projection of at most 32 tokens at once: fragments of the activations stay in registers of single warps.

A cluster of `split` blocks shares k (split-K): each block owns a slab of k, and of it every consumer warp owns two
boxes (128 k) per chunk, whose activation fragments it loads once.

    producer   one thread: TMA boxes [rows, 64 k] of the weights of one row tile and chunk into a ring of `stages` slots
    consumer   7 warps; with k permuted equally on both operands (`cute_mma`), a 16-byte piece of a row is fragment
               registers of two MMAs. Lane t takes pieces 2t and 2t + 1, which the 128-byte swizzle spreads over banks
    row tile   block b owns rows / split rows. Every warp sends its sums to their owners by bulk copies; a tile later
               one warp, in turns, adds the 7 split parts in a fixed order and stores them. No barrier of the block
               stands between tiles: buffers for two tiles are handed back over the cluster
    clusters   take row tiles in turns

A warp's slot holds 1792 bytes of every row and the blocks of a cluster read whole rows at about the same time: DRAM
pages are read in long pieces, whatever the number of tokens. The first `early` slots of weights, which are constant,
are requested before the dependency wait, the others behind the activations' loads, which would have to stand in line
behind them. With `residents` above `ctas` the next launch's blocks start when the last weights are on their way.
Floor: n * k * 2 bytes of weights; x and out are below 2 % of it for M <= 64.
Rows beyond N and tokens beyond M read as zero or as a neighbour and are not stored.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute
from kernels.common.cute_mma import mma_m16n8k16
from kernels.common.cute_ring import (
    arrive,
    arrive_peer,
    bulk_send,
    expect,
    init_barrier,
    load_f32x2,
    order_generic_before_bulk,
    peer,
    store_f32x2,
    wait,
    wait_cluster,
)
from kernels.common.cute_vector import copy_box, load_4xb32, load_shared_4xb32, load_shared_4xf32, store_shared_4xf32

from k3_backend.aot.cuda.contract import Launch, TensorMap

BOX = 64
"""k of a box: 128 bytes of each row."""
ROW = 2 * BOX
WARPS = 7
"""Consumer warps: 7168 = 7 * 2^10."""
CHUNK = 2 * WARPS
"""Boxes of a slot, two for each consumer warp."""
BUFFERS = 3
"""Tiles whose sums may be under way."""
LAG = 1
"""Tiles between sending sums and adding them: their way to the owners is hidden behind other tiles."""


@dataclass(frozen=True)
class Shape:
    """Sizes that are fixed when the kernel is compiled, and the layout of shared memory in bytes."""

    depth: int
    """K."""
    columns: int
    """N, weight rows in all."""
    rows: int
    """Weight rows of a tile; their sums are those of whole MMA tiles, of which rows beyond are not stored."""
    token_tiles: int
    """Tiles of 8 activation rows: 1 or an even number."""
    split: int
    stages: int
    early: int
    """Slots that are requested before the activations."""
    residents: int
    """Blocks for which a multiprocessor has room."""

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
    def owned(self) -> int:
        """Rows of an MMA tile that one block finishes."""
        return 16 // self.split

    @property
    def message(self) -> int:
        """Tokens of one message: two of one token tile, or two of each of a pair of them."""
        return min(4, 2 * self.token_tiles)

    @property
    def messages(self) -> int:
        """Of a lane, per row of an MMA tile."""
        return -(-self.token_tiles // 2)

    @property
    def items(self) -> int:
        """Messages of a warp for one block and tile: [tiles, messages, owned rows, 4 lanes]."""
        return self.tiles * self.messages * self.owned * 4

    @property
    def slab(self) -> int:
        return 4 * self.message * self.items

    @property
    def sources(self) -> int:
        return WARPS * self.split

    @property
    def staged_at(self) -> int:
        """Sums of this block's warps: [BUFFERS, WARPS, split owners, items, message] fp32."""
        return self.stages * self.slot

    @property
    def received_at(self) -> int:
        """Sums of all blocks' warps: [BUFFERS, sources, items, message] fp32."""
        return self.staged_at + BUFFERS * self.sources * self.slab

    @property
    def barriers_at(self) -> int:
        """`full` and `empty` of every slot, then `received` and `free` of every buffer, then `asked`."""
        return self.received_at + BUFFERS * self.sources * self.slab

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages + 16 * BUFFERS + 8


@cute.jit
def produce(w_map: cute.Pointer, ring: Int32, full: Int32, empty: Int32, rank: Int32, worker: Int32, workers: Int32,
            slots: Int32, asked: Int32, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """All slots of weights of this block, in order; one thread."""
    for i in cutlass.range(slots, unroll=1):
        if i == shape.early:
            wait(asked, Int32(0))
        s = i % shape.stages
        wait(empty + 8 * s, (i // shape.stages + 1) & 1)
        expect(full + 8 * s, Int32(CHUNK * shape.rows * ROW))
        row = (worker + (i // shape.chunks) * workers) * shape.rows
        first = (rank * shape.chunks + i % shape.chunks) * CHUNK
        for box in cutlass.range_constexpr(CHUNK):
            copy_box(ring + s * shape.slot + box * shape.box, w_map, (first + box) * BOX, row, full + 8 * s)


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
def send_sums(acc: cute.Tensor, staged: Int32, target: Int32, received: Int32, lane: Int32, *,
              shape: cutlass.Constexpr) -> None:  # fmt: skip
    """A warp's sums of a tile to the owners of its rows: [owner][item]; an item has a row and `message` tokens."""
    for half in cutlass.range_constexpr(2):
        row = lane // 4 + 8 * half
        owner, local = row // shape.owned, row % shape.owned
        for tile in cutlass.range_constexpr(shape.tiles):
            for pair in cutlass.range_constexpr(shape.messages):
                item = ((tile * shape.messages + pair) * shape.owned + local) * 4 + lane % 4
                at = 4 * (tile * shape.token_tiles + 2 * pair) + 2 * half
                place = staged + owner * shape.slab + 4 * shape.message * item
                if cutlass.const_expr(shape.message == 4):
                    store_shared_4xf32(place, (acc[at], acc[at + 1], acc[at + 4], acc[at + 5]))
                else:
                    store_f32x2(place, acc[at], acc[at + 1])
    order_generic_before_bulk()
    cute.arch.sync_warp()
    if lane < shape.split:
        bulk_send(peer(target, lane), staged + lane * shape.slab, Int32(shape.slab), peer(received, lane))


@cute.jit
def finish(out: cute.Pointer, sums: Int32, received: Int32, free: Int32, tile: Int32, rank: Int32, first_token: Int32,
           m: Int32, lane: Int32, again: Boolean, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Add the parts of this block's rows of a tile, hand the buffer back if it is used `again`, store; one warp."""
    steps = (shape.items + 31) // 32
    total = cute.make_rmem_tensor(shape.message * steps, Float32)
    total.fill(0.0)
    for i in cutlass.range_constexpr(steps):
        item = lane + 32 * i
        if item < shape.items:
            for source in cutlass.range_constexpr(shape.sources):
                place = sums + source * shape.slab + 4 * shape.message * item
                part = load_shared_4xf32(place) if cutlass.const_expr(shape.message == 4) else load_f32x2(place)
                for j in cutlass.range_constexpr(shape.message):
                    at = shape.message * i + j
                    total[at] = total[at] + part[j]
    cute.arch.sync_warp()
    if again:
        if lane == 0:
            expect(received, Int32(shape.sources * shape.slab))
        cute.arch.sync_warp()
        if lane < shape.split:
            arrive_peer(peer(free, lane))
    for i in cutlass.range_constexpr(steps):
        item = lane + 32 * i
        quad, local, group = item % 4, (item // 4) % shape.owned, item // (4 * shape.owned)
        row = 16 * (group // shape.messages) + rank * shape.owned + local
        column = tile * shape.rows + row
        for j in cutlass.range_constexpr(shape.message):
            token = first_token + 16 * (group % shape.messages) + 8 * (j // 2) + 2 * quad + j % 2
            if (item < shape.items) & (row < shape.rows) & (column < shape.columns) & (token < m):
                out[Int64(token) * shape.columns + column] = total[shape.message * i + j].to(BFloat16)


@cute.kernel
def input_projection(
    x: cute.Pointer, w_map: cute.Pointer, out: cute.Pointer, m: Int32, *, shape: cutlass.Constexpr
):  # fmt: skip
    """One cluster per worker; workers take row tiles in turns, token blocks are the grid's third dimension."""
    stages, chunks = shape.stages, shape.chunks
    tid, _, _ = cute.arch.thread_idx()
    rank, worker, token_block = cute.arch.block_idx()
    _, workers, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    first_token = token_block * shape.tokens
    turns = (shape.row_tiles - worker + workers - 1) // workers

    ring = cute.arch.get_dyn_smem(Float32, alignment=1024).toint()
    full = ring + shape.barriers_at
    empty = full + 8 * stages
    received = empty + 8 * stages
    free = received + 8 * BUFFERS
    asked = free + 8 * BUFFERS
    sums, tile_sums = ring + shape.received_at, shape.sources * shape.slab
    if tid == 0:
        for s in cutlass.range_constexpr(stages):
            init_barrier(full + 8 * s, Int32(1))
            init_barrier(empty + 8 * s, Int32(WARPS))
        for b in cutlass.range_constexpr(BUFFERS):
            init_barrier(received + 8 * b, Int32(1))
            init_barrier(free + 8 * b, Int32(shape.split))
        init_barrier(asked, Int32(WARPS))
        cute.arch.mbarrier_init_fence()
        for b in cutlass.range_constexpr(BUFFERS):
            expect(received + 8 * b, Int32(tile_sums))
    cute.arch.sync_threads()
    cute.arch.cluster_arrive_relaxed(aligned=True)

    if warp == WARPS:
        if lane == 0:
            produce(w_map, ring, full, empty, rank, worker, workers, turns * chunks, asked, shape=shape)
        cute.arch.sync_warp()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_wait()
    else:
        cute.arch.griddepcontrol_wait()
        cute.arch.cluster_wait()  # the barriers of all blocks exist
        quad_row, quad_lane = lane // 4, lane % 4
        fragments = cute.make_rmem_tensor(16 * shape.token_tiles * chunks, Int32)
        load_fragments(fragments, x, first_token, m, rank, warp, lane, shape=shape)
        if lane == 0:
            arrive(asked)
        staged = ring + shape.staged_at + warp * shape.split * shape.slab
        mine = sums + (rank * WARPS + warp) * shape.slab
        for turn in cutlass.range(turns + LAG, unroll=1):
            if turn < turns:
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
                b = turn % BUFFERS
                if turn >= BUFFERS:
                    wait_cluster(free + 8 * b, (turn // BUFFERS + 1) & 1)
                send_sums(
                    acc, staged + b * tile_sums, mine + b * tile_sums, received + 8 * b, lane, shape=shape
                )  # fmt: skip
            done = turn - LAG
            if (done >= 0) & (warp == turn % WARPS):
                b = done % BUFFERS
                wait_cluster(received + 8 * b, (done // BUFFERS) & 1)
                tile = worker + done * workers
                # nobody waits for the last ones, and a block that has ended must not be sent to
                finish(
                    out, sums + b * tile_sums, received + 8 * b, free + 8 * b, tile, rank, first_token, m, lane,
                    done + BUFFERS < turns, shape=shape,
                )  # fmt: skip
    # all sums have reached their owners: from a block that has ended nothing can be copied
    cute.arch.cluster_arrive_relaxed(aligned=True)
    cute.arch.cluster_wait()


def launch(shape: Shape, ctas: int) -> Launch:
    """One launch of as many clusters as find room, at most `ctas` blocks per multiprocessor."""
    if shape.depth != BOX * CHUNK * shape.split * shape.chunks:
        raise ValueError(f"K = {shape.depth} does not divide: {shape}")
    if shape.token_tiles > 1 and shape.token_tiles % 2:
        raise ValueError(f"{shape.token_tiles} token tiles; expected 1 or an even number")
    if shape.early > shape.stages:
        raise ValueError(f"{shape.early} early slots of {shape.stages}")
    if shape.residents < ctas:
        raise ValueError(f"{ctas} blocks per multiprocessor, but room for {shape.residents}")
    return Launch(
        name="input_projection",
        kernel=input_projection,
        arguments=("x", TensorMap("w", shape.rows, BOX), "out", "M"),
        grid=(
            shape.split,
            f"min({shape.row_tiles}, max(1, clusters * {ctas} // {shape.residents}))",
            f"ceil_div(M, {shape.tokens})",
        ),
        block=32 * (WARPS + 1),
        constants={"shape": shape},
        cluster=shape.split,
        shared=shape.shared_bytes,
        min_ctas_per_sm=shape.residents,
        expects=("tensor_core", "bulk_copy", "cluster"),
    )
