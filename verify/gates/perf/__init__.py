"""Performance gate: is the candidate faster, in which cells, by a method that it cannot bend?

Measures whole decode steps and single ops of three arms (standard path, current best, candidate) and an A/A control in
paired blocks of fresh processes, and writes one raw line per block. Decides with `verify.protocol.perf`. Cannot see:
cells outside the plan, precision (kernels gate), or which kernels a served step uses beyond the ledger's counts (path).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from harness.records import EvidenceClass, GateResult
from k3_backend.geometry import geometry
from verify.bench.ceilings import measure_ceilings
from verify.building import artifact_cache
from verify.context import Arms, GateContext
from verify.gates.arms import best_arm, candidate_arm, obstacle, standard_arm
from verify.gates.common import gate_guard, to_result
from verify.gates.kit import from_kit
from verify.gates.perf.plan import make_plan
from verify.gates.perf.workers import WorkerSampler
from verify.protocol.decision import Line
from verify.protocol.lines import last_attempt, of_kind
from verify.protocol.perf import PROTOCOL_ID, below_floor, decide
from verify.protocol.perf_plan import CUDA_PROTOCOL_ID, Plan
from verify.timing.campaign import run_campaign

__all__ = ["PROTOCOL_ID", "THREADS", "run"]

THREADS = 2
"""Per arm: the cpu target is two cores."""
MORE_CEILINGS = 3
"""Further measurements of the ceilings before a candidate counts as faster than the machine."""


@gate_guard("perf", PROTOCOL_ID)
def run(ctx: GateContext) -> GateResult:
    """Measure, or go on where an interrupted attempt stopped, and decide."""
    if ctx.target.device != "cpu":
        return from_kit("perf", CUDA_PROTOCOL_ID, ctx, decide, _cuda_detail)
    started = time.monotonic()
    blocked = obstacle("perf", ctx)
    if blocked is not None:
        return to_result("perf", PROTOCOL_ID, blocked, EvidenceClass.HARDWARE, [], time.monotonic() - started)
    assert ctx.arms is not None
    plan = _plan(ctx, ctx.arms)
    if plan.arms["candidate"] != plan.arms["best"]:
        arms = {"standard": standard_arm(), "best": best_arm(ctx), "candidate": candidate_arm(ctx)}
        sampler = WorkerSampler(
            arms,
            geometry(ctx.target.geometry),
            base_tree=ctx.base_tree,
            run_dir=ctx.run_dir / "workers",
            threads=THREADS,
        )
        run_campaign(plan, sampler, ctx.evidence, ctx.progress, before_end=lambda: _check_ceilings(ctx))
    decision = decide(ctx.evidence.lines("perf"))
    evidence = [ctx.evidence.ref("perf")]
    return to_result("perf", PROTOCOL_ID, decision, EvidenceClass.HARDWARE, evidence, time.monotonic() - started)


def _plan(ctx: GateContext, arms: Arms) -> Plan:
    """The plan; an interrupted attempt on the same plan goes on, else its header and ceilings are written."""
    plan = make_plan(ctx, arms)
    attempt = last_attempt(ctx.evidence.lines("perf"))
    if attempt is None or any(attempt[0].get(name) != value for name, value in plan.header().items()):
        ctx.evidence.append("perf", {**plan.header(), "threads": THREADS})
        attempt = None
    if plan.arms["candidate"] != plan.arms["best"] and (attempt is None or not of_kind(attempt[1], "ceilings")):
        _add_ceilings(ctx)
    return plan


def _add_ceilings(ctx: GateContext) -> None:
    ctx.progress("perf: measuring the ceilings of this machine")
    ctx.evidence.append(
        "perf", {"kind": "ceilings", "ceilings": measure_ceilings(THREADS, artifact_cache(ctx.repo.root)).record()}
    )


def _check_ceilings(ctx: GateContext) -> None:
    """Measure the ceilings again while the candidate seems faster than they allow: a busy moment makes them too low."""
    for _ in range(MORE_CEILINGS):
        if not below_floor(ctx.evidence.lines("perf")):
            return
        _add_ceilings(ctx)


def _cuda_detail(lines: Sequence[Line]) -> dict[str, Any]:
    """Beside the table: versions of the standard path, and where the candidate declares that it runs it."""
    header = lines[0]
    declared: dict[str, set[str]] = {}
    for line in lines:
        for cell in line["cells"] if line["kind"] == "block" else ():
            for site in cell["facts"]["candidate"]["sites"]:
                if site["path"] == "standard":
                    declared.setdefault(f"{site['op']}: {site['message']}", set()).add(cell["key"])
    return {
        "standard": header["standard"],
        "declared_standard": {what: sorted(keys) for what, keys in sorted(declared.items())},
    }
