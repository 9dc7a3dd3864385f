"""Run a case of stored evidence again: the same seed gives the same inputs, on this machine and these objects.

For a reviewer who wants to see a finding with his own eyes, and for an author who wants to debug it. Decides nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verify.evaluator.execute import run_case
from verify.evaluator.plan import from_json
from verify.evaluator.worker import ArmSpec, Worker, WorkerFailure

__all__ = ["replay_case"]

_BUFFER_BYTES = 1 << 30
_LOAD_TIMEOUT_S = 120.0


def replay_case(
    line: Mapping[str, Any], arm: ArmSpec, *, base_tree: Path, run_dir: Path, threads: int = 2
) -> dict[str, Any]:
    """Run one case again.

    Args:
        line: a case line of `raw/kernels.jsonl`, or an entry of its header's `plan`.
        arm: objects and schedules to run it on.
        base_tree: where the worker's code comes from.
        run_dir: where its log goes.
        threads: threads of the worker.

    Returns:
        A new case line, with the failure if the worker did not survive. Poison and red zones differ from run to run.
    """
    case = from_json(line).case
    fresh: dict[str, Any] = {"kind": "case", "id": case.id, "op": case.op, "class": case.kind, "seed": case.seed}
    fresh |= {"failure": None, "skipped": None, "refused": None}
    try:
        with Worker.start(
            arm, base_tree=base_tree, run_dir=run_dir, threads=threads, buffer_bytes=_BUFFER_BYTES
        ) as worker:
            worker.call("op.load", timeout_s=_LOAD_TIMEOUT_S)
            run_case(worker, case, np.random.default_rng(secrets.randbits(128)), fresh)
    except WorkerFailure as failure:
        fresh["failure"] = failure.record()
    return fresh
