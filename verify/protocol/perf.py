"""Decide the performance gate from the raw lines of `raw/perf.jsonl`.

Decides, per cell and baseline, whether the candidate is faster, the same or slower, and from that whether its claims
hold. A claim "faster" needs a lower bound of log(baseline / candidate) above 0, a claim "not slower" one above the
declared band. All claims must hold, each at the stage's level (an intersection-union test: no correction for the number
of cells); those against the standard path, which takes part in the first stage only, at the product of the levels. "At
least one cell faster than the current best" is corrected for the number of cells in the first stage; later stages look
only at the cells that passed it. Stages use different processes, seeds and orders and must agree, so their levels
multiply to the candidate's share of the run's error budget. A stop after two blocks can only end a measurement without
acceptance. An incomplete record never passes. Cannot see: cells outside the plan, or another machine.
Error rates: `verify.protocol.simulate`, docs/performance-protocol.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from verify.protocol.bounds import Bounds, Floats, bounds, word
from verify.protocol.decision import Decision, Finding, Line, OutcomeWord
from verify.protocol.lines import incomplete, last_attempt, of_kind
from verify.protocol.perf_checks import (
    control_bounds,
    fault_findings,
    floor_findings,
    floors_ns,
    rig_findings,
    work_findings,
)
from verify.protocol.perf_codes import CODES
from verify.protocol.perf_data import BlockError, StageData, blocks_of, interrupted, stage_data
from verify.protocol.perf_plan import PROTOCOL_ID, PROTOCOL_IDS, CellPlan, Claim, Plan, PlanError, Stage

__all__ = [
    "CODES",
    "FUTILITY_BLOCKS",
    "FUTILITY_LOSS",
    "PROTOCOL_ID",
    "PROTOCOL_IDS",
    "State",
    "below_floor",
    "decide",
    "state",
    "summarise",
]

FUTILITY_BLOCKS = 2
"""After this many blocks of the first stage the gate asks once whether going on is worth it."""
FUTILITY_LOSS = 0.03
"""Log loss beyond what a claim allows that, seen in both of these blocks in one cell, ends the measurement."""
_DISPLAY_ALPHA = 0.025
"""Per side, for the intervals of metrics and report; decisions use the stages' levels."""
_WORST_FIRST = ("????", "SLOW", "AMBG", "SAME", "FAST")

Verdict = Literal["holds", "refuted", "open"]


@dataclass(frozen=True)
class State:
    """Where a measurement stands: what a gate asks between blocks."""

    stage: Stage | None
    """Stage of the next block; None if nothing is left to measure."""
    block: int
    """Number of the next block in its stage."""
    why: str
    """Why nothing is left: `complete`, `futile`, `refuted`, `fault`; empty otherwise."""


def decide(lines: Sequence[Line]) -> Decision:
    """Outcome of the gate.

    Args:
        lines: all lines of the raw file; the last attempt counts.

    Returns:
        failed if the candidate did wrong or incomplete work in timed calls, crashed, beat the machine's floor, is
        identical to the current best, or a claim is refuted; not_evaluated without a complete record; inconclusive if
        the rig is unsound or a claim is undecided; passed only if all claims hold in all stages.
    """
    attempt = last_attempt(lines)
    if attempt is None:
        return incomplete("perf", "the file has no header")
    header, rest = attempt
    try:
        plan = Plan.from_header(header)
        if plan.arms["candidate"] == plan.arms["best"]:
            return Decision("failed", (_identical(plan),))
        ends = of_kind(rest, "end")
        if len(ends) != 1 or rest[-1].get("kind") != "end":
            return incomplete("perf", "the record has no end line")
        return _decide(plan, rest)
    except PlanError as error:
        return Decision("not_evaluated", (_finding("plan", str(error), "header", "a valid plan"),))
    except BlockError as error:
        return Decision("not_evaluated", (_finding("malformed", str(error), "raw/perf.jsonl", "complete blocks"),))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        what = f"a line lacks a field or holds another kind of value ({type(error).__name__}: {error})"
        return Decision("not_evaluated", (_finding("malformed", what, "raw/perf.jsonl", "lines of this protocol"),))


