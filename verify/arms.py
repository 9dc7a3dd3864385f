"""From kernel trees to the artifacts that gates compare: sandboxed builds, their cache, and read-only snapshots.

The compiler is fed by untrusted sources, so it runs in the sandbox with the tree, the protected headers and one scratch
folder. Nothing built is loaded here. Which arm is faster or right is not this module's business.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import sandbox
from harness.evidence import disk_errors
from harness.settings import BuildLimits
from k3_backend.aot.build import read_only_inputs
from k3_backend.aot.manifest import Artifact
from verify.context import Arms

__all__ = ["KERNELS", "SCHEDULES", "SandboxRunner", "artifact_cache", "snapshot"]

KERNELS = Path("k3_backend/kernels")
SCHEDULES = Path("k3_backend/schedules")
TIMEOUT_STATUS = 124


def artifact_cache(root: Path) -> Path:
    """The machine's cache of sandbox-built artifacts, keyed by everything that went into them."""
    return root / "build" / "artifacts"


@dataclass(frozen=True)
class SandboxRunner:
    """A compiler runner for `k3_backend.aot.build`: one tree readable, the working folder writable, limits."""

    kernels_dir: Path
    limits: BuildLimits
    epoch: int = 0
    """SOURCE_DATE_EPOCH: another value in the second build exposes objects that depend on the date."""
    versions: dict[tuple[str, ...], subprocess.CompletedProcess[str]] = field(default_factory=dict)
    """Answers to `<tool> --version`, shared by the runners of one gate: every unit asks, the tools stay."""
    readable: tuple[Path, ...] | None = None
    """What the command may read; what g++ needs for the tree if null."""

    def __call__(self, argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run one command; a timeout becomes status 124 with a message on stderr."""
        if list(argv[1:]) != ["--version"]:
            return self._run(argv, cwd)
        if tuple(argv) not in self.versions:
            self.versions[tuple(argv)] = self._run(argv, cwd)
        return self.versions[tuple(argv)]

    def _run(self, argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        limits = sandbox.Limits(
            memory_bytes=self.limits.memory_bytes,
            mapped_bytes=2 << 30,
            cpu_seconds=self.limits.seconds,
            processes=self.limits.processes,
            file_bytes=self.limits.output_bytes,
            tmp_bytes=self.limits.output_bytes * 4,
        )
        done = sandbox.run(
            argv,
            timeout_s=self.limits.seconds,
            ro=read_only_inputs(self.kernels_dir) if self.readable is None else self.readable,
            rw=[cwd],
            cwd=cwd,
            env={"SOURCE_DATE_EPOCH": str(self.epoch), "LC_ALL": "C"},
            limits=limits,
        )
        stderr = done.stderr.decode("utf-8", "replace")
        if done.timed_out:
            return subprocess.CompletedProcess(
                list(argv), TIMEOUT_STATUS, "", f"{stderr}\nkilled after {self.limits.seconds} s of compilation"
            )
        return subprocess.CompletedProcess(list(argv), done.returncode, done.stdout.decode("utf-8", "replace"), stderr)


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
