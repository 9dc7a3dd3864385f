"""Run untrusted programs (candidates' compilers, workers that load candidates' objects) under bubblewrap.

Inside there is no network, no host process, no environment variable and no file beyond the system's programs and
libraries and what the caller names; only the named folders and a private /tmp can be written. Limits hold per process
for memory, CPU time and file size, and per sandbox for the number of processes. When the sandbox's parent dies, or
`kill` is called, everything inside dies with it. As root, the program runs as a user that owns nothing; a normal user
gets a user namespace without capabilities.

What this does not do: judge what ran, bound the summed memory of all processes (the kernel is told to kill the sandbox
first when memory runs out), or hide timing side channels. Kernel bugs are out of scope.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.errors import FasttrackError
from harness.records import Reason

__all__ = ["Finished", "Limits", "kill", "popen", "python_paths", "require", "run", "unavailable"]

Fd = int | IO[bytes] | None

_TOOLS = ("bwrap", "prlimit", "setpriv", "choom", "taskset", "env")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_MIN_VERSION = (0, 5)
"""First bubblewrap with --perms and --size."""
_PATH = "/usr/bin:/bin"
_TMP = "/tmp"  # noqa: S108 - a private file system inside the sandbox
_SHM = "/dev/shm"  # noqa: S108 - likewise


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox. Per process unless said otherwise."""

    memory_bytes: int = 4 << 30
    """Private writable memory."""
    mapped_bytes: int = 16 << 30
    """Address space beyond that: libraries, file mappings, shared buffers, reserved ranges."""
    cpu_seconds: int = 3600
    processes: int = 128
    """Processes and threads of the whole sandbox."""
    file_bytes: int = 1 << 30
    """Largest file that can be written."""
    open_files: int = 256
    tmp_bytes: int = 1 << 30
    """Size of the private /tmp and of /dev/shm, each."""


@dataclass(frozen=True)
class Finished:
    """A program that ran to its end or to its deadline."""

    returncode: int
    """Exit status; 128 + signal number if a signal ended it."""
    stdout: bytes
    """At most the asked number of bytes; the rest was read and dropped."""
    stderr: bytes
    timed_out: bool
    seconds: float


