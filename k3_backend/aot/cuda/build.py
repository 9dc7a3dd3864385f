"""Build CUDA artifacts on any machine: one CuTe DSL file per op becomes cubins and a launch descriptor.

Which variants exist follows from data: for each combination of values that `kernels/<op>/cute.toml` specialises, the
schedule's buckets give the tunables. All of an op's variants are compiled by one process (`compiler.py`), which an
injectable `run` puts into a sandbox; its output is checked here before it becomes an artifact: every image must hold
exactly one kernel whose parameter table matches the arguments that the descriptor will pack.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_backend.aot.cache import cached, publish
from k3_backend.aot.compile import BuildError, Runner, run_local
from k3_backend.aot.cuda.arch import ARCHS
from k3_backend.aot.cuda.cubin import CubinError, read
from k3_backend.aot.cuda.descriptor import (
    DESCRIPTOR_NAME,
    PARAMETER_BYTES,
    Descriptor,
    LaunchSpec,
    ParameterSpec,
    VariantSpec,
    WorkspaceSpec,
    check_form,
)
from k3_backend.aot.manifest import Artifact, canonical_json, file_digest
from k3_backend.aot.schedule import Declarations, Schedule, ScheduleError, load_declarations
from k3_backend.errors import BackendError, StorageError
from k3_backend.geometry import GEOMETRIES, Geometry
from k3_backend.ops import ALL_OPS

__all__ = ["CUDA_ABI", "build", "build_all", "choices", "scheduled", "specialised_ops", "specialised_values"]

CUDA_ABI = 1
"""Version of the parameter convention between descriptor and launcher."""

TOOLS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13")
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class _Unit:
    op: str
    arch: str
    geometry: Geometry
    kernels: Path
    schedules: Path

    def error(self, what: str, *, where: str, expected: str, stderr: str = "") -> BuildError:
        return BuildError(
            what, op=self.op, arch=self.arch, where=where, expected=expected, next="docs/kernel-authoring.md",
            stderr=stderr,
        )  # fmt: skip

    @property
    def schedule_path(self) -> Path:
        return self.schedules / ARCHS[self.arch].schedules / self.geometry.name / f"{self.op}.toml"


def specialised_ops(kernels_dir: Path) -> tuple[str, ...]:
    """Ops that have a CuTe DSL kernel in a tree, sorted."""
    return tuple(sorted(path.parent.name for path in kernels_dir.glob("*/cute.py")))


def scheduled(arch: str, kernels_dir: Path, schedules_dir: Path) -> tuple[tuple[str, str], ...]:
    """(op, geometry name) pairs that have a kernel and a schedule for an architecture: what there is to build."""
    family = schedules_dir / ARCHS[arch].schedules
    ops = specialised_ops(kernels_dir)
    found = ((path.stem, path.parent.name) for path in family.glob("*/*.toml"))
    return tuple(sorted(pair for pair in found if pair[0] in ops and pair[1] in GEOMETRIES))


def specialised_values(declared: Declarations, geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Values that machine code exists for, geometry fields resolved; ScheduleError names a field that is none."""
    values: dict[str, tuple[int, ...]] = {}
    for name, entries in declared.specialised.items():
        resolved = []
        for entry in entries:
            value = getattr(geometry, entry, None) if isinstance(entry, str) else entry
            if not isinstance(value, int):
                raise ScheduleError(
                    f"specialised.{name}: {entry!r} is no integer field of a geometry", where="cute.toml",
                    expected="a field or width of k3_backend.geometry.Geometry", next="docs/kernel-authoring.md",
                )  # fmt: skip
            resolved.append(value)
        values[name] = tuple(dict.fromkeys(resolved))
    return values


def choices(declared: Declarations, schedule: Schedule, geometry: Geometry) -> list[dict[str, dict[str, int]]]:
    """Every distinct (tunables, specialised) pair that a call can ask for, in a fixed order."""
    values = specialised_values(declared, geometry)
    seen: dict[str, dict[str, dict[str, int]]] = {}
    for combination in itertools.product(*values.values()):
        sizes = dict(zip(values, combination, strict=True))
        for bucket in schedule.buckets:
            if bucket.applies(sizes):
                choice = {"tunables": dict(bucket.values), "specialised": sizes}
                seen.setdefault(canonical_json(choice), choice)
    return list(seen.values())


