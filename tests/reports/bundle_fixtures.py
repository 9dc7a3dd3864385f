"""Makes realistic bundles for the tests: evidence folder, artifacts and the record that a pipeline hands over."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import raw_lines

from harness import canonical, settings
from harness.records import (
    GATES,
    Candidate,
    EvidenceClass,
    GateName,
    GateResult,
    Measurement,
    Missing,
    Outcome,
    Reason,
)
from harness.store import EvidenceSink
from k3_backend.aot.manifest import Artifact
from reports import protocols
from reports.schema import BundleInput, Command, Commits, Disclosure, Environment, OtherCandidate
from reports.write import write_bundle
from verify.protocol.decision import Decision

ROOT = Path(__file__).resolve().parents[2]


def _with_verdicts() -> settings.Settings:
    """The project's settings, but for a smoke tier that could accept: small bundles with every verdict."""
    found = settings.load(ROOT)
    return found.model_copy(
        update={"tiers": {**found.tiers, "smoke": found.tier("smoke").model_copy(update={"perf_blocks": 2})}}
    )


SETTINGS = _with_verdicts()
OPS = ("kda_decode", "mla_decode")
ARCHS = ("x86-64-v3", "x86-64-v4-bf16")
BASE, HEAD, TREE = "a" * 40, "b" * 40, "c" * 40
PATCH = """diff --git a/{path} b/{path}
index 1111111111111111111111111111111111111111..2222222222222222222222222222222222222222 100644
--- a/{path}
+++ b/{path}
@@ -1,5 +1,9 @@
 version = 1
 [[bucket]]
-max_rows = 64
-rows_per_task = 1
+max_rows = 4
+rows_per_task = 1
+unroll = 2
+[[bucket]]
+max_rows = 64
+rows_per_task = 4
 unroll = 4
""".replace("{path}", raw_lines.SCHEDULE).encode()
STATIC: tuple[GateName, ...] = ("scope", "audit")


def make_bundle(folder: Path, *, changes: dict[str, Any] | None = None, tier: str = "smoke", **evidence: Any) -> Path:
    """Evidence, artifacts and bundle below a folder; returns the bundle."""
    artifacts = make_artifacts(folder / "artifacts")
    make_evidence(folder / "candidate", artifacts, tier=tier, **evidence)
    if not (folder / "candidate/gates/build.json").exists():
        artifacts = []
    context = make_input(artifacts, **({"tier": SETTINGS.tier(tier)} | (changes or {})))
    return write_bundle(folder / "candidate", folder / "out", context, environment=environment(), artifacts=artifacts)


def make_evidence(
    folder: Path,
    artifacts: list[Artifact],
    *,
    tier: str = "smoke",
    lines: dict[GateName, Callable[[dict[str, str]], list[dict[str, Any]]]] | None = None,
    not_evaluated: GateName | None = None,
    peers: Callable[[dict[str, str]], list[dict[str, Any]]] | None = None,
) -> None:
    """Fill an evidence folder as a verification does; gates after a failed one do not run.

    Args:
        folder: created.
        artifacts: those that were judged.
        tier: name of the tier.
        lines: gates whose lines are made by these functions of the artifacts' digests.
        not_evaluated: a gate that ends in an exception.
        peers: makes the lines of a peer table of the artifacts' digests.
    """
    folder.mkdir(parents=True)
    (folder / "candidate.patch").write_bytes(PATCH)
    sink = EvidenceSink(folder)
    digests = {f"{a.op}/{a.arch}": a.digest for a in artifacts}
    if peers is not None:
        sink.append_block("bench", peers(digests))
    recorded = raw_lines.all_passing(SETTINGS, tier, digests, BASE, HEAD)
    recorded |= {gate: make(digests) for gate, make in (lines or {}).items()}
    for gate in GATES:
        if gate == not_evaluated:
            save_not_evaluated(sink, gate)
        elif save_gate(sink, gate, recorded[gate]).outcome is Outcome.FAILED:
            break


def canonical_line(line: dict[str, Any]) -> bytes:
    """A raw line with its end, as files have it."""
    return canonical.line(line) + b"\n"


def save_gate(sink: EvidenceSink, gate: GateName, lines: list[dict[str, Any]]) -> GateResult:
    """Append raw lines, decide, and store the result as a gate does."""
    sink.append_block(gate, lines)
    header = next(line for line in lines if line["kind"] == "header")
    decision: Decision = protocols.implementation(gate, header["protocol"]).decide(sink.lines(gate))
    outcome = Outcome(decision.outcome)
    kind = EvidenceClass.STATIC if gate in STATIC else EvidenceClass.HARDWARE
    result = GateResult(
        gate=gate,
        protocol_id=header["protocol"],
        outcome=outcome,
        evidence_class=None if outcome is Outcome.NOT_EVALUATED else kind,
        reasons=tuple(Reason(**asdict(finding)) for finding in decision.findings),
        metrics={n: Missing(**m) if "missing" in m else Measurement(**m) for n, m in decision.metrics.items()},
        evidence=(sink.ref(gate),),
        detail=DETAILS.get(gate, {}),
        seconds=12.5,
    )
    sink.save_gate(result)
    return result


