"""What a decode step reads and writes beyond its own step: latent KV pages, conv windows and recurrent states.

This module allocates and names the pools; who owns which slot or page is the engine's business. Slot 0 and page 0
are null: no request owns them and no correct kernel changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_backend.geometry import Geometry

__all__ = ["DecodeState"]


@dataclass(frozen=True)
class DecodeState:
    """Pools of one model instance, keyed by 0-based layer.

    Args:
        kv_cache: MLA layer -> [pages, page_size, kv_lora + pe] bf16.
        conv_state: KDA layer -> [slots, taps, 3 * kda_width] bf16, pre-conv inputs, oldest first.
        state: KDA layer -> [slots, heads, V, K] f32 recurrent state.
    """

    geometry: Geometry
    kv_cache: dict[int, Tensor]
    conv_state: dict[int, Tensor]
    state: dict[int, Tensor]

    @classmethod
    def allocate(cls, geometry: Geometry, slots: int, pages: int, page_size: int, taps: int) -> DecodeState:
        """Zeroed pools.

        Args:
            geometry: the model's dimensions.
            slots: state slots including null slot 0.
            pages: cache pages including null page 0.
            page_size: cache rows per page.
            taps: conv rows per slot: T + 2 for the largest T = 1 + drafts that the pool serves.

        Raises:
            ValueError: fewer taps than plain decode needs, or no room beside the null slot or page.
        """
        least = geometry.conv_width - 1
        for name, value, minimum in (("slots", slots, 2), ("pages", pages, 2), ("page_size", page_size, 1)):
            if value < minimum:
                raise ValueError(f"DecodeState.{name}: {value}; expected >= {minimum}; next: allocate a larger pool")
        if taps < least:
            raise ValueError(f"DecodeState.taps: {taps}; expected >= {least}; next: pass T + {least - 1} taps")
        head = geometry.kda_head_dim
        return cls(
            geometry=geometry,
            kv_cache={
                layer: torch.zeros(pages, page_size, geometry.mla_row, dtype=torch.bfloat16)
                for layer in geometry.mla_layers
            },
            conv_state={
                layer: torch.zeros(slots, taps, 3 * geometry.kda_width, dtype=torch.bfloat16)
                for layer in geometry.kda_layers
            },
            state={
                layer: torch.zeros(slots, geometry.heads, head, head, dtype=torch.float32)
                for layer in geometry.kda_layers
            },
        )

    @property
    def slots(self) -> int:
        """State slots, null slot included."""
        return next(iter(self.state.values())).shape[0]

    @property
    def taps(self) -> int:
        """Conv rows per slot."""
        return next(iter(self.conv_state.values())).shape[1]

    @property
    def pages(self) -> int:
        """Cache pages, null page included."""
        return next(iter(self.kv_cache.values())).shape[0]

    @property
    def page_size(self) -> int:
        """Cache rows per page."""
        return next(iter(self.kv_cache.values())).shape[1]

    @property
    def max_tokens(self) -> int:
        """Largest T = 1 + drafts that the conv windows can hold."""
        return self.taps - (self.geometry.conv_width - 2)

    def tensors(self) -> dict[str, Tensor]:
        """Every pool under the name that a program's bindings use: `kv_cache.3`, `conv_state.0`, `state.0`."""
        pools = (("kv_cache", self.kv_cache), ("conv_state", self.conv_state), ("state", self.state))
        return {f"{kind}.{layer}": pool for kind, by_layer in pools for layer, pool in by_layer.items()}

    @classmethod
    def of(cls, geometry: Geometry, tensors: Mapping[str, Tensor]) -> DecodeState:
        """Pools from tensors named as in `tensors()`; references keep them in fp64."""
        return cls(
            geometry=geometry,
            kv_cache={layer: tensors[f"kv_cache.{layer}"] for layer in geometry.mla_layers},
            conv_state={layer: tensors[f"conv_state.{layer}"] for layer in geometry.kda_layers},
            state={layer: tensors[f"state.{layer}"] for layer in geometry.kda_layers},
        )

    def clone(self) -> DecodeState:
        """An independent copy, so that two arms can start from one state."""
        return DecodeState.of(self.geometry, {name: pool.clone() for name, pool in self.tensors().items()})

    def copy_(self, other: DecodeState) -> DecodeState:
        """Take over the content of another state of the same shapes, in place; addresses stay valid."""
        theirs = other.tensors()
        for name, pool in self.tensors().items():
            pool.copy_(theirs[name])
        return self
