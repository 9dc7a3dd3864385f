"""Decide the path gate from a record that was made on a GPU machine: attention half-layers, captured in graphs.

Decides: whether the kernels of the claimed artifacts, and nothing else, ran in the very graph replays whose results
were judged. Evidence of each cell, all over the same replays: what the device ledger counted, what the profiler saw
(symbol, resources and count of every kernel), which sites took the standard path and why, distances from the standard
path, and what else changed. The *watermark*: with one op made deliberately wrong, half-layer and kernels comparison
must both break.

A site may take the standard path only where the arm's own schedule has no entry for the call. The plan, drawn from
schedules and descriptors before anything ran, names these sites with the schedule's reason: a *declared* fallback. Any
other fallback fails. In a cell without one, every kernel that the profiler saw is named by a descriptor, but for the
ledger's. In a cell with one, and in cells of mode `off`, the standard path's own kernels may stand beside them.

Cannot see: speed, or what the owner of the GPU machine did to the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verify.protocol import kernels, path_cuda_record
from verify.protocol.decision import Decision, Finding, Line
from verify.protocol.path_cuda_record import HALF_LAYERS, PROTOCOL_ID
from verify.protocol.path_cuda_symbols import Problem, symbol_problems
from verify.protocol.step_distance import MEASURES, grouped, step_exceeds, step_tolerance

__all__ = ["DECLARABLE", "HALF_LAYERS", "PROTOCOL_ID", "cell_findings", "decide", "label", "ledger_symbols"]

DECLARABLE = "op.no_schedule"
"""The only reason for which a plan may declare a fallback: the schedule has no bucket for the call."""
LARGEST_MEAN = 0.25
"""A comparison whose tolerance of `mean` is above this has no power: signs flipped at random come near 1."""

_FAILURES = {
    "crash": "the worker lives on",
    "timeout": "replays end within their deadline",
    "protocol": "the worker sends only what trusted code sends",
    "error": "no exception while half-layers are captured and replayed",
}


def decide(lines: Sequence[Line]) -> Decision:
    """Outcome of the gate.

    Args:
        lines: all lines of the raw file: a header, then `load`, `cell` and `watermark` lines.

    Returns:
        failed if a cell broke a rule or a watermark went unseen; not_evaluated if lines are missing or malformed, the
        plan does not cover the scope, or no profiler saw the kernels; inconclusive if a comparison had no power; passed
        otherwise.
    """
    problem = path_cuda_record.malformed(lines)
    if problem is not None:
        return Decision("not_evaluated", (problem,))
    header = lines[0]
    loads, cells, marks = (_of_kind(lines, kind) for kind in ("load", "cell", "watermark"))
    findings = [finding for load in loads for finding in _load(header, load)]
    plan = {str(entry["id"]): entry for entry in header["plan"]}
    ledgers = ledger_symbols(lines)
    for cell in cells:
        findings += cell_findings(header, plan[str(cell["id"])], cell, ledgers)
    for mark in marks:
        findings += _watermark(header, plan[str(mark["id"])], mark)
    metrics = _metrics(header, cells, marks)
    if findings:
        return Decision("failed", tuple(grouped(findings)), metrics)
    missing = [*path_cuda_record.coverage(header), *path_cuda_record.unfinished(header, (*cells, *marks))]
    missing += _unprofiled(header, loads, cells)
    if missing:
        return Decision("not_evaluated", tuple(grouped(missing)), metrics)
    weak = [finding for cell in cells for finding in _power(header, cell)]
    return Decision("inconclusive", tuple(grouped(weak)), metrics) if weak else Decision("passed", (), metrics)


def label(entry: Line) -> str:
    """What findings call the judged object of a planned cell."""
    return f"{entry['half']} half-layer on {entry['geometry']}"


def cell_findings(header: Line, entry: Line, cell: Line, ledgers: frozenset[str]) -> Iterator[Finding]:
    """Everything that is wrong with one cell.

    Args:
        header: of the record.
        entry: the cell's plan.
        cell: its line.
        ledgers: kernels of the ledger, as the loads found them (`ledger_symbols`).
    """
    if cell["failure"] is not None:
        yield _failure(header, cell)
        return
    if cell["skipped"] is not None:
        return
    problems = [
        *_sites(entry, cell),
        *_ledger(entry, cell),
        *symbol_problems(header, entry, cell, ledgers),
        *_distances(cell),
        *_changed(cell),
    ]
    for code, message, rule in problems:
        yield Finding(f"path.{code}", f"{label(entry)}: {message}", str(cell["id"]), rule, str(header["command"]))


def _sites(entry: Line, cell: Line) -> Iterator[Problem]:
    """Sites that were captured otherwise than planned."""
    planned, captured = entry["sites"], cell["sites"]
    if [site["key"] for site in captured] != [site["key"] for site in planned]:
        yield "ledger", "other sites were captured than the program has", "the sites of the program, in order"
        return
    for want, got in zip(planned, captured, strict=True):
        if want["path"] == "standard" and entry["mode"] == "auto" and want["code"] != DECLARABLE:
            reason = f"{want['code']}: {want['message']}"
            yield (
                "fallback",
                f"{want['key']} has no specialised op: {reason}",
                "a kernel that takes every declared call",
            )
            continue
        if got["path"] == "standard" and want["path"] != "standard":
            reason = f"{got['code']}: {got['message']}"
            yield (
                "fallback",
                f"{got['key']} took the standard path: {reason}",
                "the specialised op, as the schedule says",
            )
        elif got["path"] == "standard" and got["code"] != want["code"]:
            text = f"{got['key']} took the standard path for {got['code']}, declared for {want['code']}"
            yield "fallback", text, "the reason that the plan declares"
        elif (got["path"], list(got["kernels"])) != (want["path"], names := [row["name"] for row in want["launches"]]):
            text = f"{got['key']} was captured as {got['path']} launches {list(got['kernels'])}"
            yield "symbols", text, f"{want['path']} launches {names}"


def _ledger(entry: Line, cell: Line) -> Iterator[Problem]:
    """Counts that are not one per site and replay."""
    replays = int(cell["replays"])
    before, after = cell["ledger"]["before"], cell["ledger"]["after"]
    keys = [site["key"] for site in entry["sites"]]
    if sorted(before) != sorted(keys) or sorted(after) != sorted(keys):
        yield "ledger", "the ledger lists other sites than the program", "one row per site"
        return
    for site in entry["sites"]:
        ran = [int(b) - int(a) for a, b in zip(before[site["key"]], after[site["key"]], strict=True)]
        wanted = [replays, 0] if site["path"] == "specialized" else [0, replays]
        if ran != wanted:
            text = f"{site['key']}: {ran[0]} specialised and {ran[1]} standard runs in {replays} replays"
            yield "ledger", text, f"{wanted[0]} specialised and {wanted[1]} standard runs"


def _distances(cell: Line) -> Iterator[Problem]:
    """Results that are too far from the standard path's."""
    for name, row in cell["results"].items():
        allowed = step_tolerance(row["standard"])
        wrong = step_exceeds(row["distance"], allowed)
        if wrong:
            limit = {**allowed, "nonfinite": 0}[wrong[0]]
            text = f"{name} differs from the standard path: {wrong[0]} {row['distance'][wrong[0]]:.3g}"
            yield "step_mismatch", text, f"at most {limit:.3g}"


