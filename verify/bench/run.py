"""The library behind `fasttrack bench`: the specialised path against eager torch and torch.compile, paired in one run.

For people who tune: the kernels of the working tree are taken as they are, all arms live through the whole run in one
process each, and every repeat runs a short slice of all arms one after the other, forwards and backwards in turns. That
pairs arms against drift; it does not average over processes as the perf gate does, and it decides nothing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import FasttrackError
from harness.progress import Progress, silent
from harness.records import Cell
from harness.settings import Settings, Target
from k3_backend.aot.build import build_all, build_runtime, specialised_ops
from k3_backend.aot.cpu.host import best_arch
from k3_backend.geometry import Geometry, geometry
from k3_backend.ops import OPS
from verify.bench.ceilings import measure_ceilings
from verify.bench.records import ArmTiming, BenchCell, BenchReport, PairedRatio
from verify.bench.traffic import cell_traffic
from verify.building import KERNELS, SCHEDULES, SandboxRunner, artifact_cache
from verify.evaluator.worker import ArmSpec
from verify.gates.perf.workers import WorkerSampler
from verify.protocol.bounds import bounds
from verify.protocol.floors import Ceilings, floor, merge
from verify.protocol.perf_data import midmean
from verify.protocol.perf_plan import CellPlan, Claim
from verify.timing.campaign import calls_for
from verify.timing.sampler import ArmFault, Block

__all__ = ["MIN_REPEATS", "PEERS", "SLICE_NS", "THREADS", "bench", "specialized_arm"]

PEERS: Mapping[str, str | None] = {
    "eager": None,
    "compile": "default",
    "compile-max-autotune": "max-autotune-no-cudagraphs",
}
"""Peer -> mode of torch.compile; all of them run the standard path."""
MIN_REPEATS = 24
SLICE_NS = 10_000_000
"""Least duration of a slice; one call of a slow arm takes longer."""
THREADS = 2
_SPECIALIZED = "specialized"
_PARTS = 8


def bench(
    root: Path,
    settings: Settings,
    target: Target,
    *,
    op: str | None = None,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    peers: Sequence[str] = ("eager", "compile"),
    repeats: int = MIN_REPEATS,
    progress: Progress = silent,
) -> BenchReport:
    """Measure.

    Args:
        root: the checkout; its kernels and schedules are built and run.
        settings: of the checkout.
        target: gives geometry, architectures, and the default batches and contexts.
        op: a single op instead of whole decode steps.
        batches: defaults to those of the pr tier.
        contexts: defaults to all of the target's; ignored by ops whose cost does not depend on it.
        peers: keys of `PEERS`, possibly none.
        repeats: timed slices per arm and cell, at least `MIN_REPEATS`.
        progress: told about builds, compilations and cells.

    Raises:
        FasttrackError: unknown op, peer, batch or context; a target of another device; no compiler or sandbox.
        BuildError: a kernel does not build.
        ArmFault: an arm died or refused a cell; says which.
    """
    arch = _check(target, op, peers, repeats)
    cells = _cells(settings, target, op, batches, contexts)
    shape = geometry(target.geometry)
    scratch = root / "build" / "bench"
    scratch.mkdir(parents=True, exist_ok=True)
    progress("bench: building the kernels")
    arms: dict[str, ArmSpec] = {_SPECIALIZED: specialized_arm(root, settings, shape, arch)}
    arms |= {peer: ArmSpec("standard") for peer in peers}
    compiled = {peer: mode for peer in peers if (mode := PEERS[peer]) is not None}
    progress("bench: measuring the ceilings of this machine")
    cache = artifact_cache(root)
    ceilings = measure_ceilings(THREADS, cache)
    sampler = WorkerSampler(
        arms, shape, base_tree=root, run_dir=scratch / "logs", threads=THREADS, compiled=compiled, scratch=scratch
    )
    plans = [
        CellPlan(c.key, c.model_dump(mode="json"), (Claim("standard", "faster"),), cell_traffic(c, shape))
        for c in cells
    ]
    with sampler.block(tuple(arms), secrets.token_hex(16), plans) as block:
        samples = []
        for number, plan in enumerate(plans):
            progress(f"bench: {plan.key} ({number + 1} of {len(plans)})")
            samples.append(_measure(block, plan, tuple(arms), repeats))
        foreign = block.foreign_share()
    ceilings = merge(ceilings, measure_ceilings(THREADS, cache))
    return BenchReport(
        target=target.name,
        geometry=target.geometry,
        arch=arch,
        threads=THREADS,
        repeats=repeats,
        ceilings=json.loads(json.dumps(ceilings.record())),
        foreign_cpu_share=foreign,
        cells=tuple(_report(cell, found, shape, ceilings) for cell, found in zip(cells, samples, strict=True)),
    )


def _check(target: Target, op: str | None, peers: Sequence[str], repeats: int) -> str:
    """The architecture level that this host runs."""
    if op is not None and op not in OPS:
        raise _usage(f"unknown op {op!r}", "--op", f"one of {', '.join(OPS)}", "fasttrack ops")
    for peer in peers:
        if peer not in PEERS:
            raise _usage(f"unknown peer {peer!r}", "--peers", f"some of {', '.join(PEERS)}", "fasttrack bench --help")
    if repeats < MIN_REPEATS:
        raise _usage(f"{repeats} repeats", "--repeats", f"at least {MIN_REPEATS}", "fasttrack bench --help")
    arch = best_arch(target.archs) if target.device == "cpu" else None
    if arch is None:
        what = f"this machine runs none of {', '.join(target.archs)}"
        raise _usage(what, f"target {target.name}", "a machine of the target's kind", "fasttrack doctor")
    return arch


def _cells(
    settings: Settings, target: Target, op: str | None, batches: Sequence[int] | None, contexts: Sequence[int] | None
) -> list[Cell]:
    usual = settings.tiers["pr"].batches if "pr" in settings.tiers else "all"
    default = target.batches if usual == "all" else usual
    for name, given, known in (("--batches", batches, target.batches), ("--contexts", contexts, target.contexts)):
        for value in given or ():
            if value not in known:
                raise _usage(f"{value} is not one of the target's", name, f"some of {list(known)}", "fasttrack targets")
    lengths: Sequence[int | None] = contexts or target.contexts
    if op is not None and op != "mla_decode":
        lengths = (None,)
    return [
        Cell(scope=op or "step", batch=batch, context=context) for context in lengths for batch in (batches or default)
    ]


def _usage(what: str, where: str, expected: str, command: str) -> FasttrackError:
    return FasttrackError(what, where=where, expected=expected, next=command)


def specialized_arm(root: Path, settings: Settings, shape: Geometry, arch: str) -> ArmSpec:
    """The working tree's kernels and schedules, built in the sandbox."""
    kernels, cache = root / KERNELS, artifact_cache(root)
    runner = SandboxRunner(kernels, settings.build)
    built = build_all(specialised_ops(kernels), arch, shape, kernels, cache, run=runner)
    paths = {op: artifact.path for op, artifact in built.items()} | {"runtime": build_runtime(cache).path}
    return ArmSpec("specialized", paths, root / SCHEDULES)


