"""Decide the kernels gate from the raw lines of `raw/kernels.jsonl`.

Decides: whether every evaluated op gave right results in every secret case, touched nothing that it does not own, and
gave the same bits again. Tolerances are earned by the op's standard path on the same inputs: `FACTORS` times its error,
plus what the definition's own roundings are worth there, plus `FLOORS`, the last places of the output's format. Cannot
see: cases that were not run, the timing of the kernels, or whether a served step uses them (path gate).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verify.protocol import kernels_cuda
from verify.protocol.decision import Decision, Finding, Line

__all__ = [
    "CODES",
    "FACTORS",
    "FLOORS",
    "MEASURES",
    "PROTOCOL_ID",
    "PROTOCOL_IDS",
    "ROUNDING",
    "case_codes",
    "case_fails",
    "decide",
    "exceeds",
    "first_finding",
    "tolerance",
    "worst_share",
]

PROTOCOL_ID = "kernels/1"
PROTOCOL_IDS = (PROTOCOL_ID, kernels_cuda.PROTOCOL_ID)
"""Methods whose lines this module decides: on the host, and on a GPU machine (`kernels_cuda` has what is added)."""

MEASURES = ("element", "row_l2", "mean")
"""What is bounded; see `verify.evaluator.compare.Errors`."""

FACTORS: Mapping[str, float] = {"element": 4.0, "row_l2": 3.0, "mean": 2.0}
"""How much worse than the standard path a kernel may be on the same inputs. The sum over a tensor (mean) is stable, so
its factor is small; the largest element of two different roundings varies most."""

ROUNDING: Mapping[str, float] = {"element": 2.0, "row_l2": 2.0, "mean": 1.0}
"""How much of the effect of the definition's own bf16 roundings (reference with against without them) is allowed: a
kernel that skips them is more precise, not wrong, and a sum in another order flips one here and there by a whole place,
which is twice what rounding does."""

FLOORS: Mapping[str, Mapping[str, float]] = {
    "bf16": {"element": 2.0**-7, "row_l2": 2.0**-9, "mean": 2.0**-12},
    "e4m3": {"element": 2.0**-3, "row_l2": 2.0**-5, "mean": 2.0**-8},
    "f32": {"element": 2.0**-15, "row_l2": 2.0**-16, "mean": 2.0**-18},
}
"""What is allowed where standard path and roundings happen to be exact. bf16, e4m3: one last place of one
element. f32: 2^8 last places of one element, for sums of many terms in another order and approximated exponentials."""

LARGEST_MEAN = 0.2
"""A comparison whose tolerance of `mean` is above this has no power: zeros (mean = 1) would come near it."""
POWER = 4.0
"""A comparison has power against constants if the reference's spread is this many tolerances."""

CODES = {
    "kernels.mismatch": "results are further from the reference than the tolerance that the standard path earns",
    "kernels.out_of_bounds_write": "bytes outside every tensor of the call changed",
    "kernels.input_changed": "the call changed a tensor that it may only read",
    "kernels.unowned_state_changed": "the call changed state slots or cache rows that it does not own",
    "kernels.output_not_written": "poison from before the call is left in an output",
    "kernels.workspace_not_zeroed": "a workspace that must be zero between calls was not zero after one",
    "kernels.nondeterministic": "the same inputs gave other bits: memory from before the call, or the order of workers",
    "kernels.stale_output": "a replay with changed inputs returned the results of earlier ones",
    "kernels.threads_left": "a thread or process outlived the call",
    "kernels.denormals_off": "the call left the floating-point unit in another mode",
    "kernels.crash": "the worker ended, whatever its exit status",
    "kernels.timeout": "the call did not return before its deadline",
    "kernels.protocol": "the worker sent something that trusted code never sends",
    "kernels.error": "the objects or a schedule could not be loaded, or a kernel returned an error",
    "kernels.wrong_object": "the object that the worker mapped is not the built artifact",
    "kernels.no_power": "no case could tell a tensor from a constant",
    "kernels.not_run": "every case of an op was refused by the launcher",
    "kernels.sanitizer": "compute-sanitizer found an error in one of the artifact's kernels",
    "kernels.mutant_survived": "a planted fault passed every case: the gate on that machine did not look",
    "kernels.no_late_copy": "the kernel that writes inputs late could not be loaded on the GPU machine",
    "kernels.kit": "a GPU machine has to evaluate this: build a kit, run it there, import its results",
    "kernels.no_artifacts": "the build gate left nothing to run",
    "kernels.device": "this machine cannot run the target's kernels",
    "kernels.incomplete_record": "the raw lines do not hold a complete attempt",
    "kernels.environment": "the machine could not run the gate",
    "kernels.internal_error": "the gate itself failed",
}
"""Every reason code of this gate and what it means."""

