"""A commit's GPU artifacts for a target: which units a kit holds, and their sandboxed build.

A unit is built where the commit has both a kernel for the op and a schedule for the geometry. The same function builds
what a kit carries and what its results are compared with when they come back.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import sandbox
from harness.errors import FasttrackError
from harness.git import Repository
from harness.settings import BuildLimits, Target
from k3_backend.aot.cuda.arch import ARCHS
from k3_backend.aot.cuda.build import build, specialised_ops
from k3_backend.aot.manifest import Artifact
from k3_backend.geometry import GEOMETRIES, geometry
from k3_backend.ops import OPS
from verify.arms import KERNELS, SCHEDULES, TIMEOUT_STATUS
from verify.kit.manifest import KitManifest, Unit

__all__ = ["build_units", "named", "require_covered", "require_ops", "units_of"]

JOBS = 2
_BACKEND = Path(__file__).resolve().parents[2] / "k3_backend"


def units_of(target: Target, tree: Path, ops: Iterable[str] | None = None) -> tuple[Unit, ...]:
    """Units of a tree that a target's kit holds, in a fixed order.

    Args:
        target: its architectures, and the geometries of its rank shapes; `k3` for ops whose shapes no rank divides.
        tree: export of a commit's kernels and schedules.
        ops: only these.

    Raises:
        FasttrackError: one of `ops` has no kernel, or nothing is left.
    """
    built = specialised_ops(tree / KERNELS)
    wanted = built if ops is None else require_ops(ops, built)
    names = dict.fromkeys([target.geometry, *(f"k3-slice-tp{layout.tp}" for layout in target.layouts), "k3"])
    units = [
        Unit(name, op, arch)
        for arch in target.archs
        for op in wanted
        for name in names
        if name in GEOMETRIES and (tree / SCHEDULES / ARCHS[arch].schedules / name / f"{op}.toml").is_file()
    ]
    if not units:
        raise FasttrackError(
            f"no op has both a kernel and a schedule for {', '.join(target.archs)}", where=str(KERNELS),
            expected="kernels/<op>/cute.py and schedules/<family>/<geometry>/<op>.toml", next="fasttrack ops",
        )  # fmt: skip
    return tuple(sorted(units))


def require_ops(ops: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """The same ops; FasttrackError names one that has no kernel."""
    chosen = tuple(dict.fromkeys(ops))
    for op in chosen:
        if op not in known or op not in OPS:
            raise FasttrackError(
                f"op {op!r} has no kernel", where="--ops", expected=f"some of {', '.join(known)}", next="fasttrack ops"
            )
    return chosen


def build_units(units: Sequence[Unit], tree: Path, cache: Path, limits: BuildLimits) -> dict[Unit, Artifact]:
    """Build units in the sandbox, or take them from the cache of what was built there.

    Raises:
        BuildError: a kernel does not compile.
        FasttrackError: no sandbox on this machine.
    """
    sandbox.require()
    runner = _Runner(tree / KERNELS, limits)

    def one(unit: Unit) -> Artifact:
        shapes = geometry(unit.geometry)
        return build(unit.op, unit.arch, shapes, tree / KERNELS, tree / SCHEDULES, cache, run=runner)

    with ThreadPoolExecutor(max_workers=JOBS) as pool:
        return dict(zip(units, pool.map(one, units), strict=True))


def require_covered(repo: Repository, manifest: KitManifest, left_out: Iterable[Unit]) -> None:
    """Refuse results of a kit without an artifact that the candidate may have changed.

    Raises:
        FasttrackError: names the first such artifact.
    """
    changed = [change.path for change in repo.changes(manifest.base, manifest.head)]
    common = any(path.startswith(f"{KERNELS}/common/") for path in changed)
    for unit in left_out:
        kernel, schedule = f"{KERNELS}/{unit.op}/", f"{ARCHS[unit.arch].schedules}/{unit.geometry}/{unit.op}.toml"
        if common or any(path.startswith(kernel) or path == f"{SCHEDULES}/{schedule}" for path in changed):
            raise FasttrackError(
                f"holds no {unit.key}, which the candidate changes", where=f"kit {manifest.digest[:12]}",
                expected="every changed artifact", next="fasttrack kit build without --ops, and run that",
            )  # fmt: skip


def named(artifacts: Mapping[Unit, Artifact]) -> dict[str, str]:
    """Unit key to digest, as manifests and candidates name artifacts."""
    return {unit.key: artifact.digest for unit, artifact in sorted(artifacts.items())}


@dataclass(frozen=True)
class _Runner:
    """Starts the compiling process in the sandbox, with the tree, the trusted builder and one scratch folder."""

    kernels: Path
    limits: BuildLimits

    def __call__(self, argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        limits = sandbox.Limits(
            memory_bytes=self.limits.memory_bytes, mapped_bytes=16 << 30, cpu_seconds=self.limits.seconds * JOBS,
            processes=self.limits.processes, file_bytes=self.limits.output_bytes,
            tmp_bytes=self.limits.output_bytes * 4,
        )  # fmt: skip
        done = sandbox.run(
            argv, timeout_s=self.limits.seconds, ro=[self.kernels.parent, _BACKEND, *sandbox.python_paths()], rw=[cwd],
            cwd=cwd, env={"SOURCE_DATE_EPOCH": "0", "LC_ALL": "C"}, limits=limits,
        )  # fmt: skip
        stderr = done.stderr.decode("utf-8", "replace")
        if done.timed_out:
            return subprocess.CompletedProcess(
                list(argv), TIMEOUT_STATUS, "", f"{stderr}\nkilled after {self.limits.seconds} s of compilation"
            )
        return subprocess.CompletedProcess(list(argv), done.returncode, done.stdout.decode("utf-8", "replace"), stderr)
