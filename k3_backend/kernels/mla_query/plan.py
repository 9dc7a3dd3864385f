"""Shapes and tiling of one compiled mla_query kernel, and where things lie in its shared memory."""

from dataclasses import dataclass

__all__ = ["BY_K", "BY_ROWS", "Plan"]

BY_ROWS, BY_K = 0, 1
"""What a CTA of a head's cluster owns of W_qb: rows over all of K, which its warps split; or a part of K of all rows,
which its warps split."""


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
    """BY_ROWS or BY_K."""
    tile: int
    """Tokens per pass."""
    looped: bool
    """Whether a call may have more than one pass per cluster."""
    groups: int
    """Clusters per head; they take turns at tiles."""
    warps: int
    """Per CTA."""
    cluster: int
    """CTAs that share a head."""
    e4m3: bool
    """Whether the cache holds E4M3 bytes."""

    def __post_init__(self) -> None:
        if self.form == BY_K and (self.warps != self.cluster or self.tile % 16 or self.tile > 64):
            raise ValueError("form 1: warp w has the rows that CTA w finishes; tiles of 16, 32 or 64 tokens")
        if self.form == BY_ROWS and (self.looped or self.groups > 1 or self.tile > 16):
            raise ValueError("form 0: one tile of at most 16 tokens")
        if self.q_lora % (32 * self.warps) or (self.nope // 8) % self.cluster or (self.pe // 8) % self.cluster:
            raise ValueError("K, nope or pe cannot be split evenly")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def row(self) -> int:
        """Elements of a query row and of a cache row."""
        return self.kv_lora + self.pe

    @property
    def chunks(self) -> int:
        """Chunks of 32 k that a warp multiplies."""
        return self.q_lora // (32 * self.warps)

    @property
    def pieces(self) -> int:
        """16-byte pieces of a token's q_a in these chunks."""
        return 4 * self.chunks

    @property
    def token_lanes(self) -> int:
        """Lanes that share a token in the norm."""
        if self.form == BY_K:
            return self.threads // self.tile
        return 16 if self.pieces <= 16 else 32

    @property
    def norm_steps(self) -> int:
        """Pieces per lane in the norm: by rows one in each pass over the tile's tokens, by K a share of one token's."""
        if self.form == BY_K:
            return -(-self.pieces // self.token_lanes)
        return -(-self.tile * self.token_lanes // 32)

    @property
    def nope_octets(self) -> int:
        """Groups of 8 nope rows of W_qb per CTA (by K: per warp); an octet is the n of one MMA."""
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
    def blocks(self) -> int:
        """MMAs' blocks of 16 tokens per tile."""
        return -(-self.tile // 16)

    @property
    def buffers(self) -> int:
        """Copies of everything that tiles hand over."""
        return 2 if self.looped else 1

    @property
    def squares_bytes(self) -> int:
        """Bytes that a CTA receives per tile: sums of squares of every part of K."""
        return 4 * self.tile * self.cluster

    @property
    def partial_bytes(self) -> int:
        """Bytes that a CTA receives per tile: products of every part of K with its rows."""
        return 4 * self.cluster * self.tile * 8 * self.octets

    @property
    def nope_bytes(self) -> int:
        """Bytes that a CTA receives per tile: the head's nope rows."""
        return 2 * self.tile * self.nope

    @property
    def nope_pitch(self) -> int:
        """Bytes between tokens of the nope rows; 16 mod 128, so that 16 bytes of 8 tokens share no bank."""
        return 2 * self.nope + 16

    @property
    def c_pitch(self) -> int:
        """Bytes between tokens of c; as above."""
        return 2 * (self.q_lora if self.form == BY_ROWS else self.q_lora // self.cluster) + 16

    @property
    def squares_at(self) -> int:
        """f32 [buffers, tile, parts of K]: sums of squares; before it 8 mbarriers."""
        return 64

    @property
    def partial_at(self) -> int:
        """f32: products over parts of K. By rows [warps, tile, 8 * octets]; by K [buffers, cluster, fragments]."""
        parts = self.warps if self.form == BY_ROWS else self.cluster
        return self.squares_at + 4 * self.buffers * self.tile * parts

    @property
    def nope_at(self) -> int:
        """bf16 [buffers, tile, nope] with pitch: the head's rounded nope rows."""
        parts = self.warps if self.form == BY_ROWS else self.cluster
        return self.partial_at + 4 * self.buffers * parts * self.tile * 8 * self.octets

    @property
    def norm_at(self) -> int:
        """bf16 [q_lora / cluster]: q_norm of the CTA's part of K (by K)."""
        return self.nope_at + self.buffers * self.tile * self.nope_pitch

    @property
    def absorb_at(self) -> int:
        """bf16 [nope, latents]: the W_UK slice, 16-byte pieces of a row permuted (`steps.place`)."""
        return -(-(self.norm_at + 2 * self.q_lora // self.cluster) // 128) * 128

    @property
    def c_at(self) -> int:
        """bf16 [buffers, tile, k] with pitch: normalised q_a, k in the fragments' order."""
        return self.absorb_at + 2 * self.nope * self.latents

    @property
    def shared_bytes(self) -> int:
        return self.c_at + self.buffers * self.tile * self.c_pitch
