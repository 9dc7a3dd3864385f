"""What `build` and `audit` act on: the artifacts of this checkout for a target or an architecture."""

from __future__ import annotations

from pathlib import Path

from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from harness.settings import Target
from k3_backend.aot.build import KERNELS_DIR, SCHEDULES_DIR, build_all, specialised_ops
from k3_backend.aot.cpu.host import ARCHS as CPU_ARCHS
from k3_backend.aot.cuda import build as cuda
from k3_backend.aot.cuda.arch import ARCHS as CUDA_ARCHS
from k3_backend.aot.manifest import Artifact
from k3_backend.geometry import geometry

__all__ = ["build_checkout"]


def build_checkout(
    workspace: Workspace, target: str, arch: str | None, op: str | None, folder: Path | None = None
) -> list[Artifact]:
    """Build this checkout's kernels, or take them from the cache.

    Args:
        workspace: the checkout.
        target: whose architectures and geometry are meant, if `arch` does not say.
        arch: one architecture; a GPU's may be of no target.
        op: one op; None for all that have a kernel for the device.
        folder: where artifacts go; the workspace's cache if null.

    Raises:
        FasttrackError: unknown target, architecture or op.
        BuildError: a kernel does not build.
    """
    out = folder or workspace.cache / "artifacts"
    chosen = workspace.settings.target(target)
    if arch in CUDA_ARCHS:
        return _device(arch, op, out)
    if arch is not None and (chosen.device != "cpu" or arch not in CPU_ARCHS):
        known = (*CPU_ARCHS, *CUDA_ARCHS)
        raise FasttrackError(
            f"unknown architecture {arch!r}", where="--arch", expected=f"one of {', '.join(known)}",
            next="fasttrack targets",
        )  # fmt: skip
    if chosen.device == "cuda":
        return [artifact for level in chosen.archs for artifact in _device(level, op, out)]
    return _host(chosen, (arch,) if arch else chosen.archs, op, out)


def _host(chosen: Target, archs: tuple[str, ...], op: str | None, out: Path) -> list[Artifact]:
    ops = _only(specialised_ops(), op)
    return [a for level in archs for a in build_all(ops, level, geometry(chosen.geometry), out_dir=out).values()]


def _device(arch: str, op: str | None, out: Path) -> list[Artifact]:
    units = cuda.scheduled(arch, KERNELS_DIR, SCHEDULES_DIR)
    wanted = _only(tuple(sorted({name for name, _ in units})), op)
    chosen = [unit for unit in units if unit[0] in wanted]
    return list(cuda.build_all(chosen, arch, KERNELS_DIR, SCHEDULES_DIR, out).values())


def _only(ops: tuple[str, ...], op: str | None) -> tuple[str, ...]:
    if op is not None and op not in ops:
        raise FasttrackError(
            f"op {op!r} has no kernel for this device", where="--op", expected=f"one of {', '.join(ops)}",
            next="fasttrack ops",
        )  # fmt: skip
    return ops if op is None else (op,)
