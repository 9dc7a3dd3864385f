"""Kernels gate: are the numbers of every changed op right, in secret cases, without touching what is not its own?

Measures: draws a secret plan of cases, runs them in a sandboxed worker, compares with reference and standard path in
this process, and writes one raw line per case. Decides with `verify.protocol.kernels`. Cannot see: whether a served
step uses the kernels (path), or how fast they are (perf).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from harness.records import EvidenceClass, GateResult
from k3_backend.aot.schedule import Schedule, ScheduleError, load_declarations
from k3_backend.ops import OPS
from verify.building import KERNELS, SCHEDULES
from verify.context import Arms, GateContext
from verify.evaluator.contention import Competitors
from verify.evaluator.execute import run_case
from verify.evaluator.plan import Planned, draw_plan, from_json
from verify.evaluator.receipts import receipts
from verify.evaluator.worker import Worker, WorkerError, WorkerFailure
from verify.gates.arms import candidate_arm, identity, obstacle
from verify.gates.common import command_for, gate_guard, to_result
from verify.gates.kit import from_kit
from verify.protocol import kernels_cuda
from verify.protocol.decision import Line
from verify.protocol.kernels import PROTOCOL_ID, case_fails, decide, worst_share

__all__ = ["PROTOCOL_ID", "changed_ops", "run"]

BUFFER_BYTES = 1 << 30
"""Shared buffer of the worker; pages are taken when touched."""
THREADS = 2
LOAD_TIMEOUT_S = 120.0
_LASTING = {"denormals_off", "threads_left"}
"""Events after which the worker is replaced: later cases would suffer from them."""
MAX_BAD_CASES = 3
"""Failing cases after which the rest of an op's cases is skipped: the outcome is decided."""


@gate_guard("kernels", PROTOCOL_ID)
def run(ctx: GateContext) -> GateResult:
    """Run the planned cases, or go on with those of an interrupted attempt, and decide."""
    if ctx.target.device != "cpu":
        return from_kit("kernels", kernels_cuda.PROTOCOL_ID, ctx, decide, _cuda_detail)
    started = time.monotonic()
    why_not = obstacle("kernels", ctx)
    if why_not is not None:
        return to_result("kernels", PROTOCOL_ID, why_not, EvidenceClass.STATIC, [], time.monotonic() - started)
    assert ctx.arms is not None
    plan = _plan(ctx, ctx.arms)
    done = {line["id"] for line in ctx.evidence.lines("kernels") if line.get("kind") == "case"}
    _Campaign(ctx, ctx.arms).run([planned for planned in plan if planned.case.id not in done])
    lines = ctx.evidence.lines("kernels")
    decision = decide(lines)
    evidence = [ctx.evidence.ref("kernels")]
    seconds = time.monotonic() - started
    return to_result("kernels", PROTOCOL_ID, decision, EvidenceClass.HARDWARE, evidence, seconds, _detail(lines))


def changed_ops(ctx: GateContext) -> tuple[str, ...]:
    """Ops whose kernel or schedule may behave differently from the base's, in the order of the op table.

    All of them in a tier that covers every batch, when shared kernel code changed, and when nothing changed that this
    target's ops are built from (so that the gate never passes on nothing).
    """
    assert ctx.arms is not None
    known = [op for op in OPS if op in ctx.arms.candidate]
    touched: set[str] = set()
    for change in ctx.repo.changes(ctx.candidate.base, ctx.candidate.head):
        if change.path.startswith(f"{KERNELS}/"):
            touched.add(change.path.removeprefix(f"{KERNELS}/").split("/")[0])
        elif change.path.startswith(f"{SCHEDULES}/cpu/{ctx.target.geometry}/"):
            touched.add(change.path.rsplit("/", 1)[1].removesuffix(".toml"))
    changed = tuple(op for op in known if op in touched)
    return tuple(known) if "common" in touched or ctx.tier.batches == "all" or not changed else changed


def _plan(ctx: GateContext, arms: Arms) -> list[Planned]:
    """The stored plan of an interrupted attempt on the same artifacts, else a new one, stored first of all."""
    artifacts = identity(arms)
    earlier = ctx.evidence.lines("kernels")
    if earlier:
        header = earlier[0]
        if header.get("artifacts") != artifacts or header.get("protocol") != PROTOCOL_ID:
            raise RuntimeError("raw/kernels.jsonl belongs to other artifacts or another protocol")
        return [from_json(planned) for planned in header["plan"]]
    ops = changed_ops(ctx)
    plan = draw_plan(
        ops,
        geometry=ctx.target.geometry,
        batches=ctx.target.batches_of(ctx.tier),
        tokens=tuple(1 + drafts for drafts in ctx.target.drafts),
        draws=ctx.tier.kernel_cases,
        edges=_edges(arms, ctx.target.geometry),
    )
    header = {
        "kind": "header",
        "gate": "kernels",
        "protocol": PROTOCOL_ID,
        "target": ctx.target.name,
        "tier": ctx.tier.name,
        "geometry": ctx.target.geometry,
        "ops": list(ops),
        "artifacts": artifacts,
        "planned": [planned.case.id for planned in plan],
        "plan": [planned.to_json() for planned in plan],
        "command": command_for("kernels", ctx),
    }
    ctx.evidence.append("kernels", header)
    return plan


