"""Run the planned blocks: order, calibration, legs, checks, one raw line per block. Resumes after a kill.

It asks `verify.protocol.perf.state` what comes next, so that measuring and deciding cannot disagree about when to stop.
A block that was begun and not finished stays visible by its `begin` line and is measured again with another seed.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from harness.progress import Progress
from harness.store import EvidenceSink
from verify.gates.perf.compare import Left, against_best, against_standard
from verify.gates.perf.sampler import ArmFault, Block, Leg, Sampler
from verify.protocol.lines import last_attempt, of_kind
from verify.protocol.perf import state
from verify.protocol.perf_data import blocks_of
from verify.protocol.perf_plan import MIN_LEG_NS, SWEEPS, CellPlan, Plan, Stage, block_order, leg_order, seed_digest

__all__ = ["LegTooShort", "measure_stage", "run_campaign"]

TARGET_LEG_NS = 1.25 * MIN_LEG_NS
"""Duration that calibration aims at: room for a machine that speeds up."""
MIN_STANDARD_CALLS = 4
"""The standard arm's leg is checked against on at least so many calls, however slow they are."""
_PROBE_NS = 4_000_000
_WARM_SHARE = 0.1
_MAX_CALLS = 1 << 20
_MAX_TRIES = 8


class LegTooShort(Exception):  # noqa: N818 - error classes are named for the finding
    """A leg ended below the protocol's least duration: the machine is faster than when the cell was calibrated."""

    def __init__(self, arm: str, nanoseconds: int) -> None:
        super().__init__(f"a leg of arm {arm} took {nanoseconds} ns; expected {MIN_LEG_NS} or more")
        self.arm = arm
        self.nanoseconds = nanoseconds


def run_campaign(
    plan: Plan,
    sampler: Sampler,
    evidence: EvidenceSink,
    progress: Progress,
    *,
    draw_seed: Callable[[], str] = lambda: secrets.token_hex(16),
    before_end: Callable[[], None] = lambda: None,
) -> None:
    """Measure until `state` says that nothing is left, then write the end line.

    Args:
        plan: as in the raw file's header, which is already written.
        sampler: runs the arms.
        evidence: receives lines of `raw/perf.jsonl`.
        progress: one message per block.
        draw_seed: secret of a block, drawn right before it.
        before_end: called when nothing is left to measure; may append lines.
    """
    calls = _known_calls(evidence)
    while (now := state(evidence.lines("perf"))).stage is not None:
        progress(f"perf: stage {now.stage.name}, block {now.block + 1} of {now.stage.blocks}")
        _run_block(plan, now.stage, now.block, sampler, evidence, draw_seed(), calls)
    attempt = last_attempt(evidence.lines("perf"))
    if attempt is not None and not of_kind(attempt[1], "end"):
        before_end()
        evidence.append("perf", {"kind": "end", "why": now.why})


def measure_stage(plan: Plan, stage: Stage, sampler: Sampler, evidence: EvidenceSink, progress: Progress) -> None:
    """Measure all missing blocks of a stage whatever they say, until an arm fails: for A/A records, not verdicts."""
    calls = _known_calls(evidence)
    done = len(blocks_of(evidence.lines("perf"), stage))
    for number in range(done, stage.blocks):
        progress(f"perf: block {number + 1} of {stage.blocks}")
        _run_block(plan, stage, number, sampler, evidence, secrets.token_hex(16), calls)
        if of_kind(evidence.lines("perf"), "fault"):
            return


def _known_calls(evidence: EvidenceSink) -> dict[str, _Calls]:
    """Cell -> calls per leg in the latest block."""
    calls: dict[str, _Calls] = {}
    for line in of_kind(evidence.lines("perf"), "block"):
        calls |= {cell["key"]: _Calls(cell["calls"], cell["standard_calls"]) for cell in line["cells"]}
    return calls


def _run_block(
    plan: Plan, stage: Stage, number: int, sampler: Sampler, evidence: EvidenceSink, seed: str, calls: dict[str, _Calls]
) -> None:
    place = {"stage": stage.name, "block": number}
    evidence.append("perf", {"kind": "begin", **place, "seed_sha256": seed_digest(seed)})
    visit: _Visit | None = None
    try:
        with sampler.block(stage.arms, seed, plan.cells) as block:
            visit = _Visit(plan, stage, seed, block, calls)
            visit.run()
            load = {"foreign_share": block.foreign_share(), "average_1min": os.getloadavg()[0]}
        line = {"kind": "block", **place, "seed": seed, "order": visit.orders, "cells": visit.lines(), "load": load}
        evidence.append("perf", line)
    except ArmFault as fault:
        key = visit.key if visit is not None else None
        words = {"arm": fault.arm, "cell": key, "code": fault.code, "message": str(fault), "detail": fault.detail}
        evidence.append("perf", {"kind": "fault", **place, **words})


class _Calls(NamedTuple):
    """Calls per leg of one cell.

    Arms that are compared closely have the same; the standard arm, many times slower maybe, has what fills a leg.
    """

    others: int
    standard: int

    def of(self, arm: str) -> int:
        """Calls per leg of an arm."""
        return self.standard if arm == "standard" else self.others

    def longer(self, short: LegTooShort) -> _Calls:
        """Enough more calls that the short leg would have lasted."""
        factor = max(1.25, TARGET_LEG_NS / max(1, short.nanoseconds))
        if short.arm == "standard":
            return self._replace(standard=math.ceil(self.standard * factor))
        return self._replace(others=math.ceil(self.others * factor))


