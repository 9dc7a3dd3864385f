"""`fasttrack verify`: judge a patch or a commit by the gates, no agent involved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from agents.task import Task
from fasttrack.console import Json, Output, verdict_exit
from fasttrack.evidence import bundle_of
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from harness.proposals import CandidateOutcome
from harness.records import Candidate, Cell, GateName, GateResult, Verdict, VerdictWord
from harness.settings import Target, Tier
from harness.store import RunStore
from reports.schema import Command
from verify.capability import require_compiler
from verify.kit.importing import Imported
from verify.pipeline import Job, Verification, make_candidate, require_own_base
from verify.pipeline import verify as verify_job

__all__ = ["OUTCOMES", "Judging", "gate_rows", "judge", "parse_gates", "register", "verdict_lines"]

OUTCOMES: dict[VerdictWord, CandidateOutcome] = {
    VerdictWord.ACCEPT: "accepted",
    VerdictWord.REJECT: "rejected",
    VerdictWord.INCOMPLETE: "incomplete",
}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(verify)


def verify(
    patch: Annotated[Path | None, typer.Option(help="Patch against the base commit.")] = None,
    candidate: Annotated[str | None, typer.Option(help="Commit to judge instead of a patch.")] = None,
    base: Annotated[str, typer.Option(help="Commit whose protected code judges.")] = "HEAD",
    target: Annotated[str, typer.Option(help="Target of harness.toml.")] = "cpu",
    tier: Annotated[str, typer.Option(help="smoke, pr or full.")] = "pr",
    gates: Annotated[
        str | None, typer.Option(help="Only these gates, comma-separated (and what they rest on).")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Also require this task's cells to be faster than the base.")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="Protected path that this human change may touch.")] = None,
    json: Json = False,
) -> None:
    """Judge a patch or a commit. Exit code: 0 accept, 1 reject, 2 usage or environment, 3 incomplete."""
    out, workspace = Output(json), Workspace.here()
    settings = workspace.settings
    chosen, level = settings.target(target), settings.tier(tier)
    selected = parse_gates(gates)
    if selected != ("scope",):
        require_compiler(chosen)
    loaded_task = workspace.task(task) if task else None
    cells = loaded_task.all_cells() if loaded_task else ()
    head, start, origin = _candidate_commit(workspace, patch, candidate, base)
    record = make_candidate(workspace.repo, start, head, origin)

    asked = {
        "command": "verify",
        "target": target,
        "tier": tier,
        "base": start,
        "head": head,
        "gates": gates,
        "task": task,
    }
    job = Judging(
        record=record, target=chosen, tier=level, gates=selected, task=loaded_task, cells=cells,
        allow=tuple(allow or ()), asked=asked,
    )  # fmt: skip
    raise typer.Exit(judge(workspace, out, job))


@dataclass(frozen=True, kw_only=True)
class Judging:
    """A candidate to be judged in a run of its own."""

    record: Candidate
    target: Target
    tier: Tier
    gates: tuple[GateName, ...] | None
    asked: dict[str, Any]
    """What was asked, for the run's record."""
    task: Task | None = None
    cells: tuple[Cell, ...] = ()
    allow: tuple[str, ...] = ()
    kit: Imported | None = None


def judge(workspace: Workspace, out: Output, what: Judging) -> int:
    """Verify in a new run, write the bundle, say how it ended; the verdict's exit code."""
    record, target, tier = what.record, what.target, what.tier
    with RunStore.create(workspace.runs, what.asked) as store:
        workspace.repo.keep(f"{store.run_id}/001", record.head)
        row = store.propose(
            "001", head=record.head, origin=record.origin, note=f"{record.origin} against {record.base[:12]}"
        )
        folder = store.candidate_dir(row)
        done = verify_job(
            Job(
                settings=workspace.settings,
                repo=workspace.repo,
                candidate=record,
                target=target,
                tier=tier,
                folder=folder,
                cache=workspace.cache / "trees",
                gates=what.gates,
                task_cells=what.cells,
                allow=what.allow,
                kit=what.kit,
                progress=out.say,
            )
        )
        reason = None if done.verdict.word is VerdictWord.ACCEPT else _why(done)
        row = store.finish(row.number, OUTCOMES[done.verdict.word], reason)
        bundle = bundle_of(
            workspace, store, row, done, folder, target=target, tier=tier, task=what.task, cells=what.cells,
            allow=what.allow, commands=_commands(target.name, tier.name, record.base, record.head),
        )  # fmt: skip
    out.table("gates", ("gate", "outcome", "seconds", "first reason"), gate_rows(done.results))
    for line in verdict_lines(done.verdict, done.results):
        out.say(line)
    out.say(f"bundle  {bundle}\nreport  {bundle / 'report.html'}")
    out.document(
        {
            "run": store.run_id,
            "verdict": done.verdict.model_dump(mode="json"),
            "gates": {gate: result.model_dump(mode="json") for gate, result in done.results.items()},
            "bundle": str(bundle),
            "seconds": done.seconds,
        }
    )
    return verdict_exit(done.verdict.word)