def state(lines: Sequence[Line]) -> State:
    """What comes next in an unfinished measurement whose header is valid.

    Raises:
        PlanError, BlockError: the record is not one that a gate can go on with.
    """
    attempt = last_attempt(lines)
    if attempt is None:
        raise PlanError("the file has no header")
    plan = Plan.from_header(attempt[0])
    rest = attempt[1]
    if of_kind(rest, "fault"):
        return State(None, 0, "fault")
    floors = floors_ns(plan, rest)
    gains: tuple[int, ...] | None = None
    for number, stage in enumerate(plan.stages):
        data = stage_data(plan, rest, stage)
        if any(work_findings(plan, blocks_of(rest, stage))):
            return State(None, data.blocks, "refuted")
        if number == 0 and data.blocks == FUTILITY_BLOCKS < stage.blocks and _futile(plan, data):
            return State(None, data.blocks, "futile")
        if data.blocks < stage.blocks:
            return State(stage, data.blocks, "")
        if plan.is_look:
            break
        judged = _Judged(plan, data, gains)
        if judged.outcome != "passed" or any(rig_findings(plan, data, blocks_of(rest, stage), floors)):
            return State(None, data.blocks, "refuted")
        gains = judged.gains
    return State(None, plan.stages[-1].blocks, "complete")


def below_floor(lines: Sequence[Line]) -> bool:
    """Whether some block of the candidate lies below its floor by the ceilings measured so far.

    A gate then measures the ceilings again before it believes that: a disturbed moment makes them too low.

    Raises:
        PlanError, BlockError: as `state`.
    """
    attempt = last_attempt(lines)
    if attempt is None:
        raise PlanError("the file has no header")
    plan = Plan.from_header(attempt[0])
    floors = floors_ns(plan, attempt[1])
    datas = [stage_data(plan, attempt[1], stage) for stage in plan.stages]
    return any(finding for data in datas for finding in floor_findings(plan, data, floors))


def _decide(plan: Plan, lines: Sequence[Line]) -> Decision:
    datas = [stage_data(plan, lines, stage) for stage in plan.stages]
    metrics = _metrics(plan, datas)
    blocks = of_kind(lines, "block")
    floors = floors_ns(plan, lines)
    bad = [*fault_findings(plan, lines, candidate=True), *work_findings(plan, blocks)]
    bad += [finding for data in datas for finding in floor_findings(plan, data, floors)]
    if bad:
        return Decision("failed", bad, metrics)
    if faults := list(fault_findings(plan, lines, candidate=False)):
        return Decision("inconclusive", faults, metrics)
    gains: tuple[int, ...] | None = None
    for number, data in enumerate(datas):
        if unsound := list(rig_findings(plan, data, blocks_of(lines, data.stage), floors)):
            return Decision("inconclusive", unsound, metrics)
        if number == 0 and data.blocks == FUTILITY_BLOCKS < data.stage.blocks and (stop := _futile(plan, data)):
            return Decision(stop[0], stop[1], metrics)
        if data.blocks != data.stage.blocks:
            what = f"stage {data.stage.name} has {data.blocks} of {data.stage.blocks} blocks"
            return Decision("not_evaluated", (_finding("incomplete_record", what, "raw/perf.jsonl", "all blocks"),))
        if plan.is_look:
            what = "one block shows how large the difference is, and no bound on it"
            found = Finding("perf.look", what, "all cells", "a tier with 2 blocks or more", plan.command)
            return Decision("inconclusive", (found,), metrics)
        judged = _Judged(plan, data, gains)
        if judged.outcome != "passed":
            return Decision(judged.outcome, judged.findings, metrics)
        gains = judged.gains
    return Decision("passed", (), metrics)


