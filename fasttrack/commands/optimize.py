"""`fasttrack optimize`: let a proposer search, the gatekeeper judge, and keep what is proven better."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from agents.optimize import Baseline, Optimization, RunResult
from agents.proposal import Proposer
from agents.proposers.replay import Replay
from agents.task import Task
from fasttrack.commands.verify import gate_rows, verdict_lines
from fasttrack.console import EXIT_FALLS_SHORT, EXIT_FINE, EXIT_INCOMPLETE, Json, Output
from fasttrack.evidence import bundle_of
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from harness.store import RunStore
from reports.schema import Command
from verify.capability import require_compiler
from verify.pipeline import require_own_base

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(optimize)


def optimize(
    task: Annotated[str | None, typer.Argument(help="Task id or file; not needed with --resume.")] = None,
    agent: Annotated[str | None, typer.Option(help="tuner or replay; the task's own by default.")] = None,
    target: Annotated[str | None, typer.Option(help="Must be the task's target, if given.")] = None,
    candidates: Annotated[int | None, typer.Option(min=1, help="Candidates to try, at most the task's number.")] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Search time, at most the task's.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would run, and stop.")] = False,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")] = None,
    json: Json = False,
) -> None:
    """Run an optimisation task. Exit code: 0 a candidate was accepted, 1 none was good enough, 3 undecided."""
    out, workspace = Output(json), Workspace.here()
    if resume is not None:
        with RunStore.open(workspace.runs, resume) as store:
            _require_optimize_run(store)
            loaded, path = Task.model_validate(store.spec["task"]), Path(store.spec["task_file"])
            require_own_base(workspace.repo, store.spec["start"], workspace.settings.scope)
            _finish(workspace, store, loaded, path, out)
    if task is None:
        raise FasttrackError(
            "no task", where="TASK", expected="a task id or file, or --resume RUN", next="fasttrack tasks"
        )
    path, loaded = _narrowed(workspace, task, agent, target, candidates, max_minutes)
    start = workspace.repo.resolve("HEAD")
    require_own_base(workspace.repo, start, workspace.settings.scope)
    if dry_run:
        _describe(workspace, loaded, start, out)
        raise typer.Exit(EXIT_FINE)
    require_compiler(workspace.settings.target(loaded.target))
    spec = {
        "command": "optimize",
        "task": loaded.model_dump(mode="json"),
        "task_file": path.resolve().relative_to(workspace.root).as_posix()
        if _inside(path, workspace.root)
        else str(path),
        "start": start,
    }
    with RunStore.create(workspace.runs, spec) as store:
        out.say(f"run {store.run_id} (resume with: fasttrack optimize --resume {store.run_id})")
        workspace.repo.keep(f"{store.run_id}/start", start)
        _finish(workspace, store, loaded, path, out)


def _inside(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root)


def _require_optimize_run(store: RunStore) -> None:
    if store.spec.get("command") != "optimize":
        raise FasttrackError(
            f"run {store.run_id} is not an optimisation",
            where="--resume",
            expected="a run of `optimize`",
            next="fasttrack runs",
        )


def _narrowed(
    workspace: Workspace,
    name: str,
    agent: str | None,
    target: str | None,
    candidates: int | None,
    max_minutes: float | None,
) -> tuple[Path, Task]:
    """The task with its budget narrowed by options; options never widen it."""
    path, task = workspace.task_file(name), workspace.task(name)
    if target is not None and target != task.target:
        raise FasttrackError(
            f"task {task.id} is for target {task.target}, not {target}",
            where="--target",
            expected=task.target,
            next="fasttrack tasks",
        )
    changes: dict[str, Any] = {"search": task.search.model_dump(), "budget": task.budget.model_dump()}
    if agent is not None:
        changes["search"]["agent"] = agent
    for option, value, limit, where in (
        ("--candidates", candidates, task.search.candidates, ("search", "candidates")),
        ("--max-minutes", max_minutes, task.budget.minutes, ("budget", "minutes")),
    ):
        if value is not None and not 0 < value <= limit:
            raise FasttrackError(
                f"{option} {value:g} is outside the task's limit",
                where=option,
                expected=f"above 0, at most {limit:g}",
                next=f"edit {path}",
            )
        if value is not None:
            changes[where[0]][where[1]] = value
    try:
        return path, Task.model_validate({**task.model_dump(), **changes})
    except ValidationError as error:
        raise FasttrackError(
            f"the options do not fit the task: {error.errors()[0]['msg']}",
            where="--agent",
            expected="tuner, or replay for a task with patches",
            next="fasttrack tasks",
        ) from error


def _describe(workspace: Workspace, task: Task, start: str, out: Output) -> None:
    target = workspace.settings.target(task.target)
    plan = {
        "task": task.id,
        "start": start,
        "baseline": task.baseline.kind,
        "agent": task.search.agent,
        "candidates": task.search.candidates,
        "minutes": task.budget.minutes,
        "strict_cells": [cell.key for cell in task.all_cells()],
        "screen": task.search.screen_tier,
        "final": task.search.final_tier,
        "final_cells": [cell.key for cell in target.cells(workspace.settings.tier(task.search.final_tier))],
    }
    out.table("would run", ("what", "value"), list(plan.items()))
    out.document({"dry_run": plan})


def _finish(workspace: Workspace, store: RunStore, task: Task, path: Path, out: Output) -> None:
    """Run or go on with a run, write its bundle, print, and exit with the verdict's code."""
    result = Optimization(
        store=store,
        task=task,
        settings=workspace.settings,
        repo=workspace.repo,
        cache=workspace.cache / "trees",
        make_baseline=lambda commit: _baseline(workspace, store, task, commit, out),
        make_proposer=lambda commit: _proposer(workspace, store, task, path, commit, out),
        progress=out.say,
    ).run()
    bundle = _bundle(workspace, store, task, result)
    _print(out, store, result, bundle)
    if result.accepted is not None:
        raise typer.Exit(EXIT_FINE)
    undecided = any(row.outcome == "incomplete" for row in result.rows)
    raise typer.Exit(EXIT_INCOMPLETE if undecided else EXIT_FALLS_SHORT)


