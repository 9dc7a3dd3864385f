"""Sizes of one compiled kda_decode kernel, and where things lie in its shared memory."""

from dataclasses import dataclass

__all__ = ["BETAS", "CONVOLVERS", "GATES", "HEAD", "HELPERS", "SUMS", "VALUES", "Plan"]

HEAD = 128
"""Key and value width of a head, and rank of the forget gate."""
BETAS = 16
"""Columns of the projection row that hold beta and the padding behind it."""
HELPERS = 1
"""Id of the named barrier of the helper warps."""
CONVOLVERS = 3
"""Helper warps that convolve: q, k and v."""
GATES = 4
"""Helper warps that compute the decay."""
VALUES = 2
"""Copies of an item's values: one is prepared while another is used."""
SUMS = 4
"""Copies of the sums of o^2: a block may send for item i + 2 while a peer has not yet read those of item i."""


@dataclass(frozen=True)
class Plan:
    """`*_at` are byte offsets into dynamic shared memory, or into a place of a ring where it says so."""

    heads: int
    row_width: int
    tokens: int
    cluster: int
    warps: int
    """State warps."""
    helpers: int
    """Helper warps: with 7 or more, convolution and decay have warps of their own."""
    stages: int
    """Slices in flight."""
    slices: int
    """Parts of a block's rows that are loaded, updated and stored one after the other."""
    streamed: bool
    """Whether states leave L2 before other lines, read or written."""

    def __post_init__(self) -> None:
        if self.groups < 1 or self.slice_rows % (4 * self.warps):
            raise ValueError(f"{self.slice_rows} value rows do not divide over {self.warps} warps, four at once")
        if self.helpers < GATES:
            raise ValueError(f"{self.helpers} helper warps; the decay takes {GATES}")

    @property
    def width(self) -> int:
        return self.heads * HEAD

    @property
    def value_rows(self) -> int:
        """Value rows of one block."""
        return HEAD // self.cluster

    @property
    def slice_rows(self) -> int:
        """Value rows of one slice."""
        return self.value_rows // self.slices

    @property
    def channels(self) -> int:
        """Conv channels that a block computes: q and k of the head, v of its rows."""
        return 2 * HEAD + self.value_rows

    @property
    def threads(self) -> int:
        return 32 * (self.warps + self.helpers + 1)

    @property
    def launch_registers(self) -> int:
        """Per thread, if the block has a multiprocessor to itself."""
        return 65536 // self.threads // 8 * 8

    @property
    def moved_registers(self) -> int:
        """Per thread, from helpers and producer to state warps; 0 where they are not as many whole warp groups."""
        whole = self.warps == self.helpers + 1 and self.warps % 4 == 0
        return 8 if whole and self.groups > 2 else 0

    @property
    def helper_threads(self) -> int:
        return 32 * self.helpers

    @property
    def groups(self) -> int:
        """Value rows per lane of a state warp: it handles four at once."""
        return self.slice_rows // self.warps // 4

    @property
    def first_gate(self) -> int:
        """First helper warp that computes the decay."""
        return CONVOLVERS if self.helpers >= CONVOLVERS + GATES else 0

    @property
    def gate_tiles(self) -> int:
        """Tiles of 16 gate channels per warp that computes the decay."""
        return HEAD // 16 // GATES

    @property
    def pairs(self) -> int:
        """Pairs of output columns per token."""
        return self.value_rows // 2

    @property
    def pair_rounds(self) -> int:
        """Pairs of all tokens per helper thread."""
        return -(-self.tokens * self.pairs // self.helper_threads)

    @property
    def state_bytes(self) -> int:
        """A place of the state ring: a slice of the block's rows of a head's state."""
        return 4 * self.slice_rows * HEAD

    # A place of the pieces' ring: the conv window [T + 3, channels] bf16, then pieces of the projection rows.
    @property
    def f_a_at(self) -> int:
        """[T, HEAD] bf16, in the place."""
        return 2 * (self.tokens + 3) * self.channels

    @property
    def g_out_at(self) -> int:
        """[T, value rows] bf16, in the place."""
        return self.f_a_at + 2 * self.tokens * HEAD

    @property
    def beta_at(self) -> int:
        """[T, BETAS] bf16, in the place."""
        return self.g_out_at + 2 * self.tokens * self.value_rows

    @property
    def slots_at(self) -> int:
        """[T] int32, in the place: the request's slots; the first is 0 for a null request."""
        return self.beta_at + 2 * self.tokens * BETAS

    @property
    def pieces_bytes(self) -> int:
        """What is copied into the place."""
        return self.slots_at

    @property
    def pieces_stride(self) -> int:
        """From place to place."""
        return -(-(self.slots_at + 4 * self.tokens) // 128) * 128

    @property
    def pieces_stages(self) -> int:
        """Places of the pieces' ring: those of the states, the item that is computed, and the one that is prepared."""
        return -(-self.stages // self.slices) + 2

    @property
    def pieces_at(self) -> int:
        return self.stages * self.state_bytes

    # Behind the rings: F_b of the head, then values of items.
    @property
    def f_b_at(self) -> int:
        """[HEAD, HEAD] bf16, chunks of a row swizzled."""
        return self.pieces_at + self.pieces_stages * self.pieces_stride

    @property
    def values_at(self) -> int:
        """[VALUES] of q, k, decay [T, HEAD], v, o [T, value rows], all fp32."""
        return self.f_b_at + 2 * HEAD * HEAD

    @property
    def values_floats(self) -> int:
        """From copy to copy."""
        return self.tokens * (3 * HEAD + 2 * self.value_rows)

    @property
    def v_from(self) -> int:
        """Floats in front of v in a copy."""
        return 3 * self.tokens * HEAD

    @property
    def o_from(self) -> int:
        """Floats in front of o in a copy."""
        return self.v_from + self.tokens * self.value_rows

    @property
    def parts(self) -> int:
        """Sums of o^2 per token: one of each slice of each state warp of the cluster."""
        return self.cluster * self.slices * self.warps

    @property
    def sums_at(self) -> int:
        """[SUMS, T, cluster, slices, warps] fp32."""
        return self.values_at + 4 * VALUES * self.values_floats

    # mbarriers: full and empty of each place of both rings, then values ready, outputs ready, sums.
    @property
    def barriers_at(self) -> int:
        return self.sums_at + 4 * SUMS * self.tokens * self.parts

    @property
    def pieces_barriers_at(self) -> int:
        return self.barriers_at + 16 * self.stages

    @property
    def values_barriers_at(self) -> int:
        return self.pieces_barriers_at + 16 * self.pieces_stages

    @property
    def sums_barriers_at(self) -> int:
        return self.values_barriers_at + 16 * VALUES

    @property
    def shared_bytes(self) -> int:
        return self.sums_barriers_at + 8 * SUMS
