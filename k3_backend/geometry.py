"""Kimi K3 dimensions as data: the published model and the reduced geometries that tests and targets use.

This module decides shapes only. It holds no tensors and no policy; every op, kernel descriptor and weight
initialiser derives its shapes from one `Geometry`. Sources: the published `config.json` of Kimi K3 for `k3`;
the reduced geometries keep its mechanisms and are described in `docs/geometries.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

__all__ = ["GEOMETRIES", "Geometry", "LayerKind", "geometry"]

LayerKind = Literal["kda", "mla"]
ExpertFormat = Literal["bf16", "mxfp4"]


def _pad(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Dimensions of one Kimi K3 text model, or of one tensor-parallel rank of it.

    All sizes are element counts. Layer numbers in `mla_layers` are 0-based. "Local" sizes (heads, widths)
    are what one rank holds; `k3` describes the whole model (TP1).
    """

    name: str
    vocab: int
    hidden: int
    layers: int
    mla_layers: tuple[int, ...]
    heads: int
    kda_head_dim: int
    kda_gate_rank: int
    conv_width: int = 4
    gate_lower_bound: float = -5.0
    q_lora: int
    kv_lora: int
    nope: int
    pe: int
    v_dim: int
    experts: int
    top_k: int
    latent: int
    expert_width: int
    shared_width: int
    dense_width: int
    attn_res_block: int
    routed_scale: float = 1.0
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    eps: float = 1e-5
    l2_eps: float = 1e-6
    max_positions: int = 1_048_576
    bos: int
    eos: int
    pad: int
    media: int

    def __post_init__(self) -> None:
        if self.layers - 1 not in self.mla_layers:
            raise ValueError(
                f"geometry {self.name}: last layer {self.layers - 1} must be MLA; mla_layers={self.mla_layers}"
            )
        if any(layer % self.attn_res_block == 0 for layer in self.mla_layers):
            raise ValueError(f"geometry {self.name}: AttnRes block writes must fall on KDA layers")

    def kind(self, layer: int) -> LayerKind:
        """Attention kind of a 0-based layer."""
        return "mla" if layer in self.mla_layers else "kda"

    @cached_property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based KDA layers, ascending."""
        return tuple(layer for layer in range(self.layers) if layer not in self.mla_layers)

    @property
    def attn_res_blocks(self) -> int:
        """Number of saved AttnRes rows at the end of the model."""
        return -(-self.layers // self.attn_res_block)

    def writes_block(self, layer: int) -> bool:
        """Whether the layer saves its incoming prefix as an AttnRes row and restarts the prefix."""
        return layer % self.attn_res_block == 0

    def attn_sources(self, layer: int) -> int:
        """Saved rows mixed at the attention site of a layer: ceil(layer / block)."""
        return -(-layer // self.attn_res_block)

    def mlp_sources(self, layer: int) -> int:
        """Saved rows mixed at the MLP site of a layer."""
        return layer // self.attn_res_block + 1

    @property
    def kda_width(self) -> int:
        """Heads * kda_head_dim: width of each of q, k, v, g and of the KDA output."""
        return self.heads * self.kda_head_dim

    @property
    def kda_proj_rows(self) -> int:
        """Rows of the packed KDA in-projection q|k|v|g|f_a|beta, padded to a multiple of 16."""
        return _pad(4 * self.kda_width + self.kda_gate_rank + self.heads, 16)

    @property
    def mla_row(self) -> int:
        """Width of a latent KV cache row and of an absorbed query row: kv_lora + pe."""
        return self.kv_lora + self.pe

    @property
    def mla_proj_rows(self) -> int:
        """Rows of the packed MLA first projection q_a|kv_a|gate, padded to a multiple of 16."""
        return _pad(self.q_lora + self.mla_row + self.heads * self.v_dim, 16)

    @property
    def mla_width(self) -> int:
        """Heads * v_dim: width of the MLA output before o_proj."""
        return self.heads * self.v_dim


_K3 = Geometry(
    name="k3", vocab=163_840, hidden=7168, layers=93,
    mla_layers=(*range(3, 92, 4), 92), heads=96, kda_head_dim=128, kda_gate_rank=128,
    q_lora=1536, kv_lora=512, nope=128, pe=64, v_dim=128,
    experts=896, top_k=16, latent=3584, expert_width=3072, shared_width=6144, dense_width=33_792,
    attn_res_block=12, bos=163_584, eos=163_586, pad=163_839, media=163_605,
)  # fmt: skip

_NANO = Geometry(
    name="k3-nano", vocab=264, hidden=256, layers=9, mla_layers=(3, 7, 8), heads=2, kda_head_dim=128,
    kda_gate_rank=128, q_lora=128, kv_lora=512, nope=128, pe=64, v_dim=128,
    experts=16, top_k=4, latent=128, expert_width=32, shared_width=64, dense_width=512,
    attn_res_block=6, max_positions=16_384, bos=256, eos=257, pad=258, media=259,
)  # fmt: skip

GEOMETRIES: dict[str, Geometry] = {
    g.name: g
    for g in (
        _K3,
        # One TP8 (TP16) rank's shapes as a TP1 model, for timing on one GPU.
        replace(
            _K3, name="k3-slice-tp8", layers=9, mla_layers=(3, 7, 8), heads=12, experts=128, expert_width=384,
            shared_width=768, dense_width=4224, vocab=20_480,
            bos=20_470, eos=20_471, pad=20_479, media=20_472,
        ),
        replace(
            _K3, name="k3-slice-tp16", layers=9, mla_layers=(3, 7, 8), heads=6, experts=128, expert_width=192,
            shared_width=384, dense_width=2112, vocab=10_240,
            bos=10_230, eos=10_231, pad=10_239, media=10_232,
        ),
        _NANO,
        replace(
            _NANO, name="k3-pico", hidden=192, heads=6, kda_head_dim=32, kda_gate_rank=32, q_lora=64, kv_lora=128,
            nope=32, pe=16, v_dim=32, latent=96, expert_width=64, shared_width=128, dense_width=384,
        ),
    )
}  # fmt: skip


def geometry(name: str) -> Geometry:
    """Look up a geometry by name.

    Raises:
        KeyError: unknown name; the message lists the known ones.
    """
    try:
        return GEOMETRIES[name]
    except KeyError:
        raise KeyError(f"unknown geometry {name!r}; known: {', '.join(GEOMETRIES)}") from None
