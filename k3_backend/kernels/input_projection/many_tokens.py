"""Input projection of up to 64 tokens at once: activations of a whole warp group stay in registers.

A cluster of 8 blocks shares k: block b owns 896 k. Its two warp groups own 448 k each and hold the activations of 64
tokens for them, 112 registers per thread, for the whole launch: x is read once per cluster. Weights stream past.

    producer   one thread: a slot is half of the block's k of a row tile, 7 TMA boxes [rows, 64 k]: 896 bytes per row
    groups     D [64 tokens, rows] += A [64, 16 k] B [16 k, rows], 28 steps per slot, by mma.sync; B comes from the ring
               by ldmatrix. A warp's sums go to their owners by two bulk copies: messages of 16 bytes (st.async) cost
               about 4 cycles each where they arrive
    finishers  block b owns tokens 8b .. 8b + 7; a warp per buffer adds the 16 partial sums of a tile in a fixed order,
               hands the buffer back to the cluster, and only then stores: the release would wait for its stores
    clusters   take row tiles in turns; the sums of `BUFFERS` tiles may be under way, which hides their round trip

The weights' ring is filled before the dependency wait. A tile's rows are whole DRAM rows, read by the cluster at about
the same time. Floor: n * k * 2 bytes of weights; sums cross between blocks as n * 64 * 16 * 4 bytes, on chip.
Rows beyond N and tokens beyond M read as zero, as a neighbour or as nothing and are not stored.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from kernels.common.cute_mma import matrix_x4, mma_m16n8k16, pack_bf16x2
from kernels.common.cute_ring import (
    arrive,
    arrive_peer,
    bulk_send,
    expect,
    init_barrier,
    order_generic_before_bulk,
    peer,
    store_f32x2,
    wait,
    wait_cluster,
)
from kernels.common.cute_vector import copy_box, load_4xb32, load_shared_4xf32, store_8b

from k3_backend.aot.cuda.contract import Launch, TensorMap

BOX = 64
"""k of a box: 128 bytes of each row."""
ROW = 2 * BOX
TOKENS = 64
SPLIT = 8
"""Blocks of a cluster."""
GROUPS = 2
"""Warp groups that multiply."""
BOXES = 7
"""Of a slot: 7168 = 8 * 2 * 7 * 64."""
SLAB = BOXES * BOX
"""k of a warp group."""
SOURCES = SPLIT * GROUPS
OWNED = TOKENS // SPLIT
"""Tokens that a block finishes."""
BUFFERS = 3
"""Tiles whose sums may be under way; each has a finishing warp."""
THREADS = 128 * GROUPS + 32 * (1 + BUFFERS)


@dataclass(frozen=True)
class Shape:
    """Sizes that are fixed when the kernel is compiled, and the layout of shared memory in bytes."""

    depth: int
    """K."""
    columns: int
    """N, weight rows in all."""
    rows: int
    """Weight rows of a tile, a multiple of 4."""
    stages: int
    """Slots of the ring, an even number: a slot then always serves the same group, whose waits see its phases in order.
    With an odd one, a group may ask for a phase while the one before it, the other group's, has not ended; the parity
    says yes."""

    @property
    def width(self) -> int:
        """Rows of a tile as the tensor cores see them."""
        return -(-self.rows // 8) * 8

    @property
    def row_tiles(self) -> int:
        return -(-self.columns // self.rows)

    @property
    def box(self) -> int:
        """Bytes from box to box, a multiple of the swizzle's 1024."""
        return self.width * ROW

    @property
    def slot(self) -> int:
        return BOXES * self.box

    @property
    def row(self) -> int:
        """Floats from token to token of sums: a warp's fragment stores hit 32 different banks."""
        return self.width + (8 if self.width % 16 == 0 else 0)

    @property
    def slab(self) -> int:
        """Sums of a source for one block and tile: [OWNED, row] fp32."""
        return 4 * OWNED * self.row

    @property
    def staged_at(self) -> int:
        """Sums of this block's warps: [BUFFERS, 4 * GROUPS, 2 owners, OWNED, row] fp32."""
        return self.stages * self.slot

    @property
    def received_at(self) -> int:
        """Sums of all blocks: [BUFFERS, SOURCES, OWNED, row] fp32."""
        return self.staged_at + BUFFERS * SOURCES * self.slab

    @property
    def barriers_at(self) -> int:
        """`full` and `empty` of every slot, then `received` and `free` of every buffer."""
        return self.received_at + BUFFERS * SOURCES * self.slab

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages + 16 * BUFFERS


@cute.jit
def transpose_quad(words: tuple, lane: Int32) -> tuple:
    """Register i of lane t of each four becomes register t of lane i."""
    odd, upper = (lane & 1) == 1, (lane & 2) == 2
    w = list(words)
    for i in cutlass.range_constexpr(0, 4, 2):
        sent = w[i] if odd else w[i + 1]
        got = cute.arch.shuffle_sync_bfly(sent, offset=1)
        w[i], w[i + 1] = (got if odd else w[i]), (w[i + 1] if odd else got)
    for i in cutlass.range_constexpr(2):
        sent = w[i] if upper else w[i + 2]
        got = cute.arch.shuffle_sync_bfly(sent, offset=2)
        w[i], w[i + 2] = (got if upper else w[i]), (w[i + 2] if upper else got)
    return tuple(w)