def build(
    op: str,
    arch: str,
    geometry: Geometry,
    kernels_dir: Path,
    schedules_dir: Path,
    out_dir: Path,
    *,
    run: Runner = run_local,
    only: Sequence[Mapping[str, Any]] | None = None,
) -> Artifact:
    """Build one op's CUDA artifact, or return it from the cache.

    Args:
        op: folder name below `kernels_dir`.
        arch: a key of `aot.cuda.arch.ARCHS`.
        geometry: shapes that the kernels are compiled for.
        kernels_dir: tree named `kernels`, with `<op>/cute.py` and `<op>/cute.toml`. May be an untrusted candidate's.
        schedules_dir: tree with `<family>/<geometry>/<op>.toml`.
        out_dir: cache folder, created if absent.
        run: starts the compiling process; inject a sandbox for untrusted sources.
        only: these choices instead of the schedule's (tuning).

    Raises:
        BuildError: missing or unfit source or schedule, failing compiler; names op, schedule, arch and line.
        StorageError: the artifact cannot be written.
    """
    unit = _Unit(op, arch, geometry, kernels_dir.resolve(), schedules_dir.resolve())
    if arch not in ARCHS:
        raise unit.error("unknown architecture", where=arch, expected=f"one of {', '.join(ARCHS)}")
    source, toml = unit.kernels / op / "cute.py", unit.kernels / op / "cute.toml"
    for file in (source, toml):
        if not file.is_file() or file.is_symlink():
            raise unit.error("no such regular file", where=str(file), expected="a folder with cute.py and cute.toml")
    declared, wanted = _wanted(unit, toml, only)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=out_dir.resolve()) as name:
            staging = Path(name)
            digest = _inputs_digest(unit, wanted)
            final = out_dir.resolve() / f"{op}-{arch}-{geometry.name}-{digest[:20]}"
            return cached(final, digest) or publish(_make(unit, declared, wanted, digest, staging, run), final)
    except OSError as error:
        raise StorageError(
            f"cannot write the artifact ({error.strerror or error})", where=str(out_dir),
            expected="a writable folder with free space", next=f"df -h {out_dir.parent}",
        ) from error  # fmt: skip


def build_all(
    units: Iterable[tuple[str, str]],
    arch: str,
    kernels_dir: Path,
    schedules_dir: Path,
    out_dir: Path,
    *,
    run: Runner = run_local,
    jobs: int = 2,
) -> dict[tuple[str, str], Artifact]:
    """Build (op, geometry name) pairs, `jobs` processes at a time, in the order given.

    Raises:
        BuildError: of the first pair, in that order, that does not build; the others are still finished.
    """
    names = list(units)
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        pending = {
            (op, name): pool.submit(build, op, arch, GEOMETRIES[name], kernels_dir, schedules_dir, out_dir, run=run)
            for op, name in names
        }
    return {key: future.result() for key, future in pending.items()}


def _wanted(
    unit: _Unit, toml: Path, only: Sequence[Mapping[str, Any]] | None
) -> tuple[Declarations, list[dict[str, dict[str, int]]]]:
    try:
        declared = load_declarations(toml)
        if only is not None:
            return declared, [dict(choice) for choice in only]
        schedule = Schedule.load(
            unit.schedule_path, op=unit.op, geometry=unit.geometry.name, tunables=declared.tunables,
            specialised=specialised_values(declared, unit.geometry),
        )  # fmt: skip
        return declared, choices(declared, schedule, unit.geometry)
    except ScheduleError as error:
        raise unit.error(error.what, where=error.where, expected=error.expected) from error


def toolchain() -> dict[str, str]:
    """Tool to version; PackageNotFoundError if the DSL is not installed."""
    return {name: importlib.metadata.version(name) for name in TOOLS}


