"""Input projection of up to 64 tokens, sm_90a: one row tile per cluster, sums met once, at the end.

A cluster of `split` blocks shares k (split-K) and owns `rows` weight rows, so that all clusters run at once and each
streams its weights without a pause. Nothing of the tile is read twice but x: every cluster reads all of it, from L2.

    producer   one thread: TMA boxes of 64 k of the weights and of the activations into a ring of `stages` slots of two
               boxes each; before the dependency wait it fills the ring with weights, which are constant
    consumers  one or two warp groups, which divide the rows: wgmma with both operands in shared memory, tokens as the
               64 rows of A. A box has only `tokens` of them; what A's other rows read is not used
    sums       each block leaves its partial sums in shared memory, where the ring was; after a cluster barrier every
               block adds its share of them in the order of the blocks, through distributed shared memory

Floor: N K 2 bytes of weights. From L2 come also clusters x M K 2 bytes of x, and between blocks move M N split 4 bytes.
Rows beyond N and tokens beyond M read as zero and are not stored.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute
from kernels.common.cute_mma import pack_bf16x2
from kernels.common.cute_ring import arrive, expect, init_barrier, load_peer_4xf32, peer, store_f32x2, wait
from kernels.common.cute_vector import copy_box, store_8b
from kernels.common.cute_wgmma import accumulate_box

from k3_backend.aot.cuda.contract import Launch, TensorMap

BOX = 64
"""k of a box: 128 bytes of each row."""
ROW = 2 * BOX
BOXES = 2
"""Of a slot."""
TOKENS = 64
"""Rows of A."""
WIDEST = 256
"""Columns of a wgmma, and rows of a TMA box."""


@dataclass(frozen=True)
class Shape:
    """Sizes that are fixed when the kernel is compiled, and the layout of shared memory in bytes."""

    depth: int
    """K."""
    columns: int
    """N, weight rows in all."""
    rows: int
    """Weight rows of a cluster, a multiple of 8."""
    token_tiles: int
    """Tiles of 8 tokens that a box of activations holds."""
    split: int
    """Blocks of a cluster."""
    stages: int

    @property
    def tokens(self) -> int:
        return 8 * self.token_tiles

    @property
    def groups(self) -> int:
        """Warp groups that multiply; two where their shares of the rows are whole tiles of 8."""
        return 2 if self.rows % 16 == 0 else 1

    @property
    def width(self) -> int:
        """Weight rows of a warp group."""
        return self.rows // self.groups

    @property
    def threads(self) -> int:
        """Of the consumers."""
        return 128 * self.groups

    @property
    def tiles(self) -> int:
        return -(-self.columns // self.rows)

    @property
    def steps(self) -> int:
        """Slots that a block fills in all."""
        return self.depth // (BOX * BOXES * self.split)

    @property
    def box(self) -> int:
        """Bytes of a box of activations and the box of weights behind it."""
        return (self.tokens + self.rows) * ROW

    @property
    def slot(self) -> int:
        return BOXES * self.box

    @property
    def row(self) -> int:
        """Floats from token to token of partial sums: a warp's stores of fragments hit 32 different banks."""
        return self.rows + (8 if self.rows % 16 == 0 else 0)

    @property
    def barriers_at(self) -> int:
        """`full` and `empty` of every slot, behind the ring and the partial sums [tokens, row] fp32 in its place."""
        return max(self.stages * self.slot, 4 * self.tokens * self.row)

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages


@cute.jit
def copy_weights(w_map: cute.Pointer, ring: Int32, full: Int32, step: Int32, tile: Int32, rank: Int32, *,
                 shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Announce a slot's bytes, activations included, and ask for its weights; one thread."""
    s = step % shape.stages
    expect(full + 8 * s, Int32(shape.slot))
    for i in cutlass.range_constexpr(BOXES):
        k = ((rank * shape.steps + step) * BOXES + i) * BOX
        for g in cutlass.range_constexpr(shape.groups):
            target = ring + s * shape.slot + i * shape.box + (shape.tokens + g * shape.width) * ROW
            copy_box(target, w_map, k, tile * shape.rows + g * shape.width, full + 8 * s)


@cute.jit
def copy_tokens(x_map: cute.Pointer, ring: Int32, full: Int32, step: Int32, first_token: Int32, rank: Int32, *,
                shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Ask for a slot's activations; one thread, behind the dependency wait."""
    s = step % shape.stages
    for i in cutlass.range_constexpr(BOXES):
        k = ((rank * shape.steps + step) * BOXES + i) * BOX
        copy_box(ring + s * shape.slot + i * shape.box, x_map, k, first_token, full + 8 * s)


@cute.jit
def store_partial(acc: cute.Tensor, partial: Int32, warp: Int32, lane: Int32, *, shape: cutlass.Constexpr) -> None:
    """A warp's sums, 16 tokens x `width` rows, to shared memory as [token][row]."""
    for half in cutlass.range_constexpr(2):
        token = 16 * (warp % 4) + 8 * half + lane // 4
        place = partial + 4 * (token * shape.row + (warp // 4) * shape.width + 2 * (lane % 4))
        if token < shape.tokens:
            for n in cutlass.range_constexpr(shape.width // 8):
                store_f32x2(place + 32 * n, acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1])


@cute.jit
def finish(out: cute.Pointer, partial: Int32, tile: Int32, rank: Int32, first_token: Int32, m: Int32, tid: Int32, *,
           shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Add the blocks' sums of this block's share and store them; a thread has four rows of a token at a time."""
    quads = shape.rows // 4
    items = shape.tokens * quads
    turns = -(-items // (shape.split * shape.threads))
    parts = cute.make_rmem_tensor(4 * turns * shape.split, Float32)
    for b in cutlass.range_constexpr(shape.split):
        source = peer(partial, Int32(b))
        for i in cutlass.range_constexpr(turns):
            item = cutlass.min((i * shape.split + rank) * shape.threads + tid, items - 1)
            values = load_peer_4xf32(source + 4 * ((item // quads) * shape.row + 4 * (item % quads)))
            for j in cutlass.range_constexpr(4):
                parts[4 * (i * shape.split + b) + j] = values[j]
    for i in cutlass.range_constexpr(turns):
        total = [Float32(0.0)] * 4
        for b in cutlass.range_constexpr(shape.split):
            for j in cutlass.range_constexpr(4):
                total[j] = total[j] + parts[4 * (i * shape.split + b) + j]
        item = (i * shape.split + rank) * shape.threads + tid
        token, column = first_token + item // quads, tile * shape.rows + 4 * (item % quads)
        if (item < items) & (token < m) & (column < shape.columns):
            low, high = pack_bf16x2(total[0], total[1]), pack_bf16x2(total[2], total[3])
            store_8b(out + (Int64(token) * shape.columns + column), low, high)


@cute.kernel
def input_projection(
    x_map: cute.Pointer, w_map: cute.Pointer, out: cute.Pointer, m: Int32, *, shape: cutlass.Constexpr
):  # fmt: skip
    """One cluster per row tile; token blocks are the grid's third dimension."""
    stages, steps = shape.stages, shape.steps
    tid, _, _ = cute.arch.thread_idx()
    rank, tile, token_block = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    first_token = token_block * shape.tokens

    ring = cute.arch.get_dyn_smem(Float32, alignment=1024).toint()
    full = ring + shape.barriers_at
    empty = full + 8 * stages
    if tid == shape.threads:
        for s in cutlass.range_constexpr(stages):
            init_barrier(full + 8 * s, Int32(1))
            init_barrier(empty + 8 * s, Int32(4 * shape.groups))
        cute.arch.mbarrier_init_fence()
        for s in cutlass.range_constexpr(min(stages, steps)):
            copy_weights(w_map, ring, full, Int32(s), tile, rank, shape=shape)
    cute.arch.sync_threads()
    # no room for the next launch's blocks before these end, so they may come as early as they can
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    if warp == 4 * shape.groups:
        if lane == 0:
            for s in cutlass.range_constexpr(min(stages, steps)):
                copy_tokens(x_map, ring, full, Int32(s), first_token, rank, shape=shape)
            for step in cutlass.range(stages, steps, unroll=1):
                wait(empty + 8 * (step % stages), (step // stages - 1) & 1)
                copy_weights(w_map, ring, full, step, tile, rank, shape=shape)
                copy_tokens(x_map, ring, full, step, first_token, rank, shape=shape)
        cute.arch.sync_warp()
    else:
        acc = cute.make_rmem_tensor(shape.width // 2, Float32)
        acc.fill(0.0)
        for step in cutlass.range(steps, unroll=1):
            s = step % stages
            wait(full + 8 * s, (step // stages) & 1)
            for i in cutlass.range_constexpr(BOXES):
                box = ring + s * shape.slot + i * shape.box
                weights = box + (shape.tokens + (warp // 4) * shape.width) * ROW
                sums = accumulate_box([acc[j] for j in range(shape.width // 2)], box, weights, columns=shape.width)
                for j in cutlass.range_constexpr(shape.width // 2):
                    acc[j] = sums[j]
            if lane == 0:
                arrive(empty + 8 * s)
        # every warp has read the ring's last slots, in whose place the sums go
        cute.arch.barrier(barrier_id=1, number_of_threads=shape.threads)
        store_partial(acc, ring, warp, lane, shape=shape)
    cute.arch.cluster_arrive(aligned=True)
    cute.arch.cluster_wait()
    if warp < 4 * shape.groups:
        finish(out, ring, tile, rank, first_token, m, tid, shape=shape)
    # a block's sums stay until all have read them
    cute.arch.cluster_arrive_relaxed(aligned=True)
    cute.arch.cluster_wait()


def launch(shape: Shape) -> Launch:
    """One launch of a cluster per row tile."""
    if shape.depth != BOX * BOXES * shape.split * shape.steps:
        raise ValueError(f"K = {shape.depth} does not divide into slots: {shape}")
    if shape.rows % 8 or shape.width > WIDEST or shape.tokens + shape.rows < TOKENS:
        what = f"{shape.rows} rows, {shape.tokens} tokens"
        rule = f"a multiple of 8 rows, up to {WIDEST} for a warp group, at least {TOKENS} of both together"
        raise ValueError(f"{what}; expected {rule}")
    return Launch(
        name="input_projection",
        kernel=input_projection,
        arguments=(TensorMap("x", shape.tokens, BOX), TensorMap("w", shape.width, BOX), "out", "M"),
        grid=(shape.split, shape.tiles, f"ceil_div(M, {shape.tokens})"),
        block=shape.threads + 32,
        constants={"shape": shape},
        cluster=shape.split,
        shared=shape.shared_bytes,
        expects=("tensor_core", "bulk_copy", "cluster"),
    )