_EVENTS = {
    "out_of_bounds_write": "bytes outside every tensor keep their secret pattern",
    "input_changed": "read-only tensors keep their bits",
    "unowned_state_changed": "state that the call does not own keeps its bits",
    "workspace_not_zeroed": "workspaces that start as zeros end as zeros",
    "output_not_written": "every element of an output is written",
    "nondeterministic": "the same inputs give the same bits, whatever was in memory and however late workers arrive",
    "stale_output": "a replay with changed inputs gives the results of those inputs",
    "threads_left": "no thread or process outlives the call",
    "denormals_off": "the floating-point environment is as before the call",
}
_FAILURES = {
    "crash": "the worker lives on",
    "timeout": "the call returns within its deadline",
    "protocol": "the worker sends only what trusted code sends",
    "error": "the kernel returns status 0",
}


def tolerance(dtype: str, standard: Mapping[str, Any], rounding: Mapping[str, Any]) -> dict[str, float]:
    """What a tensor's errors may be, by measure.

    Args:
        dtype: `bf16`, `e4m3` or `f32`, the tensor's own.
        standard: the standard path's errors on the same inputs.
        rounding: errors of the reference without its bf16 roundings against the reference with them.
    """
    floors = FLOORS[dtype]
    return {
        name: FACTORS[name] * float(standard[name]) + ROUNDING[name] * float(rounding[name]) + floors[name]
        for name in MEASURES
    }


def exceeds(candidate: Mapping[str, Any], allowed: Mapping[str, float]) -> list[str]:
    """Measures in which the errors are above the tolerance; wrong classes of values (NaN, not zero) come first."""
    wrong = [name for name in ("nonfinite", "nonzero") if int(candidate[name]) > 0]
    return wrong + [name for name in MEASURES if not float(candidate[name]) <= allowed[name]]


@dataclass
class _Tally:
    cases: int = 0
    refused: int = 0
    skipped: int = 0
    comparisons: int = 0
    worst: float = 0.0
    """Largest error as a share of its tolerance."""


def decide(lines: Sequence[Line]) -> Decision:
    """Outcome of the gate.

    Args:
        lines: all lines of the raw file: a header, then one line per load of the objects and one per case.

    Returns:
        failed if a load or any case broke a rule; not_evaluated if lines are missing or malformed or nothing could be
        run; inconclusive if some output was never compared with power; passed otherwise.
    """
    problem = _malformed(lines)
    if problem:
        return Decision("not_evaluated", (problem,))
    header = lines[0]
    cuda = header["protocol"] == kernels_cuda.PROTOCOL_ID
    loads, cases = _of_kind(lines, "load"), _of_kind(lines, "case")
    loaded = kernels_cuda.load_findings if cuda else _load_findings
    findings = [finding for load in loads for finding in loaded(header, load)]
    tally = _Tally()
    broken: dict[tuple[str, str, str], list[tuple[Line, str]]] = defaultdict(list)
    power: dict[tuple[str, str], bool] = {}
    for case in cases:
        _count(case, tally, power, _op(case, cuda))
        for code, tensor, text in _case_findings(case):
            broken[(code, _op(case, cuda), tensor)].append((case, text))
    findings += [_finding(header, key, hits) for key, hits in sorted(broken.items())]
    metrics = _metrics(tally)
    beside = kernels_cuda.beside(header, lines[1:], case_fails) if cuda else None
    if beside is not None:
        findings += beside.failed
        metrics |= beside.metrics
    if findings:
        return Decision("failed", tuple(findings), metrics)
    if len(cases) < len(header["planned"]):
        return Decision(
            "not_evaluated", (_incomplete(f"{len(cases)} of {len(header['planned'])} cases", "cases"),), metrics
        )
    ops = kernels_cuda.labels(header) if cuda else header["ops"]
    nothing = [op for op in ops if not any(_op(c, cuda) == op and _evaluated(c) for c in cases)]
    if nothing:
        unrun = tuple(_not_run(header, op, [c for c in cases if _op(c, cuda) == op]) for op in nothing)
        return Decision("not_evaluated", unrun, metrics)
    lacking = (*kernels_cuda.coverage_findings(header, cases), *beside.lacking) if beside is not None else ()
    if lacking:
        return Decision("not_evaluated", lacking, metrics)
    weak = [
        _no_power(header, op, tensor) for op, tensor in sorted(key for key, powerful in power.items() if not powerful)
    ]
    weak += (*kernels_cuda.weak_findings(header, loads), *beside.weak) if beside is not None else ()
    return Decision("inconclusive", tuple(weak), metrics) if weak else Decision("passed", (), metrics)


