"""The program of one attention half-layer and the names of its weights, the same for evaluator and worker."""

from __future__ import annotations

from k3_backend.geometry import Geometry, LayerKind
from k3_backend.model.program import Site, half_layer_program

__all__ = ["constant_name", "half_layer"]


def half_layer(g: Geometry, half: LayerKind, tokens: int) -> tuple[Site, ...]:
    """Sites from AttnRes to the attention's output, in order, for T = tokens.

    Raises:
        ValueError: another kind of attention.
    """
    if half not in ("kda", "mla"):
        raise ValueError(f"half-layer {half!r}; expected kda or mla")
    return half_layer_program(g, half, 1, tokens)


def constant_name(site: Site, argument: str) -> str:
    """What a site's weight is called beside bindings."""
    return f"{site.key}:{argument}"