@cute.jit
def load_fragments(fragments: cute.Tensor, x: cute.Pointer, token: Int32, m: Int32, k: Int32, lane: Int32, *,
                   shape: cutlass.Constexpr) -> None:  # fmt: skip
    """A warp's activations [16 tokens, SLAB]: registers (a0, a1, a2, a3) for each step of 16 k."""
    for half in cutlass.range_constexpr(2):
        row = x + (Int64(cutlass.min(token + 8 * half + lane // 4, m - 1)) * shape.depth + k + 8 * (lane % 4))
        for piece in cutlass.range_constexpr(SLAB // 32):
            words = load_4xb32(row + 32 * piece)
            for i in cutlass.range_constexpr(4):
                fragments[8 * piece + 4 * (i // 2) + 2 * (i % 2) + half] = words[i]
    for piece in cutlass.range_constexpr(SLAB // 32):
        for half in cutlass.range_constexpr(2):
            at = 8 * piece + half
            words = (fragments[at], fragments[at + 2], fragments[at + 4], fragments[at + 6])
            words = transpose_quad(words, lane)
            for i in cutlass.range_constexpr(4):
                fragments[at + 2 * i] = words[i]


@cute.jit
def multiply(acc: cute.Tensor, fragments: cute.Tensor, boxes: Int32, lane: Int32, *,
             shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Acc [width / 8, 4] = products of a slot and a warp's 16 tokens."""
    acc.fill(0.0)
    row = lane % 8
    for box in cutlass.range_constexpr(BOXES):
        for piece in cutlass.range_constexpr(2):
            place = boxes + box * shape.box + row * ROW + 16 * ((4 * piece + lane // 8) ^ row)
            a = [fragments[8 * (2 * box + piece) + i] for i in range(8)]
            for n in cutlass.range_constexpr(shape.width // 8):
                b = matrix_x4(place + 8 * n * ROW)
                c = tuple(acc[4 * n + i] for i in range(4))
                c = mma_m16n8k16(c, tuple(a[:4]), (b[0], b[1]))
                c = mma_m16n8k16(c, tuple(a[4:]), (b[2], b[3]))
                for i in cutlass.range_constexpr(4):
                    acc[4 * n + i] = c[i]


@cute.jit
def send_sums(acc: cute.Tensor, staged: Int32, target: Int32, barrier: Int32, lane: Int32, *,
              shape: cutlass.Constexpr) -> None:  # fmt: skip
    """A warp's sums to the two owners of its tokens; lanes 0 and 1 have the owners' mapped addresses."""
    for half in cutlass.range_constexpr(2):
        place = staged + half * shape.slab + 4 * ((lane // 4) * shape.row + 2 * (lane % 4))
        for n in cutlass.range_constexpr(shape.width // 8):
            store_f32x2(place + 32 * n, acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1])
    order_generic_before_bulk()
    cute.arch.sync_warp()
    if lane < 2:
        bulk_send(target, staged + lane * shape.slab, Int32(shape.slab), barrier)


@cute.jit
def finish(out: cute.Pointer, sums: Int32, free: Int32, tile: Int32, first_token: Int32, m: Int32, lane: Int32,
           again: Boolean, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """Add the partial sums of this block's tokens of a tile, hand the buffer back if it will be used `again`, store.

    A lane has four rows of a token.
    """
    quads = shape.width // 4
    steps = (OWNED * quads + 31) // 32
    total = cute.make_rmem_tensor(4 * steps, Float32)
    total.fill(0.0)
    for i in cutlass.range_constexpr(steps):
        item = lane + 32 * i
        if item < OWNED * quads:
            place = sums + 4 * ((item // quads) * shape.row + 4 * (item % quads))
            for source in cutlass.range_constexpr(SOURCES):
                part = load_shared_4xf32(place + source * shape.slab)
                for j in cutlass.range_constexpr(4):
                    total[4 * i + j] = total[4 * i + j] + part[j]
    cute.arch.sync_warp()
    if (lane < SPLIT) & again:
        arrive_peer(peer(free, lane))
    for i in cutlass.range_constexpr(steps):
        item = lane + 32 * i
        token, row = first_token + item // quads, 4 * (item % quads)
        column = tile * shape.rows + row
        if (item < OWNED * quads) & (token < m) & (row < shape.rows) & (column < shape.columns):
            low, high = pack_bf16x2(total[4 * i], total[4 * i + 1]), pack_bf16x2(total[4 * i + 2], total[4 * i + 3])
            store_8b(out + (Int64(token) * shape.columns + column), low, high)


@cute.jit
def produce(w_map: cute.Pointer, ring: Int32, full: Int32, empty: Int32, rank: Int32, worker: Int32, workers: Int32,
            slots: Int32, *, shape: cutlass.Constexpr) -> None:  # fmt: skip
    """All slots of weights of this block, in order; one thread."""
    for i in cutlass.range(slots, unroll=1):
        s = i % shape.stages
        wait(empty + 8 * s, (i // shape.stages + 1) & 1)
        expect(full + 8 * s, Int32(BOXES * shape.rows * ROW))
        tile, group = worker + (i // GROUPS) * workers, i % GROUPS
        for box in cutlass.range_constexpr(BOXES):
            k = (rank * GROUPS + group) * SLAB + box * BOX
            copy_box(ring + s * shape.slot + box * shape.box, w_map, k, tile * shape.rows, full + 8 * s)


@cute.kernel
def input_projection(
    x: cute.Pointer, w_map: cute.Pointer, out: cute.Pointer, m: Int32, *, shape: cutlass.Constexpr
):  # fmt: skip
    """One cluster per worker; workers take row tiles in turns, token blocks are the grid's third dimension."""
    stages = shape.stages
    tid, _, _ = cute.arch.thread_idx()
    rank, worker, token_block = cute.arch.block_idx()
    _, workers, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    first_token = token_block * TOKENS
    turns = (shape.row_tiles - worker + workers - 1) // workers

    ring = cute.arch.get_dyn_smem(Float32, alignment=1024).toint()
    full = ring + shape.barriers_at
    empty = full + 8 * stages
    received = empty + 8 * stages
    free = received + 8 * BUFFERS
    sums = ring + shape.received_at
    if tid == 0:
        for s in cutlass.range_constexpr(stages):
            init_barrier(full + 8 * s, Int32(1))
            init_barrier(empty + 8 * s, Int32(4))
        for b in cutlass.range_constexpr(BUFFERS):
            init_barrier(received + 8 * b, Int32(1))
            init_barrier(free + 8 * b, Int32(SPLIT))
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.cluster_arrive_relaxed(aligned=True)

    if warp == 4 * GROUPS:
        if lane == 0:
            produce(w_map, ring, full, empty, rank, worker, workers, turns * GROUPS, shape=shape)
        cute.arch.sync_warp()
        # the next launch's blocks come when the last weights are on their way
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_wait()
    elif warp > 4 * GROUPS:
        cute.arch.griddepcontrol_wait()
        cute.arch.cluster_wait()
        b = warp - (4 * GROUPS + 1)
        for turn in cutlass.range(b, turns, BUFFERS, unroll=1):
            if lane == 0:
                expect(received + 8 * b, Int32(SOURCES * shape.slab))
            wait_cluster(received + 8 * b, (turn // BUFFERS) & 1)
            finish(
                out, sums + b * SOURCES * shape.slab, free + 8 * b, worker + turn * workers, first_token + rank * OWNED,
                m, lane, turn + BUFFERS < turns, shape=shape,
            )  # fmt: skip
    else:
        cute.arch.griddepcontrol_wait()
        cute.arch.cluster_wait()  # the barriers of all blocks exist
        group, member = warp // 4, warp % 4
        fragments = cute.make_rmem_tensor(16 * BOXES, Int32)
        k = (rank * GROUPS + group) * SLAB
        load_fragments(fragments, x, first_token + 16 * member, m, k, lane, shape=shape)
        acc = cute.make_rmem_tensor(shape.width // 2, Float32)
        owner = 2 * member + lane % 2
        staged = ring + shape.staged_at + warp * 2 * shape.slab
        target = peer(sums + (rank * GROUPS + group) * shape.slab, owner)
        barrier = peer(received, owner)
        for turn in cutlass.range(turns, unroll=1):
            i = turn * GROUPS + group
            s = i % stages
            wait(full + 8 * s, (i // stages) & 1)
            multiply(acc, fragments, ring + s * shape.slot, lane, shape=shape)
            cute.arch.sync_warp()
            if lane == 0:
                arrive(empty + 8 * s)
            b = turn % BUFFERS
            if turn >= BUFFERS:
                wait_cluster(free + 8 * b, (turn // BUFFERS + 1) & 1)
            at = b * SOURCES * shape.slab
            send_sums(acc, staged + at, target + at, barrier + 8 * b, lane, shape=shape)
    # all sums have reached their owners: from a block that has ended nothing can be copied
    cute.arch.cluster_arrive_relaxed(aligned=True)
    cute.arch.cluster_wait()


def launch(shape: Shape) -> Launch:
    """One launch of as many clusters as there is room for, one block per multiprocessor."""
    if shape.depth != SPLIT * GROUPS * SLAB or shape.rows % 4:
        raise ValueError(f"K = {shape.depth} or the rows do not divide: {shape}")
    if shape.stages % GROUPS:
        raise ValueError(f"{shape.stages} slots; expected a multiple of {GROUPS}")
    return Launch(
        name="input_projection",
        kernel=input_projection,
        arguments=("x", TensorMap("w", shape.rows, BOX), "out", "M"),
        grid=(SPLIT, f"min({shape.row_tiles}, clusters)", f"ceil_div(M, {TOKENS})"),
        block=THREADS,
        constants={"shape": shape},
        cluster=SPLIT,
        shared=shape.shared_bytes,
        expects=("tensor_core", "bulk_copy", "cluster"),
    )