class _Judged:
    """The claims of one complete stage.

    Args:
        plan: what must hold.
        data: the stage's blocks.
        gains: indices of cells that earlier stages found faster than the best; None in the first stage.
    """

    def __init__(self, plan: Plan, data: StageData, gains: tuple[int, ...] | None) -> None:
        alpha = data.stage.alpha
        self.plan = plan
        self.stage = data.stage
        self.values: Mapping[str, Floats] = {base: data.values(base, "candidate") for base in _bases(data)}
        levels = {"best": alpha, "standard": plan.share}
        self.bounds: Mapping[str, Bounds] = {base: bounds(v, levels[base]) for base, v in self.values.items()}
        self.refuted: list[Finding] = []
        self.open: list[Finding] = []
        for at, cell in enumerate(plan.cells):
            for claim in cell.claims:
                if claim.against in self.bounds:
                    self._claim(at, cell, claim, levels[claim.against])
        self.gains = self._gains(gains)
        self.findings: Sequence[Finding] = [*self.refuted, *self.open]
        self.outcome: OutcomeWord = "failed" if self.refuted else "inconclusive" if self.open else "passed"

    def _claim(self, at: int, cell: CellPlan, claim: Claim, level: float) -> None:
        found = self.bounds[claim.against]
        low, high = float(found.low[at]), float(found.high[at])
        verdict = _verdict(claim, low, high, self.plan.margin)
        if verdict == "holds":
            return
        code = {"refuted": "cell_slower" if high < 0 else "cell_not_faster", "open": "cell_undecided"}[verdict]
        bound = 1.0 if claim.rule == "faster" else 1 / (1 + self.plan.band)
        message = (
            f"{math.exp(float(found.mean[at])):.4f} times as fast as the {_NAMES[claim.against]} "
            f"({math.exp(low):.4f}–{math.exp(high):.4f}, {word(low, high, self.plan.margin)}, stage {self.stage.name}, "
            f"{self.stage.blocks} blocks)"
        )
        expected = f"lower bound above {bound:.4f} at one-sided level {level:.4g}"
        finding = Finding(f"perf.{code}", message, cell.key, expected, self.plan.command)
        (self.refuted if verdict == "refuted" else self.open).append(finding)

    def _gains(self, earlier: tuple[int, ...] | None) -> tuple[int, ...]:
        """Cells faster than the best; a finding if there must be one and is none."""
        plan, values = self.plan, self.values["best"]
        if not plan.gain_cells:
            return ()
        first = earlier is None
        at = [plan.keys.index(key) for key in plan.gain_cells] if earlier is None else list(earlier)
        # Correcting in the first stage is enough: a cell that gains nothing must pass both, and the sum over cells of
        # (alpha_1 / cells) * alpha_2 is alpha_1 * alpha_2.
        level = self.stage.alpha / len(at) if first else self.stage.alpha
        found = bounds(values[at], level)
        faster = tuple(cell for cell, low in zip(at, found.low, strict=True) if low > 0)
        if not faster:
            # That no cell gains is shown only if every cell is shown not to.
            none = bool((bounds(values[at], self.stage.alpha).high < plan.margin).all())
            best = int(found.mean.argmax())
            message = f"no cell is shown faster than the current best (closest: {math.exp(found.mean[best]):.4f} times)"
            expected = f"one of {len(at)} cells above 1 at level {level:.4g}, stage {self.stage.name}"
            code = "no_gain" if none else "gain_undecided"
            finding = Finding(f"perf.{code}", message, plan.keys[at[best]], expected, plan.command)
            (self.refuted if none else self.open).append(finding)
        return faster


def _bases(data: StageData) -> Sequence[str]:
    """Arms of a stage that the candidate is compared with."""
    return [base for base in ("standard", "best") if data.stage.has(base)]


_NAMES = {"standard": "standard path", "best": "current best"}


def _verdict(claim: Claim, low: float, high: float, margin: float) -> Verdict:
    """Whether a claim holds. The same speed refutes "faster": a change that gains nothing is not worth a reviewer."""
    if claim.rule == "not_slower":
        return "holds" if low > -margin else "refuted" if high < -margin else "open"
    return "holds" if low > 0 else "refuted" if high < 0 or word(low, high, margin) == "SAME" else "open"


