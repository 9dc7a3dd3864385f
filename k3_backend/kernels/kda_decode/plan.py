"""Sizes of one compiled kda_decode kernel, and where things lie in its shared memory."""

from dataclasses import dataclass

__all__ = ["BETAS", "CONSUMERS", "HEAD", "Plan"]

HEAD = 128
"""Key and value width of a head, and rank of the forget gate."""
BETAS = 16
"""Columns of the projection row that hold beta and the padding behind it."""
CONSUMERS = 1
"""Id of the named barrier of the consumer warps."""


@dataclass(frozen=True)
class Plan:
    """Sizes that are fixed when the kernel is compiled, and the layout of shared memory in bytes."""

    heads: int
    row_width: int
    tokens: int
    cluster: int
    warps: int
    """Consumer warps."""
    stages: int

    @property
    def width(self) -> int:
        return self.heads * HEAD

    @property
    def value_rows(self) -> int:
        """Value rows of one block."""
        return HEAD // self.cluster

    @property
    def channels(self) -> int:
        """Conv channels that a block computes: q and k of the head, v of its rows."""
        return 2 * HEAD + self.value_rows

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def groups(self) -> int:
        """Value rows per lane: a warp handles four at once."""
        return self.value_rows // self.warps // 4

    @property
    def gate_tiles(self) -> int:
        """Tiles of 16 gate channels per warp; with 16 warps, half of them have one."""
        return max(1, HEAD // 16 // self.warps)

    @property
    def pairs(self) -> int:
        """Pairs of output columns per token."""
        return self.value_rows // 2

    @property
    def pair_rounds(self) -> int:
        """Pairs of all tokens per consumer thread."""
        return -(-self.tokens * self.pairs // (32 * self.warps))

    @property
    def state_bytes(self) -> int:
        """A place of the state ring: the block's rows of a head's state."""
        return 4 * self.value_rows * HEAD

    # A place of the pieces' ring: the conv window [T + 3, channels] bf16, then pieces of the projection rows.
    @property
    def f_a_at(self) -> int:
        """[T, HEAD] bf16."""
        return 2 * (self.tokens + 3) * self.channels

    @property
    def g_out_at(self) -> int:
        """[T, value rows] bf16."""
        return self.f_a_at + 2 * self.tokens * HEAD

    @property
    def beta_at(self) -> int:
        """[T, BETAS] bf16."""
        return self.g_out_at + 2 * self.tokens * self.value_rows

    @property
    def pieces_bytes(self) -> int:
        return self.beta_at + 2 * self.tokens * BETAS

    @property
    def pieces_stride(self) -> int:
        """From place to place: pieces, then 16 bytes with the conv slot's id (<= 0: a null request)."""
        return -(-(self.pieces_bytes + 16) // 128) * 128

    @property
    def pieces_stages(self) -> int:
        """Places of the pieces' ring: those of the states, and the item that is computed."""
        return self.stages + 1

    @property
    def pieces_at(self) -> int:
        return self.stages * self.state_bytes

    # Behind the ring: constants of the head, then values of the current item.
    @property
    def f_b_at(self) -> int:
        return self.pieces_at + self.pieces_stages * self.pieces_stride

    @property
    def conv_w_at(self) -> int:
        """[channels, 4] fp32."""
        return self.f_b_at + 2 * HEAD * HEAD

    @property
    def values_at(self) -> int:
        """q, k, decay [T, HEAD], v, o [T, value rows], sums of o^2 [2, T, cluster], all fp32."""
        return self.conv_w_at + 16 * self.channels

    @property
    def barriers_at(self) -> int:
        """Full and empty of every state, full and empty of every piece, then `sums`."""
        floats = self.tokens * (3 * HEAD + 2 * self.value_rows + 2 * self.cluster)
        return -(-(self.values_at + 4 * floats) // 8) * 8

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * (self.stages + self.pieces_stages) + 8
