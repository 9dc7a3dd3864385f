"""Baselines that a run makes for itself, by measurement, so that nobody can choose a weak one.

`tuned_at_batch`: the task's op gets the schedule that coordinate descent finds at one batch size, used in every bucket.
"""

from __future__ import annotations

from pathlib import Path

from agents.optimize import Baseline
from agents.proposers.tuner import uniform_schedule
from agents.task import Task
from agents.tuning import schedule_path, tuner_for
from harness.git import Repository
from harness.progress import Progress
from harness.settings import Settings
from k3_backend.aot.schedule import Schedule, render
from verify.pipeline import EDITABLE_ROOTS
from verify.snapshots import export_tree

__all__ = ["tuned_baseline"]


def tuned_baseline(
    task: Task, settings: Settings, repo: Repository, commit: str, cache: Path, run_dir: Path, progress: Progress
) -> Baseline:
    """Tune at the task's baseline batch on this machine and commit the result on top of `commit`.

    If the committed schedule is that already, the commit itself is the baseline.
    """
    target, op, batch = settings.target(task.target), task.ops[0], task.baseline.batch
    assert batch is not None
    tuner = tuner_for(task, settings, repo, commit, cache, run_dir, progress)
    point = tuner.tuned_for(batch, task.baseline.hold)
    path = schedule_path(target, op)
    tree = export_tree(repo, commit, EDITABLE_ROOTS, cache / "trees")
    committed = Schedule.load(tree / path, op=op, geometry=target.geometry, tunables=tuner.space)
    uniform = uniform_schedule(committed, point)
    held = "".join(f", {name} held at {value}" for name, value in task.baseline.hold.items())
    chosen = ", ".join(f"{name}={value}" for name, value in point.items())
    note = f"{op} tuned at batch {batch}{held} ({chosen}), used in every bucket"
    if uniform == committed:
        return Baseline(commit, note)
    folder = run_dir / "worktree"
    if folder.exists():
        repo.remove_worktree(folder)
    repo.add_worktree(folder, commit)
    (folder / path).write_text(render(uniform), encoding="utf-8")
    head = repo.commit_worktree(folder, f"{task.id}: baseline\n\n{note}")
    repo.remove_worktree(folder)
    if head is None:
        raise RuntimeError(f"schedule {path} changed but the worktree did not")
    return Baseline(head, note)
