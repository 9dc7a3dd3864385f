"""The arms that gates compare, as read-only snapshots of what was built and tuned."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from harness.evidence import disk_errors
from k3_backend.aot.manifest import Artifact
from verify.context import Arms

__all__ = ["snapshot"]


def snapshot(
    folder: Path,
    candidate: Mapping[str, Artifact],
    candidate_schedules: Path,
    best: Mapping[str, Artifact],
    best_schedules: Path,
    runtime: Artifact,
) -> Arms:
    """Copy artifacts and schedules of both arms into one folder that nothing else writes.

    Digests are verified on the copies. An earlier snapshot (of an interrupted run) is replaced.

    Raises:
        DiskError: full or read-only disk.
    """
    with disk_errors(folder):
        if folder.exists():
            shutil.rmtree(folder)
        arms = {}
        for name, artifacts, schedules in (
            ("candidate", candidate, candidate_schedules),
            ("best", best, best_schedules),
        ):
            home = folder / name
            copies = {}
            for op, artifact in artifacts.items():
                shutil.copytree(artifact.path, home / "artifacts" / op)
                copies[op] = Artifact.read(home / "artifacts" / op)
            (home / "schedules").mkdir(parents=True)
            if schedules.is_dir():
                shutil.copytree(schedules, home / "schedules", dirs_exist_ok=True)
            arms[name] = (copies, home / "schedules")
        return Arms(
            candidate=arms["candidate"][0],
            candidate_schedules=arms["candidate"][1],
            best=arms["best"][0],
            best_schedules=arms["best"][1],
            runtime=Artifact.read(shutil.copytree(runtime.path, folder / "runtime")),
        )
