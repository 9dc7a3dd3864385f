"""Input projection of up to 64 tokens, sm_90a: one row tile per cluster, sums met once, at the end.

A cluster of `split` blocks shares k (split-K) and owns `rows` weight rows, so that all clusters run at once and each
streams its weights without a pause. Nothing of the tile is read twice but x: every cluster reads all of it, from L2.

    producer   one thread: TMA boxes of 64 k of the weights and of the activations into a ring of `stages` slots of two
               boxes each; before the dependency wait it fills the ring with weights, which are constant
    groups     two warp groups; group g multiplies box g of every slot by wgmma, both operands in shared memory, tokens
               as the 64 rows of A. A box has only `tokens` of them; what A's other rows read is not used
    sums       the groups swap halves of their sums, leave the totals where the ring was, and send each block of the
               cluster those of its tokens by one bulk copy; it adds them in the order of the blocks

Floor: N K 2 bytes of weights. From L2 come also clusters x M K 2 bytes of x, and between blocks move M N split 4 bytes.
Rows beyond N and tokens beyond M read as zero and are not stored.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute
from kernels.common.cute_mma import pack_bf16x2
from kernels.common.cute_ring import (
    arrive,
    bulk_send,
    expect,
    init_barrier,
    order_generic_before_bulk,
    peer,
    store_f32x2,
    wait,
    wait_cluster,
)
from kernels.common.cute_vector import copy_box, fetch_map, load_shared_4xf32, store_8b, store_shared_4xf32
from kernels.common.cute_wgmma import accumulate_box

from k3_backend.aot.cuda.contract import Launch, TensorMap

BOX = 64
"""k of a box: 128 bytes of each row."""
ROW = 2 * BOX
TOKENS = 64
"""Rows of A."""
GROUPS = 2
"""Warp groups that multiply, and boxes of a slot."""
THREADS = 128 * GROUPS
"""Of the groups."""
MOST_ROWS = 216
"""Half of them are registers of sums."""
SUMS = 1
"""Id of the named barrier of the groups."""


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
    def owned(self) -> int:
        """Tokens that a block finishes."""
        return self.tokens // self.split

    @property
    def row_tiles(self) -> int:
        return -(-self.columns // self.rows)

    @property
    def steps(self) -> int:
        """Slots that a block fills in all."""
        return self.depth // (BOX * GROUPS * self.split)

    @property
    def box(self) -> int:
        """Bytes of a box of activations and the box of weights behind it."""
        return (self.tokens + self.rows) * ROW

    @property
    def slot(self) -> int:
        return GROUPS * self.box

    @property
    def row(self) -> int:
        """Floats from token to token of sums: a warp's stores of fragments hit 32 different banks."""
        return self.rows + (8 if self.rows % 16 == 0 else 0)

    @property
    def slab(self) -> int:
        """Bytes of a block's sums for one block: [owned, row] fp32."""
        return 4 * self.owned * self.row

    @property
    def swapped_at(self) -> int:
        """Sums of one group for the other: [rows / 8, 128 threads, 4] fp32.

        In place of the ring, behind the block's sums [tokens, row] fp32.
        """
        return 4 * self.tokens * self.row

    @property
    def received_at(self) -> int:
        """Sums of all blocks: [split, owned, row] fp32."""
        return max(self.stages * self.slot, self.swapped_at + self.rows // 8 * 128 * 16)

    @property
    def barriers_at(self) -> int:
        """`full` and `empty` of every slot, then `received`."""
        return self.received_at + self.split * self.slab

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages + 8


@cute.jit
def copy_weights(w_map: cute.Pointer, ring: Int32, full: Int32, step: Int32, tile: Int32, rank: Int32, *,
                 shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Announce a slot's bytes, activations included, and ask for its weights; one thread."""
    s = step % shape.stages
    expect(full + 8 * s, Int32(shape.slot))
    for i in cutlass.range_constexpr(GROUPS):
        k = ((rank * shape.steps + step) * GROUPS + i) * BOX
        target = ring + s * shape.slot + i * shape.box + shape.tokens * ROW
        copy_box(target, w_map, k, tile * shape.rows, full + 8 * s)


@cute.jit
def copy_tokens(x_map: cute.Pointer, ring: Int32, full: Int32, step: Int32, first_token: Int32, rank: Int32, *,
                shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Ask for a slot's activations; one thread, behind the dependency wait."""
    s = step % shape.stages
    for i in cutlass.range_constexpr(GROUPS):
        k = ((rank * shape.steps + step) * GROUPS + i) * BOX
        copy_box(ring + s * shape.slot + i * shape.box, x_map, k, first_token, full + 8 * s)


@cute.jit
def give(acc: cute.Tensor, swapped: Int32, thread: Int32, first: cutlass.Constexpr, last: cutlass.Constexpr) -> None:
    """Sums of the tiles first .. last - 1, of 8 rows each, for the same thread of the other group."""
    for n in cutlass.range_constexpr(first, last):
        mine = (acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3])
        store_shared_4xf32(swapped + 16 * (128 * n + thread), mine)


@cute.jit
def keep(acc: cute.Tensor, swapped: Int32, sums: Int32, thread: Int32, first: cutlass.Constexpr,
         last: cutlass.Constexpr, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Add the other group's sums of these tiles and leave the totals as [token][row]."""
    token = 16 * (thread // 32) + thread % 32 // 4
    place = sums + 4 * (token * shape.row + 2 * (thread % 4))
    for n in cutlass.range_constexpr(first, last):
        part = load_shared_4xf32(swapped + 16 * (128 * n + thread))
        if token < shape.tokens:
            store_f32x2(place + 32 * n, acc[4 * n] + part[0], acc[4 * n + 1] + part[1])
        if token + 8 < shape.tokens:
            store_f32x2(place + 32 * (n + shape.row), acc[4 * n + 2] + part[2], acc[4 * n + 3] + part[3])


@cute.jit
def finish(out: cute.Pointer, sums: Int32, tile: Int32, first_token: Int32, m: Int32, tid: Int32, *,
           shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Add the blocks' sums of this block's tokens and store them; a thread has four rows of a token at a time."""
    quads = shape.rows // 4
    items = shape.owned * quads
    for i in cutlass.range_constexpr(-(-items // THREADS)):
        item = i * THREADS + tid
        token, column = first_token + item // quads, tile * shape.rows + 4 * (item % quads)
        if (item < items) & (token < m) & (column < shape.columns):
            total = [Float32(0.0)] * 4
            for b in cutlass.range_constexpr(shape.split):
                part = load_shared_4xf32(sums + b * shape.slab + 4 * ((item // quads) * shape.row + 4 * (item % quads)))
                for j in cutlass.range_constexpr(4):
                    total[j] = total[j] + part[j]
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
    received = empty + 8 * stages
    if tid == THREADS:
        fetch_map(w_map)
        fetch_map(x_map)
        for s in cutlass.range_constexpr(stages):
            init_barrier(full + 8 * s, Int32(1))
            init_barrier(empty + 8 * s, Int32(4 * GROUPS))
        init_barrier(received, Int32(1))
        cute.arch.mbarrier_init_fence()
        expect(received, Int32(shape.split * shape.slab))
        for s in cutlass.range_constexpr(min(stages, steps)):
            copy_weights(w_map, ring, full, Int32(s), tile, rank, shape=shape)
    cute.arch.sync_threads()
    cute.arch.cluster_arrive_relaxed(aligned=True)
    # the next launch's blocks come as soon as there is room for them, and fill their rings
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    if warp == 4 * GROUPS:
        if lane == 0:
            for s in cutlass.range_constexpr(min(stages, steps)):
                copy_tokens(x_map, ring, full, Int32(s), first_token, rank, shape=shape)
            for step in cutlass.range(stages, steps, unroll=1):
                wait(empty + 8 * (step % stages), (step // stages - 1) & 1)
                copy_weights(w_map, ring, full, step, tile, rank, shape=shape)
                copy_tokens(x_map, ring, full, step, first_token, rank, shape=shape)
        cute.arch.sync_warp()
        cute.arch.cluster_wait()
    else:
        group, thread = warp // 4, tid % 128
        acc = cute.make_rmem_tensor(shape.rows // 2, Float32)
        acc.fill(0.0)
        for step in cutlass.range(steps, unroll=1):
            s = step % stages
            wait(full + 8 * s, (step // stages) & 1)
            tokens = ring + s * shape.slot + group * shape.box
            now = [acc[i] for i in range(shape.rows // 2)]
            now = accumulate_box(now, tokens, tokens + shape.tokens * ROW, columns=shape.rows)
            for i in cutlass.range_constexpr(shape.rows // 2):
                acc[i] = now[i]
            if lane == 0:
                arrive(empty + 8 * s)
        # every warp has read the ring's last slots, in whose place the sums go
        cute.arch.barrier(barrier_id=SUMS, number_of_threads=THREADS)
        tiles = shape.rows // 8
        swapped = ring + shape.swapped_at
        if group == 0:
            give(acc, swapped, thread, tiles // 2, tiles)
        else:
            give(acc, swapped, thread, 0, tiles // 2)
        cute.arch.barrier(barrier_id=SUMS, number_of_threads=THREADS)
        if group == 0:
            keep(acc, swapped, ring, thread, 0, tiles // 2, shape=shape)
        else:
            keep(acc, swapped, ring, thread, tiles // 2, tiles, shape=shape)
        order_generic_before_bulk()
        cute.arch.cluster_wait()  # the barriers of all blocks exist
        cute.arch.barrier(barrier_id=SUMS, number_of_threads=THREADS)
        sums = ring + shape.received_at
        if tid < shape.split:
            target = peer(sums + rank * shape.slab, tid)
            bulk_send(target, ring + tid * shape.slab, Int32(shape.slab), peer(received, tid))
        wait_cluster(received, Int32(0))
        finish(out, sums, tile, first_token + rank * shape.owned, m, tid, shape=shape)
    # all sums have reached their owners: from a block that has ended nothing can be copied
    cute.arch.cluster_arrive_relaxed(aligned=True)
    cute.arch.cluster_wait()


def launch(shape: Shape) -> Launch:
    """One launch of a cluster per row tile."""
    if shape.depth != BOX * GROUPS * shape.split * shape.steps:
        raise ValueError(f"K = {shape.depth} does not divide into slots: {shape}")
    if shape.rows % 8 or not TOKENS - shape.tokens <= shape.rows <= MOST_ROWS or shape.tokens % shape.split:
        what = f"{shape.rows} rows, {shape.tokens} tokens, split {shape.split}"
        rule = f"a multiple of 8 rows up to {MOST_ROWS}, at least {TOKENS} of both together, and tokens for every block"
        raise ValueError(f"{what}; expected {rule}")
    return Launch(
        name="input_projection",
        kernel=input_projection,
        arguments=(TensorMap("x", shape.tokens, BOX), TensorMap("w", shape.rows, BOX), "out", "M"),
        grid=(shape.split, shape.row_tiles, f"ceil_div(M, {shape.tokens})"),
        block=THREADS + 32,
        constants={"shape": shape},
        cluster=shape.split,
        shared=shape.shared_bytes,
        expects=("tensor_core", "bulk_copy", "cluster"),
    )
