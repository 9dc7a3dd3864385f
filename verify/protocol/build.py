"""Build decision: does every op of the candidate build for every architecture, and do two clean builds agree?

Decides from one line per (op, architecture): digests of the artifacts that were built, or the error that stopped it.
It cannot see whether the objects are right or harmless; the audit and kernels gates can.
"""

from __future__ import annotations

from collections.abc import Sequence

from verify.protocol.decision import Decision, Finding, Line
from verify.protocol.lines import as_finding, incomplete, last_attempt, of_kind

__all__ = ["CODES", "PROTOCOL_ID", "decide"]

PROTOCOL_ID = "build/1"

CODES = {
    "build.compile_error": "the compiler or linker refuses the source",
    "build.limit": "the compiler ran into the sandbox's limit of time, memory or output",
    "build.not_reproducible": "two clean builds in different folders, at different times, gave different bytes",
    "build.op_removed": "the candidate drops the kernel of an op that the base has",
    "build.unknown_op": "a kernel folder that names no op",
    "build.device": "the candidate has no kernel with a schedule for the target's device",
    "build.incomplete_record": "the raw lines do not hold a complete attempt",
    "build.environment": "the machine could not run the gate",
    "build.internal_error": "the gate itself failed",
}
"""Every reason code of this gate and what it means."""


def decide(lines: Sequence[Line]) -> Decision:
    """Failed if a unit failed or its builds disagree; passed if every unit is there; not_evaluated otherwise."""
    attempt = last_attempt(lines)
    if attempt is None:
        return incomplete("build", "no header line")
    header, body = attempt
    absent = [as_finding(line) for line in of_kind(body, "unavailable")]
    if absent:
        return Decision("not_evaluated", absent)
    units = of_kind(body, "unit")
    errors = of_kind(body, "error")
    findings = [_error(line, header) for line in errors]
    findings += [finding for line in units if (finding := _disagreement(line, header)) is not None]
    findings += [
        Finding(
            "build.op_removed",
            f"the kernel of {op} is gone",
            f"k3_backend/kernels/{op}",
            "every op that the base has",
            header["next"],
        )
        for op in header["base_ops"]
        if op not in header["ops"]
    ]
    seen = sorted((line["op"], line["arch"]) for line in (*units, *(e for e in errors if e["arch"] is not None)))
    known = [op for op in header["ops"] if not any(e["op"] == op and e["arch"] is None for e in errors)]
    units_named = header.get("units")
    named = units_named if units_named is not None else [(op, arch) for op in known for arch in header["archs"]]
    wanted = sorted((op, arch) for op, arch in named)
    if seen != wanted:
        return incomplete("build", f"{len(seen)} of {len(wanted)} units are recorded")
    return Decision("failed" if findings else "passed", findings, _metrics(units))


def _error(line: Line, header: Line) -> Finding:
    place = line["op"] if line["arch"] is None else f"{line['op']} for {line['arch']}"
    return Finding(line["code"], f"{place}: {line['message']}", line["where"], line["expected"], header["next"])


def _disagreement(line: Line, header: Line) -> Finding | None:
    """A changed unit needs two builds, an unchanged one has the base's; all digests of a unit must be one."""
    digests = line["digests"]
    needed = 2 if line["changed"] else 1
    if len(digests) >= needed and len(set(digests)) == 1:
        return None
    seen = ", ".join(d[:12] for d in digests)
    return Finding(
        "build.not_reproducible", f"{line['op']} for {line['arch']}: {len(digests)} builds gave {seen}",
        f"k3_backend/kernels/{line['op']}/cpu.cc", f"{needed} builds with one digest", header["next"],
    )  # fmt: skip


def _metrics(units: Sequence[Line]) -> dict[str, dict[str, object]]:
    return {
        "objects": {"value": float(len(units)), "unit": "objects"},
        "objects_changed": {"value": float(sum(bool(u["changed"]) for u in units)), "unit": "objects"},
        "object_bytes": {"value": float(sum(u["object_bytes"] for u in units)), "unit": "bytes"},
        "compile_seconds": {"value": float(sum(sum(u["seconds"]) for u in units)), "unit": "s"},
    }
