"""The figures that the attention side's kernels are to reach on one H200, as data.

Source: the table "Figures to reach on one H200" of issue 3 (CuTe DSL decode kernels for the attention side). Bytes are
every input read once and every output and state written once; shares are of the matching ceiling measured in the same
run. `verify.protocol.peers` compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "FIGURES", "HALF_BATCHES", "HALF_CELLS", "HALF_CONTEXTS", "HALF_GEOMETRIES", "HALF_LAYERS", "HALF_MEAN", "STANDARD",
    "Figure", "Mean", "Need",
]  # fmt: skip

MB = 1_000_000


@dataclass(frozen=True)
class Need:
    """One demand on every cell that it names."""

    kind: Literal["share", "faster", "spacing"]
    """`share`: at least `limit` of the ceiling. `faster`: a peer's time divided by ours is at least `limit`.
    `spacing`: at most the empty-kernel spacing + `limit` us + `floors` times the floor."""
    limit: float
    peers: tuple[str, ...] = ()
    """The first of these that could be had."""
    strict: bool = False
    """Whether `limit` itself is not enough: "faster" as against "no slower"."""
    floors: float = 0.0
    batches: tuple[int, int] = (1, 64)
    """Least and greatest batch, both included."""
    cache_bytes: tuple[int, int] | None = None
    """Least size of the cache that a call reads, and a size that is already too large."""

    def applies(self, batch: int, cache_bytes: int) -> bool:
        """Whether a cell is meant."""
        inside = self.cache_bytes is None or self.cache_bytes[0] <= cache_bytes < self.cache_bytes[1]
        return self.batches[0] <= batch <= self.batches[1] and inside

    @property
    def text(self) -> str:
        """The demand in words."""
        if self.kind == "share":
            return f"at least {self.limit:.0%} of the ceiling"
        if self.kind == "spacing":
            return f"at most the empty-kernel spacing + {self.limit:g} us + {self.floors:g} floors"
        what = f"{' or '.join(self.peers)}'s time / ours"
        return f"{what} {'above' if self.strict else 'at least'} {self.limit:.3g}"


@dataclass(frozen=True)
class Figure:
    """One row of the issue's table, or the part of it that concerns one op."""

    row: int
    """Of the issue's table, from 1."""
    name: str
    op: str
    needs: tuple[Need, ...]
    widths: tuple[int, ...] = ()
    """Output rows N of the projections that are meant; empty: every cell of the op."""


HALF_LAYERS = ("kda_half_layer", "mla_half_layer")
"""In the place of an op: AttnRes, input projection and token mixing of one attention layer."""
HALF_GEOMETRIES = ("k3-slice-tp8", "k3-slice-tp16")
HALF_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
HALF_CONTEXTS = (1024, 32_768)
"""Cached tokens per request; a KDA half-layer's time depends on none."""
HALF_CELLS = frozenset(
    (half, name, batch, context)
    for half in HALF_LAYERS
    for name in HALF_GEOMETRIES
    for batch in HALF_BATCHES
    for context in (HALF_CONTEXTS if half == "mla_half_layer" else (None,))
)
"""(half-layer, geometry, batch, context) of every cell that the figure on half-layers is about."""
STANDARD = "standard"
"""The peer of half-layers: the same program with every op on the standard path."""


@dataclass(frozen=True)
class Mean:
    """A demand on the geometric mean, over all of `HALF_CELLS`, of a peer's time divided by ours."""

    row: int
    name: str
    peer: str
    limit: float


def _faster(*peers: str, limit: float = 1.0, batches: tuple[int, int] = (1, 64), strict: bool = True) -> Need:
    return Need("faster", limit, peers, strict=strict, batches=batches)


_BEYOND = 1 << 62

FIGURES: tuple[Figure, ...] = (
    Figure(
        1, "input projection 6288x7168, 3648x7168", "input_projection",
        (
            Need("share", 0.88, batches=(1, 16)), Need("share", 0.80, batches=(64, 64)),
            _faster("cublas"), _faster("triton"),
        ),
        widths=(6288, 3648),
    ),
    Figure(2, "3216x7168, 2880x7168", "input_projection", (_faster("cublas"),), widths=(3216, 2880)),
    Figure(2, "q_b, W_UK shapes", "mla_query", (_faster("cublas"),)),
    Figure(2, "W_UV shapes", "mla_value", (_faster("cublas"),)),
    Figure(
        3, "fused KDA decode, 12 and 6 heads", "kda_decode",
        (
            _faster("fla_chain"),
            _faster("fla_chain", limit=1.5, batches=(1, 8), strict=False),
            _faster("fla_recurrence", batches=(8, 64), strict=False),
            _faster("in_place", limit=1 / 1.10, batches=(32, 64), strict=False),
        ),
    ),
    Figure(4, "AttnRes", "attn_res", (Need("spacing", 1.5, floors=1.25), _faster("compile"))),
    Figure(
        5, "MLA core, bf16 cache", "mla_decode",
        (
            Need("share", 0.75, cache_bytes=(200 * MB, _BEYOND)),
            Need("share", 0.60, cache_bytes=(30 * MB, 200 * MB)),
            _faster("flashinfer", "triton"),
        ),
    ),
    Figure(6, "KDA half-layer", "kda_half_layer", (_faster(STANDARD),)),
    Figure(6, "MLA half-layer, 1k and 32k", "mla_half_layer", (_faster(STANDARD),)),
)  # fmt: skip

HALF_MEAN = Mean(6, "half-layers, geometric mean over all cells", STANDARD, 1.5)
