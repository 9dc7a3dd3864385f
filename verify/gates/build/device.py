"""Building a candidate's CUDA kernels in the sandbox: every (op, geometry) that has a schedule, for every architecture.

The process that compiles runs a candidate's Python, so it sees its tree, this package's protected builder, the
interpreter's packages and one scratch folder, and no network. Units whose sources or schedule changed are built twice,
from copies in different folders; both artifacts must have one digest.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_backend.aot.compile import BuildError
from k3_backend.aot.cuda import build as cuda
from k3_backend.aot.manifest import Artifact
from k3_backend.geometry import geometry
from verify.building import KERNELS, SCHEDULES, SandboxRunner, artifact_cache, builder_paths
from verify.context import GateContext

__all__ = ["DeviceUnit", "build_units", "missing_tools", "unit_names"]

JOBS = 2
_SECOND_EPOCH = 1_000_000_000
_STDERR_CHARS = 4000


@dataclass(frozen=True)
class DeviceUnit:
    """Outcome of one op on one architecture and geometry."""

    line: dict[str, Any]
    artifact: Artifact | None


def missing_tools() -> dict[str, str] | None:
    """Why nothing can be compiled here, or None."""
    try:
        cuda.toolchain()
    except ModuleNotFoundError as error:  # PackageNotFoundError is one
        return {
            "code": "build.environment",
            "message": f"the CuTe DSL is not installed ({error})",
            "where": "nvidia-cutlass-dsl",
            "expected": "the pinned version of requirements.txt",
            "next": "make setup",
        }
    return None


def unit_names(ctx: GateContext, tree: Path) -> list[tuple[str, str, str]]:
    """(op, architecture, geometry) of everything that a tree offers for the target, in a fixed order."""
    return [
        (op, arch, name)
        for arch in ctx.target.archs
        for op, name in cuda.scheduled(arch, tree / KERNELS, tree / SCHEDULES)
    ]


def build_units(ctx: GateContext, tree: Path) -> list[DeviceUnit]:
    """Build a candidate tree's units, two at a time."""
    changed = _changed(ctx)
    cache = artifact_cache(ctx.repo.root)
    with tempfile.TemporaryDirectory(prefix="build-", dir=ctx.run_dir) as name:
        scratch = Path(name)
        copy = scratch / "another-place"
        shutil.copytree(tree / KERNELS, copy / KERNELS)
        if (tree / SCHEDULES).is_dir():
            shutil.copytree(tree / SCHEDULES, copy / SCHEDULES)
        scratch.chmod(0o755)
        with ThreadPoolExecutor(max_workers=JOBS) as pool:
            return list(
                pool.map(
                    lambda unit: _unit(ctx, unit, tree, copy, cache, scratch / "second", changed),
                    unit_names(ctx, tree),
                )
            )


def _unit(
    ctx: GateContext,
    unit: tuple[str, str, str],
    tree: Path,
    copy: Path,
    cache: Path,
    second: Path,
    changed: frozenset[str],
) -> DeviceUnit:
    op, arch, name = unit
    label = f"{arch}/{name}"
    moved = bool({f"kernels/{op}", "kernels/common", f"schedules/{op}"} & changed)
    try:
        artifacts, times = [], []
        for place, out, epoch in ((tree, cache, 0), *(((copy, second, _SECOND_EPOCH),) if moved else ())):
            started = time.monotonic()
            runner = SandboxRunner(place / KERNELS, ctx.settings.build, epoch, readable=builder_paths(place / KERNELS))
            artifacts.append(cuda.build(op, arch, geometry(name), place / KERNELS, place / SCHEDULES, out, run=runner))
            times.append(time.monotonic() - started)
    except BuildError as error:
        return DeviceUnit(_error_line(op, label, error, ctx, tree), None)
    first = artifacts[0]
    line = {
        "kind": "unit", "op": op, "arch": label, "changed": moved, "inputs_digest": first.inputs_digest,
        "digests": [a.digest for a in artifacts], "seconds": times,
        "object_bytes": sum((first.path / file).stat().st_size for file in first.files if file.endswith(".cubin")),
        "toolchain": dict(first.toolchain),
    }  # fmt: skip
    if len({a.digest for a in artifacts}) > 1:
        shutil.rmtree(first.path)  # the cache keeps nothing that cannot be reproduced
        return DeviceUnit(line, None)
    return DeviceUnit(line, first)


def _changed(ctx: GateContext) -> frozenset[str]:
    """`kernels/<folder>` and `schedules/<op>` in which the candidate differs from the base."""
    found = set()
    for change in ctx.repo.changes(ctx.candidate.base, ctx.candidate.head):
        if change.path.startswith(f"{KERNELS}/"):
            found.add("kernels/" + change.path.removeprefix(f"{KERNELS}/").split("/")[0])
        elif change.path.startswith(f"{SCHEDULES}/"):
            found.add("schedules/" + Path(change.path).stem)
    return frozenset(found)


def _error_line(op: str, label: str, error: BuildError, ctx: GateContext, tree: Path) -> dict[str, Any]:
    limits = ctx.settings.build
    killed = "killed after" in error.stderr or "MemoryError" in error.stderr
    sizes = f"{limits.memory_bytes >> 20} MiB of memory, {limits.output_bytes >> 20} MiB of output"

    def in_repo(text: str) -> str:
        return text.replace(str(tree.resolve()) + "/", "").replace(str(tree) + "/", "")

    return {
        "kind": "error", "op": op, "arch": label, "code": "build.limit" if killed else "build.compile_error",
        "message": in_repo(error.what.partition(": ")[2]), "where": in_repo(error.where),
        "expected": f"to stay within {limits.seconds} s, {sizes}" if killed else error.expected,
        "command": "", "stderr": in_repo(error.stderr)[-_STDERR_CHARS:],
    }  # fmt: skip