def _op(case: Line, cuda: bool) -> str:
    """What findings call the judged object of a case: its op, and on a GPU machine also its geometry."""
    return kernels_cuda.label(case) if cuda else str(case["op"])


def case_fails(case: Line) -> bool:
    """Whether a case line alone is enough to fail the gate."""
    return any(True for _ in _case_findings(case))


def case_codes(case: Line) -> frozenset[str]:
    """Codes of every rule that a case line alone breaks."""
    return frozenset(code for code, _, _ in _case_findings(case))


def first_finding(case: Line) -> str | None:
    """What a case line alone shows first, in words; None if it breaks no rule."""
    return next((f"{code}: {seen}" for code, _, seen in _case_findings(case)), None)


def worst_share(case: Line) -> float:
    """Largest error of a case as a share of its tolerance; 0 if nothing was compared."""
    shares = [0.0]
    for row in case.get("values", ()):
        allowed = _allowed(row)
        shares += [float(row["candidate"][name]) / allowed[name] for name in MEASURES]
    return max(shares)


def _allowed(row: Mapping[str, Any]) -> dict[str, float]:
    return tolerance(str(row["dtype"]), row["standard"], row["rounding"])


def _of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line.get("kind") == kind]


def _evaluated(case: Line) -> bool:
    return case["refused"] is None and case["skipped"] is None


def _count(case: Line, tally: _Tally, power: dict[tuple[str, str], bool], op: str) -> None:
    """Add a case to the totals, and what its comparisons could have told apart to the power table."""
    tally.cases += 1
    tally.refused += case["refused"] is not None
    tally.skipped += case["skipped"] is not None
    tally.comparisons += len(case.get("values", ())) + len(case.get("choices", ()))
    tally.worst = max(tally.worst, worst_share(case))
    for row in case.get("values", ()):
        allowed = _allowed(row)["mean"]
        key = (op, str(row["tensor"]))
        power[key] = power.get(key, False) or (allowed <= LARGEST_MEAN and float(row["spread"]) >= POWER * allowed)


def _case_findings(case: Line) -> Iterable[tuple[str, str, str]]:
    """(code, tensor, what was seen) of every broken rule of a case."""
    failure = case["failure"]
    if failure is not None:
        yield f"kernels.{failure['failure']}", "", str(failure["message"])
    for event in case.get("events", ()):
        where = f" at byte {event['offset']}" if "offset" in event else ""
        yield (
            f"kernels.{event['code']}",
            str(event["tensor"]),
            f"{event['tensor']}{where} in run `{event['run']}`".strip(),
        )
    for row in case.get("values", ()):
        allowed = _allowed(row)
        wrong = exceeds(row["candidate"], allowed)
        if wrong:
            yield "kernels.mismatch", str(row["tensor"]), _mismatch(row, wrong[0], allowed)
    for row in case.get("choices", ()):
        if int(row["violations"]) > 0:
            text = f"{row['tensor']}{row['worst']} breaks the rule `{row['rule']}` in run `{row['run']}`"
            yield "kernels.mismatch", str(row["tensor"]), text


def _load_findings(header: Line, load: Line) -> Iterable[Finding]:
    """A load that failed, or that mapped other files than the artifacts."""
    failure = load["failure"]
    if failure is not None:
        code, message = f"kernels.{failure['failure']}", f"loading the objects: {failure['message']}"
        yield Finding(code, message, "op.load", _FAILURES[failure["failure"]], str(header["command"]))
        return
    for op, digest in header["artifacts"].items():
        receipt = load["receipts"].get(op)
        if receipt is None or receipt["digest"] != digest or receipt["mapped"] != receipt["object"]:
            rule = f"the object of artifact {digest} mapped in the worker"
            yield Finding(
                "kernels.wrong_object",
                f"op {op}: another or no object is mapped",
                f"op {op}",
                rule,
                str(header["command"]),
            )


