"""Whose measurements raw lines are: headers against the bundle that they came with.

Two candidates' raw files decide equally well; only what their headers name tells them apart. Every value that a header
states about candidate, commits, target, tier, rules or artifacts has to be the bundle's. A header need not state all of
them, but it has to name the candidate: by commit or by the digests of its artifacts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.records import GateName, GateResult, Reason
from reports.folder import refusal
from reports.load import Loaded

__all__ = ["identity_findings"]


def identity_findings(loaded: Loaded, gate: GateName, result: GateResult) -> Iterator[Reason]:
    """What the headers of a gate's raw file name differently from the bundle."""
    bundle = loaded.bundle
    stated = {
        "gate": gate,
        "protocol": result.protocol_id,
        "base": bundle.commits.base,
        "head": bundle.commits.head,
        "target": bundle.target.name,
        "geometry": bundle.target.geometry,
        "tier": bundle.tier.name,
        "allow": list(bundle.allowed),
        "editable": list(bundle.scope.editable),
    }
    for number, line in enumerate(loaded.raw[gate], start=1):
        if line.get("kind") != "header":
            continue
        where = f"raw/{gate}.jsonl:{number}"
        for key, value in stated.items():
            if key in line and line[key] != value:
                yield refusal("identity", f"its header names another {key}", where, f"{key} {value}")
        artifacts = _artifacts(line)
        if artifacts is not None and not _among(artifacts, bundle.candidate.artifacts):
            message = "its header names artifacts that are not the candidate's"
            yield refusal("identity", message, where, "digests of candidate.artifacts")
        if "head" not in line and not artifacts:
            yield refusal(
                "identity", "its header does not say which candidate it is about", where, "a commit or artifacts"
            )


def _artifacts(header: Mapping[str, Any]) -> dict[str, str] | None:
    """Digests of the candidate's artifacts that a header names, by `op` or `op/arch`; None where it names none."""
    arms, objects = header.get("arms"), header.get("objects")
    if isinstance(arms, Mapping) and isinstance(arms.get("candidate"), Mapping):
        return dict(arms["candidate"])
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
