"""Synthetic performance measurements: plans, a sampler with arms of known speed, records made by the real campaign."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.progress import silent
from harness.records import Cell
from harness.store import EvidenceSink
from verify.protocol.floors import Ceilings, Traffic
from verify.protocol.perf import decide
from verify.protocol.perf_plan import CellPlan, Claim, Plan, plan_stages
from verify.timing.campaign import run_campaign
from verify.timing.compare import Left
from verify.timing.sampler import ArmFault, Paths, Slice

STEP_CELLS = tuple(Cell(scope="step", batch=batch, context=256) for batch in (1, 8, 64))
OP_CELL = Cell(scope="kda_decode", batch=8)
KEYS = [cell.key for cell in (*STEP_CELLS, OP_CELL)]


def make_plan(
    *,
    blocks: int = 8,
    candidates: int = 4,
    task: Sequence[Cell] = (OP_CELL,),
    cells: Sequence[Cell] = (*STEP_CELLS, OP_CELL),
    band: float = 0.02,
    traffic: Traffic = Traffic(1000.0, 0.0, 0.0),  # noqa: B008 - frozen
) -> Plan:
    """A plan as the gate makes it: task cells faster than the best, steps faster than standard and not slower."""
    wanted = {cell.key for cell in task}

    def claims(cell: Cell) -> tuple[Claim, ...]:
        best = Claim("best", "faster" if cell.key in wanted else "not_slower")
        return (Claim("standard", "faster"), best) if cell.scope == "step" else (best,)

    return Plan(
        target="cpu",
        tier="pr",
        arms={"standard": {"base": "s"}, "best": {"digest": "b"}, "candidate": {"digest": "c"}},
        band=band,
        alpha_per_run=0.01,
        candidates=candidates,
        stages=plan_stages(blocks, 0.01, candidates),
        cells=tuple(CellPlan(cell.key, cell.model_dump(mode="json"), claims(cell), traffic) for cell in cells),
        gain_cells=() if task else tuple(cell.key for cell in cells),
        command="fasttrack verify --gates perf",
    )


@dataclass
class FakeSampler:
    """Arms with known times per call. Outputs are a chain in which every call's rows are different."""

    speed: Mapping[str, Callable[[str], float]]
    """Arm -> cell key -> nanoseconds per call."""
    noise: float = 0.005
    seed: int = 1
    corrupt: Callable[[str, str, Left], Left] = lambda _arm, _key, left: left
    fault: tuple[int, str, str] | None = None
    """(block since construction, arm, code): that arm's first slice in that block dies."""
    worker_factor: float = 1.0
    """Worker's time relative to the evaluator's, candidate only."""
    fallback: bool = False
    blocks: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """Arms and seed of every block that was started."""
    kill_at: int | None = None
    """Raise KeyboardInterrupt at this slice, counted over all blocks: a kill in the middle of a block."""
    slices: int = 0

    @contextlib.contextmanager
    def block(self, arms: Sequence[str], seed: str, cells: Sequence[CellPlan]) -> Iterator[FakeBlock]:  # noqa: ARG002
        self.blocks.append((tuple(arms), seed))
        yield FakeBlock(self, seed)