def _changed(cell: Line) -> Iterator[Problem]:
    """Bytes that the half-layer does not own."""
    for hit in cell["changed"]:
        text = f"{hit['tensor']} at byte {hit['offset']} changed ({hit['code']})"
        yield "unowned_state_changed", text, "inputs, other requests' state and red zones keep their bits"


def _watermark(header: Line, entry: Line, mark: Line) -> Iterator[Finding]:
    """A deliberately wrong op that some comparison did not notice."""
    if mark["failure"] is not None:
        yield _failure(header, mark)
        return
    if mark["skipped"] is not None:
        return
    where, again, op = str(mark["id"]), str(header["command"]), str(entry["spoil"])
    for code, message, rule in (*_sites(entry, mark), *_ledger(entry, mark)):
        yield Finding(f"path.{code}", f"{label(entry)}: {message}", where, rule, again)
    if not any(True for _ in _distances(mark)):
        text = f"{label(entry)}: op {op} was made deliberately wrong and the result stayed within tolerance"
        rule = "a half-layer comparison that breaks: the judged result comes from this kernel"
        yield Finding("path.watermark_unseen", text, where, rule, again)
    if "kernels.mismatch" not in kernels.case_codes(mark["case"]):
        text = f"{label(entry)}: op {op} was made deliberately wrong and the kernels comparison passed"
        rule = "a kernels comparison that breaks: the compared bytes come from this kernel"
        yield Finding("path.watermark_unseen", text, where, rule, again)