def _inputs_digest(unit: _Unit, wanted: Sequence[Mapping[str, Any]]) -> str:
    """sha256 over everything that decides the artifact's bytes, independent of where the trees lie."""
    try:
        tools = toolchain()
    except importlib.metadata.PackageNotFoundError as error:
        raise unit.error(f"no CuTe DSL ({error})", where="nvidia_cutlass_dsl", expected="make setup") from error
    trusted = sorted(Path(__file__).parent.glob("*.py")) + sorted((_PACKAGE / "ops" / unit.op).glob("interface.py"))
    return hashlib.sha256(
        canonical_json({
            "op": unit.op, "arch": unit.arch, "geometry": repr(unit.geometry), "abi": CUDA_ABI, "tools": tools,
            "python": f"{sys.version_info.major}.{sys.version_info.minor}", "choices": list(wanted),
            "sources": {name: file_digest(unit.kernels.parent / name) for name in _sources(unit)},
            "builder": {str(p.relative_to(_PACKAGE)): file_digest(p) for p in trusted},
        }).encode()
    ).hexdigest()  # fmt: skip


def _sources(unit: _Unit) -> tuple[str, ...]:
    """Every file that `kernels/<op>/cute.py` imports from its own tree, itself included, relative to the tree's parent.

    The compiling process loads no other file of the tree (it is compared afterwards), so these decide the result.
    """
    found: dict[str, None] = {}
    left = [f"kernels/{unit.op}/cute.py"]
    while left:
        name = left.pop()
        path = unit.kernels.parent / name
        if name in found or not path.is_file() or path.is_symlink():
            continue
        found[name] = None
        try:
            tree = ast.parse(path.read_bytes(), filename=name)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise unit.error(f"is not Python ({error})", where=f"{name}:{line}", expected="Python source") from error
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            left += [m.replace(".", "/") + ".py" for m in modules if m.split(".", maxsplit=1)[0] == "kernels"]
    return tuple(sorted(found))


def _make(
    unit: _Unit,
    declared: Declarations,
    wanted: Sequence[Mapping[str, Any]],
    digest: str,
    staging: Path,
    run: Runner,
) -> Artifact:
    scratch, result = staging / "scratch", staging / "artifact"
    (scratch / "dump").mkdir(parents=True)
    (scratch / "out").mkdir()
    result.mkdir()
    compiled = _compile(unit, wanted, scratch, run)
    variants = tuple(_variant(unit, raw, scratch / "out") for raw in compiled)
    descriptor = Descriptor(
        op=unit.op, arch=unit.arch, geometry=unit.geometry.name, tunables=tuple(t.name for t in declared.tunables),
        specialised=tuple(declared.specialised), variants=variants,
    )  # fmt: skip
    try:
        check_form(descriptor, ALL_OPS[unit.op])
    except (ValueError, BackendError) as error:
        raise unit.error(str(error), where=f"kernels/{unit.op}/cute.py", expected="a valid variant") from error
    for image in descriptor.images():
        shutil.copyfile(scratch / "out" / image, result / image)
        shutil.copyfile((scratch / "out" / image).with_suffix(".ptx"), (result / image).with_suffix(".ptx"))
    shutil.copyfile(unit.kernels / unit.op / "cute.toml", result / "cute.toml")
    (result / DESCRIPTOR_NAME).write_text(descriptor.to_text(), encoding="utf-8")
    artifact = Artifact(
        op=unit.op, arch=unit.arch, geometry=unit.geometry.name, device="cuda", abi=CUDA_ABI,
        files={file.name: file_digest(file) for file in sorted(result.iterdir())},
        toolchain=toolchain(), inputs_digest=digest, path=result,
    )  # fmt: skip
    if _inputs_digest(unit, wanted) != digest:
        expected = "sources and tools that stay as they are until the build ends"
        where = f"kernels/{unit.op}/cute.py"
        raise unit.error("the inputs changed during the build", where=where, expected=expected)
    artifact.write()
    return artifact