def _futile(plan: Plan, data: StageData) -> tuple[OutcomeWord, list[Finding]] | None:
    """Whether two blocks already show that going on is not worth it, and what that means.

    The rule can only end a measurement without acceptance, so it costs power, not validity: a cell that is clearly
    slower in both blocks is refuted; if the cells that must gain lose on average in both, it stays inconclusive.
    """
    values = {base: data.values(base, "candidate") for base in ("standard", "best")}
    found: list[Finding] = []
    for at, cell in enumerate(plan.cells):
        for claim in cell.claims:
            allowed = plan.margin if claim.rule == "not_slower" else 0.0
            best_of = float(values[claim.against][at].max())
            if best_of < -allowed - FUTILITY_LOSS:
                message = f"at most {math.exp(best_of):.4f} times as fast as the {_NAMES[claim.against]} in both blocks"
                expected = f"above {math.exp(-allowed - FUTILITY_LOSS):.4f} in one of them"
                found.append(Finding("perf.cell_slower", message, cell.key, expected, plan.command))
    if found:
        return "failed", found
    gaining = [at for at, cell in enumerate(plan.cells) if Claim("best", "faster") in cell.claims]
    if not gaining:
        return None
    better = float(values["best"][gaining].mean(axis=0).max())
    if better < 0:
        message = (
            f"the cells that must gain are at most {math.exp(better):.4f} times as fast as the best in both blocks"
        )
        where = plan.keys[gaining[0]] if len(gaining) == 1 else f"{len(gaining)} task cells"
        return "inconclusive", [Finding("perf.futile", message, where, "a gain in one of them", plan.command)]
    return None


def _metrics(plan: Plan, datas: Sequence[StageData]) -> dict[str, dict[str, Any]]:
    """Ratios pooled over all blocks present, with 95 % intervals: for reading, not for deciding."""
    metrics: dict[str, dict[str, Any]] = {}
    for base in ("best", "standard"):
        values = _pooled(datas, base)
        blocks = values.shape[1]
        if blocks == 0:
            metrics[f"worst_ratio_{base}"] = {"missing": "no block was measured"}
            continue
        tables = [{**numbers, "unit": "x", "samples": blocks} for numbers in _ratios(values)]
        metrics[f"worst_ratio_{base}"] = min(tables, key=lambda table: float(table["value"]))
        metrics |= {f"ratio_{base}/{key}": table for key, table in zip(plan.keys, tables, strict=True)}
        claimed = [at for at, cell in enumerate(plan.cells) if Claim("standard", "faster") in cell.claims]
        if base == "standard" and claimed:
            mean = math.exp(float(np.mean([math.log(float(tables[at]["value"])) for at in claimed])))
            metrics["geometric_mean_standard"] = {"value": mean, "unit": "x", "samples": blocks}
    if datas[0].blocks >= 2 and datas[0].stage.control:
        mean, low, high = (math.exp(value) for value in control_bounds(datas[0]))
        metrics["control"] = {"value": mean, "unit": "x", "low": low, "high": high, "samples": datas[0].blocks}
    return metrics


def _pooled(datas: Sequence[StageData], base: str) -> Floats:
    """Values of all stages in which a baseline takes part, [cells, blocks]."""
    none = np.empty((len(datas[0].keys), 0))
    return np.concatenate([none, *(data.values(base, "candidate") for data in datas if data.stage.has(base))], axis=1)


def _ratios(values: Floats) -> list[dict[str, float | None]]:
    """Per cell `value`, `low` and `high`, a 95 % interval; one block has no interval, none has no value."""
    if values.shape[1] < 2:
        column = np.exp(values[:, 0]).tolist() if values.shape[1] else [None] * len(values)
        return [{"value": value, "low": None, "high": None} for value in column]
    found = bounds(values, _DISPLAY_ALPHA)
    rows = np.exp(np.stack([found.mean, found.low, found.high], axis=1)).tolist()
    return [dict(zip(("value", "low", "high"), row, strict=True)) for row in rows]


