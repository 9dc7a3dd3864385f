"""One verification: a candidate commit goes through the gates, cheapest first, and a verdict comes out.

This module decides order, early stop and resumption; each gate decides its own outcome. Finished gates are stored as
they finish, so a killed verification goes on where it stopped. It never reads the working tree: candidate, base and
current best are exports of commits.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from harness import canonical
from harness.errors import FasttrackError
from harness.evidence import write_atomic
from harness.git import Repository
from harness.progress import Progress, silent
from harness.records import (
    GATES,
    Candidate,
    Cell,
    GateName,
    GateResult,
    Outcome,
    Verdict,
    decide,
)
from harness.settings import Scope, Settings, Target, Tier
from harness.store import EvidenceSink
from k3_backend.aot.manifest import Artifact
from verify.context import GateContext
from verify.gates.kit import keep_peer_table
from verify.kit.importing import Imported
from verify.snapshots import JUDGING_PATHS, export_tree

__all__ = ["Job", "Verification", "gate_module", "make_candidate", "require_own_base", "verify"]

EDITABLE_ROOTS = ("k3_backend/kernels", "k3_backend/schedules")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be verified, where and how thoroughly."""

    settings: Settings
    repo: Repository
    candidate: Candidate
    target: Target
    tier: Tier
    folder: Path
    """Private folder of this verification: evidence, gate results, scratch."""
    cache: Path
    """Folder for exports, shared by the verifications of a run."""
    best: str | None = None
    """Commit of the current best; the base commit if null."""
    gates: tuple[GateName, ...] | None = None
    """Only these gates; all that the target requires if null."""
    task_cells: tuple[Cell, ...] = ()
    allow: tuple[str, ...] = ()
    candidates_tried: int = 1
    kit: Imported | None = None
    """Results from a GPU machine, for the gates that it evaluated."""
    progress: Progress = silent


@dataclass(frozen=True)
class Verification:
    """A finished verification."""

    candidate: Candidate
    """With the digests of its artifacts, where the build gate passed."""
    results: dict[GateName, GateResult]
    verdict: Verdict
    seconds: float
    artifacts: tuple[Artifact, ...] = ()
    """What was judged, as built; empty where the build gate did not pass."""


def gate_module(gate: GateName) -> ModuleType:
    """The package of a gate: `PROTOCOL_ID` and `run(ctx)`."""
    return importlib.import_module(f"verify.gates.{gate}")


def make_candidate(repo: Repository, base: str, head: str, origin: str) -> Candidate:
    """Describe a commit as a candidate against a base commit.

    Raises:
        FasttrackError: the two commits hold the same tree.
    """
    patch = repo.patch(base, head)
    if not patch:
        raise FasttrackError(
            "the candidate changes nothing",
            where=f"{base[:12]}..{head[:12]}",
            expected="a commit that differs from the base",
            next="fasttrack verify --candidate REV --base REV",
        )
    return Candidate(
        base=base, head=head, tree=repo.tree(head), patch_sha256=hashlib.sha256(patch).hexdigest(), origin=origin
    )


def require_own_base(repo: Repository, base: str, scope: Scope) -> None:
    """Refuse to judge against a base whose protected code is not the code that is running.

    Raises:
        FasttrackError: dirty working tree, or protected files of HEAD and base differ.
    """
    repo.require_clean()
    head = repo.resolve("HEAD")
    if repo.protected_digest(head, scope) != repo.protected_digest(base, scope):
        raise FasttrackError(
            f"protected files of base {base[:12]} differ from those of the running checkout {head[:12]}",
            where="--base",
            expected="a base judged by its own protected code",
            next=f"git checkout {base[:12]}",
        )


def verify(job: Job) -> Verification:
    """Run the gates of a job in order and decide.

    A failed gate ends the run early: later gates cost more and cannot turn the verdict. Results that are already
    stored for this candidate are used again, so calling this twice with one folder resumes.
    """
    started = time.monotonic()
    context = _context(job)
    keep_peer_table(context)
    results: dict[GateName, GateResult] = {}
    for gate in _selected(job):
        result = _stored(job.folder, gate)
        if result is None or _sets_arms(gate, context):
            job.progress(f"{gate}: running")
            result = gate_module(gate).run(context)
            context.evidence.save_gate(result)
        results[gate] = result
        if gate == "scope" and result.outcome is not Outcome.FAILED:
            # Only now: exporting refuses links and unsafe names, which are findings of the scope gate, not errors.
            context.candidate_tree = export_tree(job.repo, job.candidate.head, EDITABLE_ROOTS, job.cache)
        job.progress(f"{gate}: {result.outcome.value} ({result.seconds:.1f} s)")
        if result.outcome is Outcome.FAILED:
            break
    verdict = decide(job.target.name, job.tier.name, dict(job.target.required), results)
    return Verification(context.candidate, results, verdict, time.monotonic() - started, context.built)


def _selected(job: Job) -> Sequence[GateName]:
    """The gates to run: those asked for, preceded by `scope` and `build`, which all later ones rest on."""
    asked = set(job.target.required) if job.gates is None else set(job.gates)
    if asked - {"scope"}:
        asked.add("scope")
    if asked - {"scope", "build"}:
        asked.add("build")
    return tuple(gate for gate in GATES if gate in asked)


def _sets_arms(gate: GateName, context: GateContext) -> bool:
    """The build gate also loads the arms that later gates compare; a resumed run repeats it from its cache."""
    return gate == "build" and context.arms is None


def _stored(folder: Path, gate: GateName) -> GateResult | None:
    path = folder / "gates" / f"{gate}.json"
    if not path.exists():
        return None
    return GateResult.model_validate(json.loads(path.read_text(encoding="utf-8")))


def _context(job: Job) -> GateContext:
    base = job.candidate.base
    best = job.best or base
    base_tree = export_tree(job.repo, base, JUDGING_PATHS, job.cache)
    _store_candidate(job)
    return GateContext(
        settings=job.settings,
        target=job.target,
        tier=job.tier,
        repo=job.repo,
        candidate=job.candidate,
        run_dir=job.folder,
        evidence=EvidenceSink(job.folder),
        base_tree=base_tree,
        best_tree=base_tree if best == base else export_tree(job.repo, best, EDITABLE_ROOTS, job.cache),
        task_cells=job.task_cells,
        allow=job.allow,
        candidates_tried=job.candidates_tried,
        kit=job.kit,
        progress=job.progress,
    )


def _store_candidate(job: Job) -> None:
    """Write what is judged beside its evidence: the record and the canonical patch."""
    patch = job.repo.patch(job.candidate.base, job.candidate.head)
    write_atomic(job.folder / "candidate.patch", patch)
    write_atomic(job.folder / "candidate.json", canonical.document(job.candidate.model_dump(mode="json")))
