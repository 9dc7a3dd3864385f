"""Run the planned blocks: order, calibration, legs, checks, one raw line per block. Resumes after a kill.

It asks `verify.protocol.perf.state` what comes next, so that measuring and deciding cannot disagree about when to stop.
A block that was begun and not finished stays visible by its `begin` line and is measured again with another seed.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from verify.protocol.lines import last_attempt, of_kind
from verify.protocol.perf import state
from verify.protocol.perf_data import blocks_of, order_code
from verify.protocol.perf_plan import (
    MIN_ROUNDS,
    MIN_SLICE_NS,
    CellPlan,
    Plan,
    Stage,
    cell_order,
    seed_digest,
    slice_order,
)
from verify.timing.compare import Left, against_best, against_standard
from verify.timing.sampler import ArmFault, Block, Sampler, Slice

__all__ = ["MAX_ROUNDS", "SLICE_NS", "Evidence", "SliceTooShort", "calls_for", "measure_stage", "run_campaign"]

SLICE_NS = 3_000_000
"""Duration of a slice that calibration aims at. The shorter, the more noise its round has in common; much shorter, and
asking and answering would count."""
VISIT_NS = 120_000_000
"""Time per compared arm and visit, in as many slices as that makes, within `MIN_ROUNDS` and `MAX_ROUNDS`."""
GPU_SLICE_NS = 10_000_000
GPU_VISIT_NS = 120_000_000
"""The same on a GPU: asking and answering take 0.3 ms of a slice, now 0.2 and now 0.6."""
MAX_ROUNDS = 40
_MAX_TRIES = 8
_PROBES = 3


class Evidence(Protocol):
    """Where raw lines go: append-only, fsynced per line."""

    def lines(self, gate: str, /) -> list[dict[str, Any]]:
        """All lines of a gate so far."""
        ...

    def append(self, gate: str, line: Mapping[str, Any], /) -> None:
        """Add a line."""
        ...


class SliceTooShort(Exception):  # noqa: N818 - error classes are named for the finding
    """Slices ended below the protocol's least duration: the machine is faster than when the cell was calibrated."""

    def __init__(self, arm: str, nanoseconds: float) -> None:
        super().__init__(f"slices of arm {arm} took {nanoseconds:.0f} ns; expected {MIN_SLICE_NS} or more")
        self.arm = arm
        self.nanoseconds = nanoseconds


