"""Build CPU artifacts: one C++ file per op becomes one shared object with digests, from source bytes alone.

`build` compiles `kernels/<op>/cpu.cc` for an architecture level and a geometry; `build_runtime` compiles the trusted
launcher. Results live in a content-addressed cache: the key hashes every source and header of the op, the calling
convention, flags, geometry macros and tool versions, and the same key gives the same bytes in any folder. The compiler
is started through an injectable `run`, so that a gatekeeper can put it into a sandbox. Nothing built is loaded here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from k3_backend.aot.cpu.host import ARCHS
from k3_backend.aot.manifest import Artifact, ArtifactError, canonical_json, file_digest
from k3_backend.aot.schedule import ScheduleError, load_tunables
from k3_backend.errors import BackendError
from k3_backend.geometry import Geometry

__all__ = [
    "ABI_VERSION", "KERNELS_DIR", "SCHEDULES_DIR", "BuildError", "Runner", "build", "build_all", "build_runtime",
    "default_cache_dir", "geometry_macros", "read_only_inputs", "run_local", "specialised_ops",
]  # fmt: skip

ABI_VERSION = 1
"""`K3_ABI_VERSION` of `aot/cpu/k3_cpu.h`."""

_PACKAGE = Path(__file__).resolve().parent.parent
KERNELS_DIR = _PACKAGE / "kernels"
SCHEDULES_DIR = _PACKAGE / "schedules"
_ABI_DIR = _PACKAGE / "aot" / "cpu"

Runner = Callable[[Sequence[str], Path], "subprocess.CompletedProcess[str]"]
"""Runs an argument list in a working folder and returns status, stdout and stderr; never raises on a bad status."""

COMPILER = "g++"
_BASE_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-ffp-contract=fast", "-nostartfiles",
    # No hidden helper calls or constructors: what the audit sees is what the source says.
    "-fno-threadsafe-statics", "-fno-stack-protector", "-fcf-protection=none", "-U_FORTIFY_SOURCE",
    "-g0", "-Wall", "-Wextra",
)  # fmt: skip
_LINK_FLAGS = ("-Wl,--build-id=none", "-Wl,--as-needed", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-z,noexecstack")
_DERIVED_MACROS = ("kda_width", "kda_proj_rows", "mla_row", "mla_proj_rows", "mla_width", "attn_res_blocks")


class BuildError(BackendError):
    """An op does not build. `stderr` and `command` hold the compiler's side; `where` is the first file:line it names."""

    def __init__(
        self,
        what: str,
        *,
        op: str,
        arch: str,
        where: str,
        expected: str,
        next: str,
        command: str = "",
        stderr: str = "",  # noqa: A002
    ) -> None:
        super().__init__(f"op {op} for {arch}: {what}", where=where, expected=expected, next=next)
        self.op = op
        self.arch = arch
        self.command = command
        self.stderr = stderr


