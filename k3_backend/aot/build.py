"""Build CPU artifacts: one C++ file per op becomes one shared object with digests, from source bytes alone.

`build` compiles `kernels/<op>/cpu.cc` for an architecture level and a geometry; `build_runtime` compiles the trusted
launcher. Results live in a content-addressed cache: the key hashes every source and header of the op, the calling
convention, flags, geometry macros and tool versions, and the same key gives the same bytes in any folder. The compiler
is started through an injectable `run`, so that a gatekeeper can put it into a sandbox. Nothing built is loaded here.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from k3_backend.aot.cache import cached, publish
from k3_backend.aot.compile import (
    ABI_DIR,
    ABI_VERSION,
    BuildError,
    FfiPaths,
    Inputs,
    Runner,
    Unit,
    compile_unit,
    run_local,
)
from k3_backend.aot.cpu.host import ARCHS
from k3_backend.aot.manifest import Artifact, file_digest
from k3_backend.aot.schedule import ScheduleError, load_tunables
from k3_backend.errors import StorageError
from k3_backend.geometry import Geometry

__all__ = [
    "ABI_VERSION", "KERNELS_DIR", "SCHEDULES_DIR", "BuildError", "Runner", "build", "build_all", "build_runtime",
    "default_cache_dir", "geometry_macros", "read_only_inputs", "run_local", "specialised_ops",
]  # fmt: skip

_PACKAGE = Path(__file__).resolve().parent.parent
KERNELS_DIR = _PACKAGE / "kernels"
SCHEDULES_DIR = _PACKAGE / "schedules"
_DERIVED_MACROS = ("kda_width", "kda_proj_rows", "mla_row", "mla_proj_rows", "mla_width", "attn_res_blocks")


def default_cache_dir() -> Path:
    """Where artifacts of a developer's machine are kept: `$XDG_CACHE_HOME/k3_backend`, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k3_backend"


def specialised_ops(kernels_dir: Path = KERNELS_DIR) -> tuple[str, ...]:
    """Ops that have a CPU kernel in a tree, sorted."""
    return tuple(sorted(path.parent.name for path in kernels_dir.glob("*/cpu.cc")))


def geometry_macros(geometry: Geometry) -> dict[str, int]:
    """`K3_<FIELD>` for every integer field of a geometry and for its derived widths."""
    fields = [f.name for f in dataclasses.fields(geometry)]
    values = {name: getattr(geometry, name) for name in (*fields, *_DERIVED_MACROS)}
    return {f"K3_{name.upper()}": value for name, value in sorted(values.items()) if isinstance(value, int)}


def read_only_inputs(kernels_dir: Path = KERNELS_DIR) -> tuple[Path, ...]:
    """Folders that a sandboxed `run` must make readable, besides the system's compiler; its cwd must be writable."""
    ffi = FfiPaths.installed()
    return (kernels_dir.resolve(), ABI_DIR, ffi.include, ffi.library.parent)


def build(
    op: str,
    arch: str,
    geometry: Geometry,
    kernels_dir: Path = KERNELS_DIR,
    out_dir: Path | None = None,
    *,
    run: Runner = run_local,
) -> Artifact:
    """Build one op's CPU kernel, or return it from the cache.

    Args:
        op: folder name below `kernels_dir`.
        arch: a key of `aot.cpu.host.ARCHS`.
        geometry: enters the object as `K3_*` macros.
        kernels_dir: tree with `<op>/cpu.cc`, `<op>/cpu.toml` and `common/*.h`. May be an untrusted candidate's.
        out_dir: cache folder, created if absent; default `default_cache_dir()`.
        run: starts the compiler; inject a sandbox for untrusted sources (`read_only_inputs` lists what it needs).

    Raises:
        BuildError: missing or unfit source, unknown arch, failing compiler; carries command and stderr.
        StorageError: the artifact cannot be written.
    """
    root = kernels_dir.resolve()
    folder, common = root / op, root / "common"
    source, declarations = folder / "cpu.cc", folder / "cpu.toml"
    sources = tuple(sorted(p for d in (folder, common) if d.is_dir() for p in d.rglob("*") if _is_regular(p)))
    macros = tuple(f"-D{name}={value}" for name, value in geometry_macros(geometry).items())
    flags = ARCHS[arch].compiler_flags if arch in ARCHS else ()
    unit = Unit(op, arch, geometry.name, root, source, sources, (declarations,), (*flags, *macros))
    if arch not in ARCHS:
        raise unit.error("unknown architecture level", where=arch, expected=f"one of {', '.join(ARCHS)}")
    for file in (source, declarations):
        if not _is_regular(file):
            raise unit.error("no such regular file", where=file, expected="a folder with cpu.cc and cpu.toml")
    try:
        load_tunables(declarations)
    except ScheduleError as error:
        raise unit.error(error.what, where=error.where, expected=error.expected) from error
    return _build_unit(unit, out_dir or default_cache_dir(), run)


