"""From a finished verification to its bundle: the words that the evidence folder itself cannot know."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import reports
from agents.optimize import RunResult
from agents.task import Task
from fasttrack.workspace import Workspace
from harness.proposals import CandidateRow
from harness.records import Cell, GateName, GateResult, Measurement, Missing, Outcome
from harness.settings import Target, Tier
from harness.store import RunStore
from reports.schema import BundleInput, Command, Commits, Disclosure, OtherCandidate
from verify.pipeline import Verification

__all__ = ["bundle_of"]

STATEMENTS: dict[str, tuple[Literal["person", "search", "model", "replay"], str]] = {
    "patch": ("person", "A plain patch was handed in for verification; no agent of this harness wrote it."),
    "rev": ("person", "A commit was handed in for verification; no agent of this harness wrote it."),
    "tuner": (
        "search",
        "A search over the tunables that the kernel declares wrote this schedule. No language model took part.",
    ),
    "replay": ("replay", "Recorded patches were applied one after the other. This run did not write them."),
}


def bundle_of(
    workspace: Workspace,
    store: RunStore,
    row: CandidateRow,
    done: Verification,
    folder: Path,
    *,
    target: Target,
    tier: Tier,
    commands: tuple[Command, ...],
    task: Task | None = None,
    result: RunResult | None = None,
    allow: tuple[str, ...] = (),
    cells: tuple[Cell, ...] = (),
) -> Path:
    """Write the bundle of one verification into `runs/<run>/bundles` and return its folder."""
    proposer, statement = STATEMENTS[row.origin.split(":")[0]]
    others = () if result is None else tuple(_other(store, r) for r in result.rows if r.number != row.number)
    context = BundleInput(
        run=store.run_id,
        name=row.folder,
        task=task.id if task else None,
        candidate=done.candidate,
        target=target,
        tier=tier,
        scope=workspace.settings.scope,
        task_cells=cells,
        commits=Commits(
            base=done.candidate.base,
            head=done.candidate.head,
            evaluator=workspace.repo.resolve("HEAD"),
            evaluator_dirty=bool(workspace.repo.dirty()),
        ),
        allowed=allow,
        disclosure=Disclosure(proposer=proposer, statement=statement),
        commands=commands,
        limits=_limits(done, target, task),
        others=others,
        candidates_planned=task.search.candidates if task else 1,
        finished=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds=done.seconds,
    )
    return reports.write_bundle(
        folder, store.path / "bundles", context, environment=reports.environment.capture(), artifacts=done.artifacts
    )


def _other(store: RunStore, row: CandidateRow) -> OtherCandidate:
    """A candidate of the same run; one that is still open can only be the bundled one."""
    measured = store.get(f"measured/{row.number}", {})
    worst = min(measured, key=measured.__getitem__) if measured else None
    ratio = (
        Measurement(value=measured[worst], unit="x")
        if worst is not None
        else Missing(missing="the perf gate did not measure this candidate")
    )
    return OtherCandidate(
        name=row.folder,
        origin=row.origin,
        note=row.note,
        head=row.head,
        outcome=row.outcome or "incomplete",
        reason=row.reason or "still open when this bundle was written",
        ratio=ratio,
    )


def _limits(done: Verification, target: Target, task: Task | None) -> tuple[str, ...]:
    """What the evidence does not show."""
    limits = []
    gates: list[GateName] = [g for g in target.required if g not in done.results]
    if gates:
        limits.append(f"Gates that did not run: {', '.join(gates)}.")
    unevaluated = [g for g, r in done.results.items() if r.outcome is Outcome.NOT_EVALUATED]
    if unevaluated:
        limits.append(f"Gates that could not be evaluated on this machine: {', '.join(unevaluated)}.")
    limits += [
        f"Gate {gate} was measured on another machine ({_gpu(result)}) through kit {str(result.detail['kit'])[:12]}; "
        "this bundle's environment.json describes the machine that imported its results."
        for gate, result in done.results.items()
        if "kit" in result.detail
    ]
    if task:
        limits.append(f"Conditions: {task.conditions}")
    limits.append(
        f"Speed was measured on one machine with geometry {target.geometry}; it says nothing about other targets."
        if "perf" in done.results
        else "No speed was measured."
    )
    return tuple(limits)


def _gpu(result: GateResult) -> str:
    gpu = dict(result.detail.get("machine", {})).get("gpu") or {}
    return str(gpu.get("name") or "a GPU that it does not name")
