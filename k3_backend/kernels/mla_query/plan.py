"""Shapes and tiling of one compiled mla_query kernel, and where things lie in its shared memory."""

from dataclasses import dataclass

__all__ = ["DIRECT", "NORMED", "SHARED", "Plan"]

DIRECT, SHARED, NORMED = 0, 1, 2
"""How the tokens' q_a reaches the warps: lanes load it from global memory; it is copied once per cluster, multicast to
the shared memory of all its CTAs; the same with rows that a launch before this one has normalised."""


@dataclass(frozen=True)
class Plan:
    """`*_at` are byte offsets into dynamic shared memory."""

    heads: int
    proj_row: int
    q_lora: int
    kv_lora: int
    nope: int
    pe: int
    form: int
    """DIRECT, SHARED or NORMED."""
    tile: int
    """Tokens per pass."""
    warps: int
    """Per CTA; they split K of W_qb."""
    cluster: int
    """CTAs that share a head."""
    stages: int
    """Tiles of q_a in shared memory."""

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def row(self) -> int:
        """Elements of a query row and of a cache row."""
        return self.kv_lora + self.pe

    @property
    def chunks(self) -> int:
        """Chunks of 32 k that a warp owns."""
        return self.q_lora // (32 * self.warps)

    @property
    def pieces(self) -> int:
        """16-byte pieces of a token's q_a that a warp owns."""
        return 4 * self.chunks

    @property
    def token_lanes(self) -> int:
        """Lanes of a warp that share a token in the norm, a piece each."""
        return 16 if self.pieces <= 16 else 32

    @property
    def passes(self) -> int:
        """Passes of the norm over the tile's tokens."""
        return -(-self.tile * self.token_lanes // 32)

    @property
    def nope_octets(self) -> int:
        """Groups of 8 nope rows of W_qb per CTA; an octet is the n of one MMA."""
        return self.nope // (8 * self.cluster)

    @property
    def pe_octets(self) -> int:
        return self.pe // (8 * self.cluster)

    @property
    def octets(self) -> int:
        return self.nope_octets + self.pe_octets

    @property
    def latents(self) -> int:
        """Latents of W_UK per CTA."""
        return self.kv_lora // self.cluster

    @property
    def halves(self) -> range:
        """Of the MMA's 16 token rows, lane (g, t) works on row g and, in tiles of 16, on row g + 8."""
        return range(-(-self.tile // 8))

    @property
    def looped(self) -> bool:
        """Whether a call may have more than one tile: the next one's q_a needs a stage of its own."""
        return self.stages > 1

    @property
    def exchanges(self) -> int:
        """Buffers for the head's nope rows; the protocol needs three when tiles overlap."""
        return 3 if self.looped else 1

    @property
    def partials(self) -> int:
        """Buffers for partial sums; without the norm's barrier between tiles there must be two."""
        return 2 if self.form == NORMED else 1

    @property
    def exchange_bytes(self) -> int:
        """Bytes that a CTA receives per tile and exchange."""
        return 2 * self.tile * self.nope

    @property
    def tile_bytes(self) -> int:
        """Bytes that a CTA receives per tile and stage."""
        return 2 * self.tile * self.q_lora

    @property
    def nope_pitch(self) -> int:
        """Bytes between tokens of an exchange buffer; 16 mod 128, so that 16 bytes of 8 tokens share no bank."""
        return 2 * self.nope + 16

    @property
    def token_pitch(self) -> int:
        """Bytes between tokens of a tile; as above."""
        return 2 * self.q_lora + 16

    @property
    def exchanged_at(self) -> int:
        """Barriers of the exchanges, behind those of the stages."""
        return 8 * self.stages

    @property
    def squares_at(self) -> int:
        """f32 [tile, warps]: sums of squares over each warp's k."""
        return 64

    @property
    def partial_at(self) -> int:
        """f32 [partials, warps, tile, 8 * octets]: products over each warp's k."""
        return self.squares_at + 4 * self.warps * self.tile

    @property
    def exchange_at(self) -> int:
        """bf16 [exchanges, tile, nope] with pitch: the head's rounded nope rows."""
        return self.partial_at + 4 * self.partials * self.warps * self.tile * 8 * self.octets

    @property
    def absorb_at(self) -> int:
        """bf16 [nope, latents]: the W_UK slice, 16-byte pieces of a row permuted (`steps.place`)."""
        return -(-(self.exchange_at + self.exchanges * self.tile * self.nope_pitch) // 128) * 128

    @property
    def tokens_at(self) -> int:
        """bf16 [stages, tile, q_lora] with pitch: q_a of the tiles at work, then c in its place."""
        return self.absorb_at + 2 * self.nope * self.latents

    @property
    def shared_bytes(self) -> int:
        return self.tokens_at + self.stages * self.tile * self.token_pitch