def parse_gates(text: str | None) -> tuple[GateName, ...] | None:
    """Gate names from a comma-separated option.

    Raises:
        FasttrackError: unknown or no name.
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    known: tuple[GateName, ...] = get_args(GateName)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise FasttrackError(
            f"unknown gate {', '.join(unknown) or '(none given)'}",
            where="--gates",
            expected=f"some of {', '.join(known)}",
            next="fasttrack gates",
        )
    return tuple(gate for gate in known if gate in names)


def gate_rows(results: Mapping[GateName, GateResult]) -> list[tuple[str, str, str, str]]:
    """Table rows: gate, outcome, seconds, first reason."""
    return [
        (
            gate,
            result.outcome.value,
            f"{result.seconds:.1f}",
            f"{result.reasons[0].message} ({result.reasons[0].where})" if result.reasons else "",
        )
        for gate, result in results.items()
    ]


def verdict_lines(verdict: Verdict, results: Mapping[GateName, GateResult]) -> list[str]:
    """The verdict with every reason: for a reject those of the failed gates, for an incomplete what is missing."""
    lines = [f"verdict: {verdict.word.value} (target {verdict.target}, tier {verdict.tier})"]
    reasons = [r for gate in verdict.failed for r in results[gate].reasons] if verdict.failed else list(verdict.unmet)
    lines += [f"  {r.code}: {r.message}; where: {r.where}; expected: {r.expected}; next: {r.next}" for r in reasons]
    return lines


def _why(done: Verification) -> str:
    reasons = [r for gate in done.verdict.failed for r in done.results[gate].reasons] or list(done.verdict.unmet)
    return f"{reasons[0].message} ({reasons[0].where})"


def _candidate_commit(
    workspace: Workspace, patch: Path | None, candidate: str | None, base: str
) -> tuple[str, str, str]:
    """The commit to judge, its base, and where it came from."""
    if (patch is None) == (candidate is None):
        raise FasttrackError(
            "nothing to judge, or two things",
            where="--patch, --candidate",
            expected="exactly one of --patch FILE and --candidate REV",
            next="fasttrack verify --help",
        )
    repo = workspace.repo
    start = repo.resolve(base)
    require_own_base(repo, start, workspace.settings.scope)
    if candidate is not None:
        return repo.resolve(candidate), start, f"rev:{candidate}"
    assert patch is not None
    try:
        content = patch.read_bytes()
    except OSError as error:
        raise FasttrackError(
            f"cannot read the patch: {error.strerror}",
            where=str(patch),
            expected="a git patch",
            next="git diff BASE > PATCH",
        ) from error
    return repo.commit_patch(start, content, f"patch {patch.name}", str(patch)), start, f"patch:{patch.name}"


def _commands(target: str, tier: str, base: str, head: str) -> tuple[Command, ...]:
    return (
        Command(
            purpose="judge the same change again",
            argv=(
                "fasttrack",
                "verify",
                "--patch",
                "candidate.patch",
                "--base",
                base,
                "--target",
                target,
                "--tier",
                tier,
            ),
        ),
        Command(purpose="recompute the verdict from the raw data", argv=("fasttrack", "bundle", "verify", "BUNDLE")),
        Command(purpose="see the change", argv=("git", "diff", base, head)),
    )