def run_campaign(
    plan: Plan,
    sampler: Sampler,
    evidence: Evidence,
    progress: Callable[[str], None],
    *,
    draw_seed: Callable[[], str] = lambda: secrets.token_hex(16),
    before_end: Callable[[], None] = lambda: None,
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Measure until `state` says that nothing is left, then write the end line.

    Args:
        plan: as in the raw file's header, which is already written.
        sampler: runs the arms.
        evidence: receives lines of `raw/perf.jsonl`.
        progress: one message per block.
        draw_seed: secret of a block, drawn right before it.
        before_end: called when nothing is left to measure; may append lines.
        over: asked before every block: whether to stop here, without an end line, to be resumed.
    """
    calls = _known_calls(evidence)
    while (now := state(evidence.lines("perf"))).stage is not None:
        if over():
            return
        progress(f"perf: stage {now.stage.name}, block {now.block + 1} of {now.stage.blocks}")
        _run_block(plan, now.stage, now.block, sampler, evidence, draw_seed(), calls)
    attempt = last_attempt(evidence.lines("perf"))
    if attempt is not None and not of_kind(attempt[1], "end"):
        before_end()
        evidence.append("perf", {"kind": "end", "why": now.why})


def measure_stage(
    plan: Plan, stage: Stage, sampler: Sampler, evidence: Evidence, progress: Callable[[str], None]
) -> None:
    """Measure all missing blocks of a stage whatever they say, until an arm fails: for A/A records, not verdicts."""
    calls = _known_calls(evidence)
    done = len(blocks_of(evidence.lines("perf"), stage))
    for number in range(done, stage.blocks):
        progress(f"perf: block {number + 1} of {stage.blocks}")
        _run_block(plan, stage, number, sampler, evidence, secrets.token_hex(16), calls)
        if of_kind(evidence.lines("perf"), "fault"):
            return


def _known_calls(evidence: Evidence) -> dict[str, _Calls]:
    """Cell -> what a visit consisted of in the latest block."""
    calls: dict[str, _Calls] = {}
    for line in of_kind(evidence.lines("perf"), "block"):
        calls |= {c["key"]: _Calls(c["calls"], c["standard_calls"], c["rounds"]) for c in line["cells"]}
    return calls


def _run_block(
    plan: Plan, stage: Stage, number: int, sampler: Sampler, evidence: Evidence, seed: str, calls: dict[str, _Calls]
) -> None:
    place = {"stage": stage.name, "block": number}
    started = time.monotonic()
    evidence.append("perf", {"kind": "begin", **place, "seed_sha256": seed_digest(seed)})
    visit: _Visit | None = None
    try:
        with sampler.block(stage.arms, seed, plan.cells) as block:
            visit = _Visit(plan, stage, seed, block, calls)
            visit.run()
            load = {"foreign_share": block.foreign_share(), "average_1min": os.getloadavg()[0]}
        line = {"kind": "block", **place, "seed": seed, "order": visit.order, "cells": visit.lines(), "load": load}
        line["seconds"] = time.monotonic() - started
        evidence.append("perf", line)
    except ArmFault as fault:
        key = visit.key if visit is not None else None
        words = {"arm": fault.arm, "cell": key, "code": fault.code, "message": str(fault), "detail": fault.detail}
        evidence.append("perf", {"kind": "fault", **place, **words})


def calls_for(block: Block, arm: str, cell: CellPlan, nanoseconds: float) -> int:
    """Calls of an arm that take about so long; found by slices of growing length, which also warm it up."""
    calls, most = 1, block.most(cell)
    while True:
        taken = _quickest(block, arm, cell, calls)
        if taken >= nanoseconds or calls >= most:
            return min(most, max(1, math.floor(calls * nanoseconds / taken)))
        calls = min(most, max(2 * calls, math.ceil(calls * nanoseconds / taken)))


def _quickest(block: Block, arm: str, cell: CellPlan, calls: int) -> int:
    """Nanoseconds of the quickest of some slices."""
    block.prepare(arm, cell, calls, _PROBES)
    block.reset(arm, cell)
    return min(block.slice(arm, cell).evaluator_ns for _ in range(_PROBES))


@contextlib.contextmanager
def _on_one_cpu() -> Iterator[None]:
    """Keep this thread on the CPU on which the arms' driver threads wait: it asks and then sleeps while they run."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Calls(NamedTuple):
    """What a visit of one cell consists of.

    Arms that are compared closely have equal slices; the standard arm, many times slower maybe, has what fills a slice.
    """

    others: int
    """Calls per slice."""
    standard: int
    rounds: int

    def of(self, arm: str) -> int:
        """Calls per slice of an arm."""
        return self.standard if arm == "standard" else self.others


class _Visit:
    """The cells of one block."""

    def __init__(self, plan: Plan, stage: Stage, seed: str, block: Block, calls: dict[str, _Calls]) -> None:
        self.plan = plan
        self.cells = {cell.key: cell for cell in plan.cells}
        self.stage = stage
        self.seed = seed
        self.block = block
        self.calls = calls
        """Cell -> sizes, from an earlier block where there is one."""
        self.order = list(cell_order(seed, plan.keys))
        self.key: str | None = None
        """Cell in work, for fault lines."""
        self._lines: dict[str, dict[str, Any]] = {}
        self._restarts: dict[str, int] = dict.fromkeys(self.cells, 0)

    def run(self) -> None:
        """Visit every cell; one whose slices got too short starts again."""
        for key in self.order:
            self.key = key
            started = time.monotonic()
            self._lines[key] = self._visit(self.cells[key])
            self._lines[key]["seconds"] = time.monotonic() - started
        self.key = None

    def lines(self) -> list[dict[str, Any]]:
        """The cells of the block line, in plan order."""
        return [self._lines[key] for key in self.cells]

    def _visit(self, cell: CellPlan) -> dict[str, Any]:
        for _ in range(_MAX_TRIES):
            if cell.key not in self.calls:
                self.calls[cell.key] = self._calibrated(cell)
            try:
                return self._measured(cell, self.calls[cell.key])
            except SliceTooShort as short:
                # All slices are taken again with more calls. That rests on any arm's, so it favours none.
                self._restarts[cell.key] += 1
                self.calls[cell.key] = self._longer(cell, self.calls[cell.key], short)
        raise RuntimeError(f"cell {cell.key}: slices stay below {MIN_SLICE_NS} ns after {_MAX_TRIES} calibrations")

    def _calibrated(self, cell: CellPlan) -> _Calls:
        """Slices of `SLICE_NS` for the faster of the compared arms and for the standard arm; rounds for `VISIT_NS`."""
        same = self.plan.on_gpu
        arms = [arm for arm in self.stage.arms if arm != "control" and not (same and arm == "standard")]
        slice_ns = GPU_SLICE_NS if same else SLICE_NS
        fitting = {arm: calls_for(self.block, arm, cell, slice_ns) for arm in arms}
        others = max(fitting["best"], fitting["candidate"])
        taken = _quickest(self.block, "best", cell, others)
        wanted = (GPU_VISIT_NS if same else VISIT_NS) / taken
        rounds = 2 * math.ceil(max(MIN_ROUNDS, min(MAX_ROUNDS, wanted)) / 2)
        return _Calls(others, others if same else fitting.get("standard", 1), rounds)

    def _longer(self, cell: CellPlan, calls: _Calls, short: SliceTooShort) -> _Calls:
        """Enough more calls that the short slices would have lasted."""
        factor, most = max(1.25, SLICE_NS / short.nanoseconds), self.block.most(cell)
        if self.plan.on_gpu:
            longer = min(most, math.ceil(calls.others * factor))
            return calls._replace(others=longer, standard=longer)
        if short.arm == "standard":
            return calls._replace(standard=min(most, math.ceil(calls.standard * factor)))
        return calls._replace(others=min(most, math.ceil(calls.others * factor)))

    def _measured(self, cell: CellPlan, calls: _Calls) -> dict[str, Any]:
        """One visit: all slices in the order of the seed, then what the arms left behind."""
        block, arms = self.block, self.stage.arms
        order = slice_order(self.seed, cell.key, calls.rounds, arms)
        for arm in arms:
            block.prepare(arm, cell, calls.of(arm), order.count(arm))
        for arm in arms:
            block.reset(arm, cell)
        slices: list[tuple[str, Slice]] = []
        early: dict[str, Left] = {}
        with _on_one_cpu():
            for arm in order:
                slices.append((arm, block.slice(arm, cell)))
                if not cell.is_step and arm not in early:
                    # Later slices of an op write over these outputs, from states that only its own chain knows.
                    early[arm] = block.left(arm, cell)
        for arm in arms:
            median = statistics.median(taken.evaluator_ns for name, taken in slices if name == arm)
            if median < MIN_SLICE_NS:
                raise SliceTooShort(arm, median)
        compared = [arm for arm in arms if arm != "standard"]
        again: int | None = None
        if not cell.is_step:
            # What a kernel that counts its calls leaves out of a slice could be made good by the slice's last calls.
            # Where this run ends it cannot know.
            again = 1 + secrets.randbelow(calls.others)
            for arm in compared:
                block.again(arm, cell, again)
        facts = {arm: dict(block.facts(arm, cell)) for arm in arms}
        return {
            "key": cell.key,
            "calls": calls.others,
            "standard_calls": calls.standard,
            "rounds": calls.rounds,
            "restarts": self._restarts[cell.key],
            "again": again,
            "order": order_code(self.seed, cell.key, calls.rounds, arms),
            "ns": [taken.evaluator_ns for _, taken in slices],
            "worker_ns": [taken.worker_ns for _, taken in slices],
            "checks": self._checks(cell, compared, early),
            "paths": {arm: block.paths(arm, cell)._asdict() for arm in compared},
            **({"facts": facts} if any(facts.values()) else {}),
        }

    def _checks(self, cell: CellPlan, compared: list[str], early: dict[str, Left]) -> dict[str, dict[str, float]]:
        """Worst distances of what the compared arms left behind, by arm.

        Args:
            cell: visited.
            compared: arms.
            early: what each arm's first slice left, for an op; a step's chain is kept whole.
        """
        block = self.block
        final = {arm: block.left(arm, cell) for arm in compared}
        first = early or final
        if "standard" in self.stage.arms and "standard" not in first:
            first = {**first, "standard": block.left("standard", cell)}
        checks: dict[str, dict[str, float]] = {}
        for arm in compared:
            found = [block.reference(cell, first[arm])]
            if "standard" in first and first[arm].known_start and first["standard"].known_start:
                found.append(against_standard(first[arm], first["standard"]))
            if arm != "best":
                # The standard arm's chain is shorter; the best's has the same length and was accepted before.
                found += [against_best(left[arm], left["best"]) for left in ([early, final] if early else [final])]
            checks[arm] = {}
            for name, value in (item for row in found for item in row.items()):
                checks[arm][name] = max(checks[arm].get(name, 0.0), value)
        return checks