def _baseline(workspace: Workspace, store: RunStore, task: Task, commit: str, out: Output) -> Baseline:
    if task.baseline.kind == "head":
        return Baseline(commit, "kernels and schedules as committed")
    from agents.baseline import tuned_baseline  # torch takes seconds, which other commands need not wait for

    return tuned_baseline(task, workspace.settings, workspace.repo, commit, workspace.cache, store.path, out.say)


def _proposer(workspace: Workspace, store: RunStore, task: Task, path: Path, commit: str, out: Output) -> Proposer:
    if task.search.agent == "replay":
        folder = (workspace.root / path).parent
        return Replay(tuple(folder / patch for patch in task.search.patches))
    from agents.tuning import tuner_for  # as above

    return tuner_for(task, workspace.settings, workspace.repo, commit, workspace.cache, store.path, out.say)


def _bundle(workspace: Workspace, store: RunStore, task: Task, result: RunResult) -> Path | None:
    """The bundle of the final verification; none if no candidate came that far."""
    if result.final is None or result.final_row is None:
        return None
    if (written := store.get("bundle")) is not None:
        return store.path / str(written)
    row = next(r for r in result.rows if r.number == result.final_row.number)
    settings = workspace.settings
    bundle = bundle_of(
        workspace, store, row, result.final, store.candidate_dir(row) / "final",
        target=settings.target(task.target), tier=settings.tier(task.search.final_tier), task=task, result=result,
        cells=task.all_cells(),
        commands=(
            Command(
                purpose="judge the same change again",
                argv=("fasttrack", "verify", "--patch", "candidate.patch", "--base", result.baseline.commit,
                      "--target", task.target, "--tier", task.search.final_tier, "--task", task.id),
            ),
            Command(purpose="run the task again from the same start", argv=("fasttrack", "optimize", task.id)),
            Command(purpose="recompute the verdict", argv=("fasttrack", "bundle", "verify", "BUNDLE")),
        ),
    )  # fmt: skip
    store.put("bundle", bundle.relative_to(store.path).as_posix())
    return bundle


def _print(out: Output, store: RunStore, result: RunResult, bundle: Path | None) -> None:
    out.table(
        f"candidates of run {store.run_id}",
        ("candidate", "outcome", "what it tries", "reason"),
        [(row.folder, row.outcome, row.note, row.reason or "") for row in result.rows],
    )
    if result.final is not None:
        out.table(
            "gates of the final verification",
            ("gate", "outcome", "seconds", "first reason"),
            gate_rows(result.final.results),
        )
        for line in verdict_lines(result.final.verdict, result.final.results):
            out.say(line)
    else:
        out.say("verdict: reject (no candidate was better than the baseline in every cell of the task)")
    if bundle is not None:
        out.say(f"bundle  {bundle}\nreport  {bundle / 'report.html'}")
    out.document(
        {
            "run": store.run_id,
            "baseline": {"commit": result.baseline.commit, "note": result.baseline.note},
            "ending": result.ending,
            "candidates": [
                {"name": row.folder, "outcome": row.outcome, "note": row.note, "reason": row.reason, "head": row.head}
                for row in result.rows
            ],
            "accepted": result.accepted.folder if result.accepted else None,
            "verdict": result.final.verdict.model_dump(mode="json") if result.final else None,
            "bundle": str(bundle) if bundle else None,
        }
    )