def run_local(argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a build command on this machine, unsandboxed: for trusted sources and developers' own kernels."""
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TMPDIR": str(cwd)}
    return subprocess.run(list(argv), cwd=cwd, env=env, text=True, errors="replace", capture_output=True, check=False)


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


def _ffi_paths() -> tuple[Path, Path, str]:
    """Include folder, library file and version of the installed apache-tvm-ffi."""
    from tvm_ffi import libinfo

    return (
        Path(libinfo.find_include_path()),
        Path(libinfo.find_libtvm_ffi()),
        importlib.metadata.version("apache-tvm-ffi"),
    )


def read_only_inputs(kernels_dir: Path = KERNELS_DIR) -> tuple[Path, ...]:
    """Folders that a sandboxed `run` must make readable, besides the system's compiler; its cwd must be writable."""
    include, library, _ = _ffi_paths()
    return (kernels_dir, _ABI_DIR, include, library.parent)


@dataclasses.dataclass(frozen=True)
class _Unit:
    """One object to compile: its place in the tree, its flags, and the files whose bytes decide the result."""

    op: str
    arch: str
    geometry: str
    root: Path
    """Folder that is mapped away from the object and that all of `sources` lie in."""
    source: Path
    sources: tuple[Path, ...]
    extra_files: tuple[Path, ...]
    """Files copied into the artifact beside the object."""
    flags: tuple[str, ...]


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
    """
    if arch not in ARCHS:
        raise BuildError(
            "unknown architecture level",
            op=op,
            arch=arch,
            where=arch,
            expected=f"one of {', '.join(ARCHS)}",
            next="fasttrack targets",
        )
    folder, common = kernels_dir / op, kernels_dir / "common"
    source, declarations = folder / "cpu.cc", folder / "cpu.toml"
    for file in (source, declarations):
        if file.is_symlink() or not file.is_file():
            raise BuildError(
                "no such regular file",
                op=op,
                arch=arch,
                where=str(file),
                expected="cpu.cc and cpu.toml",
                next="docs/kernel-authoring.md",
            )
    try:
        load_tunables(declarations)
    except ScheduleError as error:
        raise BuildError(
            error.what, op=op, arch=arch, where=error.where, expected=error.expected, next=error.next
        ) from error
    sources = tuple(
        sorted(p for d in (folder, common) if d.is_dir() for p in d.rglob("*") if p.is_file() and not p.is_symlink())
    )
    macros = tuple(f"-D{name}={value}" for name, value in geometry_macros(geometry).items())
    flags = (*ARCHS[arch].compiler_flags, *macros)
    unit = _Unit(op, arch, geometry.name, kernels_dir, source, sources, (declarations,), flags)
    return _build_unit(unit, out_dir or default_cache_dir(), run)


def build_runtime(out_dir: Path | None = None, *, run: Runner = run_local) -> Artifact:
    """Build the trusted CPU runtime (`aot/cpu/runtime.cc`), or return it from the cache.

    Raises:
        BuildError: the compiler fails or is missing.
    """
    source = _ABI_DIR / "runtime.cc"
    unit = _Unit("runtime", "x86-64", "any", _ABI_DIR, source, (source,), (), ("-march=x86-64", "-pthread"))
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


def _toolchain(unit: _Unit, run: Runner, cwd: Path) -> dict[str, str]:
    versions = {}
    for tool in (COMPILER, "ld"):
        command = [tool, "--version"]
        try:
            done = run(command, cwd)
        except OSError as error:
            raise _tool_error(unit, command, str(error)) from error
        if done.returncode != 0 or not done.stdout.strip():
            raise _tool_error(unit, command, done.stderr)
        versions[tool] = done.stdout.splitlines()[0].strip()
    return {**versions, "apache-tvm-ffi": _ffi_paths()[2]}


def _tool_error(unit: _Unit, command: Sequence[str], stderr: str) -> BuildError:
    return BuildError(
        f"compiler is not usable: {stderr.strip()[-200:]}", op=unit.op, arch=unit.arch, where=shlex.join(command),
        expected="GNU g++ 12 or newer with binutils on PATH", next="apt-get install g++", command=shlex.join(command), stderr=stderr,
    )  # fmt: skip


def _command(unit: _Unit) -> list[str]:
    include, library, _ = _ffi_paths()
    return [
        COMPILER, *_BASE_FLAGS, *unit.flags, f"-frandom-seed={unit.op}",
        f"-ffile-prefix-map={unit.root}=.", f"-ffile-prefix-map={_ABI_DIR}=.", f"-ffile-prefix-map={include}=tvm_ffi",
        f"-I{_ABI_DIR}", f"-I{unit.root}", f"-I{include}", "-MMD", "-MF", f"{unit.op}.d",
        "-o", f"{unit.op}.so", str(unit.source), *_LINK_FLAGS, f"-L{library.parent}", "-ltvm_ffi", "-lm",
    ]  # fmt: skip


def _inputs_digest(unit: _Unit, toolchain: dict[str, str]) -> str:
    include, library, _ = _ffi_paths()
    shared = {
        "k3_cpu.h": _ABI_DIR / "k3_cpu.h",
        "c_api.h": include / "tvm" / "ffi" / "c_api.h",
        "dlpack.h": include / "dlpack" / "dlpack.h",
    }
    places = {str(unit.root): "<root>", str(_ABI_DIR): "<abi>", str(include): "<ffi>", str(library.parent): "<ffi-lib>"}
    command = _command(unit)
    for place in sorted(places, key=len, reverse=True):
        command = [part.replace(place, places[place]) for part in command]
    content = {
        "abi": ABI_VERSION,
        "command": command,
        "toolchain": toolchain,
        "sources": {p.relative_to(unit.root).as_posix(): file_digest(p) for p in unit.sources},
        "headers": {name: file_digest(path) for name, path in shared.items()},
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def _build_unit(unit: _Unit, out_dir: Path, run: Runner) -> Artifact:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".building-", dir=out_dir))
    except OSError as error:
        raise BuildError(
            f"cannot write ({error.strerror})", op=unit.op, arch=unit.arch, where=str(out_dir),
            expected="a writable folder with free space", next="choose another output folder",
        ) from error  # fmt: skip
    try:
        toolchain = _toolchain(unit, run, staging)
        key = _inputs_digest(unit, toolchain)
        final = out_dir.resolve() / f"{unit.op}-{unit.arch}-{unit.geometry}-{key[:20]}"
        cached = _cached(final, key)
        if cached is not None:
            return cached
        _compile(unit, staging, run)
        files = {}
        for file in unit.extra_files:
            shutil.copyfile(file, staging / file.name)
        for name in (f"{unit.op}.so", *(f.name for f in unit.extra_files)):
            files[name] = file_digest(staging / name)
        artifact = Artifact(
            op=unit.op, arch=unit.arch, geometry=unit.geometry, device="cpu", abi=ABI_VERSION, files=files,
            toolchain=toolchain, inputs_digest=key, path=staging,
        )  # fmt: skip
        artifact.write()
        return _publish(artifact, final, key)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _cached(final: Path, key: str) -> Artifact | None:
    """The finished artifact of this key; a damaged entry (interrupted disk, edited by hand) is removed and rebuilt."""
    if not final.is_dir():
        return None
    try:
        artifact = Artifact.read(final)
    except ArtifactError:
        shutil.rmtree(final)
        return None
    return artifact if artifact.inputs_digest == key else None


def _publish(artifact: Artifact, final: Path, key: str) -> Artifact:
    """Move the staged folder into place; if another builder was first, its (equal) result is used."""
    try:
        artifact.path.rename(final)
    except OSError:
        winner = _cached(final, key)
        if winner is None:
            raise
        return winner
    return dataclasses.replace(artifact, path=final)


def _compile(unit: _Unit, staging: Path, run: Runner) -> None:
    command = _command(unit)
    done = run(command, staging)
    if done.returncode != 0:
        where, message = _first_error(done.stderr, unit)
        raise BuildError(
            message, op=unit.op, arch=unit.arch, where=where, expected=f"{COMPILER} to exit with 0 (it exited with {done.returncode})",
            next=f"fasttrack build --op {unit.op} --arch {unit.arch}", command=shlex.join(command), stderr=done.stderr,
        )  # fmt: skip
    object_file = staging / f"{unit.op}.so"
    if object_file.is_symlink() or not object_file.is_file():
        raise BuildError(
            "the compiler left no object", op=unit.op, arch=unit.arch, where=str(object_file), expected="a shared object",
            next=f"fasttrack build --op {unit.op} --arch {unit.arch}", command=shlex.join(command), stderr=done.stderr,
        )  # fmt: skip
    _check_includes(unit, staging)


def _check_includes(unit: _Unit, staging: Path) -> None:
    """Refuse an object whose bytes depend on files that its cache key does not hash."""
    depfile = (staging / f"{unit.op}.d").read_text(encoding="utf-8", errors="replace")
    include, _, _ = _ffi_paths()
    hashed = {p.resolve() for p in unit.sources}
    for word in (
        depfile.partition(":")[2].replace("\\\n", " ").split()
    ):  # -MMD: the compiler's own headers are not listed
        path = (staging / word).resolve()
        if path in hashed or path.is_relative_to(_ABI_DIR) or path.is_relative_to(include.resolve()):
            continue
        raise BuildError(
            f"includes {path}, which its cache key does not cover", op=unit.op, arch=unit.arch, where=str(unit.source),
            expected=f"headers from kernels/{unit.op}/, kernels/common/, k3_cpu.h and the compiler's own", next="docs/kernel-authoring.md",
        )  # fmt: skip


def _first_error(stderr: str, unit: _Unit) -> tuple[str, str]:
    """`file:line` and message of the first compiler or linker error; the tail of stderr if none is recognised."""
    found = re.search(
        r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.*)$", stderr, re.MULTILINE
    )
    if found:
        return f"{found['file']}:{found['line']}", found["text"]
    undefined = re.search(r"undefined reference to [`'](?P<symbol>[^'`]+)'", stderr)
    if undefined:
        return str(unit.source), f"undefined symbol {undefined['symbol']}"
    return str(unit.source), f"compiler failed: {stderr.strip()[-300:]}"