def _edges(arms: Arms, geometry_name: str) -> dict[str, list[int]]:
    """Rows at which each op's schedule changes bucket. Unreadable schedules have none; loading reports them."""
    edges: dict[str, list[int]] = {}
    for op, artifact in arms.candidate.items():
        path = arms.candidate_schedules / "cpu" / geometry_name / f"{op}.toml"
        try:
            declared = load_declarations(artifact.path / "cpu.toml")
            schedule = Schedule.load(path, op=op, geometry=geometry_name, tunables=declared.tunables)
        except ScheduleError:
            continue
        edges[op] = [bucket.max_rows for bucket in schedule.buckets]
    return edges


class _Campaign:
    """Runs the waiting cases. A worker that died is replaced; the op that killed it is not run again."""

    def __init__(self, ctx: GateContext, arms: Arms) -> None:
        self.ctx = ctx
        self.arms = arms
        self.bad: Counter[str] = Counter()
        self.stopped: dict[str, str] = {}
        """op -> why its remaining cases are skipped."""
        for line in ctx.evidence.lines("kernels"):
            if line["kind"] == "case":
                self._count(line)

    def run(self, waiting: Sequence[Planned]) -> None:
        """Run all cases, recording one line each; ends early only if the objects cannot be loaded (recorded)."""
        left = list(waiting)
        with Competitors() as competitors:
            while left:
                with Worker.start(
                    candidate_arm(self.ctx),
                    base_tree=self.ctx.base_tree,
                    run_dir=self.ctx.run_dir / "workers",
                    threads=THREADS,
                    buffer_bytes=BUFFER_BYTES,
                ) as worker:
                    if not self._load(worker):
                        return
                    while left and self._case(worker, left.pop(0), competitors):
                        self.ctx.progress(f"kernels: {len(waiting) - len(left)} of {len(waiting)} cases")

    def _load(self, worker: Worker) -> bool:
        """Load the objects and record which files were mapped; False if that failed."""
        line: dict[str, Any] = {"kind": "load", "failure": None, "receipts": {}}
        try:
            worker.call("op.load", timeout_s=LOAD_TIMEOUT_S)
            line["receipts"] = receipts(worker.tasks(), {**self.arms.candidate, "runtime": self.arms.runtime})
        except WorkerFailure as failure:
            line["failure"] = failure.record()
        self.ctx.evidence.append("kernels", line)
        return line["failure"] is None

    def _case(self, worker: Worker, planned: Planned, competitors: Competitors) -> bool:
        """Run one case and record its line; False if the worker is gone."""
        case = planned.case
        line: dict[str, Any] = {**planned.to_json(), "kind": "case", "class": case.kind, "rows": case.rows}
        line |= {"skipped": self.stopped.get(case.op), "refused": None, "failure": None}
        alive, started = True, time.monotonic()
        if line["skipped"] is None:
            rng = np.random.default_rng(secrets.randbits(128))
            try:
                load = competitors.busy if planned.contended else contextlib.nullcontext
                run_case(worker, case, rng, line, load)
            except WorkerFailure as failure:
                line["failure"] = failure.record()
                alive = isinstance(failure, WorkerError)
        line["seconds"] = time.monotonic() - started
        self.ctx.evidence.append("kernels", line)
        self._count(line)
        return alive and not _LASTING & {event["code"] for event in line.get("events", ())}

    def _count(self, line: Line) -> None:
        """Stop an op whose outcome is decided: after a fatal failure, or after several bad cases."""
        op = str(line["op"])
        failure = line["failure"]
        self.bad[op] += case_fails(line)
        if failure is not None and failure["failure"] != WorkerError.kind:
            self.stopped[op] = f"the worker ended in case {line['id']}"
        elif self.bad[op] >= MAX_BAD_CASES:
            self.stopped[op] = f"{MAX_BAD_CASES} cases failed"


def _detail(lines: Sequence[Line], name: Callable[[Line], str] = lambda line: str(line["op"])) -> dict[str, Any]:
    """Per op for the report: cases by class, and the largest error as a share of its tolerance."""
    table: dict[str, Any] = {}
    for line in lines:
        if line["kind"] != "case":
            continue
        row = table.setdefault(name(line), {"cases": 0, "refused": 0, "skipped": 0, "classes": {}, "worst_share": 0.0})
        row["cases"] += 1
        row["refused"] += line["refused"] is not None
        row["skipped"] += line["skipped"] is not None
        row["classes"][line["class"]] = row["classes"].get(line["class"], 0) + 1
        row["worst_share"] = max(row["worst_share"], worst_share(line))
    return {"ops": table}


def _cuda_detail(lines: Sequence[Line]) -> dict[str, Any]:
    """The same per artifact: a kit's record has several geometries of an op."""
    return _detail(lines, kernels_cuda.label)
