"""Raw lines of a peer table, with times of our choice."""

from __future__ import annotations

from typing import Any

from verify.bench.gpu.cells import PeerCell

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


def header(*cells: PeerCell) -> dict[str, Any]:
    """First line of a record."""
    return {
        "kind": "header", "protocol": "bench-cuda/1", "planned": [cell.to_json() for cell in cells],
        "machine": MACHINE, "packages": {"distributions": ["fla_core-0.6.0"], "objects": {}, "digest": "0" * 64},
    }  # fmt: skip
