"""From target, tier, task and arms to the plan: which cells, which claims, which traffic, which error budget."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records import Cell
from k3_backend.aot.manifest import Artifact
from k3_backend.geometry import Geometry, geometry
from verify.bench.traffic import cell_traffic
from verify.context import Arms, GateContext
from verify.gates.common import command_for
from verify.protocol.perf_plan import CellPlan, Claim, Plan, plan_stages

__all__ = ["MAX_OP_CELLS", "changed_ops", "make_plan", "op_cells"]

MAX_OP_CELLS = 6
"""Cells of single ops beside the step cells of a verification without a task."""
_CONTEXT_OPS = ("mla_decode",)
"""Ops whose cost depends on the cached context."""


def make_plan(ctx: GateContext, arms: Arms) -> Plan:
    """The plan of a verification.

    With a task, its cells must be faster than the current best; the target's step cells must be faster than the
    standard path and not slower than the best. Without one, op cells of the changed ops join them as not slower, and at
    least one cell of all must be faster.
    """
    shape = geometry(ctx.target.geometry)
    steps = ctx.target.cells(ctx.tier)
    wanted = {cell.key: cell for cell in (*steps, *ctx.task_cells)}
    if not ctx.task_cells:
        batches, context = ctx.target.batches_of(ctx.tier), max(ctx.target.contexts_of(ctx.tier))
        wanted |= {cell.key: cell for cell in op_cells(changed_ops(arms), batches, context)}
    task = {cell.key for cell in ctx.task_cells}
    plan = Plan(
        target=ctx.target.name,
        tier=ctx.tier.name,
        arms={
            "standard": {"geometry": ctx.target.geometry, "base": ctx.candidate.base},
            "best": _identity(arms.best, arms.best_schedules, shape),
            "candidate": _identity(arms.candidate, arms.candidate_schedules, shape),
        },
        band=ctx.target.perf.not_slower_band,
        alpha_per_run=ctx.target.perf.alpha_per_run,
        candidates=ctx.candidates_tried,
        stages=plan_stages(ctx.tier.perf_blocks, ctx.target.perf.alpha_per_run, ctx.candidates_tried),
        cells=tuple(_cell(cell, cell.key in task, shape) for cell in wanted.values()),
        gain_cells=() if task else tuple(wanted),
        command=command_for("perf", ctx),
    )
    plan.check()
    return plan


def changed_ops(arms: Arms) -> tuple[str, ...]:
    """Ops that run other code or another schedule in the candidate than in the current best."""
    return tuple(
        op
        for op, artifact in arms.candidate.items()
        if op not in arms.best
        or artifact.digest != arms.best[op].digest
        or _schedule(arms.candidate_schedules, artifact) != _schedule(arms.best_schedules, arms.best[op])
    )


def op_cells(ops: Sequence[str], batches: Sequence[int], context: int) -> Iterable[Cell]:
    """Cells of single ops, spread over the batches; none where so many changed that only whole steps speak for them."""
    if not ops or len(ops) > MAX_OP_CELLS // 2:
        return
    count = min(len(batches), MAX_OP_CELLS // len(ops))
    picked = sorted({batches[round(at * (len(batches) - 1) / max(1, count - 1))] for at in range(count)})
    for op in ops:
        for batch in picked:
            yield Cell(scope=op, batch=batch, context=context if op in _CONTEXT_OPS else None)


def _cell(cell: Cell, in_task: bool, g: Geometry) -> CellPlan:
    claims = [Claim("best", "faster" if in_task else "not_slower")]
    if cell.scope == "step":
        claims.insert(0, Claim("standard", "faster"))
    return CellPlan(cell.key, cell.model_dump(mode="json"), tuple(claims), cell_traffic(cell, g))


def _identity(artifacts: Mapping[str, Artifact], schedules: Path, g: Geometry) -> dict[str, Any]:
    """Digests of what an arm runs."""
    folder = schedules / "cpu" / g.name
    return {
        "artifacts": {op: artifact.digest for op, artifact in sorted(artifacts.items())},
        "schedules": {path.stem: _digest(path) for path in sorted(folder.glob("*.toml"))},
    }


def _schedule(schedules: Path, artifact: Artifact) -> str | None:
    path = schedules / "cpu" / artifact.geometry / f"{artifact.op}.toml"
    return _digest(path) if path.is_file() else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
