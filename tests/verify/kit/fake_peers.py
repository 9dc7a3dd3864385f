"""Peer methods of a worker without a GPU: made-up times, and faults by batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.verify.peer_fixtures import arm, ceilings
from verify.workers import peer_methods
from verify.workers.main import Session

FAULTY = "FASTTRACK_TEST_FAULTY"
"""Environment variable: `<batch>:<fault>` of the cell that goes wrong."""


def install() -> None:
    """Make these the peer methods of every session of this process."""
    peer_methods.METHODS.update({
        "peers.load": _load, "peers.ceilings": _ceilings, "peers.cell": _cell,
    })  # fmt: skip


def _load(session: Session, *, op: str, arch: str, geometry_name: str, artifact: str) -> dict[str, Any]:
    assert session.schedules is not None
    assert (Path(artifact) / "cuda.json").is_file()
    assert (op, arch, geometry_name) == (*Path(artifact).parts[-1:], "sm_90a", Path(artifact).parts[-2])
    return {}


def _ceilings(session: Session) -> dict[str, Any]:
    found = ceilings()
    del found["kind"]
    return found


def _cell(session: Session, *, cell: Mapping[str, Any], seed: int) -> dict[str, Any]:
    batch, _, fault = os.environ.get(FAULTY, "0:").partition(":")
    if int(batch) == cell["batch"]:
        if fault == "exits":
            os._exit(0)
        if fault == "raises":
            raise ValueError("no such tensor")
        if fault == "device":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    arms = {"ours": arm(20.0), "cublas": arm(25.0), "compile": arm(None, "cannot be imported here (no triton)")}
    return {"sets": 8, "calls": 48, "rotated_bytes": 500_000_000, "arms": arms, "seconds": {}}
