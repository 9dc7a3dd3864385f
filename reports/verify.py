"""Checking a bundle as a stranger would: hash everything, decide everything again, say what could not be checked.

`verify_bundle` decides whether a bundle is what it claims to be, from its own files and this checkout's decision
functions. It runs no candidate code and measures nothing. It cannot see whether the measurements happened on the
stated machine; `reports.claims.ASSUMED` lists what has to be trusted or measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness import canonical
from harness.records import GateName, GateResult, Outcome, Reason, VerdictWord, decide
from k3_backend.aot.manifest import Artifact as BuiltArtifact
from reports import derive, load, protocols
from reports.claims import BundleCheck, CheckWord, Claim, ClaimStatus
from reports.folder import refusal
from reports.identity import identity_findings
from reports.load import Loaded
from reports.peers import peer_findings
from reports.render import render_all
from reports.schema import RENDER_VERSION
from reports.text import count
from verify.protocol.decision import Decision

__all__ = ["check_loaded", "verify_bundle"]

_RELATIVE_TOLERANCE = 1e-9
"""Metrics are compared to this: quantile functions differ in the last bits between library versions."""


class _Checks:
    """Collects claims; a claim holds when its check yields no reason."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.reasons: list[Reason] = []

    def add(self, claim: str, check: Callable[[], Iterator[Reason]]) -> bool:
        """Run a check; True when the claim holds."""
        try:
            found = list(check())
        except protocols.UnknownProtocolError as error:
            self.claims.append(Claim(claim=claim, status=ClaimStatus.NOT_CHECKED, note=str(error)))
            return False
        except Exception as error:
            message = f"cannot be checked: {type(error).__name__}: {str(error)[:200]}"
            found = [refusal("check_failed", message, claim, "values as a gate writes them")]
        self.reasons += found
        self.claims.append(Claim(claim=claim, status=ClaimStatus.REFUSED if found else ClaimStatus.HOLDS))
        return not found

    def word(self) -> CheckWord:
        """The conclusion."""
        if self.reasons:
            return CheckWord.REFUSED
        unchecked = any(claim.status is ClaimStatus.NOT_CHECKED for claim in self.claims)
        return CheckWord.PARTIAL if unchecked else CheckWord.VERIFIED


def verify_bundle(path: Path) -> BundleCheck:
    """Check a bundle folder.

    Args:
        path: the bundle's folder; may come from anyone.

    Returns:
        The check; it never raises for anything that the folder contains.
    """
    reading = load.read_bundle(path)
    checks = _Checks()
    for step in load.STEPS[: reading.held]:
        checks.claims.append(Claim(claim=step, status=ClaimStatus.HOLDS))
    if reading.loaded is None:
        checks.add(load.STEPS[reading.held], reading.findings)
        for step in (*load.STEPS[reading.held + 1 :], "the claims of the bundle"):
            checks.claims.append(Claim(claim=step, status=ClaimStatus.NOT_CHECKED, note="an earlier step was refused"))
    verdict = _check_claims(reading.loaded, checks) if reading.loaded is not None else None
    return _conclude(reading.name, reading.digest, verdict, checks)


def check_loaded(loaded: Loaded) -> BundleCheck:
    """Check the claims of a bundle whose files and records are known to be intact, as the writer's are."""
    checks = _Checks()
    verdict = _check_claims(loaded, checks)
    return _conclude(loaded.name, loaded.digest or None, verdict, checks)


def _conclude(name: str, digest: str | None, verdict: VerdictWord | None, checks: _Checks) -> BundleCheck:
    return BundleCheck(
        bundle=name,
        digest=digest,
        word=checks.word(),
        verdict=verdict,
        claims=tuple(checks.claims),
        reasons=tuple(checks.reasons),
    )