@functools.cache
def unavailable() -> Reason | None:
    """Why no sandbox can be had on this machine, or None. Decided once per process by starting one."""
    missing = [tool for tool in _TOOLS if _tool(tool) is None]
    if missing:
        package = "bubblewrap" if "bwrap" in missing else "util-linux"
        return _reason(f"{', '.join(missing)} not found", f"install {package}, for example: apt-get install {package}")
    version = subprocess.run([_required("bwrap"), "--version"], capture_output=True, text=True, check=False).stdout
    found = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if found < _MIN_VERSION:
        return _reason(f"{version.strip() or 'bwrap of unknown version'} is too old", "install bubblewrap 0.5 or later")
    try:
        probe = _start(["/usr/bin/true"], limits=Limits(), stderr=subprocess.PIPE)
        _, stderr = probe.communicate(timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _reason(f"the probe did not finish ({error})", "fasttrack doctor")
    if probe.returncode:
        why = stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {probe.returncode}"]
        hint = "allow unprivileged user namespaces: sysctl kernel.unprivileged_userns_clone=1"
        if os.geteuid() == 0:
            hint = "run as a normal user, or give the container CAP_SYS_ADMIN"
        return _reason(f"bubblewrap cannot start ({why[-1]})", hint)
    return None


def require() -> None:
    """Stop with a clear message where there is no sandbox.

    Raises:
        FasttrackError: see `unavailable`.
    """
    reason = unavailable()
    if reason is not None:
        raise FasttrackError(reason.message, where=reason.where, expected=reason.expected, next=reason.next)


def python_paths() -> tuple[Path, ...]:
    """Folders that must be readable for this interpreter and its installed packages to run inside."""
    found = [
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path(sys.exec_prefix),
        Path(sys.executable).resolve().parent.parent,
    ]
    return tuple(dict.fromkeys(p for p in found if not p.is_relative_to("/usr") or p.is_relative_to("/usr/local")))


def popen(
    argv: Sequence[str],
    *,
    ro: Iterable[Path] = (),
    rw: Iterable[Path] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    limits: Limits | None = None,
    cpus: Sequence[int] | None = None,
    stdin: Fd = subprocess.DEVNULL,
    stdout: Fd = subprocess.DEVNULL,
    stderr: Fd = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a program in a fresh sandbox.

    The process that is returned is bubblewrap; its exit status is the program's (128 + signal number after a signal).
    It dies when the *thread* that called this ends, so call from a thread that outlives it; end it with `kill`.

    Args:
        argv: program (a path that exists inside) and arguments.
        ro: files and folders that appear at their own paths, read-only.
        rw: folders that appear at their own paths and can be written. As root they and their files are given to the
            sandbox's user.
        cwd: working folder inside; /tmp if None.
        env: the whole environment, besides PATH, HOME, TMPDIR, LC_ALL and USER, which it may override.
        pass_fds: descriptors that stay open inside.
        limits: bounds; the defaults of `Limits` if None.
        cpus: CPUs on which the sandbox may run; all if None.
        stdin: as in subprocess; /dev/null by default, like the next two, so that nothing is inherited unnoticed.
        stdout: as in subprocess.
        stderr: as in subprocess.

    Raises:
        FasttrackError: no sandbox on this machine, a path does not exist or cannot be made usable inside.
    """
    require()
    return _start(
        argv,
        ro=ro,
        rw=rw,
        cwd=cwd,
        env=env,
        pass_fds=pass_fds,
        limits=limits or Limits(),
        cpus=cpus,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    output_bytes: int = 1 << 20,
    ro: Iterable[Path] = (),
    rw: Iterable[Path] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    cpus: Sequence[int] | None = None,
) -> Finished:
    """Run a program to its end; past the deadline everything inside is killed. See `popen` for the arguments.

    Raises:
        FasttrackError: as `popen`. A failing, killed or endless program is a result, not an error.
    """
    started = time.monotonic()
    process = popen(
        argv, ro=ro, rw=rw, cwd=cwd, env=env, limits=limits, cpus=cpus, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        stdout, stderr, timed_out = _collect(process, started + timeout_s, output_bytes)
    finally:
        kill(process)
    return Finished(_status(process.returncode), stdout, stderr, timed_out, time.monotonic() - started)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a sandbox with all that runs inside, and wait for it. Idempotent."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def _collect(process: subprocess.Popen[bytes], deadline: float, limit: int) -> tuple[bytes, bytes, bool]:
    """Drain both pipes until the program has ended or the deadline passes; keep the first `limit` bytes of each."""
    if process.stdout is None or process.stderr is None:
        raise ValueError("both pipes are needed")
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe, buffer in kept.items():
            selector.register(pipe, selectors.EVENT_READ, buffer)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(kept[process.stdout]), bytes(kept[process.stderr]), True
            for key, _ in selector.select(left):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data[: max(0, limit - len(key.data))])
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return bytes(kept[process.stdout]), bytes(kept[process.stderr]), True
    return bytes(kept[process.stdout]), bytes(kept[process.stderr]), False


def _start(
    argv: Sequence[str],
    *,
    ro: Iterable[Path] = (),
    rw: Iterable[Path] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    limits: Limits,
    cpus: Sequence[int] | None = None,
    stdin: Fd = subprocess.DEVNULL,
    stdout: Fd = subprocess.DEVNULL,
    stderr: Fd = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    user = _sandbox_user() if os.geteuid() == 0 else None
    command = [
        _required("bwrap"),
        *_namespaces(user),
        *_system_view(limits),
        *_binds(tuple(ro), tuple(rw), user),
        "--chdir",
        "/",
        "--",
        *_entry(user, limits, cpus, cwd or Path(_TMP)),
        *argv,
    ]
    inside = {
        "PATH": _PATH,
        "HOME": _TMP,
        "TMPDIR": _TMP,
        "LC_ALL": "C.UTF-8",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
    }
    return subprocess.Popen(
        command,
        env=inside | dict(env or {}),
        cwd="/",
        pass_fds=pass_fds,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def _namespaces(user: int | None) -> list[str]:
    flags = [
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--hostname",
        "sandbox",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    if user is None:
        return [*flags, "--unshare-user", "--disable-userns"] if _has_disable_userns() else [*flags, "--unshare-user"]
    # Dropping to the sandbox's user needs these two until setpriv has done it.
    return [*flags, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def _system_view(limits: Limits) -> list[str]:
    """An empty root with the system's programs and libraries, read-only; private /proc, /dev, /tmp."""
    view: list[str] = []
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            view += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            view += ["--ro-bind", name, name]
    view += ["--perms", "0755", "--dir", "/etc"]
    for name in _SYSTEM_FILES:
        view += ["--ro-bind-try", name, name]
    size = str(limits.tmp_bytes)
    view += ["--proc", "/proc", "--dev", "/dev"]
    return [
        *view,
        "--perms",
        "1777",
        "--size",
        size,
        "--tmpfs",
        _SHM,
        "--perms",
        "1777",
        "--size",
        size,
        "--tmpfs",
        _TMP,
    ]


def _binds(ro: tuple[Path, ...], rw: tuple[Path, ...], user: int | None) -> list[str]:
    """Bind mounts, outer paths before inner ones; then the root that they hang in becomes read-only."""
    modes: dict[Path, bool] = {}
    for path, writable in [*((p, False) for p in ro), *((p, True) for p in rw)]:
        place = Path(os.path.abspath(path))
        if not place.exists():
            raise FasttrackError(
                "no such file or folder",
                where=str(place),
                expected="a path to show inside the sandbox",
                next=f"ls -d {place}",
            )
        if modes.setdefault(place, writable) != writable:
            raise FasttrackError(
                "both read-only and writable", where=str(place), expected="one of them", next="report this as a bug"
            )
    present = (*modes, *map(Path, _SYSTEM))
    binds: list[str] = []
    for place in sorted(modes, key=lambda p: len(p.parts)):
        _give(place, modes[place], user)
        # bubblewrap makes missing parents for its own user only.
        for parent in reversed(place.parents[:-1]):
            if parent != Path(_TMP) and not any(parent.is_relative_to(outer) for outer in present):
                binds += ["--perms", "0755", "--dir", str(parent)]
        binds += ["--bind" if modes[place] else "--ro-bind", str(place.resolve()), str(place)]
    return [*binds, "--remount-ro", "/"]


def _give(path: Path, writable: bool, user: int | None) -> None:
    """As root: hand a writable folder to the sandbox's user; check that others may read a read-only one."""
    if user is None:
        return
    if writable:
        for folder, _, files in os.walk(path, followlinks=False):
            for name in (folder, *(os.path.join(folder, f) for f in files)):
                os.chown(name, user, user, follow_symlinks=False)
        return
    mode = path.stat().st_mode
    needed = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
    if mode & needed != needed:
        raise FasttrackError(
            f"mode {stat.S_IMODE(mode):04o} hides it from the sandbox's user",
            where=str(path),
            expected="readable by others (0755 folders, 0644 files) when run as root",
            next=f"chmod -R o+rX {path}",
        )


def _entry(user: int | None, limits: Limits, cpus: Sequence[int] | None, cwd: Path) -> list[str]:
    """Programs that drop privileges and set limits, each then becoming the next; all from the system's own folders."""
    chain: list[str] = []
    if user is not None:
        chain += [
            _required("setpriv"),
            f"--reuid={user}",
            f"--regid={user}",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
            "--no-new-privs",
            "--",
        ]
    chain += [_required("choom"), "-n", "1000", "--"]
    if cpus is not None:
        chain += [_required("taskset"), "-c", ",".join(str(cpu) for cpu in cpus)]
    return [
        *chain,
        _required("env"),
        f"--chdir={cwd}",
        f"PWD={cwd}",
        _required("prlimit"),
        f"--data={limits.memory_bytes}",
        f"--as={limits.memory_bytes + limits.mapped_bytes}",
        f"--cpu={limits.cpu_seconds}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.file_bytes}",
        f"--nofile={limits.open_files}",
        "--core=0",
        "--memlock=0",
        "--",
    ]


def _sandbox_user() -> int:
    """A user id that owns nothing and that no other sandbox has, so that process limits count each sandbox alone."""
    with open("/proc/self/uid_map", "rb") as file:
        mapped = max((int(line.split()[0]) + int(line.split()[2]) for line in file), default=65536)
    low, high = (1_000_000_000, 2_000_000_000) if mapped > 2_000_000_000 else (61_184, min(mapped, 65_520))
    return low + secrets.randbelow(high - low)


@functools.cache
def _has_disable_userns() -> bool:
    done = subprocess.run([_required("bwrap"), "--help"], capture_output=True, text=True, check=False)
    return "--disable-userns" in done.stdout + done.stderr


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{_PATH}:/usr/sbin:/sbin")


def _required(name: str) -> str:
    path = _tool(name)
    if path is None:
        raise FasttrackError(
            f"{name} not found", where=_PATH, expected="bubblewrap and util-linux", next="fasttrack doctor"
        )
    return path


def _reason(message: str, next_step: str) -> Reason:
    return Reason(
        code="sandbox.unavailable",
        message=message,
        where="sandbox",
        expected="bubblewrap 0.5 or later that can start",
        next=next_step,
    )
