"""A commit's GPU artifacts for a target: which units a kit holds, and their sandboxed build.

A unit is what the build gate builds: an op for one architecture, with the shapes of one geometry that has a schedule.
The same function builds what a kit carries and what its results are compared with when they come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import sandbox
from harness.errors import FasttrackError
from harness.git import Repository
from harness.settings import BuildLimits, Target
from k3_backend.aot.cuda.arch import ARCHS
from k3_backend.aot.cuda.build import build, scheduled, specialised_ops
from k3_backend.aot.manifest import Artifact
from k3_backend.geometry import geometry
from k3_backend.ops import ALL_OPS
from verify.building import KERNELS, SCHEDULES, SandboxRunner, builder_paths
from verify.kit.manifest import KitManifest, Unit

__all__ = ["build_units", "named", "require_covered", "require_ops", "units_of"]

JOBS = 2


def units_of(
    target: Target, tree: Path, ops: Iterable[str] | None = None, *, none_is_fine: bool = False
) -> tuple[Unit, ...]:
    """Units of a tree that a target's kit holds, in a fixed order.

    Args:
        target: its architectures.
        tree: export of a commit's kernels and schedules.
        ops: only these.
        none_is_fine: whether `ops` may lack a kernel here, and nothing may be left.

    Raises:
        FasttrackError: one of `ops` has no kernel, or nothing is left.
    """
    built = specialised_ops(tree / KERNELS)
    wanted = tuple(built) if ops is None else tuple(ops) if none_is_fine else require_ops(ops, built)
    units = [
        Unit(name, op, arch)
        for arch in target.archs
        for op, name in scheduled(arch, tree / KERNELS, tree / SCHEDULES)
        if op in wanted
    ]
    if not units and not none_is_fine:
        raise FasttrackError(
            f"no op has both a kernel and a schedule for {', '.join(target.archs)}", where=str(KERNELS),
            expected="kernels/<op>/cute.py and schedules/<family>/<geometry>/<op>.toml", next="fasttrack ops",
        )  # fmt: skip
    return tuple(sorted(units))


def require_ops(ops: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """The same ops; FasttrackError names one that has no kernel."""
    chosen = tuple(dict.fromkeys(ops))
    for op in chosen:
        if op not in known or op not in ALL_OPS:
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
    runner = SandboxRunner(tree / KERNELS, limits, readable=builder_paths(tree / KERNELS))

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