def _check_claims(loaded: Loaded, checks: _Checks) -> VerdictWord | None:
    """The claims of an intact bundle. Returns the verdict word where all of it was recomputed."""
    checks.add("candidate.patch is the candidate's patch", partial(_patch, loaded))
    checks.add("the performance cells are those of target and tier", partial(_cells, loaded))
    checks.add("artifact digests follow from their manifests and files", partial(_artifacts, loaded))
    decided = True
    for gate, result in loaded.results.items():
        claim = f"{gate} {result.outcome.value}: {_basis(loaded, gate)}"
        decided &= checks.add(claim, partial(_gate, loaded, gate, result))
    recomputed = checks.add(f"verdict {loaded.bundle.verdict.word.value}: recomputed", partial(_verdict, loaded))
    if loaded.bundle.peers is not None:
        claim = f"peer table {loaded.bundle.peers.outcome.value}: decided again from {len(loaded.peers)} raw lines"
        checks.add(claim, partial(peer_findings, loaded))
    for gate, lines in loaded.raw.items():
        claim = f"derived/{gate}.parquet is the table of raw/{gate}.jsonl"
        checks.add(claim, partial(_derived, loaded, gate, lines))
    checks.add("report.md and report.html say what the records say", partial(_reports, loaded))
    return loaded.bundle.verdict.word if decided and recomputed else None


def _basis(loaded: Loaded, gate: GateName) -> str:
    """From what a gate is decided again."""
    if _error_lines(loaded, gate) is not None:
        return "its error record says why"
    return f"decided again from {len(loaded.raw[gate])} raw lines" if gate in loaded.raw else "nothing was recorded"


def _patch(loaded: Loaded) -> Iterator[Reason]:
    expected = loaded.bundle.candidate.patch_sha256
    if hashlib.sha256(loaded.files["candidate.patch"]).hexdigest() != expected:
        yield refusal("patch", "is not the patch that was judged", "candidate.patch", f"sha256 {expected}")


def _cells(loaded: Loaded) -> Iterator[Reason]:
    bundle = loaded.bundle
    planned = bundle.target.cells(bundle.tier)
    if bundle.cells != planned:
        message = f"lists {len(bundle.cells)} cells that are not the planned ones"
        yield refusal("cells", message, "bundle.json: cells", f"the {len(planned)} cells of tier {bundle.tier.name}")


def _artifacts(loaded: Loaded) -> Iterator[Reason]:
    bundle = loaded.bundle
    listed = {artifact.name: artifact.digest for artifact in bundle.artifacts}
    if len(listed) != len(bundle.artifacts) or listed != bundle.candidate.artifacts:
        expected = "one artifact per entry of candidate.artifacts, with its digest"
        yield refusal("artifacts", "artifacts differ from those of the candidate", "bundle.json: artifacts", expected)
    units = [line for line in loaded.raw.get("build", ()) if line.get("kind") == "unit"]
    built_units = {str(line.get("name", f"{line['op']}/{line['arch']}")): line["digests"] for line in units}
    gate = loaded.results.get("build")
    # A gate that could not build here says nothing about objects that were built elsewhere from the same commit.
    compared = {} if gate is not None and gate.outcome is Outcome.NOT_EVALUATED else listed
    for name, digest in compared.items():
        if set(built_units.get(name, ())) != {digest}:
            yield refusal(
                "artifacts", f"{name} is not what the build gate built", "raw/build.jsonl", f"digest {digest}"
            )
    for artifact in bundle.artifacts:
        where = artifact.manifest.path
        try:
            # Laid out as the builder does, not as our records: strict JSON, but its own spacing.
            content = canonical.parse(loaded.files[where], form="any")
            stated = {key: content.pop(key) for key in ("version", "digest")}
            built = BuiltArtifact(path=Path(), **content)
            same = (built.name, built.op, built.arch, built.geometry, dict(built.files)) == (
                artifact.name, artifact.op, artifact.arch, artifact.geometry, artifact.files
            )  # fmt: skip
            digest = built.digest
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            expected = "the manifest that the builder writes"
            yield refusal("artifacts", f"is no artifact manifest: {error}", where, expected)
            continue
        if not same or {digest, stated["digest"]} != {artifact.digest}:
            message = "differs from bundle.json, or its digest does not follow from its content"
            yield refusal("artifacts", message, where, f"digest {artifact.digest}")