def _compile(unit: _Unit, wanted: Sequence[Mapping[str, Any]], scratch: Path, run: Runner) -> list[dict[str, Any]]:
    request = {"op": unit.op, "arch": unit.arch, "geometry": unit.geometry.name, "choices": list(wanted)}
    (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
    command = [
        "env", "-C", str(unit.kernels.parent), f"CUTE_DSL_ARCH={unit.arch}", "CUTE_DSL_KEEP=ptx,cubin",
        f"CUTE_DSL_DUMP_DIR={scratch / 'dump'}",
        "CUTE_DSL_NO_CACHE=1", "PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={_PACKAGE.parent}",
        sys.executable, "-m", "k3_backend.aot.cuda.compiler", str(scratch / "request.json"), str(scratch / "out"),
    ]  # fmt: skip
    done = run(command, scratch)
    result, problem = scratch / "out" / "result.json", scratch / "out" / "error.json"
    if problem.is_file():
        found = json.loads(problem.read_text(encoding="utf-8"))
        place = f"{found['file_line'] or f'kernels/{unit.op}/cute.py'}"
        what = f"launch {found['launch'] or '-'} with {_spell(found['choices'])}: {found['error'][:600]}"
        raise unit.error(what, where=place, expected="a kernel that compiles", stderr=found["traceback"])
    if done.returncode != 0 or not result.is_file():
        what = f"the compiler ended with status {done.returncode}"
        raise unit.error(what, where=f"kernels/{unit.op}/cute.py", expected="status 0", stderr=done.stderr[-4000:])
    answer = json.loads(result.read_text(encoding="utf-8"))
    if unknown := set(answer["loaded"]) - set(_sources(unit)):
        what = f"files outside the hashed sources were imported: {', '.join(sorted(unknown))}"
        raise unit.error(what, where=f"kernels/{unit.op}/cute.py", expected="plain import statements")
    compiled = answer["variants"]
    if not isinstance(compiled, list) or len(compiled) != len(wanted):
        raise unit.error("incomplete compiler result", where=f"kernels/{unit.op}/cute.py", expected="all variants")
    return compiled


def _spell(choice: Mapping[str, Any] | None) -> str:
    if not choice:
        return "no choices"
    return ", ".join(f"{k} = {v}" for part in choice.values() for k, v in part.items())


def _variant(unit: _Unit, raw: Mapping[str, Any], out: Path) -> VariantSpec:
    return VariantSpec(
        choices=dict(raw["choices"]),
        launches=tuple(_launch(unit, entry, out) for entry in raw["launches"]),
        workspaces=tuple(WorkspaceSpec(**entry) for entry in raw["workspaces"]),
        requires=tuple(raw["requires"]),
    )


def _launch(unit: _Unit, raw: Mapping[str, Any], out: Path) -> LaunchSpec:
    """One launch with what the cubin itself says; the image's name is the digest of its bytes, computed here."""
    image = out / Path(raw["image"]).name
    where = f"kernels/{unit.op}/cute.py, launch {raw['name']}"
    try:
        found = tuple(read(image.read_bytes()).kernels.values())
    except CubinError as error:
        raise unit.error(error.what, where=where, expected="a readable cubin") from error
    if len(found) != 1 or f"{file_digest(image)}.cubin" != image.name:
        raise unit.error(f"{len(found)} kernels in {image.name}", where=where, expected="one kernel, named by digest")
    kernel = found[0]
    sizes = [PARAMETER_BYTES[p["kind"]] for p in raw["parameters"]]
    if [(p.index, p.size) for p in kernel.parameters] != list(enumerate(sizes)):
        what = f"the cubin reads parameters of {[p.size for p in kernel.parameters]} bytes"
        raise unit.error(what, where=where, expected=f"{sizes}: flat pointers and 32-bit numbers, all of them used")
    if raw["shared"] + kernel.shared_bytes > ARCHS[unit.arch].max_shared_per_block:
        what = f"{raw['shared']} + {kernel.shared_bytes} bytes of shared memory"
        raise unit.error(what, where=where, expected=f"at most {ARCHS[unit.arch].max_shared_per_block}")
    if kernel.registers is None:
        raise unit.error("the cubin names no register count", where=where, expected="an entry of .nv.info")
    parameters = tuple(
        ParameterSpec(
            p["name"],
            p["kind"],
            p["role"],
            k.offset,
            p["expression"],
            p["tensor"],
            None if p["box"] is None else (int(p["box"][0]), int(p["box"][1])),
        )
        for p, k in zip(raw["parameters"], kernel.parameters, strict=True)
    )
    return LaunchSpec(
        name=raw["name"], image=image.name, entry=kernel.name, parameters=parameters, grid=tuple(raw["grid"]),
        block=raw["block"], cluster=raw["cluster"], shared=raw["shared"], min_ctas_per_sm=raw["min_ctas_per_sm"],
        pdl=raw["pdl"], expects=tuple(raw["expects"]), polling=raw["polling"], registers=kernel.registers,
        static_shared=kernel.shared_bytes, urgent=raw["urgent"], carveout=raw["carveout"],
    )  # fmt: skip
