"""Build gate: every op builds for every architecture of the target, reproducibly, from the candidate's exported tree.

Compilers run in the sandbox, against the base's headers. An op whose sources equal the base's is built once and shared
through the artifact cache; a changed op is built twice, from copies in different folders and with different dates, and
both artifacts must have one digest. Sets the arms that later gates compare. Loads nothing of what it built.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import sandbox
from harness.records import EvidenceClass, GateResult
from k3_backend.aot.build import build, build_runtime, specialised_ops
from k3_backend.aot.compile import COMPILER, BuildError
from k3_backend.aot.cpu.host import best_arch
from k3_backend.aot.manifest import Artifact
from k3_backend.geometry import Geometry, geometry
from verify.arms import snapshot
from verify.building import KERNELS, SCHEDULES, SandboxRunner, artifact_cache
from verify.context import GateContext
from verify.gates.build.device import build_units, missing_tools, unit_names
from verify.gates.common import command_for, gate_guard, to_result
from verify.protocol.build import PROTOCOL_ID, decide

__all__ = ["PROTOCOL_ID", "run"]

JOBS = 2
_SECOND_EPOCH = 1_000_000_000
"""A date far from the first build's (0)."""
_STDERR_CHARS = 4000
_ABANDONED_S = 3600.0
_LIMIT_SIGNS = re.compile(
    r"killed after \d+ s|out of memory|virtual memory exhausted|Cannot allocate memory|File size limit|Killed signal"
)


@gate_guard("build", PROTOCOL_ID)
def run(ctx: GateContext) -> GateResult:
    """Build the candidate and, where it builds, set `ctx.arms`, `ctx.built` and the candidate's artifact digests."""
    started = time.monotonic()
    obstacle = _obstacle(ctx)
    if obstacle is not None:
        ctx.evidence.append_block("build", [_header(ctx, (), ()), {"kind": "unavailable", **obstacle}])
        decision = decide(ctx.evidence.lines("build"))
        return to_result(
            "build",
            PROTOCOL_ID,
            decision,
            EvidenceClass.STATIC,
            [ctx.evidence.ref("build")],
            time.monotonic() - started,
        )
    if ctx.candidate_tree is None:
        raise RuntimeError("the scope gate has not let the candidate's tree pass")
    if ctx.target.device == "cuda":
        return _run_device(ctx, ctx.candidate_tree, started)
    builder = _Builder(ctx, ctx.candidate_tree / KERNELS)
    ops, base_ops = specialised_ops(builder.kernels), specialised_ops(ctx.base_tree / KERNELS)
    ctx.evidence.append("build", _header(ctx, ops, base_ops))
    units = builder.build_all(ops)
    ctx.evidence.append_block("build", [unit.line for unit in units])
    decision = decide(ctx.evidence.lines("build"))
    host = best_arch(ctx.target.archs)
    if decision.outcome == "passed":
        _publish(ctx, builder, units, host)
    evidence = EvidenceClass.STATIC if host is None else EvidenceClass.HARDWARE
    detail = {"units": [unit.line for unit in units], "host_arch": host}
    return to_result(
        "build", PROTOCOL_ID, decision, evidence, [ctx.evidence.ref("build")], time.monotonic() - started, detail
    )


def _run_device(ctx: GateContext, tree: Path, started: float) -> GateResult:
    """The same for CUDA: units are (op, geometry) pairs with a schedule; the arms are made where kernels can run."""
    names, base_names = unit_names(ctx, tree), unit_names(ctx, ctx.base_tree)
    header = _header(ctx, sorted({op for op, _, _ in names}), sorted({op for op, _, _ in base_names}))
    ctx.evidence.append("build", {**header, "units": [[op, f"{arch}/{name}"] for op, arch, name in names]})
    units = build_units(ctx, tree)
    ctx.evidence.append_block("build", [unit.line for unit in units])
    decision = decide(ctx.evidence.lines("build"))
    if decision.outcome == "passed":
        ctx.built = tuple(unit.artifact for unit in units if unit.artifact is not None)
        digests = {a.name: a.digest for a in ctx.built}
        ctx.candidate = ctx.candidate.model_copy(update={"artifacts": digests})
    return to_result(
        "build", PROTOCOL_ID, decision, EvidenceClass.STATIC, [ctx.evidence.ref("build")],
        time.monotonic() - started, {"units": [unit.line for unit in units], "host_arch": None},
    )  # fmt: skip