def _gate(loaded: Loaded, gate: GateName, result: GateResult) -> Iterator[Reason]:
    where = f"gates/{gate}.json"
    if result.outcome is Outcome.NOT_EVALUATED and (gate not in loaded.raw or _error_lines(loaded, gate) is not None):
        # An exception or a missing tool ended the gate: there is no complete record, and no number may rest on it.
        yield from _without_record(loaded, gate, result)
        return
    yield from identity_findings(loaded, gate, result)
    decision = protocols.redecide(gate, result.protocol_id, loaded.raw[gate])
    if decision.outcome != result.outcome.value:
        expected = f"{decision.outcome}, as its raw lines decide"
        yield refusal("outcome", f"claims {result.outcome.value}", where, expected)
    if tuple(Reason(**asdict(finding)) for finding in decision.findings) != result.reasons:
        expected = f"the {count(len(decision.findings), 'reason')} that its raw lines give"
        yield refusal("reasons", "states other reasons than its raw lines give", where, expected)
    yield from _metrics(decision, result, where)


def _without_record(loaded: Loaded, gate: GateName, result: GateResult) -> Iterator[Reason]:
    where = f"gates/{gate}.json"
    if result.metrics:
        yield refusal("metric", "has metrics without an evaluation", where, "no metrics beside not_evaluated")
    for line in _error_lines(loaded, gate) or ():
        if (line.get("kind"), line.get("gate"), line.get("protocol")) != ("error", gate, result.protocol_id):
            yield refusal(
                "error_record", "is not an error of this gate", f"raw/{gate}_error.jsonl", "kind, gate, protocol"
            )


def _error_lines(loaded: Loaded, gate: GateName) -> list[dict[str, Any]] | None:
    data = loaded.files.get(f"raw/{gate}_error.jsonl")
    return None if data is None else canonical.parse_lines(data)


def _metrics(decision: Decision, result: GateResult, where: str) -> Iterator[Reason]:
    stored = {name: metric.model_dump() for name, metric in result.metrics.items()}
    for name in sorted(decision.metrics.keys() | stored.keys()):
        if name not in stored or name not in decision.metrics or not _close(decision.metrics[name], stored[name]):
            expected = json.dumps(dict(decision.metrics.get(name, {})), default=str)[:200]
            yield refusal("metric", f"metric {name} is not what its raw lines give", where, expected)


def _close(decided: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether two metrics agree; keys that one side leaves out count as null."""
    for key in decided.keys() | stored.keys():
        a, b = decided.get(key), stored.get(key)
        if isinstance(a, int | float) and isinstance(b, int | float):
            if abs(a - b) > _RELATIVE_TOLERANCE * max(abs(a), abs(b)):
                return False
        elif a != b:
            return False
    return True


def _verdict(loaded: Loaded) -> Iterator[Reason]:
    bundle = loaded.bundle
    verdict = decide(bundle.target.name, bundle.tier.name, bundle.target.required, loaded.results)
    if verdict != bundle.verdict:
        expected = f"{verdict.word.value}, as the gate results decide"
        yield refusal("verdict", f"claims {bundle.verdict.word.value}", "bundle.json: verdict", expected)


def _derived(loaded: Loaded, gate: GateName, lines: list[dict[str, Any]]) -> Iterator[Reason]:
    where = f"derived/{gate}.parquet"
    expected = f"the table of raw/{gate}.jsonl"
    try:
        same = derive.same_table(loaded.files[where], lines)
    except (pa.ArrowException, OSError, ValueError) as error:
        yield refusal("derived", f"cannot be compared: {str(error)[:200]}", where, expected)
        return
    if not same:
        yield refusal("derived", "holds other values than the raw lines", where, expected)


def _reports(loaded: Loaded) -> Iterator[Reason]:
    version = loaded.bundle.render_version
    if version != RENDER_VERSION:
        raise protocols.UnknownProtocolError(
            f"rendered by version {version}; this checkout renders version {RENDER_VERSION}"
        )
    for form, text in render_all(loaded).items():
        if text.encode() != loaded.files[f"report.{form}"]:
            yield refusal(
                "report", "is not what the records render to", f"report.{form}", "the rendering of this bundle"
            )
