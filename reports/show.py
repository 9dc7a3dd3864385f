"""A bundle in a few lines, and two bundles side by side.

Both read intact bundles and decide nothing; whether their claims hold is for `verify_bundle`, and the text says so.
Numbers of gates that were decided by different protocols are never put beside each other.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness.records import GATES, Digest, GateName, Measurement, Missing, Outcome, Reason, Record, VerdictWord
from reports.content.words import measured
from reports.load import Loaded, load_bundle
from reports.patch import read_patch
from reports.text import visible_line

__all__ = ["BundleDiff", "BundleView", "GateChange", "GateView", "MetricChange", "ValueChange", "diff", "show"]

_UNVERIFIED = "Shown as stated. Check it with: fasttrack bundle verify"


class GateView(Record):
    """One gate, in short."""

    gate: GateName
    required: bool
    outcome: Outcome | None
    """Null when the gate did not run."""
    reasons: tuple[Reason, ...]
    metrics: dict[str, Measurement | Missing]


class BundleView(Record):
    """What `show` prints."""

    bundle: str
    digest: Digest
    run: str
    candidate: str
    origin: str
    base: str
    head: str
    target: str
    tier: str
    verdict: VerdictWord
    files: tuple[str, ...]
    """Paths that the candidate changes."""
    added_lines: int
    removed_lines: int
    gates: tuple[GateView, ...]
    finished: str
    report: str
    """Path of the page to open."""

    def text(self) -> str:
        """For a terminal."""
        lines = [
            f"{self.verdict.value}: candidate {self.candidate} of run {self.run}",
            f"  target {self.target}, tier {self.tier}",
            f"  base {self.base[:12]}, head {self.head[:12]}, origin {self.origin}, finished {self.finished}",
            f"  {len(self.files)} files, +{self.added_lines} -{self.removed_lines} lines: {', '.join(self.files[:4])}",
        ]
        for view in self.gates:
            outcome = "not run" if view.outcome is None else view.outcome.value
            lines.append(
                f"  {view.gate:<9} {outcome:<14} {'' if view.required else '(not required) '}{_first(view.reasons)}"
            )
            lines += [f"    {name}: {measured(metric)}" for name, metric in view.metrics.items()]
        lines += [f"  report: {self.report}", f"  {_UNVERIFIED} {self.bundle}"]
        return _plain(lines)


class ValueChange(Record):
    """A value that differs."""

    what: str
    a: str
    b: str


class MetricChange(Record):
    """A metric of both bundles."""

    metric: str
    a: Measurement | Missing
    b: Measurement | Missing


class GateChange(Record):
    """One gate in both bundles."""

    gate: GateName
    a: Outcome | None
    b: Outcome | None
    comparable: bool
    """Whether both were decided by the same protocol; metrics are compared only then."""
    metrics: tuple[MetricChange, ...]


class BundleDiff(Record):
    """What `diff` prints."""

    a: str
    b: str
    values: tuple[ValueChange, ...]
    """Candidate, target, verdict and machine, where they differ."""
    gates: tuple[GateChange, ...]

    def text(self) -> str:
        """For a terminal."""
        lines = [f"a {self.a}", f"b {self.b}"]
        lines += [f"  {change.what}: {change.a} | {change.b}" for change in self.values]
        for gate in self.gates:
            sides = " | ".join("not run" if side is None else side.value for side in (gate.a, gate.b))
            note = "" if gate.comparable else "  (different protocols: numbers are not comparable)"
            lines.append(f"  {gate.gate:<9} {sides}{note}")
            lines += [f"    {m.metric}: {measured(m.a)} | {measured(m.b)}" for m in gate.metrics if m.a != m.b]
        return _plain(lines)


def show(path: Path) -> BundleView:
    """Summarise a bundle.

    Raises:
        BundleRefusedError: the folder is not an intact bundle.
    """
    loaded = load_bundle(path)
    bundle = loaded.bundle
    patch = read_patch(loaded.files["candidate.patch"])
    return BundleView(
        bundle=str(path),
        digest=loaded.digest,
        run=bundle.run,
        candidate=bundle.name,
        origin=bundle.candidate.origin,
        base=bundle.commits.base,
        head=bundle.commits.head,
        target=bundle.target.name,
        tier=bundle.tier.name,
        verdict=bundle.verdict.word,
        files=tuple(file.path for file in patch.files),
        added_lines=patch.added,
        removed_lines=patch.removed,
        gates=tuple(_gate_view(loaded, gate) for gate in GATES),
        finished=bundle.finished,
        report=str(path / "report.html"),
    )


def diff(a: Path, b: Path) -> BundleDiff:
    """Compare two bundles.

    Raises:
        BundleRefusedError: one of the folders is not an intact bundle.
    """
    left, right = load_bundle(a), load_bundle(b)
    before, after = _values(left), _values(right)
    changes = [
        ValueChange(what=what, a=before.get(what, "–"), b=after.get(what, "–"))
        for what in before | after
        if before.get(what) != after.get(what)
    ]
    gates = tuple(_gate_change(left, right, gate) for gate in GATES if gate in left.results or gate in right.results)
    return BundleDiff(a=left.name, b=right.name, values=tuple(changes), gates=gates)


def _gate_view(loaded: Loaded, gate: GateName) -> GateView:
    result = loaded.results.get(gate)
    return GateView(
        gate=gate,
        required=gate in loaded.bundle.target.required,
        outcome=None if result is None else result.outcome,
        reasons=() if result is None else result.reasons,
        metrics={} if result is None else result.metrics,
    )


def _gate_change(left: Loaded, right: Loaded, gate: GateName) -> GateChange:
    a, b = left.results.get(gate), right.results.get(gate)
    comparable = a is not None and b is not None and a.protocol_id == b.protocol_id
    metrics: list[MetricChange] = []
    if a is not None and b is not None and comparable:
        absent = Missing(missing="not stated by this bundle")
        for name in sorted(a.metrics.keys() | b.metrics.keys()):
            metrics.append(MetricChange(metric=name, a=a.metrics.get(name, absent), b=b.metrics.get(name, absent)))
    return GateChange(
        gate=gate,
        a=None if a is None else a.outcome,
        b=None if b is None else b.outcome,
        comparable=comparable,
        metrics=tuple(metrics),
    )


def _values(loaded: Loaded) -> dict[str, str]:
    bundle, env = loaded.bundle, loaded.environment
    values = {
        "verdict": bundle.verdict.word.value,
        "target": bundle.target.name,
        "tier": bundle.tier.name,
        "target rules": hashlib.sha256(bundle.target.model_dump_json().encode()).hexdigest(),
        "base": bundle.commits.base,
        "head": bundle.commits.head,
        "patch": bundle.candidate.patch_sha256,
        "evaluator": bundle.commits.evaluator,
    }
    machine = env.model_dump(mode="json", exclude={"packages", "load_average"})
    values |= {f"environment {key.replace('_', ' ')}": str(value) for key, value in machine.items()}
    return values | {f"package {name}": version for name, version in env.packages.items()}


def _first(reasons: tuple[Reason, ...]) -> str:
    if not reasons:
        return ""
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"{reasons[0].message} [{reasons[0].where}]{more}; next: {reasons[0].next}"


def _plain(lines: list[str]) -> str:
    return "\n".join(visible_line(line).rstrip() for line in lines)
