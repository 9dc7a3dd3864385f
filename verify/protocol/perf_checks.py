"""Everything but the speed claims: did the arms do the work, is the clock honest, is the rig sound?

Each function returns findings. `work_findings` and `floor_findings` are about the candidate and make it fail;
`rig_findings` are about the measurement and make it inconclusive. What they see is what the raw lines hold: outputs
were compared by the evaluator while the lines were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verify.protocol.bounds import bounds
from verify.protocol.decision import Finding, Line
from verify.protocol.floors import GUARD, Ceilings, floor, merge
from verify.protocol.perf_data import StageData
from verify.protocol.perf_plan import CONTROL_ALPHA, Plan

__all__ = [
    "CLOCK_LATENCY_NS", "CLOCK_SHARE", "CLOCK_TOLERANCE", "TOLERANCES", "control_bounds", "fault_findings",
    "floor_findings", "floors_ns", "rig_findings", "work_findings",
]  # fmt: skip

TOLERANCES: Mapping[str, float] = {
    "nonfinite": 0.0,
    "output_broken": 0.02,
    "output_median": 0.2,
    "output_mean": 0.35,
    "chain_broken": 0.02,
    "chain_median": 0.2,
    "chain_mean": 0.35,
    "state_mean": 0.25,
    "choice_rows": 0.1,
    "reference_row": 0.1,
    "reference_mean": 0.02,
}
"""Largest difference per check: `output` from the standard arm on the calls that both ran, `chain` and `state` from
the current best on the whole chain, `reference` of a sampled call. They catch work that was not done. In a chain of
whole steps of the nano model an honest row is off by .03 (median) and, where near-tied experts fell the other way, in
0.4 % of the rows by more than 1; the row of a skipped or repeated call is off by 1.4, in 98 % of the cases by more than
1. So `broken`, the share of rows off by more than 1 (less three rows), shows from 2 % of skipped calls on. Precision is
judged by the kernels gate on the same artifact digests."""

CLOCK_TOLERANCE = 0.03
CLOCK_LATENCY_NS = 1e6
"""The evaluator's time of a slice may exceed the worker's own by that share and that much: asking and answering."""
CLOCK_SHARE = 0.1
"""Share of an arm's slices that may exceed it (a busy machine delays an answer now and then)."""
_CLOCK_SLACK = 0.002
"""Share by which a worker's time may exceed the evaluator's: nothing, but for reading two clocks."""

_OWN_ARM = "candidate"


def fault_findings(plan: Plan, lines: Iterable[Line], *, candidate: bool) -> Iterator[Finding]:
    """Crashes, timeouts and errors: of the candidate's process, or of the others'."""
    for line in lines:
        if line.get("kind") != "fault" or (line["arm"] == _OWN_ARM) != candidate:
            continue
        where = f"block {line['stage']}/{line['block']}, arm {line['arm']}, {line['cell'] or 'start'}"
        code = f"perf.{line['code']}" if candidate else "perf.rig_fault"
        expected = "the call returns within its deadline and the process lives on"
        yield Finding(code, line["message"], where, expected, plan.command)


def work_findings(plan: Plan, lines: Iterable[Line]) -> Iterator[Finding]:
    """Timed outputs or states of the candidate that are wrong, and timed steps that took the standard path."""
    for where, arm, cell, required in _arm_cells(plan, lines):
        if arm != _OWN_ARM:
            continue
        for name, value in _exceeding(cell["checks"][arm], required):
            message = f"outputs of the timed calls are wrong: {name} is {value:.3g}"
            expected = f"{name} at most {TOLERANCES[name]:g} against what the other arms and the reference give"
            yield Finding("perf.output_mismatch", message, where, expected, plan.command)
        standard = cell["paths"][arm]["standard"]
        if standard:
            message = f"{standard} timed calls took the standard path"
            yield Finding("perf.fallback", message, where, "every timed call on the specialised path", plan.command)


def floors_ns(plan: Plan, lines: Iterable[Line]) -> list[float] | None:
    """Floor of each cell from the highest ceilings that the record holds; None if it holds none."""
    found: Ceilings | None = None
    for line in lines:
        if line.get("kind") == "ceilings":
            measured = Ceilings.from_json(line["ceilings"])
            found = measured if found is None else merge(found, measured)
    return None if found is None else [floor(cell.traffic, found).ns for cell in plan.cells]


def floor_findings(plan: Plan, data: StageData, floors: Sequence[float] | None) -> Iterator[Finding]:
    """Blocks in which the candidate's median slice is faster than the machine."""
    if not data.blocks or floors is None:
        return
    fastest = data.typical_ns(_OWN_ARM).min(axis=0)
    for key, least, found in zip(plan.keys, floors, fastest, strict=True):
        if found < least * (1 - GUARD):
            message = f"a call took {found / 1e3:.2f} µs; what it must move and compute takes {least / 1e3:.2f} µs"
            expected = f"at least {least * (1 - GUARD) / 1e3:.2f} µs (floor less {GUARD:.0%})"
            yield Finding("perf.below_floor", message, key, expected, plan.command)


