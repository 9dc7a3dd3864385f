"""What the kernels gate demands of a record that was made on a GPU machine, beyond the rules of every kernels record.

Lines are chained to the kit and to one run of it. Each artifact was loaded from the bytes that the kit names. Every
evaluated case saw late inputs and replays from a captured graph; per artifact, one case was replayed `REPLAYS` times
and one ran beside another stream's work. The rules are applied by `verify.protocol.kernels.decide`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verify.protocol import chain
from verify.protocol.decision import Finding, Line
from verify.protocol.sanitizers import SANITIZERS, Verdict, verdicts

__all__ = [
    "EVALUATOR_FAILED",
    "KINDS",
    "PROTOCOL_ID",
    "REPLAYS",
    "Beside",
    "beside",
    "coverage_findings",
    "disordered",
    "label",
    "labels",
    "load_findings",
    "weak_findings",
]

PROTOCOL_ID = "kernels-cuda/1"

KINDS = ("load", "case", "sanitizer", "sanitizer_control", "mutant")
"""Kinds of lines behind the header. A `mutant` line is a case's line, of an arm that must be rejected."""

REPLAYS = 1000
"""Graph replays on the same contents that must give the same bits, for at least one case of each artifact."""

EVALUATOR_FAILED = "the evaluator failed"
"""How the reason of a case begins that was skipped for no fault of the candidate."""

RUNS = ("first", "again", "changed", "late")
"""Runs that every evaluated case has."""


def label(case: Line) -> str:
    """An artifact as findings name it."""
    return f"{case['op']} on {case['geometry']}"


def labels(header: Line) -> list[str]:
    """All artifacts of a record."""
    return [f"{op} on {geometry}" for op, _, geometry in (key.split("/") for key in sorted(header["artifacts"]))]


def disordered(lines: Sequence[Line]) -> str | None:
    """Why the lines are not one record as it was written, or None."""
    header = lines[0]
    number = chain.broken(chain.start(str(header["kit"]), str(header["nonce"]), str(header["gate"])), lines)
    return None if number is None else f"line {number} does not follow from the lines before it"


def load_findings(header: Line, load: Line) -> Iterator[Finding]:
    """A load that failed, or whose worker read another artifact. Failures carry their own code."""
    key, failure, receipt = str(load["unit"]), load["failure"], load["receipt"]
    if failure is not None:
        yield Finding(
            f"kernels.{failure['failure']}", f"loading {key}: {failure['message']}", "card.load",
            "images that the driver takes", str(header["command"]),
        )  # fmt: skip
    elif (
        receipt is None
        or receipt["digest"] != header["artifacts"].get(key)
        or any(f"{digest}.cubin" != name for name, digest in receipt["images"].items())
    ):
        yield Finding(
            "kernels.wrong_object", f"{key}: other images than the artifact's were loaded", key,
            f"the images of artifact {header['artifacts'].get(key)}", str(header["command"]),
        )  # fmt: skip


def coverage_findings(header: Line, cases: Sequence[Line]) -> Iterator[Finding]:
    """What a complete record has to hold and this one does not."""
    yield from _plan_findings(header)
    for case in cases:
        if case["skipped"] is not None:
            yield _lacks(header, label(case), f"case {case['id']} was skipped: {case['skipped']}")
    evaluated: dict[str, list[Line]] = {name: [] for name in labels(header)}
    for case in cases:
        if case["refused"] is None and case["skipped"] is None:
            evaluated[label(case)].append(case)
    for name, own in evaluated.items():
        for case in own:
            absent = [run for run in RUNS if run not in case["runs"]]
            if absent or int(case["replays"]) < 1:
                yield _lacks(header, name, f"case {case['id']} has no run {', '.join(absent) or 'replayed'}")
        if own and max(int(case["replays"]) for case in own) < REPLAYS:
            yield _lacks(header, name, f"no case was replayed {REPLAYS} times")
        if own and not any("contended" in case["runs"] for case in own):
            yield _lacks(header, name, "no case ran beside another stream's work")


