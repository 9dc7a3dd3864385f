"""The checkout that a command works on: its root, its settings, and the folder for runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from agents.task import Task, load_task, task_files
from harness.errors import FasttrackError
from harness.git import Repository
from harness.settings import Settings
from verify.targets import load as load_settings

__all__ = ["Workspace"]

SETTINGS_FILE = "harness.toml"


@dataclass(frozen=True)
class Workspace:
    """A checkout of this project.

    The application runs from its checkout, so the code that judges is the code of this tree.
    """

    root: Path

    @classmethod
    def here(cls) -> Workspace:
        """The checkout that holds the running code."""
        return cls(Path(__file__).resolve().parents[1])

    @cached_property
    def settings(self) -> Settings:
        """Validated `harness.toml`; FasttrackError if it has a problem."""
        return load_settings(self.root / SETTINGS_FILE)

    @cached_property
    def repo(self) -> Repository:
        """The git repository; FasttrackError if there is none."""
        return Repository(self.root)

    @property
    def runs(self) -> Path:
        """Folder of all runs."""
        return self.root / "runs"

    @property
    def cache(self) -> Path:
        """Folder of content-addressed build outputs and exports; may be deleted at any time between runs."""
        return self.root / "build"

    def task_file(self, name: str) -> Path:
        """The file of a task named by path or id.

        Raises:
            FasttrackError: no such file or id.
        """
        path = Path(name)
        if not path.suffix:
            path = next((file for file in task_files(self.root) if file.stem == name), path)
        if not os.path.isfile(path):
            known = ", ".join(file.stem for file in task_files(self.root))
            raise FasttrackError(
                f"unknown task {name!r}",
                where="TASK",
                expected=f"a task file, or one of {known}",
                next="fasttrack tasks",
            )
        return path

    def task(self, name: str) -> Task:
        """A task by file path or id.

        Raises:
            FasttrackError: no such task, or it is not valid; its target, tiers and cells included.
        """
        path = self.task_file(name)
        task = load_task(path)
        self.check(task, path)
        return task

    def check(self, task: Task, path: Path) -> None:
        """Hold a task against the settings: target, tiers, ops and cells must exist there.

        Raises:
            FasttrackError: the first thing that does not fit.
        """
        from k3_backend.ops import OPS

        target = self.settings.target(task.target, where=f"{path}: target")
        for key, tier in (("screen_tier", task.search.screen_tier), ("final_tier", task.search.final_tier)):
            self.settings.tier(tier, where=f"{path}: search.{key}")
        for name in (*task.ops, *(group.scope for group in task.cells if group.scope != "step")):
            if name not in OPS:
                raise FasttrackError(
                    f"unknown op {name!r}", where=str(path), expected=f"one of {', '.join(OPS)}", next="fasttrack ops"
                )
        for cell in task.all_cells():
            if cell.batch not in target.batches or (cell.context is not None and cell.context not in target.contexts):
                raise FasttrackError(
                    f"cell {cell.key} is not in the matrix of target {target.name}",
                    where=str(path),
                    expected=f"batches {list(target.batches)}, contexts {list(target.contexts)}",
                    next="fasttrack targets",
                )
        for patch in task.search.patches:
            if not (path.parent / patch).is_file():
                raise FasttrackError(
                    f"no such patch file {patch!r}",
                    where=f"{path}: search.patches",
                    expected="paths relative to the task file",
                    next=f"ls {path.parent}",
                )
        for glob in task.editable:
            if not any(_below(glob, editable) for editable in self.settings.scope.editable):
                raise FasttrackError(
                    f"{glob} is not editable",
                    where=f"{path}: editable",
                    expected=f"paths within {', '.join(self.settings.scope.editable)}",
                    next=f"edit {path}",
                )


def _below(glob: str, editable: str) -> bool:
    return glob == editable or (editable.endswith("/**") and glob.startswith(editable[:-2]))
