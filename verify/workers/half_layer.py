"""The program of an attention half-layer: AttnRes, input projection and one kind of attention, as one layer runs them.

Evaluator and worker both take it from here, so that a site's name means the same on both sides. Constants get names of
their own beside the program's bindings.
"""

from __future__ import annotations

from functools import cache

from k3_backend.geometry import Geometry
from k3_backend.model.program import Site, decode_program

__all__ = ["constant_name", "half_layer"]

_FRONT = ("attn_res.attention", "input_projection")
_MIXERS = ("kda_decode", "mla_query", "mla_decode", "mla_value")


@cache
def half_layer(g: Geometry, half: str, tokens: int) -> tuple[Site, ...]:
    """Sites from AttnRes to the attention's output, in order.

    Args:
        g: the model's dimensions.
        half: `kda` or `mla`.
        tokens: T, query tokens per request.

    Raises:
        ValueError: another kind.
    """
    if half not in ("kda", "mla"):
        raise ValueError(f"half-layer {half!r}; expected kda or mla")
    layer = next(n for n in range(1, g.layers) if g.kind(n) == half and not g.writes_block(n))
    names = (*_FRONT, *_MIXERS)
    return tuple(site for site in decode_program(g, tokens) if site.layer == layer and site.name in names)


def constant_name(site: Site, argument: str) -> str:
    """What a site's weight is called beside bindings."""
    return f"{site.key}:{argument}"
