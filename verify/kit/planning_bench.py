"""The plan of the peer table, made where the kit is built: which cells, and the bytes that each must move.

It travels in the kit's manifest and is made again where results are imported, so the GPU machine has no say in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from k3_backend.geometry import geometry
from k3_backend.model.program import HALF_LAYERS, half_layer_program
from verify.bench.gpu.cells import PeerCell, plan
from verify.bench.traffic import half_layer_traffic
from verify.kit.manifest import Unit
from verify.kit.planning import copies_of
from verify.protocol.peer_figures import HALF_CELLS

__all__ = ["bench_plan"]


def bench_plan(units: Iterable[Unit]) -> dict[str, Any]:
    """The part of the raw header that is fixed where the kit is built.

    Half-layers come last, and only those of which the kit has every op; a site without a schedule for a cell's rows is
    no reason to leave it out, but runs the standard path, as it would in a step.

    Args:
        units: artifacts of the arm whose table it is.
    """
    at_hand = {(unit.op, unit.geometry) for unit in units}
    cells = [cell.to_json() for cell in plan(at_hand)]
    for half, name, batch, context in sorted(HALF_CELLS, key=lambda cell: (cell[1], cell[0], cell[3] or 0, cell[2])):
        sites = half_layer_program(geometry(name), HALF_LAYERS[half], 1)
        if all((site.op, name) in at_hand for site in sites):
            cells.append(_half(half, name, batch, context))
    return {"planned": cells}


def _half(half: str, name: str, batch: int, context: int | None) -> dict[str, Any]:
    """A half-layer's cell in the form of `PeerCell.to_json`, with the half-layers of one replay as `copies`."""
    g, cell = geometry(name), PeerCell(half, name, batch, context=context)
    traffic = half_layer_traffic(g, half, batch=batch, tokens=1, context=context or 0)
    cache = batch * (context or 0) * g.mla_row * 2
    facts = {"read_bytes": int(traffic.read_bytes), "write_bytes": int(traffic.write_bytes), "cache_bytes": cache}
    return {"key": cell.key, **asdict(cell), **facts, "width": None, "copies": copies_of(half, g)}