def rig_findings(
    plan: Plan, data: StageData, lines: Sequence[Line], floors: Sequence[float] | None
) -> Iterator[Finding]:
    """Reasons not to trust this stage's numbers, whatever they say."""
    if floors is None:
        message = "no ceilings of this machine are in the record"
        yield Finding("perf.floor_missing", message, "all cells", "ceilings measured in the same run", plan.command)
    if not data.blocks:
        return
    for where, arm, cell, required in _arm_cells(plan, lines):
        if arm != _OWN_ARM and (wrong := list(_exceeding(cell["checks"][arm], required))):
            name, value = wrong[0]
            message = f"outputs of arm {arm} are wrong: {name} is {value:.3g}"
            expected = f"{name} at most {TOLERANCES[name]:g} for an arm that was accepted before"
            yield Finding("perf.baseline_mismatch", message, where, expected, plan.command)
    if floors is not None and data.stage.has("standard"):
        yield from _broken_floors(plan, data, floors)
    yield from _clock(plan, data)
    if data.stage.control:
        yield from _control(plan, data)


def control_bounds(data: StageData) -> tuple[float, float, float]:
    """A/A over all cells: (mean log ratio, lower, upper), at CONTROL_ALPHA / 2 per side."""
    pooled = bounds(data.values("best", "control").mean(axis=0, keepdims=True), CONTROL_ALPHA / 4)
    return float(pooled.mean[0]), float(pooled.low[0]), float(pooled.high[0])


def _arm_cells(plan: Plan, lines: Iterable[Line]) -> Iterator[tuple[str, str, Mapping[str, Any], Sequence[str]]]:
    """(where, arm, cell record, checks that it must have) of every cell of every block, specialised arms only.

    Steps, and on a GPU everything, are compared with the standard arm where it takes part; all but the best with it.
    """
    stages = {stage.name: stage for stage in plan.stages}
    met = {cell.key for cell in plan.cells if plan.meets_standard(cell)}
    for line in lines:
        if line.get("kind") != "block":
            continue
        standard = stages[line["stage"]].has("standard")
        for cell in line["cells"]:
            for arm in cell["paths"]:
                required = ["output_broken"] if standard and cell["key"] in met else []
                required += ["chain_broken"] if arm != "best" else []
                yield f"{cell['key']}, block {line['stage']}/{line['block']}", arm, cell, required


def _exceeding(checks: Mapping[str, float], required: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Checks beyond their tolerance. A missing check is not a passed one."""
    yield from ((name, float("inf")) for name in required if name not in checks)
    for name, value in checks.items():
        if not value <= TOLERANCES[name]:
            yield name, value


def _broken_floors(plan: Plan, data: StageData, floors: Sequence[float]) -> Iterator[Finding]:
    """A trusted arm below the floor shows that the floor is wrong."""
    fastest = data.typical_ns("standard").min(axis=0)
    for key, least, found in zip(plan.keys, floors, fastest, strict=True):
        if found < least * (1 - GUARD):
            message = f"the standard arm took {found / 1e3:.2f} µs, below the floor of {least / 1e3:.2f} µs"
            yield Finding("perf.floor_wrong", message, key, "a floor that trusted code respects", plan.command)


def _clock(plan: Plan, data: StageData) -> Iterator[Finding]:
    for arm in data.stage.arms:
        times, own = data.clocks_ns(arm)
        if (own > times * (1 + _CLOCK_SLACK)).any():
            message = f"arm {arm} reports more time than passed on the evaluator's clock"
            yield Finding("perf.clock_forged", message, f"arm {arm}", "one clock for both processes", plan.command)
        allowed = own * (1 + CLOCK_TOLERANCE) + CLOCK_LATENCY_NS
        share = float((times > allowed).mean())
        if share > CLOCK_SHARE:
            limit = f"{CLOCK_TOLERANCE:.0%} and {CLOCK_LATENCY_NS / 1e6:g} ms"
            message = f"in {share:.0%} of the slices of arm {arm} the two clocks differ by more than {limit}"
            expected = f"at most {CLOCK_SHARE:.0%} of the slices (a quieter machine)"
            yield Finding("perf.clock_disagrees", message, f"arm {arm}", expected, plan.command)


def _control(plan: Plan, data: StageData) -> Iterator[Finding]:
    """The current best against itself, in total and per cell, each with half of the control's error."""
    mean, low, high = control_bounds(data)
    if low > 0 or high < 0 or abs(mean) > plan.margin:
        message = f"the current best reads {np.exp(mean):.4f} against itself ({np.exp(low):.4f}–{np.exp(high):.4f})"
        expected = f"1.00 inside the interval and within {plan.band:.1%}"
        yield Finding("perf.control", message, "all cells", expected, plan.command)
    cells = bounds(data.values("best", "control"), CONTROL_ALPHA / (4 * len(plan.cells)), borrow=False)
    for at in np.flatnonzero((cells.low > 0) | (cells.high < 0)):
        ratio, lower, upper = (float(np.exp(value[at])) for value in (cells.mean, cells.low, cells.high))
        message = f"the current best reads {ratio:.4f} against itself ({lower:.4f}–{upper:.4f})"
        yield Finding("perf.control", message, plan.keys[at], "1.00 inside the interval", plan.command)
