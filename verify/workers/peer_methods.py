"""Methods of the peer table on a GPU: ceilings, and one cell at a time, our kernel beside its peers.

Our kernels' cubins and the peers' packages run in this process; none of it decides about a candidate. The packages that
`--peers DIR` brings are put on the path here, and their digests were recorded by the evaluator before this started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verify.workers.main import Method, Session

__all__ = ["METHODS"]


def load(session: Session, *, op: str, arch: str, geometry_name: str, artifact: str) -> dict[str, Any]:
    """Load one op's kernels; those of another op are forgotten."""
    from verify.bench.gpu.ours import Ours

    if session.schedules is None:
        raise ValueError("this arm has no schedules")
    session.areas["peers.ours"] = Ours(Path(artifact), session.schedules, op, arch, geometry_name)
    return {}


def packages(session: Session, *, folder: str) -> dict[str, Any]:  # noqa: ARG001 - every method has the same signature
    """Make the packages of a `--peers` folder importable, and say where its shared objects lie."""
    from verify.bench.gpu.peers.flashinfer_mla import FOLDER_VARIABLE

    os.environ[FOLDER_VARIABLE] = folder
    sys.path.append(str(Path(folder) / "site"))
    return {}


def ceilings(session: Session) -> dict[str, Any]:  # noqa: ARG001
    """Memory ceilings and the spacing of empty launches, now."""
    from verify.bench.gpu.ceilings import measure

    return measure()


def cell(session: Session, *, cell: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Check and time one cell's arms."""
    from verify.bench.gpu.cells import PeerCell
    from verify.bench.gpu.measure import measure_cell

    return measure_cell(PeerCell.from_json(cell), session.areas["peers.ours"], seed)


METHODS: dict[str, Method] = {
    "peers.load": load,
    "peers.packages": packages,
    "peers.ceilings": ceilings,
    "peers.cell": cell,
}