def _obstacle(ctx: GateContext) -> dict[str, str] | None:
    """Why nothing can be built here: no kernels, no sandbox, no compiler."""
    if ctx.target.device == "cuda" and ctx.candidate_tree is not None and not unit_names(ctx, ctx.candidate_tree):
        return {
            "code": "build.device",
            "message": f"the candidate has no kernel with a schedule for {', '.join(ctx.target.archs)}",
            "where": f"target {ctx.target.name}",
            "expected": "k3_backend/kernels/<op>/cute.py and k3_backend/schedules/<family>/<geometry>/<op>.toml",
            "next": "docs/kernel-authoring.md",
        }
    reason = sandbox.unavailable()
    if reason is not None:
        return {
            "code": "build.environment",
            "message": reason.message,
            "where": reason.where,
            "expected": reason.expected,
            "next": reason.next,
        }
    if ctx.target.device == "cuda":
        return missing_tools()
    probe = sandbox.run([COMPILER, "--version"], timeout_s=30)
    if probe.returncode:
        return {
            "code": "build.environment",
            "message": f"{COMPILER} does not run in the sandbox (status {probe.returncode})",
            "where": COMPILER,
            "expected": "GNU g++ 12 or newer below /usr",
            "next": "apt-get install g++",
        }
    return None


def _header(ctx: GateContext, ops: Iterable[str], base_ops: Iterable[str]) -> dict[str, Any]:
    return {
        "kind": "header",
        "gate": "build",
        "protocol": PROTOCOL_ID,
        "base": ctx.candidate.base,
        "head": ctx.candidate.head,
        "target": ctx.target.name,
        "archs": list(ctx.target.archs),
        "geometry": ctx.target.geometry,
        "ops": list(ops),
        "base_ops": list(base_ops),
        "limits": ctx.settings.build.model_dump(),
        "next": command_for("build", ctx),
    }


@dataclass(frozen=True)
class _Unit:
    """Outcome of one op on one architecture."""

    line: dict[str, Any]
    artifact: Artifact | None