@dataclass(frozen=True)
class _Samples:
    """Nanoseconds per call by arm, one per repeat, paired by position."""

    calls: Mapping[str, int]
    times: Mapping[str, list[float]]


def _measure(block: Block, cell: CellPlan, arms: Sequence[str], repeats: int) -> _Samples:
    calls = {arm: calls_for(block, arm, cell, SLICE_NS) for arm in arms}
    for arm in arms:
        block.prepare(arm, cell, calls[arm], repeats)
        block.reset(arm, cell)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(repeats):
        for arm in arms if repeat % 2 == 0 else reversed(arms):
            times[arm].append(block.slice(arm, cell).evaluator_ns / calls[arm])
    if _SPECIALIZED in arms and (fallen := block.paths(_SPECIALIZED, cell).standard):
        raise ArmFault(_SPECIALIZED, "error", f"{cell.key}: {fallen} calls took the standard path")
    return _Samples(calls, times)


def _report(cell: Cell, samples: _Samples, shape: Geometry, ceilings: Ceilings) -> BenchCell:
    found = floor(cell_traffic(cell, shape), ceilings)
    arms = tuple(_timing(arm, samples, found.ns) for arm in samples.times)
    return BenchCell(
        cell=cell,
        arms=arms,
        ratio=_ratio(samples, arms),
        floor_us=found.ns / 1e3,
        floor_resource=found.resource,
    )


def _timing(arm: str, samples: _Samples, floor_ns: float) -> ArmTiming:
    times = np.array(samples.times[arm]) / 1e3
    low, median, high = (float(value) for value in np.percentile(times, (25, 50, 75)))
    return ArmTiming(
        arm=arm,
        median_us=median,
        quartile_low_us=low,
        quartile_high_us=high,
        fastest_us=float(times.min()),
        slowest_us=float(times.max()),
        samples_us=tuple(times.tolist()),
        calls=samples.calls[arm],
        floor_share=floor_ns / 1e3 / median,
    )


def _ratio(samples: _Samples, arms: Sequence[ArmTiming]) -> PairedRatio | None:
    """Against the peer with the lower median: midmean of the paired log ratios, with Student bounds over eighths of the
    repeats, since neighbouring repeats share the machine's moods.
    """
    peers = [timing for timing in arms if timing.arm != _SPECIALIZED]
    if not peers:
        return None
    best = min(peers, key=lambda timing: timing.median_us)
    paired: Any = np.log(samples.times[best.arm]) - np.log(samples.times[_SPECIALIZED])
    parts = np.array([[midmean(part) for part in np.array_split(paired, _PARTS)]])
    found = bounds(parts, 0.025)
    value, low, high = (float(np.exp(bound[0])) for bound in (found.mean, found.low, found.high))
    return PairedRatio(against=best.arm, value=value, low=low, high=high)
