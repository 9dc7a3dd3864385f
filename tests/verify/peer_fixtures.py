"""Raw lines of a peer table, with times of our choice."""

from __future__ import annotations

from typing import Any

from k3_backend.geometry import geometry
from verify.bench.gpu.cells import PeerCell
from verify.protocol.peer_figures import HALF_CELLS
from verify.protocol.peers import PROTOCOL_ID

ROUNDS = 30
MACHINE = {"gpu": {"name": "H200", "driver": "580.1"}, "cuda": "13.0", "packages": {"torch": "2.11"}}


def arm(us: float | None, missing: str | None = None, spread: float = 0.0) -> dict[str, Any]:
    """One arm's record: the same time in every round, or times rising by `spread` in all."""
    if us is None:
        return {"missing": missing, "errors": {}, "samples_us": None}
    samples = [us * (1 + spread * i / ROUNDS) for i in range(ROUNDS)]
    return {
        "missing": None, "errors": {}, "samples_us": samples, "pdl": False, "note": "", "facts": {},
        "device_us": us / 2,
    }  # fmt: skip


def cell_line(cell: PeerCell, **arms: dict[str, Any]) -> dict[str, Any]:
    """A measured cell."""
    return {
        "kind": "cell", "key": cell.key, "seed": 1, "failure": None, "arms": arms, "sets": 8, "calls": 48,
        "rotated_bytes": 500_000_000,
    }  # fmt: skip


def ceilings(read: float = 4500.0, copy: float = 4200.0, update: float = 4300.0, empty: float = 1.0) -> dict[str, Any]:
    """GB/s, and us between empty launches."""
    gbps = {"read": {"a": read, "b": read / 2}, "write": {"a": 4000.0}, "copy": {"a": copy}, "update": {"a": update}}
    return {"kind": "ceilings", "gbps": gbps, "empty_us": {"1": empty, "132": 2.0}}


def half(half: str, geometry_name: str, batch: int, context: int | None, copies: int = 8) -> dict[str, Any]:
    """A planned half-layer with made-up bytes."""
    key = "/".join([half, geometry_name, f"B{batch}", "T1", *([] if context is None else [f"C{context}"])])
    cache = batch * (context or 0) * geometry(geometry_name).mla_row * 2
    return {
        "key": key, "op": half, "geometry": geometry_name, "batch": batch, "tokens": 1, "context": context,
        "site": None, "sources": None, "width": None, "copies": copies, "read_bytes": 90_000_000 + cache,
        "write_bytes": 1_000_000, "cache_bytes": cache,
    }  # fmt: skip


def half_cells() -> list[dict[str, Any]]:
    """Every half-layer that the issue's figure is about."""
    return [half(*cell) for cell in sorted(HALF_CELLS, key=str)]


def half_line(
    cell: dict[str, Any], ours: float, standard: float, *fallbacks: str, spread: float = 0.0
) -> dict[str, Any]:
    """A measured half-layer."""
    arms = {"ours": {**arm(ours), "fallbacks": list(fallbacks)}, "standard": arm(standard, spread=spread)}
    return {
        "kind": "cell", "key": cell["key"], "seed": "0" * 32, "failure": None, "arms": arms, "sets": 8, "calls": 16,
        "rotated_bytes": 700_000_000,
    }  # fmt: skip


def header(*cells: PeerCell | dict[str, Any]) -> dict[str, Any]:
    """First line of a record."""
    return {
        "kind": "header", "protocol": PROTOCOL_ID, "head": "c" * 40, "begun": "2026-11-30T00:00:00Z",
        "planned": [cell.to_json() if isinstance(cell, PeerCell) else cell for cell in cells],
        "machine": MACHINE, "packages": {"distributions": ["fla_core-0.6.0"], "objects": {}, "digest": "0" * 64},
    }  # fmt: skip