class _Builder:
    """Builds one candidate's units, two at a time."""

    def __init__(self, ctx: GateContext, kernels: Path) -> None:
        self.ctx = ctx
        self.kernels = kernels
        self.geometry: Geometry = geometry(ctx.target.geometry)
        self.cache = artifact_cache(ctx.repo.root)
        self.changed = _changed_folders(ctx)
        self.versions: dict[tuple[str, ...], subprocess.CompletedProcess[str]] = {}
        _sweep(ctx.run_dir, "build-*", older_than_s=0.0)
        _sweep(self.cache, ".building-*", older_than_s=_ABANDONED_S)

    def build_all(self, ops: Iterable[str]) -> list[_Unit]:
        """Every op on every architecture, in a fixed order. Folders that name no op are reported, not built."""
        units: list[_Unit] = []
        pairs = []
        for op in ops:
            if (self.ctx.base_tree / "k3_backend" / "ops" / op / "interface.py").is_file():
                pairs += [(op, arch) for arch in self.ctx.target.archs]
            else:
                units.append(_Unit(_unknown_op(op), None))
        with tempfile.TemporaryDirectory(prefix="build-", dir=self.ctx.run_dir) as name:
            scratch = Path(name)
            # The second build reads another copy of the tree, so that its place cannot enter the object unnoticed.
            copy = scratch / "another-place" / "kernels"
            shutil.copytree(self.kernels, copy)
            scratch.chmod(0o755)
            with ThreadPoolExecutor(max_workers=JOBS) as pool:
                units += pool.map(lambda pair: self._unit(pair[0], pair[1], copy, scratch / "second"), pairs)
        return units

    def _unit(self, op: str, arch: str, copy: Path, second: Path) -> _Unit:
        changed = bool({op, "common"} & self.changed)
        try:
            first, seconds = self._timed(op, arch, self.kernels, self.cache, epoch=0)
            artifacts, times = [first], [seconds]
            if changed:
                again, seconds = self._timed(op, arch, copy, second, epoch=_SECOND_EPOCH)
                artifacts.append(again)
                times.append(seconds)
        except BuildError as error:
            return _Unit(self._error_line(op, arch, error), None)
        line = {
            "kind": "unit",
            "op": op,
            "arch": arch,
            "changed": changed,
            "inputs_digest": first.inputs_digest,
            "digests": [a.digest for a in artifacts],
            "seconds": times,
            "object_bytes": _size(first),
            "toolchain": dict(first.toolchain),
        }
        if len({a.digest for a in artifacts}) > 1:
            # The cache promises one artifact per key, so it keeps none that cannot be reproduced.
            shutil.rmtree(first.path)
            return _Unit(line, None)
        return _Unit(line, first)

    def _timed(self, op: str, arch: str, kernels: Path, out: Path, *, epoch: int) -> tuple[Artifact, float]:
        started = time.monotonic()
        artifact = build(op, arch, self.geometry, kernels, out, run=self._runner(kernels, epoch))
        return artifact, time.monotonic() - started

    def _runner(self, kernels: Path, epoch: int = 0) -> SandboxRunner:
        return SandboxRunner(kernels, self.ctx.settings.build, epoch, self.versions)

    def runtime(self) -> Artifact:
        """The trusted launcher."""
        return build_runtime(self.cache, run=self._runner(self.kernels))

    def best(self, arch: str) -> dict[str, Artifact]:
        """The current best's kernels for one architecture."""
        kernels = self.ctx.best_tree / KERNELS
        runner = self._runner(kernels)
        with ThreadPoolExecutor(max_workers=JOBS) as pool:
            ops = specialised_ops(kernels)
            built = pool.map(lambda op: build(op, arch, self.geometry, kernels, self.cache, run=runner), ops)
            return dict(zip(ops, built, strict=True))

    def _error_line(self, op: str, arch: str, error: BuildError) -> dict[str, Any]:
        limit = bool(_LIMIT_SIGNS.search(error.stderr))
        limits = self.ctx.settings.build
        sizes = f"{limits.memory_bytes >> 20} MiB of memory, {limits.output_bytes >> 20} MiB of output"
        bounds = f"{limits.seconds} s, {sizes} per compiler run"
        return {
            "kind": "error",
            "op": op,
            "arch": arch,
            "code": "build.limit" if limit else "build.compile_error",
            "message": self._in_repo(error.what.partition(": ")[2]),
            "where": self._in_repo(error.where),
            "expected": f"to stay within {bounds}" if limit else error.expected,
            "command": self._in_repo(error.command),
            "stderr": self._in_repo(error.stderr)[-_STDERR_CHARS:],
        }

    def _in_repo(self, text: str) -> str:
        """Exported places as repository paths: that is what the author knows."""
        return text.replace(str(self.kernels), str(KERNELS))


def _sweep(folder: Path, pattern: str, *, older_than_s: float) -> None:
    """Remove what killed builds left behind; folders that another process may still use are younger."""
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process swept it first
            if time.time() - path.stat().st_mtime >= older_than_s:
                shutil.rmtree(path)


def _unknown_op(op: str) -> dict[str, Any]:
    return {
        "kind": "error",
        "op": op,
        "arch": None,
        "code": "build.unknown_op",
        "message": "a kernel folder that names no op",
        "where": f"{KERNELS}/{op}/cpu.cc",
        "expected": "a folder of k3_backend/ops",
        "command": "",
        "stderr": "",
    }


def _size(artifact: Artifact) -> int:
    return artifact.object_path.stat().st_size


def _changed_folders(ctx: GateContext) -> frozenset[str]:
    """Names of the folders below the kernels tree in which the candidate differs from the base."""
    prefix = f"{KERNELS}/"
    changes = ctx.repo.changes(ctx.candidate.base, ctx.candidate.head)
    return frozenset(c.path.removeprefix(prefix).split("/")[0] for c in changes if c.path.startswith(prefix))


def _publish(ctx: GateContext, builder: _Builder, units: list[_Unit], host: str | None) -> None:
    """Set what later gates use: all artifacts, their digests, and, where this host can run one, the arms."""
    ctx.built = tuple(unit.artifact for unit in units if unit.artifact is not None)
    digests = {f"{a.op}/{a.arch}": a.digest for a in ctx.built}
    ctx.candidate = ctx.candidate.model_copy(update={"artifacts": digests})
    if host is None or ctx.candidate_tree is None:
        return
    ctx.arms = snapshot(
        ctx.run_dir / "arms",
        {a.op: a for a in ctx.built if a.arch == host},
        ctx.candidate_tree / SCHEDULES,
        builder.best(host),
        ctx.best_tree / SCHEDULES,
        builder.runtime(),
    )