class _Visit:
    """The cells of one block, visited `SWEEPS` times."""

    def __init__(self, plan: Plan, stage: Stage, seed: str, block: Block, calls: dict[str, _Calls]) -> None:
        self.cells = {cell.key: cell for cell in plan.cells}
        self.stage = stage
        self.seed = seed
        self.block = block
        self.calls = calls
        """Cell -> calls per leg, from an earlier block where there is one."""
        self.orders = [list(block_order(seed, plan.keys, sweep)) for sweep in range(SWEEPS)]
        self.key: str | None = None
        """Cell in work, for fault lines."""
        self._legs: dict[str, list[list[tuple[str, Leg]]]] = {}
        self._checks: dict[str, dict[str, dict[str, float]]] = {key: {} for key in self.cells}
        self._standard: dict[str, Left] = {}
        self._restarts: dict[str, int] = dict.fromkeys(self.cells, 0)

    def run(self) -> None:
        """Visit every cell in every sweep; a cell whose legs got too short starts again from its first visit."""
        for sweep, order in enumerate(self.orders):
            for key in order:
                self.key = key
                self._visit(self.cells[key], sweep)
        self.key = None

    def lines(self) -> list[dict[str, Any]]:
        """The cells of the block line, in plan order."""
        return [self._line(key) for key in self.cells]

    def _line(self, key: str) -> dict[str, Any]:
        legs = [leg for visit in self._legs[key] for leg in visit]
        paths = {arm: {"specialized": 0, "standard": 0} for arm in self.stage.arms if arm != "standard"}
        for arm, leg in legs:
            if arm in paths:
                paths[arm]["specialized"] += leg.specialized
                paths[arm]["standard"] += leg.standard
        return {
            "key": key,
            "calls": self.calls[key].others,
            "standard_calls": self.calls[key].standard,
            "restarts": self._restarts[key],
            "legs": [[arm, leg.evaluator_ns, leg.worker_ns] for arm, leg in legs],
            "checks": self._checks[key],
            "paths": paths,
        }

    def _visit(self, cell: CellPlan, sweep: int) -> None:
        for _ in range(_MAX_TRIES):
            try:
                if cell.key not in self.calls:
                    self._calibrate(cell)
                for again in range(len(self._legs.get(cell.key, [])), sweep + 1):
                    self._sweep(cell, again)
                return
            except LegTooShort as short:
                # The count must be the same in all legs of the block, so all of them are taken again. That rests on the
                # shortest leg of any arm, so it favours none.
                self._restarts[cell.key] += 1
                self._legs.pop(cell.key, None)
                self._checks[cell.key] = {}
                self.calls[cell.key] = self._fitting(cell, *self.calls[cell.key].longer(short))
        raise RuntimeError(f"cell {cell.key}: legs stay shorter than {MIN_LEG_NS} ns after {_MAX_TRIES} calibrations")

    def _calibrate(self, cell: CellPlan) -> None:
        """Calls per leg such that the fastest of the compared arms, and the standard arm, take `TARGET_LEG_NS`."""
        per_call = {arm: self._probe(arm, cell) for arm in ("standard", "best", "candidate")}
        others = _filling(min(per_call["best"], per_call["candidate"]))
        standard = max(_filling(per_call["standard"]), min(others, MIN_STANDARD_CALLS))
        self.calls[cell.key] = self._fitting(cell, others, standard)

    def _fitting(self, cell: CellPlan, others: int, standard: int) -> _Calls:
        return _Calls(self.block.fit(cell, others), self.block.fit(cell, standard))

    def _probe(self, arm: str, cell: CellPlan) -> float:
        """Nanoseconds per call, roughly."""
        calls = 1
        while True:
            self.block.prepare(arm, cell, calls)
            taken = self.block.leg(arm, cell, warm=1).evaluator_ns
            if taken >= _PROBE_NS or calls >= _MAX_CALLS:
                return taken / calls
            calls = min(_MAX_CALLS, max(2 * calls, math.ceil(calls * _PROBE_NS / taken)))

    def _sweep(self, cell: CellPlan, sweep: int) -> None:
        calls = self.calls[cell.key]
        order = leg_order(self.seed, cell.key, sweep, self.stage.arms)
        for arm in dict.fromkeys(order):
            self.block.prepare(arm, cell, calls.of(arm))
        legs: list[tuple[str, Leg]] = []
        left: dict[str, list[Left]] = {arm: [] for arm in order}
        for arm in order:
            leg = self.block.leg(arm, cell, warm=max(1, math.ceil(calls.of(arm) * _WARM_SHARE)))
            legs.append((arm, leg))
            if leg.evaluator_ns < MIN_LEG_NS:
                raise LegTooShort(arm, leg.evaluator_ns)
            left[arm].append(self.block.left(arm, cell))
        if "standard" in left:
            self._standard[cell.key] = left.pop("standard")[0]
        for arm, results in left.items():
            for result in results:
                self._check(cell, arm, result, left["best"][0])
        self._legs.setdefault(cell.key, []).append(legs)

    def _check(self, cell: CellPlan, arm: str, left: Left, best: Left) -> None:
        """Keep the worst of all legs per check."""
        comparisons = [self.block.reference(cell, left)]
        standard = self._standard[cell.key]
        if left.known_start and standard.known_start:
            comparisons.append(against_standard(left, standard))
        if arm != "best":
            # The standard arm's chain is shorter; the best's has the same length and was accepted before.
            comparisons.append(against_best(left, best))
        kept = self._checks[cell.key].setdefault(arm, {})
        for found in comparisons:
            for name, value in found.items():
                kept[name] = max(kept.get(name, 0.0), value)


def _filling(nanoseconds: float) -> int:
    """Calls of that duration that fill a leg."""
    return min(_MAX_CALLS, math.ceil(TARGET_LEG_NS / nanoseconds))
