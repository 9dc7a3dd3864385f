"""One compiler run: the exact command, what its result depends on, and what went wrong if it failed.

`build.py` decides what to build and where results are kept; this module knows g++. Flags are fixed per architecture
level, paths are mapped away, nothing of the time, the folder or the machine enters an object, and an object that
includes a file outside the hashed inputs is refused, because its cache key would not describe it.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from k3_backend.aot.manifest import canonical_json, file_digest
from k3_backend.errors import BackendError

__all__ = ["ABI_DIR", "ABI_VERSION", "BuildError", "FfiPaths", "Inputs", "Runner", "Unit", "compile_unit", "run_local"]

ABI_VERSION = 1
"""`K3_ABI_VERSION` of `aot/cpu/k3_cpu.h`."""

ABI_DIR = Path(__file__).resolve().parent / "cpu"
"""Folder of k3_cpu.h and runtime.cc: always this package's own, never a candidate's."""

Runner = Callable[[Sequence[str], Path], "subprocess.CompletedProcess[str]"]
"""Runs an argument list in a working folder and returns status, stdout and stderr; never raises on a bad status."""

COMPILER = "g++"
_SPARE_BYTES = 64 << 20
"""A compiler that ran out of space while less than this was free was stopped by the disk, not by its source."""
_COMPILE_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-ffp-contract=fast", "-nostartfiles",
    # No hidden helper calls or constructors: what the audit sees is what the source says.
    "-fno-threadsafe-statics", "-fno-stack-protector", "-fcf-protection=none", "-U_FORTIFY_SOURCE",
    "-g0", "-Wall", "-Wextra",
)  # fmt: skip
_LINK_FLAGS = ("-Wl,--build-id=none", "-Wl,--as-needed", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-z,noexecstack")


class BuildError(BackendError):
    """An op does not build. `where` is the first file:line the compiler names; `command` and `stderr` hold the rest."""

    def __init__(
        self,
        what: str,
        *,
        op: str,
        arch: str,
        where: str,
        expected: str,
        next: str,  # noqa: A002 - the field's name everywhere
        command: str = "",
        stderr: str = "",
    ) -> None:
        super().__init__(f"op {op} for {arch}: {what}", where=where, expected=expected, next=next)
        self.op = op
        self.arch = arch
        self.command = command
        self.stderr = stderr


@dataclass(frozen=True)
class FfiPaths:
    """Where the installed apache-tvm-ffi keeps what kernels compile and link against."""

    include: Path
    library: Path
    version: str

    @classmethod
    def installed(cls) -> FfiPaths:
        """Of the running interpreter's package; ImportError if apache-tvm-ffi is not installed."""
        from tvm_ffi import libinfo  # only building needs it: importing this module must not

        version = importlib.metadata.version("apache-tvm-ffi")
        return cls(Path(libinfo.find_include_path()).resolve(), Path(libinfo.find_libtvm_ffi()).resolve(), version)


class Inputs(NamedTuple):
    """What one build depends on, as found when it started."""

    ffi: FfiPaths
    toolchain: Mapping[str, str]
    """Tool to version line."""
    digest: str
    """sha256 over sources, headers, command and toolchain, independent of where the trees lie: the cache key."""