def _mismatch(row: Mapping[str, Any], measure: str, allowed: Mapping[str, float]) -> str:
    place = f"{row['tensor']}{row['candidate']['worst']} in run {row['run']}"
    got = row["candidate"][measure]
    if measure in MEASURES:
        standard = row["standard"][measure]
        return f"{place}: {measure} error {got:.3g}, allowed {allowed[measure]:.3g} (standard path {standard:.3g})"
    return f"{place}: {got} elements are {measure} where the reference is not"


def _finding(header: Line, key: tuple[str, str, str], hits: list[tuple[Line, str]]) -> Finding:
    code, op, _ = key
    case, text = hits[0]
    more = f" ({len(hits)} times in {len({str(c['id']) for c, _ in hits})} cases)" if len(hits) > 1 else ""
    rule = _EVENTS.get(code.partition(".")[2]) or _FAILURES.get(code.partition(".")[2])
    return Finding(
        code=code,
        message=f"op {op}: {text}{more}",
        where=f"case {case['id']} seed {case['seed']}",
        expected=rule
        or "errors within those of the standard path times the declared factor, plus the format's rounding",
        next=str(header["command"]),
    )


def _not_run(header: Line, op: str, cases: Sequence[Line]) -> Finding:
    refused = [str(c["refused"]) for c in cases if c.get("refused") is not None]
    why = f"every case was refused: {refused[0]}" if refused else "no case was planned"
    return Finding(
        "kernels.not_run",
        f"op {op}: {why}",
        f"op {op}",
        "at least one case that the launcher takes",
        str(header["command"]),
    )


def _no_power(header: Line, op: str, tensor: str) -> Finding:
    return Finding(
        "kernels.no_power",
        f"op {op}: no case could tell {tensor} from a constant",
        f"op {op}, tensor {tensor}",
        f"a comparison with mean tolerance up to {LARGEST_MEAN} whose reference varies by {POWER:g} tolerances",
        str(header["command"]),
    )


def _metrics(tally: _Tally) -> dict[str, Mapping[str, Any]]:
    return {
        "cases": {"value": float(tally.cases), "unit": "cases"},
        "refused": {"value": float(tally.refused), "unit": "cases"},
        "comparisons": {"value": float(tally.comparisons), "unit": "tensors"},
        "worst_share": {"value": tally.worst, "unit": "of tolerance"},
    }


def _incomplete(message: str, where: str) -> Finding:
    rule = "one header, at least one load, and every planned case once"
    return Finding("kernels.incomplete_record", message, where, rule, "fasttrack verify --gates kernels")


def _malformed(lines: Sequence[Line]) -> Finding | None:
    """Why the lines cannot be decided on, or None. Missing cases are judged later: a failure may explain them."""
    if not lines or lines[0].get("kind") != "header":
        return _incomplete("no header line", "line 1")
    header = lines[0]
    if header.get("protocol") not in PROTOCOL_IDS:
        return _incomplete(f"protocol {header.get('protocol')!r}; this decides {', '.join(PROTOCOL_IDS)}", "line 1")
    if header["protocol"] == kernels_cuda.PROTOCOL_ID and (what := kernels_cuda.disordered(lines)):
        return _incomplete(what, "the chain of lines")
    if not header.get("ops") or not header.get("planned"):
        return _incomplete("no op or no case was planned", "line 1")
    kinds = ("load", "case") if header["protocol"] == PROTOCOL_ID else kernels_cuda.KINDS
    for number, line in enumerate(lines[1:], start=2):
        if line.get("kind") not in kinds:
            return _incomplete(f"line of kind {line.get('kind')!r}", f"line {number}")
    found = [str(case["id"]) for case in _of_kind(lines, "case")]
    unplanned = set(found) - set(map(str, header["planned"]))
    if unplanned or len(set(found)) != len(found):
        return _incomplete(
            "a case that was not planned, or one that was recorded twice", min(unplanned, default="cases")
        )
    if not _of_kind(lines, "load"):
        return _incomplete("the objects were never loaded", "loads")
    return None
