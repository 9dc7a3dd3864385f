"""The command line of a sandbox: namespaces, what is visible, limits, and how privileges are dropped on the way in.

Builds argument lists and prepares the named folders; starts nothing. `harness.sandbox` is the interface.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import FasttrackError

__all__ = ["PATH", "TMP", "TOOLS", "Limits", "command", "required", "tool"]

TOOLS = ("bwrap", "prlimit", "setpriv", "choom", "taskset", "env")
PATH = "/usr/bin:/bin"
TMP = "/tmp"  # noqa: S108 - a private file system inside the sandbox
_SHM = "/dev/shm"  # noqa: S108 - likewise
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")


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


def command(
    argv: Sequence[str],
    ro: tuple[Path, ...],
    rw: tuple[Path, ...],
    cwd: Path,
    limits: Limits,
    cpus: Sequence[int] | None,
    seccomp_fd: int | None,
) -> list[str]:
    """The argument list that starts `argv` in a sandbox; the parameters are those of `harness.sandbox.popen`.

    Raises:
        FasttrackError: a tool is missing, or a path does not exist or cannot be made usable inside.
    """
    user = _sandbox_user() if os.geteuid() == 0 else None
    return [
        required("bwrap"),
        *_namespaces(user),
        *_system_view(limits),
        *_binds(ro, rw, user),
        *(() if seccomp_fd is None else ("--seccomp", str(seccomp_fd))),
        *("--chdir", "/", "--"),
        *_entry(user, limits, cpus, cwd),
        *argv,
    ]


def _namespaces(user: int | None) -> list[str]:
    flags = [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
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
    private = ("--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs")
    return [*view, "--proc", "/proc", "--dev", "/dev", *private, _SHM, "--remount-ro", "/dev", *private, TMP]


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
            if parent != Path(TMP) and not any(parent.is_relative_to(outer) for outer in present):
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
        chain += [required("setpriv"), f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        chain += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]
    chain += [required("choom"), "-n", "1000", "--"]
    if cpus is not None:
        chain += [required("taskset"), "-c", ",".join(str(cpu) for cpu in cpus)]
    chain += [required("env"), f"--chdir={cwd}", f"PWD={cwd}"]
    return [
        *chain,
        required("prlimit"),
        f"--data={limits.memory_bytes}",
        f"--as={limits.memory_bytes + limits.mapped_bytes}",
        f"--cpu={limits.cpu_seconds}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.file_bytes}",
        f"--nofile={limits.open_files}",
        *("--core=0", "--memlock=0", "--"),
    ]


def _sandbox_user() -> int:
    """A user id that owns nothing and that no other sandbox has, so that process limits count each sandbox alone."""
    with open("/proc/self/uid_map", "rb") as file:
        mapped = max((int(line.split()[0]) + int(line.split()[2]) for line in file), default=65536)
    low, high = (1_000_000_000, 2_000_000_000) if mapped > 2_000_000_000 else (61_184, min(mapped, 65_520))
    return low + secrets.randbelow(high - low)


@functools.cache
def _has_disable_userns() -> bool:
    done = subprocess.run([required("bwrap"), "--help"], capture_output=True, text=True, check=False)
    return "--disable-userns" in done.stdout + done.stderr


def tool(name: str) -> str | None:
    """Absolute path of a program in the system's own folders, or None."""
    return shutil.which(name, path=f"{PATH}:/usr/sbin:/sbin")


def required(name: str) -> str:
    """As `tool`; FasttrackError if there is none."""
    path = tool(name)
    if path is None:
        raise FasttrackError(
            f"{name} not found", where=PATH, expected="bubblewrap and util-linux", next="fasttrack doctor"
        )
    return path
