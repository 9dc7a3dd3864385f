"""Features gate: do prefill, mixed batches, speculation, sampling, long context, abort and slot reuse still work?

Both arms run the same requests on the same engine: the standard arm shows how far two modes differ when nothing is
specialised, and the candidate's modes may differ by a stated multiple of that. What decides is
`verify.protocol.features`. It cannot see wrong kernels that agree with themselves in every mode.
"""

from __future__ import annotations

import os
import time
from typing import Final

from harness.records import EvidenceClass, GateResult
from k3_backend.geometry import geometry
from verify.context import GateContext
from verify.evaluator.engine import EngineArm
from verify.evaluator.worker import ArmSpec, Worker, WorkerFailure
from verify.gates.arms import UNTIMED_STANDARD_THREADS, candidate_arm, obstacle, side_by_side, standard_arm
from verify.gates.common import gate_guard, to_result
from verify.gates.features.checks import CHECKS, Plan, draw_plan, plain_run
from verify.protocol import features as protocol

__all__ = ["PROTOCOL_ID", "run"]

PROTOCOL_ID = protocol.PROTOCOL_ID
GATE: Final = "features"

SAMPLES_PER_EVAL_SAMPLE = 16
"""Draws of the sampling test, per evaluation sample of the tier."""

THREADS = 2


@gate_guard(GATE, PROTOCOL_ID)
def run(ctx: GateContext) -> GateResult:
    """Run every check in both arms and decide."""
    started = time.monotonic()
    blocked = obstacle(GATE, ctx)
    if blocked is not None:
        return to_result(GATE, PROTOCOL_ID, blocked, EvidenceClass.HARDWARE, [], time.monotonic() - started)
    seed = int.from_bytes(os.urandom(8))
    plan = draw_plan(
        seed,
        requests=8,
        context=ctx.target.contexts_of(ctx.tier)[-1],
        samples=SAMPLES_PER_EVAL_SAMPLE * ctx.tier.eval_samples,
    )
    header = {
        "kind": "header", "gate": GATE, "protocol": PROTOCOL_ID, "geometry": ctx.target.geometry, "seed": str(seed),
        "checks": list(protocol.CHECKS), "factor": protocol.FACTOR, "floor_nats": protocol.FLOOR_NATS,
        "min_p": protocol.MIN_P,
        "arms": {"candidate": dict(ctx.candidate.artifacts)},
    }  # fmt: skip
    ctx.evidence.append(GATE, header)
    side_by_side(
        {
            "standard": lambda: _run_arm(ctx, "standard", standard_arm(), UNTIMED_STANDARD_THREADS, plan),
            "candidate": lambda: _run_arm(ctx, "candidate", candidate_arm(ctx), THREADS, plan),
        }
    )
    ctx.evidence.append(GATE, {"kind": "end"})
    decision = protocol.decide(ctx.evidence.lines(GATE))
    return to_result(
        GATE, PROTOCOL_ID, decision, EvidenceClass.HARDWARE, [ctx.evidence.ref(GATE)], time.monotonic() - started
    )


def _run_arm(ctx: GateContext, name: str, spec: ArmSpec, threads: int, plan: Plan) -> None:
    """One line per check; a worker that dies ends its arm with a failure line, which fails the gate."""
    check = "start"
    try:
        with Worker.start(
            spec, base_tree=ctx.base_tree, run_dir=ctx.run_dir / "logs", threads=threads, buffer_bytes=1 << 16
        ) as worker:
            arm = EngineArm(worker, geometry(ctx.target.geometry).name, specialized=spec.kind == "specialized")
            plain = plain_run(arm, plan)
            for check, function in CHECKS.items():
                ctx.progress(f"features: {check}, {name} arm")
                ctx.evidence.append(GATE, {"kind": "check", "check": check, "arm": name, **function(arm, plan, plain)})
    except (WorkerFailure, ValueError) as failure:
        record = failure.record() if isinstance(failure, WorkerFailure) else {}
        line = {"kind": "failure", "check": check, "arm": name, "message": str(failure), "record": record}
        ctx.evidence.append(GATE, line)
