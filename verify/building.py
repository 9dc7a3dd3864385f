"""Sandboxed builds of kernel trees, and their cache.

The compiler is fed by untrusted sources, so it runs in the sandbox with the tree, the protected headers and one scratch
folder. Nothing built is loaded here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import k3_backend
from harness import sandbox
from harness.settings import BuildLimits
from k3_backend.aot.build import read_only_inputs

__all__ = ["KERNELS", "SCHEDULES", "SandboxRunner", "artifact_cache", "builder_paths"]

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


def builder_paths(kernels: Path) -> tuple[Path, ...]:
    """What the process that compiles CUDA kernels must be able to read, its working folder aside."""
    return (kernels.resolve(), Path(k3_backend.__file__).resolve().parent, *sandbox.python_paths())