def _load(header: Line, load: Line) -> Iterator[Finding]:
    """A worker that could not load the arm, or that loaded other images."""
    if load["failure"] is not None:
        yield _failure(header, load)
        return
    for key, digest in header["artifacts"].items():
        op, _, geometry = key.split("/")
        receipt = load["images"].get(op)
        if geometry != load["geometry"] or op not in header["symbols"].get(geometry, {}):
            continue
        named = receipt is not None and receipt["digest"] == digest and receipt["images"]
        if not named or any(f"{sha256}.cubin" != name for name, sha256 in receipt["images"].items()):
            yield Finding(
                "path.wrong_object", f"{key}: other images than the artifact's were loaded", key,
                f"the images of artifact {digest}", str(header["command"]),
            )  # fmt: skip


def _failure(header: Line, line: Line) -> Finding:
    failure = line["failure"]
    where = str(line.get("id", f"loading {line.get('geometry')}"))
    rule = _FAILURES[failure["failure"]]
    return Finding(f"path.{failure['failure']}", str(failure["message"]), where, rule, str(header["command"]))


def _unprofiled(header: Line, loads: Sequence[Line], cells: Sequence[Line]) -> Iterator[Finding]:
    """Loads after which no kernel could be counted, and cells in which none was."""
    reasons = [(str(load["geometry"]), load["profiler"]["obstacle"]) for load in loads]
    seen = [(where, str(reason)) for where, reason in reasons if reason is not None]
    if not seen:
        bare = (cell for cell in cells if cell["kernels"] is None and cell["skipped"] is None)
        seen = [(str(cell["id"]), "the cell has none") for cell in bare]
    for where, reason in seen:
        rule = "a profiler that counts kernels (CUPTI), permitted for this user"
        yield Finding("path.no_profiler", f"no kernel symbols: {reason}", where, rule, str(header["command"]))


def _power(header: Line, cell: Line) -> Iterator[Finding]:
    """Comparisons that would have let a wrong result through."""
    for name, row in cell["results"].items():
        allowed = step_tolerance(row["standard"])["mean"]
        if not allowed <= LARGEST_MEAN:
            text = f"the tolerance of {name} is {allowed:.3g}"
            yield Finding("path.no_power", text, str(cell["id"]), f"at most {LARGEST_MEAN}", str(header["command"]))


def ledger_symbols(lines: Sequence[Line]) -> frozenset[str]:
    """Kernels that add to the ledger, as the loads of a record found them."""
    loads = (load for load in _of_kind(lines, "load") if load["failure"] is None)
    return frozenset(str(load["profiler"]["ledger"]) for load in loads)


def _of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line.get("kind") == kind]


def _metrics(header: Line, cells: Sequence[Line], marks: Sequence[Line]) -> dict[str, Mapping[str, Any]]:
    judged = [cell for cell in cells if cell["failure"] is None and cell["skipped"] is None]
    auto = [cell for cell in judged if cell["mode"] == "auto"]
    shares = [
        float(row["distance"][name]) / step_tolerance(row["standard"])[name]
        for cell in auto
        for row in cell["results"].values()
        for name in MEASURES
    ]
    declared = [
        site
        for entry in header["plan"]
        if entry["mode"] == "auto"
        for site in entry["sites"]
        if site["code"] is not None
    ]
    traced = [row for cell in auto if cell["kernels"] is not None for row in cell["kernels"]]
    own = {name for table in header["symbols"].values() for names in table.values() for name in names}
    return {
        "cells": {"value": float(len(judged)), "unit": "cells"},
        "specialised_launches": {
            "value": float(sum(int(row["count"]) for row in traced if row["name"] in own)),
            "unit": "launches seen by the profiler",
        },
        "declared_fallbacks": {"value": float(len(declared)), "unit": "sites without a schedule"},
        "watermarks": {"value": float(len(marks)), "unit": "ops"},
        "worst_share": {"value": max(shares), "unit": "of tolerance"} if shares else {"missing": "no cell was judged"},
    }
