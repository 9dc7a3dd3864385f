"""Decide the path gate from the raw lines of `raw/path.jsonl`.

Decides: whether the specialised kernels really ran, at every site of every claimed decode step, gave the step's result,
and nothing else did. Evidence: ledger counts against the step's program, refusals, receipts of the mapped objects, the
distance between specialised and standard steps, and the *watermark*: with one op made deliberately wrong, the kernels
comparison and the step comparison must both break. Cannot see: speed, or numbers of single ops (kernels gate).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verify.protocol import kernels, path_cuda
from verify.protocol.decision import Decision, Finding, Line
from verify.protocol.step_distance import FACTORS, FLOORS, MEASURES, grouped, step_exceeds, step_tolerance

__all__ = [
    "CODES", "FACTORS", "FLOORS", "MEASURES", "PROTOCOL_ID", "PROTOCOL_IDS", "decide", "step_exceeds", "step_tolerance",
]  # fmt: skip

PROTOCOL_ID = "path/1"
PROTOCOL_IDS = (PROTOCOL_ID, path_cuda.PROTOCOL_ID)
"""Methods whose lines this module decides: whole steps on the host, and half-layers on a GPU machine (`path_cuda`)."""

CODES = {
    "path.fallback": "a claimed step took the standard path; the message gives the planner's reason",
    "path.ledger": "the ledger counts other runs than the step's program has",
    "path.symbols": "the profiler saw other kernels, or another number of them, than the captured sites launch",
    "path.step_mismatch": "a specialised step differs from the standard step by more than rounding explains",
    "path.unowned_state_changed": "a step changed state slots or cache rows of requests that are not in the batch",
    "path.watermark_unseen": "an op was made deliberately wrong and a comparison did not notice",
    "path.wrong_object": "the object that the worker mapped is not the built artifact",
    "path.crash": "the worker ended, whatever its exit status",
    "path.timeout": "a step did not end before its deadline",
    "path.protocol": "the worker sent something that trusted code never sends",
    "path.error": "the objects could not be loaded, or a step raised an error",
    "path.no_profiler": "the GPU machine's profiler reports no kernels, so nobody saw which ones ran",
    "path.no_power": "the standard path is so far from the reference in a cell that nothing could be told apart",
    "path.no_artifacts": "the build gate left nothing to run",
    "path.kit": "a GPU machine has to evaluate this: build a kit, run it there, import its results",
    "path.device": "this machine cannot run the target's kernels",
    "path.incomplete_record": "the raw lines do not hold a complete attempt",
    "path.environment": "the machine could not run the gate",
    "path.internal_error": "the gate itself failed",
}
"""Every reason code of this gate and what it means."""

_FAILURES = {
    "crash": "the worker lives on",
    "timeout": "the step ends within its deadline",
    "protocol": "the worker sends only what trusted code sends",
    "error": "no exception in the step",
}


def decide(lines: Sequence[Line]) -> Decision:
    """Outcome of the gate.

    Args:
        lines: all lines of the raw file: a header, then `load`, `tolerance`, `cell` and `watermark` lines.

    Returns:
        failed if a step fell back, ran other launches than the program's, differed from the standard step or changed
        state it does not own, or if a watermark went unseen; not_evaluated if lines are missing or malformed; passed
        otherwise.
    """
    if lines and lines[0].get("protocol") == path_cuda.PROTOCOL_ID:
        return path_cuda.decide(lines)
    problem = _malformed(lines)
    if problem is not None:
        return Decision("not_evaluated", (problem,))
    header = lines[0]
    cells, marks = _of_kind(lines, "cell"), _of_kind(lines, "watermark")
    allowed = step_tolerance(_of_kind(lines, "tolerance")[0]["standard"])
    findings = [finding for line in lines for finding in _failure(header, line)]
    findings += [finding for load in _of_kind(lines, "load") for finding in _receipts(header, load)]
    findings += [finding for cell in cells for finding in _cell(header, cell, allowed)]
    findings += [finding for mark in marks for finding in _watermark(header, mark, allowed)]
    metrics = _metrics(cells, marks, allowed)
    if findings:
        return Decision("failed", tuple(grouped(findings)), metrics)
    left = sorted(set(map(str, header["planned"])) - {str(line["id"]) for line in (*cells, *marks)})
    if left:
        return Decision("not_evaluated", (_incomplete(f"{len(left)} planned steps are missing", left[0]),), metrics)
    return Decision("passed", (), metrics)


def _of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line.get("kind") == kind]


def _failure(header: Line, line: Line) -> Iterable[Finding]:
    """A worker that died or raised while this line was measured."""
    failure = line.get("failure")
    if failure is not None:
        code, where = f"path.{failure['failure']}", str(line.get("id", line["kind"]))
        yield Finding(code, str(failure["message"]), where, _FAILURES[failure["failure"]], str(header["command"]))


def _receipts(header: Line, load: Line) -> Iterable[Finding]:
    for op, digest in header["artifacts"].items():
        receipt = load["receipts"].get(op)
        if load["failure"] is None and (
            receipt is None or receipt["digest"] != digest or receipt["mapped"] != receipt["object"]
        ):
            rule = f"the object of artifact {digest} mapped in the worker"
            yield Finding(
                "path.wrong_object",
                f"another or no object of op {op} is mapped",
                f"op {op}",
                rule,
                str(header["command"]),
            )


def _cell(header: Line, cell: Line, allowed: Mapping[str, float]) -> Iterable[Finding]:
    """Everything that is wrong with the steps of one cell."""
    if cell["failure"] is not None:
        return
    where, again = str(cell["id"]), str(header["command"])
    specialised = cell["mode"] == "auto"
    for code, message, place, expected in cell["refusals"] if specialised else ():
        yield Finding("path.fallback", f"the standard path ran: {code}: {place}: {message}", where, expected, again)
    if not (specialised and cell["refusals"]):
        for message in _ledger_differs(header, cell, specialised):
            kind = "specialised" if specialised else "standard"
            rule = f"{cell['steps']} launches of the {kind} op at every site, no others"
            yield Finding("path.ledger", message, where, rule, again)
    for number, distance in enumerate(cell["distances"]):
        wrong = step_exceeds(distance, allowed)
        if wrong:
            limit = {**allowed, "nonfinite": 0}[wrong[0]]
            text = f"step {number} differs from the standard step: {wrong[0]} {distance[wrong[0]]:.3g}"
            yield Finding("path.step_mismatch", text, where, f"at most {limit:.3g}", again)
    for pool in cell["changed_pools"]:
        text = f"the step changed rows of {pool} that belong to no request of the batch"
        yield Finding(
            "path.unowned_state_changed", text, where, "slots and cache rows of other requests keep their bits", again
        )


def _ledger_differs(header: Line, cell: Line, specialised: bool) -> Iterable[str]:
    """Differences between the ledger and what the program must have counted."""
    ran, idle = ("specialized", "standard") if specialised else ("standard", "specialized")
    ledger, steps = cell["ledger"], cell["steps"]
    counted = [(row["layer"], row["op"], row["site"]) for row in ledger["sites"]]
    if counted != [tuple(site) for site in header["sites"]]:
        yield "the ledger lists other sites than the step's program"
        return
    for row in ledger["sites"]:
        if row[ran] != steps or row[idle] != 0:
            place = "final" if row["layer"] is None else f"layer {row['layer']}"
            yield f"{place} {row['site']}: {row['specialized']} specialised and {row['standard']} standard runs"
    if ledger["steps"] != {ran: steps, idle: 0}:
        yield f"steps counted as {dict(ledger['steps'])}"
    fallbacks = dict(ledger["fallbacks"])
    if fallbacks if specialised else fallbacks.get("mode.off") != steps:
        yield f"fallbacks counted as {fallbacks}"


def _watermark(header: Line, mark: Line, allowed: Mapping[str, float]) -> Iterable[Finding]:
    """A deliberately wrong op that some comparison did not notice."""
    if mark["failure"] is not None:
        return
    where, again, op = str(mark["id"]), str(header["command"]), mark["spoil"]
    for code, message, place, expected in mark["refusals"]:
        yield Finding("path.fallback", f"the standard path ran: {code}: {place}: {message}", where, expected, again)
    if mark["refusals"]:
        return
    if not any(step_exceeds(distance, allowed) for distance in mark["distances"]):
        text = f"op {op} was made deliberately wrong and the step's result stayed within tolerance"
        rule = "a step comparison that breaks: the judged result comes from this kernel"
        yield Finding("path.watermark_unseen", text, where, rule, again)
    if not kernels.case_fails(mark["case"]):
        text = f"op {op} was made deliberately wrong and the kernels comparison passed"
        rule = "a kernels comparison that breaks: the compared bytes come from this kernel"
        yield Finding("path.watermark_unseen", text, where, rule, again)


def _metrics(cells: Sequence[Line], marks: Sequence[Line], allowed: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    judged = [cell for cell in cells if cell["mode"] == "auto" and cell["failure"] is None]
    shares = [float(d[name]) / allowed[name] for cell in judged for d in cell["distances"] for name in MEASURES]
    launches = [row["specialized"] for cell in judged for row in cell["ledger"]["sites"]]
    fallbacks = [count for cell in judged for count in cell["ledger"]["fallbacks"].values()]
    return {
        "cells": {"value": float(len(judged)), "unit": "cells"},
        "specialised_launches": {"value": float(sum(launches)), "unit": "launches"},
        "fallbacks": {"value": float(sum(fallbacks)), "unit": "steps"},
        "watermarks": {"value": float(len(marks)), "unit": "ops"},
        "worst_share": {"value": max(shares), "unit": "of tolerance"} if shares else {"missing": "no step was judged"},
    }


def _incomplete(message: str, where: str) -> Finding:
    rule = "one header, one tolerance, at least one load, and every planned step once"
    return Finding("path.incomplete_record", message, where, rule, "fasttrack verify --gates path")


def _malformed(lines: Sequence[Line]) -> Finding | None:
    """Why the lines cannot be decided on, or None. Missing steps are judged later: a failure may explain them."""
    if not lines or lines[0].get("kind") != "header":
        return _incomplete("no header line", "line 1")
    header = lines[0]
    if header.get("protocol") != PROTOCOL_ID:
        return _incomplete(f"protocol {header.get('protocol')!r}; this decides {PROTOCOL_ID}", "line 1")
    if not header.get("planned") or not header.get("sites") or not header.get("artifacts"):
        return _incomplete("no step, site or artifact was planned", "line 1")
    for number, line in enumerate(lines[1:], start=2):
        if line.get("kind") not in ("load", "tolerance", "cell", "watermark"):
            return _incomplete(f"line of kind {line.get('kind')!r}", f"line {number}")
    if len(_of_kind(lines, "tolerance")) != 1 or not _of_kind(lines, "load"):
        return _incomplete("no tolerance, more than one, or no load of the objects", "raw/path.jsonl")
    found = [str(line["id"]) for line in lines if line["kind"] in ("cell", "watermark")]
    unplanned = set(found) - set(map(str, header["planned"]))
    if unplanned or len(set(found)) != len(found):
        return _incomplete(
            "a step that was not planned, or one that was recorded twice", min(unplanned, default="cells")
        )
    return None