@dataclass(frozen=True)
class Unit:
    """One object to compile: its place in the tree, its flags, and the files whose bytes decide the result."""

    op: str
    arch: str
    geometry: str
    root: Path
    """Folder that is mapped away from the object and that all of `sources` lie in."""
    source: Path
    sources: tuple[Path, ...]
    """Every file that may be included from `root`, sorted."""
    extra_files: tuple[Path, ...]
    """Files copied into the artifact beside the object."""
    flags: tuple[str, ...]

    @property
    def object_name(self) -> str:
        """File name of the object inside the artifact folder."""
        return f"{self.op}.so"

    def error(
        self, what: str, *, where: str | Path, expected: str, command: Sequence[str] = (), stderr: str = "",
        next: str = "docs/kernel-authoring.md",  # noqa: A002 - the field's name everywhere
    ) -> BuildError:  # fmt: skip
        """A `BuildError` about this unit."""
        return BuildError(
            what, op=self.op, arch=self.arch, where=str(where), expected=expected, next=next,
            command=shlex.join(command), stderr=stderr,
        )  # fmt: skip

    def command(self, ffi: FfiPaths) -> list[str]:
        """The compiler's argument list; outputs are relative to its working folder."""
        return [
            COMPILER, *_COMPILE_FLAGS, *self.flags, f"-frandom-seed={self.op}",
            f"-ffile-prefix-map={self.root}=.", f"-ffile-prefix-map={ABI_DIR}=.",
            f"-ffile-prefix-map={ffi.include}=tvm_ffi",
            f"-I{ABI_DIR}", f"-I{self.root}", f"-I{ffi.include}", "-MMD", "-MF", f"{self.op}.d",
            "-o", self.object_name, str(self.source), *_LINK_FLAGS, f"-L{ffi.library.parent}", "-ltvm_ffi", "-lm",
        ]  # fmt: skip

    def inputs(self, run: Runner, cwd: Path) -> Inputs:
        """Look up the tools and hash everything that decides the object's bytes.

        Raises:
            BuildError: compiler, linker or apache-tvm-ffi missing.
        """
        try:
            ffi = FfiPaths.installed()
        except ImportError as error:
            expected = "apache-tvm-ffi in this environment (pip install 'k3-backend[cpu]')"
            raise self.error(f"no kernel ABI headers ({error})", where="tvm_ffi", expected=expected) from error
        toolchain = self._toolchain(ffi, run, cwd)
        shared = {
            "k3_cpu.h": ABI_DIR / "k3_cpu.h",
            "c_api.h": ffi.include / "tvm" / "ffi" / "c_api.h",
            "dlpack.h": ffi.include / "dlpack" / "dlpack.h",
        }
        places = {self.root: "<root>", ABI_DIR: "<abi>", ffi.include: "<ffi>", ffi.library.parent: "<ffi-lib>"}
        command = " ".join(self.command(ffi))
        for place in sorted(places, key=lambda path: len(str(path)), reverse=True):
            command = command.replace(str(place), places[place])
        content = {
            "abi": ABI_VERSION,
            "command": command,
            "toolchain": toolchain,
            "sources": {p.relative_to(self.root).as_posix(): file_digest(p) for p in self.sources},
            "headers": {name: file_digest(path) for name, path in shared.items()},
        }
        return Inputs(ffi, toolchain, hashlib.sha256(canonical_json(content).encode()).hexdigest())

    def _toolchain(self, ffi: FfiPaths, run: Runner, cwd: Path) -> dict[str, str]:
        versions = {}
        for tool in (COMPILER, "ld"):
            command = [tool, "--version"]
            try:
                done = run(command, cwd)
                problem = None if done.returncode == 0 and done.stdout.strip() else done.stderr.strip()[-200:]
            except OSError as error:
                problem = str(error)
            if problem is not None:
                raise self.error(
                    f"no usable compiler ({problem})", where=shlex.join(command), command=command, stderr=problem,
                    expected="GNU g++ 12 or newer with binutils on PATH", next="apt-get install g++",
                )  # fmt: skip
            versions[tool] = done.stdout.splitlines()[0].strip()
        return {**versions, "apache-tvm-ffi": ffi.version}


def run_local(argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a build command on this machine, unsandboxed: for trusted sources and developers' own kernels."""
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TMPDIR": str(cwd)}
    return subprocess.run(list(argv), cwd=cwd, env=env, text=True, errors="replace", capture_output=True, check=False)


def compile_unit(unit: Unit, ffi: FfiPaths, run: Runner, folder: Path) -> None:
    """Compile one unit into `folder/<op>.so`.

    Raises:
        BuildError: the compiler fails, leaves no regular file, or read a file that the cache key does not cover.
        OSError: the compiler fails because the disk is full.
    """
    command = unit.command(ffi)
    done = run(command, folder)
    if done.returncode != 0:
        if os.strerror(errno.ENOSPC) in done.stderr and shutil.disk_usage(folder).free < _SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        where, message = _first_error(done.stderr, unit)
        expected = f"{COMPILER} to exit with 0 (it exited with {done.returncode})"
        raise unit.error(message, where=where, expected=expected, command=command, stderr=done.stderr)
    result = folder / unit.object_name
    depfile = folder / f"{unit.op}.d"
    for file in (result, depfile):
        if file.is_symlink() or not file.is_file():
            raise unit.error("the compiler left no such file", where=file, expected="a regular file", command=command)
    _check_includes(unit, ffi, folder, depfile.read_text(encoding="utf-8", errors="replace"))
    depfile.unlink()


def _check_includes(unit: Unit, ffi: FfiPaths, folder: Path, depfile: str) -> None:
    """Refuse an object that includes unhashed files. -MMD lists all but the compiler's own headers."""
    hashed = {path.resolve() for path in unit.sources}
    for word in depfile.partition(":")[2].replace("\\\n", " ").split():
        path = (folder / word).resolve()
        if path not in hashed and not path.is_relative_to(ABI_DIR) and not path.is_relative_to(ffi.include):
            raise unit.error(
                f"includes {path}, which its cache key does not cover", where=unit.source,
                expected=f"headers from kernels/{unit.op}/, kernels/common/, k3_cpu.h and the compiler's own",
            )  # fmt: skip


def _first_error(stderr: str, unit: Unit) -> tuple[str, str]:
    """`file:line` and message of the first compiler or linker error; the tail of stderr if none is recognised."""
    error = r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.*)$"
    found = re.search(error, stderr, re.MULTILINE)
    if found:
        return f"{found['file']}:{found['line']}", found["text"]
    undefined = re.search(r"undefined reference to [`'](?P<symbol>[^'`]+)'", stderr)
    if undefined:
        return str(unit.source), f"undefined symbol {undefined['symbol']}"
    return str(unit.source), f"compiler failed: {stderr.strip()[-300:]}"
