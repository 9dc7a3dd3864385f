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
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness import seccomp
from harness.errors import FasttrackError
from harness.records import Reason
from harness.sandbox_command import PATH, TMP, TOOLS, Limits, command, required, tool

__all__ = ["Finished", "Limits", "kill", "popen", "python_paths", "require", "run", "unavailable"]

Fd = int | IO[bytes] | None

_MIN_VERSION = (0, 5)
"""First bubblewrap with --perms and --size."""
_ENVIRONMENT = {
    "PATH": PATH,
    "HOME": TMP,
    "TMPDIR": TMP,
    "LC_ALL": "C.UTF-8",
    "USER": "sandbox",
    "LOGNAME": "sandbox",
}
"""What programs expect to find; nothing of the caller's."""


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
    missing = [name for name in TOOLS if tool(name) is None]
    if missing:
        package = "bubblewrap" if "bwrap" in missing else "util-linux"
        return _reason(f"{', '.join(missing)} not found", f"install {package}, for example: apt-get install {package}")
    version = subprocess.run([required("bwrap"), "--version"], capture_output=True, text=True, check=False).stdout
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
    with _filter_fd() as seccomp_fd:
        fds = pass_fds if seccomp_fd is None else (*pass_fds, seccomp_fd)
        return subprocess.Popen(
            command(argv, tuple(ro), tuple(rw), cwd or Path(TMP), limits, cpus, seccomp_fd),
            env=_ENVIRONMENT | dict(env or {}),
            cwd="/",
            pass_fds=fds,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


@contextmanager
def _filter_fd() -> Iterator[int | None]:
    """A descriptor from which bubblewrap reads the system-call filter; None where there is no filter."""
    code = seccomp.program()
    if code is None:
        yield None
        return
    fd = os.memfd_create("seccomp")
    try:
        os.write(fd, code)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _reason(message: str, next_step: str) -> Reason:
    return Reason(
        code="sandbox.unavailable",
        message=message,
        where="sandbox",
        expected="bubblewrap 0.5 or later that can start",
        next=next_step,
    )