def save_not_evaluated(sink: EvidenceSink, gate: GateName) -> None:
    """Store a gate that ended in an exception."""
    protocol = f"{gate}/1"
    line = {"kind": "error", "gate": gate, "protocol": protocol, "type": "RuntimeError", "message": "no sandbox"}
    sink.append(f"{gate}_error", line)
    reason = Reason(
        code=f"{gate}.environment",
        message="bubblewrap is not installed",
        where="PATH",
        expected="bwrap",
        next="make setup",
    )
    evidence = (sink.ref(f"{gate}_error"),)
    sink.save_gate(
        GateResult(
            gate=gate,
            protocol_id=protocol,
            outcome=Outcome.NOT_EVALUATED,
            reasons=(reason,),
            evidence=evidence,
            seconds=0.1,
        )
    )


def make_artifacts(folder: Path) -> list[Artifact]:
    """Artifact folders as the builder leaves them."""
    artifacts = []
    for op in OPS:
        for arch in ARCHS:
            path = folder / op / arch
            path.mkdir(parents=True)
            data = b"\x7fELF" + hashlib.sha256(f"{op}{arch}".encode()).digest() * 50
            (path / f"{op}.so").write_bytes(data)
            artifact = Artifact(
                op=op, arch=arch, geometry="k3-nano", device="cpu", abi=1, path=path, inputs_digest="d" * 64,
                files={f"{op}.so": hashlib.sha256(data).hexdigest()}, toolchain={"g++": "g++ 12.2.0"},
            )  # fmt: skip
            artifact.write()
            artifacts.append(artifact)
    return artifacts


def environment() -> Environment:
    """A machine without a compiler, so that a missing value is on the page."""
    return Environment(
        cpu_model="Example CPU @ 2.0 GHz", cpu_flags_sha256="e" * 64, cpu_features=("avx2", "avx512f"), cores=2,
        memory_bytes=8 << 30, kernel="Linux 6.1.0 x86_64", python="CPython 3.11.7",
        compiler=Missing(missing="g++ is not installed"), packages={"numpy": "2.4.6", "torch": "2.13.0"},
        container=("cgroup cpu.max 200000 100000",), load_average=(0.5, 0.25, 0.125),
    )  # fmt: skip


DETAILS: dict[str, dict[str, Any]] = {
    "build": {"objects": [{"op": "kda_decode", "seconds": 3.5}, {"op": "mla_decode", "seconds": 2.25}], "jobs": 2},
}


def make_input(artifacts: list[Artifact], **changes: Any) -> BundleInput:
    """What a pipeline hands over, with some values changed."""
    candidate = Candidate(
        base=BASE, head=HEAD, tree=TREE, patch_sha256=hashlib.sha256(PATCH).hexdigest(), origin="tuner",
        artifacts={f"{a.op}/{a.arch}": a.digest for a in artifacts},
    )  # fmt: skip
    slower = OtherCandidate(
        name="001-111111111111", origin="tuner", note="rows_per_task=2 in every bucket", head="1" * 40,
        outcome="rejected", reason="slower in 3 cells", ratio=Measurement(value=0.93, unit="x", low=0.91, high=0.95),
    )  # fmt: skip
    beaten = OtherCandidate(
        name="002-222222222222", origin="tuner", note="unroll=8 below 4 rows", head="2" * 40, outcome="beaten",
        reason="003 was faster", ratio=Missing(missing="screened only"),
    )  # fmt: skip
    again = ("fasttrack", "verify", "--candidate", HEAD[:12], "--target", "cpu", "--tier", "smoke")
    values: dict[str, Any] = {
        "run": "20260101T120000Z-0badcafe",
        "name": "003-bbbbbbbbbbbb",
        "task": "cpu-kda-decode",
        "candidate": candidate,
        "target": SETTINGS.target("cpu"),
        "tier": SETTINGS.tier("smoke"),
        "scope": SETTINGS.scope,
        "commits": Commits(base=BASE, head=HEAD, evaluator=BASE, evaluator_dirty=False),
        "disclosure": Disclosure(proposer="search", statement="A search over declared tunables; no language model."),
        "commands": (Command(purpose="Verify this candidate again", argv=again),),
        "limits": ("Measured on one machine with 2 cores.", "Weights are seeded, not trained."),
        "others": (slower, beaten),
        "candidates_planned": 20,
        "finished": "2026-01-01T12:05:00Z",
        "seconds": 287.0,
    }
    return BundleInput(**(values | changes))