class FakeBlock:
    def __init__(self, sampler: FakeSampler, seed: str) -> None:
        self.sampler = sampler
        self.seed = seed
        self.random = random.Random(f"{sampler.seed}/{len(sampler.blocks)}")
        self.calls: dict[tuple[str, str], int] = {}
        self.done: dict[tuple[str, str], int] = {}
        self.last: dict[tuple[str, str], int] = {}
        names = ("standard", "best", "candidate", "control", *sampler.speed)
        self.process = {arm: self.random.gauss(0, sampler.noise) for arm in dict.fromkeys(names)}

    def prepare(self, arm: str, cell: CellPlan, calls: int, slices: int) -> None:  # noqa: ARG002
        self.calls[arm, cell.key] = calls

    def most(self, cell: CellPlan) -> int:  # noqa: ARG002
        return 1 << 16

    def reset(self, arm: str, cell: CellPlan) -> None:
        self.done[arm, cell.key] = 0

    def slice(self, arm: str, cell: CellPlan) -> Slice:
        sampler = self.sampler
        sampler.slices += 1
        if sampler.kill_at == sampler.slices:
            raise KeyboardInterrupt
        if sampler.fault is not None and sampler.fault[:2] == (len(sampler.blocks) - 1, arm):
            raise ArmFault(arm, sampler.fault[2], f"step.run: {sampler.fault[2]}")
        calls = self.calls[arm, cell.key]
        self.done[arm, cell.key] += calls
        self.last[arm, cell.key] = calls
        per_call = sampler.speed.get(arm, sampler.speed["best"])(cell.key)
        elapsed = calls * per_call * math.exp(self.process[arm] + self.random.gauss(0, sampler.noise))
        factor = sampler.worker_factor if arm == "candidate" else 1.0
        return Slice(round(elapsed), round(elapsed * 0.999 * factor))

    def again(self, arm: str, cell: CellPlan, calls: int) -> None:
        self.done[arm, cell.key] += calls
        self.last[arm, cell.key] = calls

    def paths(self, arm: str, cell: CellPlan) -> Paths:
        done = self.done[arm, cell.key]
        return Paths(0, done) if self.sampler.fallback and arm == "candidate" else Paths(done, 0)

    def left(self, arm: str, cell: CellPlan) -> Left:
        # The first calls of a longer chain are those of a shorter one; of an op, the last slice is seen.
        values = np.random.default_rng(list(f"{self.seed}/{cell.key}".encode())).standard_normal((256, 2, 8))
        done = (self.done if cell.is_step else self.last)[arm, cell.key]
        outputs = np.resize(values, (done, 2, 8)).astype(np.float32)
        left = Left({"hidden": outputs}, {"state": outputs[-1]})
        return self.sampler.corrupt(arm, cell.key, left)

    def reference(self, cell: CellPlan, left: Left) -> Mapping[str, float]:  # noqa: ARG002
        return {}

    def facts(self, arm: str, cell: CellPlan) -> Mapping[str, Any]:  # noqa: ARG002
        return {}

    def foreign_share(self) -> float:
        return 0.01


def speeds(gain: float | Mapping[str, float], *, standard: float = 2.0, best_ns: float = 200_000.0) -> Any:
    """Arms whose candidate is 1 + gain times as fast as the best, per cell where a mapping is given."""

    def candidate(key: str) -> float:
        return best_ns / (1 + (gain if isinstance(gain, float) else gain.get(key, 0.0)))

    return {"standard": lambda _key: best_ns * standard, "best": lambda _key: best_ns, "candidate": candidate}


CEILINGS = Ceilings(
    threads=2,
    read=((1 << 20, 100.0), (1 << 27, 10.0)),
    write=((1 << 20, 50.0), (1 << 27, 5.0)),
    copy=((1 << 20, 80.0), (1 << 27, 8.0)),
    fma_gflops=100.0,
    bf16_gflops=1000.0,
    bf16_unit="amx",
)


def begin(folder: Path, plan: Plan, *, ceilings: Ceilings | None = CEILINGS) -> EvidenceSink:
    """A raw file with what the gate writes before the first block."""
    evidence = EvidenceSink(folder)
    evidence.append("perf", plan.header())
    if ceilings is not None:
        evidence.append("perf", {"kind": "ceilings", "ceilings": ceilings.record()})
    return evidence


def record(
    folder: Path, plan: Plan, sampler: FakeSampler, *, ceilings: Ceilings | None = CEILINGS
) -> list[dict[str, Any]]:
    """Lines of a finished measurement by the real campaign, with seeds that are the same in every run of the tests."""
    evidence = begin(folder, plan, ceilings=ceilings)
    numbers = itertools.count()
    run_campaign(plan, sampler, evidence, silent, draw_seed=lambda: hashlib.sha256(b"%d" % next(numbers)).hexdigest())
    return evidence.lines("perf")


def codes(lines: list[dict[str, Any]]) -> set[str]:
    """Reason codes that the decision gives."""
    return {finding.code for finding in decide(lines).findings}


def header_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The header line of a record."""
    return next(line for line in lines if line["kind"] == "header")
