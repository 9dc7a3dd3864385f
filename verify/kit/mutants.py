"""Planted faults on the GPU machine: arms that the kernels gate has to reject, on cases of the candidate's own plan.

A mutant is the candidate with one fault, built like it. Its cases run until one fails; what was tried is recorded as
`mutant` lines beside the candidate's. A mutant that passes says that the gate, here and now, does not look.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from verify.evaluator.execute import run_on
from verify.evaluator.failures import WorkerError, WorkerFailure
from verify.evaluator.plan import Planned
from verify.kit.card import CardDevice
from verify.kit.child import started
from verify.kit.context import KitContext
from verify.kit.manifest import Unit
from verify.protocol.kernels import case_fails

__all__ = ["run"]

GATE = "kernels"
BUFFER_BYTES = 3 << 29
LOAD_TIMEOUT_S = 180.0
MOST_CASES = 64
"""Cases per mutant; honest faults show in the first few."""
REPLAYS = 8


def run(kit: KitContext, plan: Sequence[Planned]) -> None:
    """Try every mutant that was not rejected yet, until the time is over."""
    lines = [line for line in kit.results.lines(GATE) if line["kind"] == "mutant"]
    rejected = {line["mutant"] for line in lines if case_fails(line)}
    waiting = [name for name in kit.manifest.mutants if name not in rejected]
    with ThreadPoolExecutor(max_workers=kit.jobs) as pool:
        list(pool.map(lambda name: _try(kit, name, plan), waiting))


def _try(kit: KitContext, name: str, plan: Sequence[Planned]) -> None:
    """Run a mutant's cases until one fails."""
    done = {(line["mutant"], line["id"]) for line in kit.results.lines(GATE) if line["kind"] == "mutant"}
    for unit in kit.manifest.units(name):
        own = [p for p in plan if (p.case.op, p.case.geometry) == (unit.op, unit.geometry)]
        waiting = [p for p in own if (name, p.case.id) not in done]
        waiting = sorted(waiting, key=lambda planned: planned.case.rows)[: MOST_CASES - len(own) + len(waiting)]
        if _rejected(kit, name, unit, waiting):
            kit.progress(f"{GATE}: mutant {name} rejected")
            return
    kit.progress(f"{GATE}: mutant {name} not rejected" + (" (the time is over)" if kit.over() else ""))


def _rejected(kit: KitContext, name: str, unit: Unit, waiting: Sequence[Planned]) -> bool:
    if kit.over() or not waiting:
        return False
    try:
        with started(
            unit.op, kit.artifact(name, unit), kit.schedules(name), code=kit.code, logs=kit.logs,
            buffer_bytes=BUFFER_BYTES, bootstrap=kit.machine.bootstrap,
        ) as worker:  # fmt: skip
            worker.call(
                "card.load", timeout_s=LOAD_TIMEOUT_S, op=unit.op, arch=unit.arch, geometry_name=unit.geometry,
                nbytes=BUFFER_BYTES,
            )  # fmt: skip
            for planned in waiting:
                if kit.over():
                    return False
                device = CardDevice(worker, kit.evaluator, REPLAYS, 1 << 28, contended=planned.contended)
                line = _case(device, name, planned)
                kit.results.append(GATE, kit.without_folders(line))
                if case_fails(line):
                    return True
    except WorkerFailure as failure:
        kit.progress(f"{GATE}: mutant {name} could not be loaded: {failure}")
    return False


def _case(device: CardDevice, name: str, planned: Planned) -> dict[str, Any]:
    case = planned.case
    line: dict[str, Any] = {**planned.to_json(), "kind": "mutant", "mutant": name, "class": case.kind}
    line |= {"rows": case.rows, "skipped": None, "refused": None, "failure": None}
    try:
        run_on(device, case, np.random.default_rng(secrets.randbits(128)), line)
    except WorkerError as failure:
        line["skipped"] = str(failure)[:300]  # the launcher's or this code's own mistake proves nothing
    except WorkerFailure as failure:
        line["failure"] = failure.record()
    return line