def _plan_findings(header: Line) -> Iterator[Finding]:
    """What the plan should hold for each artifact: every class `draws` times, every declared batch and T once."""
    plan = list(header["plan"])
    if [case["id"] for case in plan] != list(header["planned"]):
        yield _lacks(header, "all", "the plan's cases are not the planned ones")
    for key in sorted(header["artifacts"]):
        op, _, geometry = key.split("/")
        own = [case for case in plan if (case["op"], case["geometry"]) == (op, geometry)]
        drawn = Counter(str(case["kind"]) for case in own)
        absent = [f"class {kind}" for kind in header["classes"][op] if drawn[kind] < int(header["draws"])]
        plain = {int(case["batch"]) for case in own if int(case["tokens"]) == 1}
        absent += [f"batch {batch}" for batch in header["batches"] if batch not in plain]
        seen = {int(case["tokens"]) for case in own}
        absent += [f"T = {tokens}" for tokens in header["tokens"] if tokens not in seen]
        if absent:
            yield _lacks(header, f"{op} on {geometry}", f"the plan lacks {', '.join(absent[:5])}")


@dataclass(frozen=True)
class Beside:
    """What the lines beside the cases come to."""

    failed: tuple[Finding, ...]
    """Memory errors in the artifacts' kernels."""
    lacking: tuple[Finding, ...]
    """Mutants that were not run."""
    weak: tuple[Finding, ...]
    """Mutants that nothing noticed."""
    metrics: Mapping[str, Mapping[str, Any]]


def beside(header: Line, lines: Sequence[Line], fails: Callable[[Line], bool]) -> Beside:
    """Judge memory checkers and mutants.

    Args:
        header: of the record.
        lines: all of it.
        fails: whether a case's line alone fails the gate.
    """
    checks = verdicts(lines)
    errors = tuple(_sanitizer_finding(header, check.line) for check in checks if check.status == "errors")
    metrics = _sanitizer_metrics(checks, len(SANITIZERS) * len(header["artifacts"]))
    tried: dict[str, list[bool]] = {name: [] for name in header["mutants"]}
    for line in lines:
        if line["kind"] == "mutant":
            tried.setdefault(str(line["mutant"]), []).append(fails(line))
    if tried:
        rejected = sum(any(found) for found in tried.values())
        metrics["mutants_rejected"] = {"value": float(rejected), "unit": f"of {len(tried)} mutants"}
    unrun = tuple(_lacks(header, name, f"mutant {name} was not run") for name, found in tried.items() if not found)
    survived = tuple(_survivor(header, name) for name, found in tried.items() if found and not any(found))
    return Beside(errors, unrun, survived, metrics)


def _sanitizer_metrics(checks: Sequence[Verdict], wanted: int) -> dict[str, dict[str, Any]]:
    """How many checks came to what; those that have no line were not evaluated either."""
    count = Counter(check.status for check in checks)
    if not count["clean"] + count["errors"]:
        reasons = sorted({str(check.reason) for check in checks})
        return {"sanitizer_clean": {"missing": "; ".join(reasons)[:300] or "no memory checker was run"}}
    unit = f"of {wanted} checks"
    return {
        "sanitizer_clean": {"value": float(count["clean"]), "unit": unit},
        "sanitizer_not_evaluated": {"value": float(wanted - count["clean"] - count["errors"]), "unit": unit},
        "sanitizer_errors": {"value": float(count["errors"]), "unit": unit},
    }


def _sanitizer_finding(header: Line, line: Line) -> Finding:
    return Finding(
        "kernels.sanitizer", f"{line['unit']}: {line['tool']} found errors ({line['summary']})", str(line["unit"]),
        f"no error of {line['tool']} in the artifact's kernels", str(header["command"]),
    )  # fmt: skip


def _survivor(header: Line, name: str) -> Finding:
    return Finding(
        "kernels.mutant_survived", f"mutant {name} passed every case that was run on it", f"mutant {name}",
        "at least one case that fails: a gate that misses a planted fault proves nothing", str(header["command"]),
    )  # fmt: skip


def weak_findings(header: Line, loads: Sequence[Line]) -> Iterator[Finding]:
    """Loads after which late inputs were copied without letting the kernel start early."""
    weak = sorted(
        {str(load["unit"]) for load in loads if load["receipt"] and not load["receipt"]["device"]["late_copy"]}
    )
    for key in weak:
        yield Finding(
            "kernels.no_late_copy", f"{key}: the late copy could not be loaded, so no kernel started before its inputs",
            key, "a driver that assembles PTX", str(header["command"]),
        )  # fmt: skip


def _lacks(header: Line, name: str, what: str) -> Finding:
    return Finding(
        "kernels.incomplete_record", f"op {name}: {what}", f"op {name}",
        f"runs {', '.join(RUNS)} and replays for every case, {REPLAYS} replays and a contended run for every artifact",
        str(header["command"]),
    )  # fmt: skip