def summarise(lines: Sequence[Line]) -> dict[str, Any]:
    """The measurement as tables for a report: per cell ratios, words and block values; controls of the rig.

    Raises:
        PlanError, BlockError: the lines are not a record of this protocol.
    """
    attempt = last_attempt(lines)
    if attempt is None:
        raise PlanError("the file has no header")
    plan = Plan.from_header(attempt[0])
    rest = attempt[1]
    datas = [stage_data(plan, rest, stage) for stage in plan.stages]
    words = {base: _words(plan, datas, base) for base in ("standard", "best")}
    values = {base: _pooled(datas, base) for base in ("standard", "best")}
    shown = {base: _ratios(v) for base, v in values.items()}
    measured = [data for data in datas if data.blocks]
    typical = {
        arm: np.concatenate([data.typical_ns(arm) for data in measured if data.stage.has(arm)])
        for arm in (datas[0].stage.arms if measured else ())
    }
    cells = []
    for at, cell in enumerate(plan.cells):
        against = {}
        for base, found in shown.items():
            numbers = {"ratio": found[at]["value"], "low": found[at]["low"], "high": found[at]["high"]}
            blocks = [math.exp(float(value)) for value in values[base][at]]
            against[base] = {**numbers, "word": words[base][at], "blocks": blocks}
        share = 1e3 * (plan.chains[cell.key]["copies"] if plan.on_gpu else 1)
        medians = {arm: float(np.median(times[:, at])) / share for arm, times in typical.items()}
        cells.append({"cell": dict(cell.cell), "against": against, "median_us": medians})
    return {"cells": cells, "note": _note(plan), "controls": list(_controls(plan, datas, rest))}


def _words(plan: Plan, datas: Sequence[StageData], base: str) -> list[str]:
    """Per cell the most cautious word of the stages that were measured."""
    per_stage = []
    for data in datas:
        if data.blocks >= 2 and data.stage.has(base):
            found = bounds(data.values(base, "candidate"), plan.share if base == "standard" else data.stage.alpha)
            pairs = zip(found.low, found.high, strict=True)
            per_stage.append([word(float(low), float(high), plan.margin) for low, high in pairs])
    if not per_stage:
        return ["????"] * len(plan.cells)
    return [min(column, key=_WORST_FIRST.index) for column in zip(*per_stage, strict=True)]


def _note(plan: Plan) -> str:
    stages = " and ".join(f"{s.blocks} blocks at level {s.alpha:.3g} ({s.name})" for s in plan.stages)
    each = " A call is one half-layer or one op, of several in a graph." if plan.on_gpu else ""
    if plan.is_look:
        return f"One block of the candidate beside the current best: ratios without an interval, and no words.{each}"
    return (
        f"Intervals are 95 % over all blocks (trimmed mean, Student t). Words need every stage: {stages}. FAST: lower "
        f"bound above 1; SAME: inside the band of {plan.band:.1%}; SLOW: upper bound below it; AMBG: neither.{each}"
    )


def _controls(plan: Plan, datas: Sequence[StageData], lines: Sequence[Line]) -> Iterator[tuple[str, str]]:
    first = datas[0]
    if first.stage.control and first.blocks >= 2:
        mean, low, high = control_bounds(first)
        yield "current best against itself", f"{math.exp(mean):.4f} ({math.exp(low):.4f}–{math.exp(high):.4f})"
    measured = [data for data in datas if data.blocks]
    for arm in ("standard", "candidate"):
        clocks = [data.clocks_ns(arm) for data in measured if data.stage.has(arm)]
        if clocks:
            excess = np.concatenate([evaluator - own for evaluator, own in clocks])
            yield f"evaluator's clock beyond the worker's, median slice, {arm}", f"{np.median(excess) / 1e3:.0f} µs"
    floors = floors_ns(plan, lines)
    if measured and floors is not None:
        share = max(float(np.max(floors / data.typical_ns("candidate").min(axis=0))) for data in measured)
        yield "closest to a physical floor", f"{share:.0%} of it"
    loads = [line["load"] for line in of_kind(lines, "block")]
    if loads:
        busiest = max(load["foreign_share"] for load in loads)
        yield "CPU time used by other processes, worst block", f"{busiest:.1%}"
    yield "blocks interrupted and repeated", str(interrupted(lines))


def _identical(plan: Plan) -> Finding:
    message = "the candidate's artifacts and schedules are those of the current best"
    return Finding("perf.identical", message, "artifact digests", "a change of what runs", plan.command)


def _finding(code: str, message: str, where: str, expected: str) -> Finding:
    return Finding(f"perf.{code}", message, where, expected, "fasttrack verify --gates perf")
