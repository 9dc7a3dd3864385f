"""The plan of the perf gate on a GPU, made where the kit is built: cells, claims, chains, error budget.

It travels in the kit's manifest and is made again where results are imported, so the GPU machine has no say in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from harness.errors import FasttrackError
from harness.records import Cell
from harness.settings import Layout, Target, Tier
from k3_backend.aot.cuda.arch import ARCHS
from k3_backend.geometry import GEOMETRIES, Geometry
from k3_backend.model.program import HALF_LAYERS
from k3_backend.ops import OPS
from verify.bench.traffic import cell_traffic, half_layer_traffic, op_traffic
from verify.kit.build import Arm
from verify.kit.manifest import Unit
from verify.protocol.floors import Traffic
from verify.protocol.perf_plan import CUDA_PROTOCOL_ID, CellPlan, Claim, Plan, plan_stages

__all__ = ["changed_units", "copies_of", "perf_plan", "rank_geometries"]

ROTATED_BYTES = 400e6
"""Bytes that one replay moves at least, where `MOST_COPIES` allows: several times the last-level cache."""
FEWEST_COPIES = 8
MOST_COPIES = 64
MAX_OP_CELLS = 6
"""Cells of single ops beside the half-layers."""
_CONTEXT_OPS = ("mla_decode",)


def perf_plan(
    target: Target, tier: Tier, *, base: str, candidate: Arm, best: Arm, command: str, candidates: int = 1
) -> Plan:
    """The plan of a kit.

    Half-layers of every layout must be faster than the standard path and not slower than the best; single ops whose
    artifact or schedule changed must not be slower, and at least one cell of all must be faster. An op for which an arm
    has no kernel runs the standard path in it.

    Args:
        target: cells, band and error budget.
        tier: which part of them.
        base: commit of the protected code, whose standard path is compared with.
        candidate: its arm.
        best: that of the current best.
        command: judges again.
        candidates: over how many the error budget is spent.

    Raises:
        FasttrackError: a layout has no geometry.
    """
    shapes = {layout.key: _geometry(target, layout) for layout in target.one_gpu_layouts}
    cells = [*target.cells(tier), *_op_cells(target, tier, candidate, best, shapes)]
    planned = []
    chains: dict[str, dict[str, Any]] = {}
    for cell in cells:
        assert cell.layout is not None
        g = shapes[cell.layout]
        one = cell_traffic(cell, g)
        copies = copies_of(cell.scope, g, cell.tokens)
        chains[cell.key] = {"geometry": g.name, "copies": copies}
        claims = [Claim("best", "not_slower")]
        if cell.scope.endswith("_half_layer"):
            claims.insert(0, Claim("standard", "faster"))
        total = Traffic(one.read_bytes * copies, one.write_bytes * copies, one.flops * copies)
        planned.append(CellPlan(cell.key, cell.model_dump(mode="json"), tuple(claims), total))
    plan = Plan(
        target=target.name,
        tier=tier.name,
        arms={
            "standard": {"geometries": sorted(g.name for g in shapes.values()), "base": base},
            "best": _identity(best),
            "candidate": _identity(candidate),
        },
        band=target.perf.not_slower_band,
        alpha_per_run=target.perf.alpha_per_run,
        candidates=candidates,
        stages=plan_stages(tier.perf_blocks, target.perf.alpha_per_run, candidates),
        cells=tuple(planned),
        gain_cells=tuple(cell.key for cell in cells),
        command=command,
        protocol=CUDA_PROTOCOL_ID,
        chains=chains,
    )
    plan.check()
    return plan


def rank_geometries(target: Target) -> list[str]:
    """Geometries whose half-layers one GPU runs: rank shapes of the target's layouts, by name.

    An artifact of another geometry, such as the MLA core of all heads over a DCP shard, claims no half-layer.

    Raises:
        FasttrackError: a layout has no geometry.
    """
    return sorted({_geometry(target, layout).name for layout in target.one_gpu_layouts})


def changed_units(candidate: Arm, best: Arm) -> tuple[Unit, ...]:
    """Artifacts that are others, or run by another schedule, in the candidate than in the current best."""
    return tuple(
        unit
        for unit, artifact in sorted(candidate.artifacts.items())
        if unit not in best.artifacts
        or artifact.digest != best.artifacts[unit].digest
        or _schedule(candidate, unit) != _schedule(best, unit)
    )


def _op_cells(target: Target, tier: Tier, candidate: Arm, best: Arm, shapes: Mapping[str, Geometry]) -> list[Cell]:
    """Cells of changed ops, spread over the batches; none where so many changed that half-layers speak for them."""
    layouts = {g.name: key for key, g in shapes.items()}
    changed = [unit for unit in changed_units(candidate, best) if unit.geometry in layouts and unit.op in OPS]
    batches = target.batches_of(tier)
    if not changed or len(changed) > MAX_OP_CELLS // 2:
        return []
    count = min(len(batches), MAX_OP_CELLS // len(changed))
    picked = sorted({batches[round(at * (len(batches) - 1) / max(1, count - 1))] for at in range(count)})
    contexts = target.half_layer_contexts
    context = contexts[-1] if tier.contexts == "all" else contexts[: tier.contexts][-1]
    return [
        Cell(
            scope=unit.op, batch=batch, context=context if unit.op in _CONTEXT_OPS else None,
            layout=layouts[unit.geometry],
        )
        for unit in changed
        for batch in picked
    ]  # fmt: skip


def copies_of(scope: str, g: Geometry, tokens: int = 1) -> int:
    """Half-layers or calls of one replay.

    Args:
        scope: half-layer or op.
        g: geometry.
        tokens: T.
    """
    # The weights decide: they are the same for all batches, so that the cells of a kind share them.
    if scope in HALF_LAYERS:
        least = half_layer_traffic(g, scope, batch=1, tokens=tokens, context=1)
    else:
        least = op_traffic(scope, g, batch=1, tokens=1, context=1, site="kda")
    each = least.read_bytes + least.write_bytes
    return max(FEWEST_COPIES, min(MOST_COPIES, math.ceil(ROTATED_BYTES / each)))


def _geometry(target: Target, layout: Layout) -> Geometry:
    """Rank shapes of a layout, as a model of one rank."""
    name = f"{target.geometry.rpartition('-tp')[0]}-tp{layout.tp}"
    if name not in GEOMETRIES:
        raise FasttrackError(
            f"no geometry {name}", where=f"target {target.name}, layout {layout.key}",
            expected=f"one of {', '.join(GEOMETRIES)}", next="fasttrack targets",
        )  # fmt: skip
    return GEOMETRIES[name]


def _identity(arm: Arm) -> dict[str, Any]:
    """Digests of what an arm runs."""
    return {
        "artifacts": {unit.key: artifact.digest for unit, artifact in sorted(arm.artifacts.items())},
        "schedules": {unit.key: _schedule(arm, unit) for unit in sorted(arm.artifacts)},
    }


def _schedule(arm: Arm, unit: Unit) -> str:
    path = arm.schedules / ARCHS[unit.arch].schedules / unit.geometry / f"{unit.op}.toml"
    return hashlib.sha256(path.read_bytes()).hexdigest()
