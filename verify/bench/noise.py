"""Measure this machine's noise as the perf gate sees it: the working tree's kernels against themselves.

Best, candidate and control run the same artifacts, through the gate's own campaign, for a number of blocks. The record
is kept as raw lines; `verify.protocol.simulate` turns it into a noise file, from which it computes error rates. Run it
on a machine that does nothing else, or the error rates are those of a busy one.

`python -m verify.bench.noise --blocks 24 --out verify/protocol/noise/cpu.json --note "..."`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import FasttrackError
from harness.progress import Progress
from harness.records import Cell
from harness.settings import Settings, Target, load
from harness.store import EvidenceSink
from k3_backend.aot.cpu.host import best_arch
from k3_backend.geometry import geometry
from verify.bench.run import THREADS, specialized_arm
from verify.evaluator.worker import ArmSpec
from verify.gates.perf.workers import WorkerSampler
from verify.protocol.floors import Traffic
from verify.protocol.perf_plan import CellPlan, Claim, Plan, Stage
from verify.protocol.simulate import extract
from verify.timing.campaign import measure_stage

__all__ = ["main", "measure_noise", "noise_plan"]


def noise_plan(target: Target, cells: Sequence[Cell], blocks: int) -> Plan:
    """One stage over the cells, whose candidate is the best under another name."""
    planned = tuple(
        CellPlan(cell.key, cell.model_dump(mode="json"), (Claim("best", "not_slower"),), Traffic(0.0, 0.0, 0.0))
        for cell in cells
    )
    return Plan(
        target=target.name,
        tier="noise",
        arms={"standard": {}, "best": {"process": 1}, "candidate": {"process": 2}},
        band=target.perf.not_slower_band,
        alpha_per_run=target.perf.alpha_per_run,
        candidates=1,
        stages=(Stage("search", blocks, target.perf.alpha_per_run, control=True),),
        cells=planned,
        gain_cells=tuple(cell.key for cell in cells),
        command="python -m verify.bench.noise",
    )


def measure_noise(
    root: Path, settings: Settings, target: Target, cells: Sequence[Cell], blocks: int, folder: Path, progress: Progress
) -> list[dict[str, object]]:
    """Raw lines of an A/A measurement; goes on with those that `folder` already holds.

    Raises:
        FasttrackError: a target of another device, no compiler or sandbox, or an arm that died.
    """
    arch = best_arch(target.archs) if target.device == "cpu" else None
    if arch is None:
        raise FasttrackError(
            f"this machine runs none of {', '.join(target.archs)}",
            where=f"target {target.name}",
            expected="a machine of the target's kind",
            next="fasttrack doctor",
        )
    shape = geometry(target.geometry)
    arm = specialized_arm(root, settings, shape, arch)
    plan = noise_plan(target, cells, blocks)
    evidence = EvidenceSink(folder)
    if not evidence.lines("perf"):
        evidence.append("perf", plan.header())
    sampler = WorkerSampler(
        {"standard": ArmSpec("standard"), "best": arm, "candidate": arm},
        shape,
        base_tree=root,
        run_dir=folder / "logs",
        threads=THREADS,
    )
    measure_stage(plan, plan.stages[0], sampler, evidence, progress)
    lines = evidence.lines("perf")
    faults = [line for line in lines if line["kind"] == "fault"]
    if faults:
        raise FasttrackError(
            f"arm {faults[0]['arm']} failed: {faults[0]['message']}",
            where=str(folder),
            expected="arms that run every cell",
            next="fasttrack bench --no-peers",
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m verify.bench.noise", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--tier", default="pr", help="whose step cells are measured")
    parser.add_argument("--op", action="append", default=[], help="also this op, at the tier's batches")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/noise"), help="raw lines; a second call goes on there"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", required=True, help="machine and circumstances, kept in the file")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    settings = load(given.root)
    target, tier = settings.target(given.target), settings.tier(given.tier)
    cells = [*target.cells(tier), *(Cell(scope=op, batch=b) for op in given.op for b in target.batches_of(tier))]
    lines = measure_noise(
        given.root.resolve(),
        settings,
        target,
        cells,
        given.blocks,
        given.folder,
        lambda text: print(text, file=sys.stderr),
    )
    given.out.write_text(extract(lines, {"note": given.note}).dump(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
