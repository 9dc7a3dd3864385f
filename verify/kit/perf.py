"""The perf gate on a GPU machine: the plan of the kit's manifest, run by the campaign that every perf gate runs.

Half-layers and single ops of four arms (standard path, current best, candidate, and the best again as control) in
paired blocks of fresh processes; one raw line per block. Deciding is `verify.protocol.perf`, here and wherever the
lines travel. Cannot see: cells outside the plan, whole steps, or precision (kernels gate).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verify.kit.context import KitContext
from verify.kit.perf_arms import ArmFiles, KitSampler, files_of
from verify.protocol.lines import of_kind
from verify.protocol.perf import below_floor
from verify.protocol.perf_plan import ARMS, Plan
from verify.timing.campaign import run_campaign

__all__ = ["predicted_seconds", "run"]

GATE = "perf"
MORE_CEILINGS = 3
"""Further measurements of the ceilings before a candidate counts as faster than the machine."""
BLOCK_S = 12.0
"""Seconds that starting the processes of a block and loading their arms takes (1x H200)."""
VISIT_S = 0.22
"""Seconds per arm and visit: setting a chain, resets, slices, copying out."""


def run(kit: KitContext) -> None:
    """Measure, or go on where a session stopped."""
    plan = Plan.from_header(kit.manifest.plans[GATE])
    lines = _Lines(kit)
    if not lines.lines(GATE):
        lines.append(GATE, _header(kit, plan))
    if plan.arms["candidate"] == plan.arms["best"]:
        kit.progress(f"{GATE}: the candidate is the current best; nothing is measured")
        return
    if of_kind(lines.lines(GATE), "end"):
        kit.progress(f"{GATE}: finished before")
        return
    cells, blocks = len(plan.cells), sum(stage.blocks for stage in plan.stages)
    kit.progress(f"{GATE}: {cells} cells, {blocks} blocks, about {predicted_seconds(plan):.0f} s if none is futile")
    if not of_kind(lines.lines(GATE), "ceilings"):
        _add_ceilings(kit, lines)
    best = files_of(kit, "best")
    sampler = KitSampler(
        plan.chains,
        {"standard": ArmFiles(), "best": best, "control": best, "candidate": files_of(kit, "candidate")},
        arch=kit.manifest.arch, code=kit.code, logs=kit.logs, bootstrap=kit.machine.bootstrap,
    )  # fmt: skip
    run_campaign(plan, sampler, lines, kit.progress, before_end=lambda: _check_ceilings(kit, lines), over=kit.over)


def predicted_seconds(plan: Plan) -> float:
    """About how long all blocks take."""
    return sum(stage.blocks * (BLOCK_S + VISIT_S * len(stage.arms) * len(plan.cells)) for stage in plan.stages)


class _Lines:
    """The gate's raw lines, without this machine's folders."""

    def __init__(self, kit: KitContext) -> None:
        self._kit = kit

    def lines(self, gate: str, /) -> list[dict[str, Any]]:
        """All lines so far."""
        return self._kit.results.lines(gate)

    def append(self, gate: str, line: Mapping[str, Any], /) -> None:
        """Add a line."""
        self._kit.results.append(gate, self._kit.without_folders(dict(line)))


def _header(kit: KitContext, plan: Plan) -> dict[str, Any]:
    own = {"standard": kit.machine.standard_path(), "processes": list(ARMS)}
    return {**kit.header(GATE, kit.manifest.protocols[GATE]), **plan.header(), **own}


def _add_ceilings(kit: KitContext, lines: _Lines) -> None:
    kit.progress(f"{GATE}: measuring the ceilings of this GPU")
    lines.append(GATE, {"kind": "ceilings", "ceilings": kit.machine.ceilings().record()})


def _check_ceilings(kit: KitContext, lines: _Lines) -> None:
    """Measure the ceilings again while the candidate seems faster than they allow: a busy moment makes them too low."""
    for _ in range(MORE_CEILINGS):
        if not below_floor(lines.lines(GATE)):
            return
        _add_ceilings(kit, lines)
