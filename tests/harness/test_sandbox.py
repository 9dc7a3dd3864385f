from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from harness import sandbox, seccomp
from harness.errors import FasttrackError
from harness.sandbox import Finished, Limits

ROOT = Path(__file__).resolve().parents[2]
_REASON = sandbox.unavailable()
needs_sandbox = pytest.mark.skipif(_REASON is not None, reason=_REASON.message if _REASON else "")


def sh(script: str, **options: object) -> Finished:
    return sandbox.run(["/bin/sh", "-c", script], timeout_s=20, **options)  # type: ignore[arg-type]


def python(script: str, **options: object) -> Finished:
    argv = [sys.executable, "-I", "-S", "-c", textwrap.dedent(script)]
    options.setdefault("ro", sandbox.python_paths())
    return sandbox.run(argv, timeout_s=30, **options)  # type: ignore[arg-type]


def alive(marker: str) -> list[str]:
    """Processes of this machine whose command line holds the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if marker in command:
                found.append(command)
    return found


def gone(marker: str, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not alive(marker):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def marker() -> str:
    """A number of seconds that no other `sleep` of this machine uses."""
    return f"{700_000 + time.time_ns() % 100_000}.25"


def test_a_missing_tool_is_a_reason_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bubblewrap, gates crash or run untrusted code unprotected."""
    monkeypatch.setattr(sandbox, "tool", lambda name: None if name == "bwrap" else f"/usr/bin/{name}")
    sandbox.unavailable.cache_clear()
    try:
        reason = sandbox.unavailable()
        assert reason is not None
        assert (reason.code, reason.message) == ("sandbox.unavailable", "bwrap not found")
        assert "install bubblewrap" in reason.next
        with pytest.raises(FasttrackError, match="bwrap not found"):
            sandbox.popen(["/bin/true"])
    finally:
        monkeypatch.undo()
        sandbox.unavailable.cache_clear()


@needs_sandbox
def test_no_secret_of_the_caller_is_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An API key or other secret of the user reaches candidate code."""
    canary = "canary-5f1c0ffee"
    monkeypatch.setenv("ANTHROPIC_API_KEY", canary)
    (tmp_path / "secret").write_text(canary)
    done = sh(
        "env; cat /proc/*/environ /proc/*/cmdline; ls /proc/self/fd; cat /proc/self/mountinfo", env={"ASKED": "yes"}
    )
    assert "ASKED=yes" in done.stdout.decode()
    assert canary not in (done.stdout + done.stderr).decode("utf-8", "replace")
    assert sh(f"cat {tmp_path}/secret").returncode != 0


@needs_sandbox
def test_only_named_paths_are_visible(tmp_path: Path) -> None:
    """Candidate code reads the home folder, other runs or the checkout."""
    for name in ("mine", "other"):
        (tmp_path / name).mkdir(mode=0o755)
        (tmp_path / name / "f").write_text(name)
    places = f"{tmp_path}/other {ROOT} /root /home /etc/passwd /var /run /opt /srv /mnt"
    done = sh(f"cat {tmp_path}/mine/f; for p in {places}; do ls -d $p; done; ls {tmp_path}", ro=[tmp_path / "mine"])
    assert done.stdout.decode() == "minemine\n", done.stderr.decode()


@needs_sandbox
def test_writes_reach_only_the_named_folder(tmp_path: Path) -> None:
    """Candidate code changes the checkout, the system, or a folder that was given read-only."""
    for name in ("in", "out"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "in" / "f").write_text("untouched")
    script = f"""
        for p in / /usr /etc /var /dev /proc/sys/kernel {tmp_path}/in {ROOT}; do
          touch $p/planted && echo WROTE $p
        done
        echo x > {tmp_path}/in/f && echo WROTE in
        echo x > {tmp_path}/out/result && echo x > /tmp/scratch && echo fine
    """
    done = sh(script, ro=[tmp_path / "in"], rw=[tmp_path / "out"])
    assert done.stdout.decode() == "fine\n"
    assert (tmp_path / "in" / "f").read_text() == "untouched"
    assert (tmp_path / "out" / "result").read_text() == "x\n"
    assert not Path("/tmp/scratch").exists()
    sh(f"touch {tmp_path}/beside", rw=[tmp_path / "out"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@needs_sandbox
def test_working_folder_and_exit_status(tmp_path: Path) -> None:
    """Relative outputs land elsewhere, or a failure is reported as success."""
    (tmp_path / "w").mkdir(mode=0o755)
    assert sh("pwd; exit 7", rw=[tmp_path / "w"], cwd=tmp_path / "w").stdout.decode().strip() == str(tmp_path / "w")
    assert sh("exit 7").returncode == 7
    assert sh("kill -SEGV $$").returncode == 128 + 11


@needs_sandbox
def test_there_is_no_network(tmp_path: Path) -> None:
    """Candidate code fetches or sends data; even a server on this machine, or an abstract socket, is out of reach."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0fasttrack-test-{os.getpid()}")
        local.listen()
        done = python(
            f"""
            import socket
            for family, address in (
                (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_INET, ("1.1.1.1", 80)),
                (socket.AF_UNIX, "\\0fasttrack-test-{os.getpid()}"),
            ):
                s = socket.socket(family)
                s.settimeout(3)
                print("connected" if s.connect_ex(address) == 0 else "refused")
            """
        )
    assert done.stdout.decode().split() == ["refused"] * 3, done.stderr.decode()