def build_runtime(out_dir: Path | None = None, *, run: Runner = run_local) -> Artifact:
    """Build the trusted CPU runtime (`aot/cpu/runtime.cc`), or return it from the cache.

    Raises:
        BuildError: the compiler fails or is missing.
    """
    source = ABI_DIR / "runtime.cc"
    unit = Unit("runtime", "x86-64", "any", ABI_DIR, source, (source,), (), ("-march=x86-64", "-pthread"))
    return _build_unit(unit, out_dir or default_cache_dir(), run)


def build_all(
    ops: Iterable[str],
    arch: str,
    geometry: Geometry,
    kernels_dir: Path = KERNELS_DIR,
    out_dir: Path | None = None,
    *,
    run: Runner = run_local,
    jobs: int = 2,
) -> dict[str, Artifact]:
    """Build several ops, `jobs` compilers at a time; op name to artifact, in the order given.

    Raises:
        BuildError: of the first op, in the order given, that does not build; the others are still finished.
    """
    names = list(ops)
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        pending = {op: pool.submit(build, op, arch, geometry, kernels_dir, out_dir, run=run) for op in names}
    return {op: future.result() for op, future in pending.items()}


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _build_unit(unit: Unit, out_dir: Path, run: Runner) -> Artifact:
    """The cached artifact of the unit's key, or a fresh one: staged in a private folder, then moved into place."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=out_dir.resolve()) as name:
            staging = Path(name)
            inputs = unit.inputs(run, staging)
            final = out_dir.resolve() / f"{unit.op}-{unit.arch}-{unit.geometry}-{inputs.digest[:20]}"
            return cached(final, inputs.digest) or publish(_make(unit, inputs, staging, run), final)
    except OSError as error:
        raise StorageError(
            f"cannot write the artifact ({error.strerror or error})", where=str(out_dir),
            expected="a writable folder with free space", next=f"df -h {out_dir.parent}",
        ) from error  # fmt: skip


def _make(unit: Unit, inputs: Inputs, staging: Path, run: Runner) -> Artifact:
    """Compile in one folder, collect the result in another; both lie in `staging`."""
    scratch = staging / "scratch"
    result = staging / "artifact"
    scratch.mkdir()
    result.mkdir()
    compile_unit(unit, inputs.ffi, run, scratch)
    for file in (scratch / unit.object_name, *unit.extra_files):
        shutil.copyfile(file, result / file.name)
    files = {file.name: file_digest(file) for file in sorted(result.iterdir())}
    artifact = Artifact(
        op=unit.op, arch=unit.arch, geometry=unit.geometry, device="cpu", abi=ABI_VERSION, files=files,
        toolchain=inputs.toolchain, inputs_digest=inputs.digest, path=result,
    )  # fmt: skip
    if unit.inputs(run, scratch) != inputs:
        expected = "sources and tools that stay as they are until the build ends"
        raise unit.error("the inputs changed during the build", where=unit.source, expected=expected)
    artifact.write()
    return artifact
