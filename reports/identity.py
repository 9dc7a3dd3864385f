"""Whose measurements raw lines are, and under which rules: headers against the bundle that they came with.

Two candidates' raw files decide equally well; only what their headers name tells them apart. Every value that a header
states about candidate, commits, target, tier, rules or artifacts has to be the bundle's. A header need not state all of
them, but it has to name the candidate: by commit or by the digests of its artifacts. The performance plan has to hold
the cells, claims and error budget that target, tier and task ask for: a weaker plan would pass more easily.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.records import GateName, GateResult, Reason
from reports.folder import refusal
from reports.load import Loaded
from reports.schema import Bundle

__all__ = ["identity_findings"]


def identity_findings(loaded: Loaded, gate: GateName, result: GateResult) -> Iterator[Reason]:
    """What the headers of a gate's raw file name differently from the bundle."""
    stated = _stated(loaded.bundle) | {"gate": gate, "protocol": result.protocol_id}
    for number, line in enumerate(loaded.raw[gate], start=1):
        if line.get("kind") != "header":
            continue
        where = f"raw/{gate}.jsonl:{number}"
        for key, value in stated.items():
            if key in line and line[key] != value:
                yield refusal("identity", f"its header names another {key}", where, f"{key} {value}")
        artifacts = _artifacts(line)
        if artifacts is not None and not _among(artifacts, loaded.bundle.candidate.artifacts):
            message = "its header names artifacts that are not the candidate's"
            yield refusal("identity", message, where, "digests of candidate.artifacts")
        if "head" not in line and not artifacts:
            message = "its header does not say which candidate it is about"
            yield refusal("identity", message, where, "a commit or artifacts")
        if gate == "perf":
            yield from _plan_findings(loaded.bundle, line, where)


def _stated(bundle: Bundle) -> dict[str, Any]:
    """Header keys that mean the same in every gate, with the value that they must have."""
    return {
        "base": bundle.commits.base,
        "head": bundle.commits.head,
        "target": bundle.target.name,
        "geometry": bundle.target.geometry,
        "tier": bundle.tier.name,
        "allow": list(bundle.allowed),
        "editable": list(bundle.scope.editable),
        "band": bundle.target.perf.not_slower_band,
        "alpha_per_run": bundle.target.perf.alpha_per_run,
        "candidates": bundle.candidates_planned,
    }


def _plan_findings(bundle: Bundle, header: Mapping[str, Any], where: str) -> Iterator[Reason]:
    """Cells and claims that the performance plan should have and has not."""
    claims = {cell["key"]: {(c["against"], c["rule"]) for c in cell["claims"]} for cell in header["cells"]}
    task = {cell.key for cell in bundle.task_cells}
    for cell in bundle.cells:
        best = ("best", "faster" if cell.key in task else "not_slower")
        if not {("standard", "faster"), best} <= claims.get(cell.key, set()):
            expected = f"faster than the standard path, {best[1].replace('_', ' ')} than the best"
            yield refusal("plan", f"its plan does not claim enough in cell {cell.key}", where, expected)
    for key in sorted(task):
        if ("best", "faster") not in claims.get(key, set()):
            yield refusal("plan", f"its plan does not claim the task's cell {key}", where, "faster than the best")


def _artifacts(header: Mapping[str, Any]) -> dict[str, str] | None:
    """Digests of the candidate's artifacts that a header names, by `op` or `op/arch`; None where it names none."""
    arms, objects = header.get("arms"), header.get("objects")
    if isinstance(arms, Mapping):
        return dict(arms["candidate"].get("artifacts", arms["candidate"]))
    if isinstance(header.get("artifacts"), Mapping):
        return dict(header["artifacts"])
    if isinstance(objects, list):
        return {f"{entry['op']}/{entry['arch']}": entry["digest"] for entry in objects}
    return None


def _among(named: Mapping[str, str], candidate: Mapping[str, str]) -> bool:
    """Whether every named digest belongs to the candidate under that op, and architecture where one is named."""
    return all(
        digest in {d for name, d in candidate.items() if key in (name, name.rpartition("/")[0])}
        for key, digest in named.items()
    )