@needs_sandbox
def test_other_processes_are_invisible() -> None:
    """Candidate code signals or traces the evaluator."""
    done = sh(
        "ls /proc | grep -c '^[0-9]'; kill -0 1 && kill -9 1; kill -0 " + str(os.getpid()) + " || echo unreachable"
    )
    assert int(done.stdout.split()[0]) < 10
    assert b"unreachable" in done.stdout


@needs_sandbox
def test_it_runs_without_privileges() -> None:
    """Candidate code holds capabilities, or gains some through a set-uid program."""
    status = sh("cat /proc/self/status; id -u").stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    if os.geteuid() == 0:
        assert status.split()[-1] != "0"
    assert sh("mount -t tmpfs none /tmp").returncode != 0


@needs_sandbox
def test_dangerous_system_calls_are_denied() -> None:
    """Candidate code makes namespaces of its own, traces, or reaches kernel interfaces that no kernel needs."""
    done = python(
        f"""
        import ctypes, errno, os, threading
        libc = ctypes.CDLL(None, use_errno=True)
        for name, number in {dict(sorted(seccomp.DENIED.items()))!r}.items():
            ctypes.set_errno(0)
            result = libc.syscall(number, 0, 0, 0, 0, 0)
            if (result, ctypes.get_errno()) != (-1, errno.EPERM):
                print("open:", name, result, ctypes.get_errno())
        print("namespace", libc.syscall(56, 0x10000011, 0, 0, 0, 0), ctypes.get_errno())
        thread = threading.Thread(target=lambda: print("thread"))
        thread.start()
        thread.join()
        pid = os.fork()
        if pid == 0:
            os._exit(3)
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert done.stdout.decode() == "namespace -1 1\nthread\nchild 3\n", done.stderr.decode()


@needs_sandbox
def test_memory_is_bounded() -> None:
    """A candidate or its compiler takes all memory of the machine."""
    limits = Limits(memory_bytes=256 << 20, mapped_bytes=1 << 30)
    private = python("x = bytearray(200 << 20); print('small'); y = bytearray(200 << 20); print('big')", limits=limits)
    assert private.stdout.decode().split() == ["small"]
    assert private.returncode == 1
    shared = python("import mmap; a = mmap.mmap(-1, 4 << 30); print('big')", limits=limits)
    assert (shared.stdout, shared.returncode) == (b"", 1)


@needs_sandbox
def test_fork_bombs_are_bounded(marker: str) -> None:
    """A fork bomb stops the machine, or outlives its sandbox."""
    bomb = f"""
        import os, time
        children = 0
        try:
            while True:
                if os.fork() == 0:
                    os.execv("/bin/sleep", ["sleep", "{marker}"])
                children += 1
        except OSError as error:
            print(children, type(error).__name__, flush=True)
        time.sleep(0.2)
    """
    started = time.monotonic()
    done = python(bomb, limits=Limits(processes=40))
    children, error = done.stdout.decode().split()
    assert error == "BlockingIOError"
    assert 20 <= int(children) <= 40
    assert time.monotonic() - started < 20
    assert gone(marker)


@needs_sandbox
def test_process_limits_count_each_sandbox_alone() -> None:
    """One sandbox's processes use up the limit of another that runs beside it."""
    hog = sandbox.popen(
        ["/bin/sh", "-c", "for i in 1 2 3 4 5 6 7 8; do sleep 30 & done; wait"], limits=Limits(processes=12)
    )
    try:
        time.sleep(0.3)
        assert (
            sh("for i in 1 2 3 4 5 6 7 8; do sleep 0.1 & done; wait; echo fine", limits=Limits(processes=12)).stdout
            == b"fine\n"
        )
    finally:
        sandbox.kill(hog)


@needs_sandbox
def test_files_cpu_time_and_tmp_are_bounded(tmp_path: Path) -> None:
    """A candidate fills the disk or computes forever."""
    (tmp_path / "w").mkdir(mode=0o755)
    big = sh(
        f"dd if=/dev/zero of={tmp_path}/w/f bs=1M count=50", rw=[tmp_path / "w"], limits=Limits(file_bytes=1 << 20)
    )
    assert big.returncode != 0
    assert (tmp_path / "w" / "f").stat().st_size <= 1 << 20
    for place in ("/tmp", "/dev/shm"):
        full = sh(
            f"for i in 1 2 3 4; do dd if=/dev/zero of={place}/$i bs=1M count=1 || exit 9; done",
            limits=Limits(tmp_bytes=2 << 20),
        )
        assert full.returncode == 9
    assert sh("while :; do :; done", limits=Limits(cpu_seconds=1)).returncode in (128 + 9, 128 + 24)


@needs_sandbox
def test_deadline_kills_the_whole_tree(marker: str) -> None:
    """A hanging candidate leaves processes behind, or hangs the evaluator with them."""
    started = time.monotonic()
    children = f"(setsid sleep {marker} &) ; (sleep {marker} & sleep {marker}) &"
    script = f"trap '' TERM HUP INT; {children} echo started; sleep {marker}"
    done = sandbox.run(["/bin/sh", "-c", script], timeout_s=1.0)
    assert done.timed_out
    assert done.stdout == b"started\n"
    assert time.monotonic() - started < 10
    assert gone(marker)


@needs_sandbox
def test_daemons_do_not_outlive_the_program(marker: str) -> None:
    """A background process goes on after the program has ended and meets later runs."""
    assert sh(f"(setsid sleep {marker} >/dev/null 2>&1 &); sleep 0.1; exit 0").returncode == 0
    assert gone(marker)


@needs_sandbox
def test_it_dies_with_its_parent(marker: str) -> None:
    """A killed evaluator leaves sandboxes running."""
    code = f"""
        import sys, time
        from harness import sandbox, seccomp
        sandbox.popen(["/bin/sh", "-c", "sleep {marker}"])
        print("ready", flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    assert alive(marker)
    parent.kill()
    parent.communicate()
    assert gone(marker)


@needs_sandbox
def test_output_floods_are_cut_not_stored() -> None:
    """A program that prints without end exhausts the evaluator's memory, or blocks it."""
    done = sandbox.run(["/bin/sh", "-c", "yes | head -c 30000000; echo end >&2"], timeout_s=20, output_bytes=1000)
    assert (len(done.stdout), done.stderr, done.returncode) == (1000, b"end\n", 0)


@needs_sandbox
def test_python_with_installed_packages_runs_inside() -> None:
    """Workers cannot import what they need."""
    done = sandbox.run(
        [sys.executable, "-I", "-c", "import numpy, tvm_ffi; print(numpy.ones(2).sum())"],
        timeout_s=60,
        ro=sandbox.python_paths(),
    )
    assert done.stdout == b"2.0\n", done.stderr.decode()


@needs_sandbox
def test_a_compiler_runs_inside(tmp_path: Path) -> None:
    """The build gate cannot compile, or its output cannot be read back."""
    work = tmp_path / "w"
    work.mkdir(mode=0o755)
    (work / "a.cc").write_text('extern "C" int f() { return 3; }\n')
    done = sandbox.run(["g++", "-shared", "-fPIC", "-o", "a.so", "a.cc"], timeout_s=60, rw=[work], cwd=work)
    assert done.returncode == 0, done.stderr.decode()
    assert (work / "a.so").read_bytes()[:4] == b"\x7fELF"


@needs_sandbox
def test_descriptors_pass_only_when_named() -> None:
    """A result-bearing descriptor of the evaluator leaks into the sandbox."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        argv = [sys.executable, "-I", "-S", "-c", f"import os; os.write({write}, b'hello')"]
        leaked = sandbox.popen(argv, ro=sandbox.python_paths())
        assert leaked.wait(20) == 1
        passed = sandbox.popen(argv, ro=sandbox.python_paths(), pass_fds=[write])
        assert passed.wait(20) == 0
        assert os.read(read, 100) == b"hello"
    finally:
        os.close(read)
        os.close(write)


@needs_sandbox
def test_cpus_can_be_chosen() -> None:
    """A worker moves to a CPU that another arm is being timed on."""
    cpu = min(os.sched_getaffinity(0))
    done = python("import os; print(sorted(os.sched_getaffinity(0)))", cpus=[cpu])
    assert done.stdout.decode().strip() == f"[{cpu}]"


@needs_sandbox
def test_wrong_paths_are_clear_errors(tmp_path: Path) -> None:
    """A missing folder ends in bubblewrap's own message, or in a silent gap inside."""
    with pytest.raises(FasttrackError, match="no such file or folder"):
        sh("true", ro=[tmp_path / "absent"])
    with pytest.raises(FasttrackError, match="both read-only and writable"):
        sh("true", ro=[tmp_path], rw=[tmp_path])
    if os.geteuid() == 0:
        (tmp_path / "hidden").mkdir(mode=0o700)
        with pytest.raises(FasttrackError, match=r"mode 0700 .*chmod -R o\+rX"):
            sh("true", ro=[tmp_path / "hidden"])


@needs_sandbox
def test_inner_binds_win_over_outer_ones(tmp_path: Path) -> None:
    """A writable folder inside a read-only tree is hidden by it, or opens the tree."""
    inner = tmp_path / "tree" / "scratch"
    inner.mkdir(parents=True)
    (tmp_path / "tree").chmod(0o755)
    done = sh(f"touch {inner}/ok && echo in; touch {tmp_path}/tree/no || echo out", ro=[tmp_path / "tree"], rw=[inner])
    assert done.stdout.decode().split() == ["in", "out"]


@needs_sandbox
def test_sandboxes_can_be_started_from_threads() -> None:
    """Parallel builds fail or get each other's output."""
    results: dict[int, bytes] = {}

    def work(index: int) -> None:
        results[index] = sh(f"echo {index}").stdout

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"{i}\n".encode() for i in range(6)}
