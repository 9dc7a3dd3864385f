"""The worker's control channel: crashes, hangs, forged and oversized answers, and the sealed buffer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from verify.evaluator.worker import (
    ArmSpec,
    SharedBuffer,
    Worker,
    WorkerCrashed,
    WorkerError,
    WorkerProtocolError,
    WorkerTimeout,
)
from verify.workers.shared import View

REPO = Path(__file__).parents[2]

HOSTILE_METHODS = """
import ctypes, gc, json, os, sys, time

def segfault(session):
    ctypes.string_at(8)

def leave(session):
    print("PASS", flush=True)
    os._exit(0)

def hang(session):
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)

def _control():
    from verify.workers.protocol import Channel
    return next(o for o in gc.get_objects() if isinstance(o, Channel))

def wrong_nonce(session):
    _control()._sock.sendall(b'{"id":1,"result":{"verdict":"PASS"},"nonce":"00"}\\n')
    return {}

def no_json(session):
    _control()._sock.sendall(b'PASS\\n')
    return {}

def flood(session):
    block = b"x" * (1 << 20)
    for _ in range(40):
        _control()._sock.sendall(block)
    return {}

def wrong_id(session):
    _control().send({"id": 999, "result": {}})
    return {}

def no_result(session):
    return None

def shrink(session):
    found = [int(fd) for fd in os.listdir("/proc/self/fd")]
    for fd in found:
        try:
            os.ftruncate(fd, 1)
        except OSError:
            pass
    return {}

def fill(session, view):
    from verify.workers.shared import View
    View.from_json(view).array(session.buffer)[...] = 7
    return {}

METHODS = {"engine." + f.__name__: f for f in (
    segfault, leave, hang, wrong_nonce, no_json, flood, wrong_id, no_result, shrink, fill)}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export whose engine area misbehaves in every way that trusted code never would."""
    root = tmp_path_factory.mktemp("tree")
    root.chmod(0o755)  # readable by the sandbox's user
    (root / "verify").mkdir()
    shutil.copy(REPO / "verify/__init__.py", root / "verify")
    shutil.copytree(REPO / "verify/workers", root / "verify/workers", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "verify/workers/engine_methods.py").write_text(HOSTILE_METHODS)
    return root


@pytest.fixture
def worker(tree: Path, tmp_path: Path) -> Iterator[Worker]:
    with Worker.start(
        ArmSpec("standard"), base_tree=tree, run_dir=tmp_path, threads=1, buffer_bytes=1 << 20
    ) as started:
        yield started


def test_answers_come_from_the_given_tree(worker: Worker, tree: Path) -> None:
    """A worker that imports the checkout instead of the export of the base commit."""
    answer = worker.call("op.ping", timeout_s=10, value=[1, "two"])
    assert answer["echo"] == {"value": [1, "two"]}
    assert answer["source"].startswith(str(tree))


def test_a_crash_names_signal_and_method(worker: Worker) -> None:
    """A dead worker taken for a slow or a finished one."""
    with pytest.raises(WorkerCrashed) as caught:
        worker.call("engine.segfault", timeout_s=30)
    assert caught.value.detail["signal"] == "SIGSEGV"
    assert caught.value.method == "engine.segfault"
    assert caught.value.finding("kernels", where="x", next="y").code == "kernels.crash"


def test_exit_zero_with_pass_on_stdout_is_a_crash(worker: Worker) -> None:
    """An exit code or a printed word taken for success."""
    with pytest.raises(WorkerCrashed, match="exited with status 0") as caught:
        worker.call("engine.leave", timeout_s=30)
    assert "PASS" in caught.value.log


def test_a_hang_ends_at_the_deadline_with_its_children(worker: Worker) -> None:
    """A hanging kernel, or a process it left behind, that outlives its deadline."""
    start = time.monotonic()
    with pytest.raises(WorkerTimeout):
        worker.call("engine.hang", timeout_s=1.0)
    assert time.monotonic() - start < 5
    with pytest.raises(WorkerCrashed):
        worker.call("op.ping", timeout_s=5)


@pytest.mark.parametrize("method", ["wrong_nonce", "no_json", "flood", "wrong_id", "no_result"])
def test_forged_answers_are_refused(worker: Worker, method: str) -> None:
    """An answer without the run's nonce, too long, not JSON, or to another request that is believed."""
    with pytest.raises(WorkerProtocolError):
        worker.call(f"engine.{method}", timeout_s=30)


def test_an_exception_in_a_method_keeps_the_worker(worker: Worker) -> None:
    """One refused call that costs the whole worker, or an exception that is swallowed."""
    with pytest.raises(WorkerError, match="unknown method") as caught:
        worker.call("op.nothing", timeout_s=10)
    assert "Traceback" in caught.value.detail["traceback"]
    assert worker.call("op.ping", timeout_s=10)


def test_the_buffer_cannot_be_truncated(worker: Worker) -> None:
    """A worker that shrinks the shared file so that the evaluator dies of SIGBUS."""
    worker.call("engine.shrink", timeout_s=10)
    worker.buffer.bytes[-1] = 3
    assert worker.buffer.bytes[-1] == 3


def test_both_sides_see_the_same_bytes(worker: Worker) -> None:
    """Views that resolve to different memory on the two sides."""
    view = worker.buffer.view("f32", (3, 5))
    worker.call("engine.fill", timeout_s=10, view=view.to_json())
    assert np.array_equal(worker.buffer.array(view), np.full((3, 5), 7, dtype=np.float32))


def test_views_are_bounded() -> None:
    """A control message that names memory outside the buffer."""
    buffer = SharedBuffer(4096)
    with pytest.raises(ValueError, match="beyond the buffer"):
        View(4000, "f32", (100,)).array(buffer.bytes)
    with pytest.raises(ValueError, match="not a tensor view"):
        View.from_json({"offset": -4, "dtype": "f32", "shape": [1]})
    with pytest.raises(ValueError, match="not a tensor view"):
        View.from_json({"offset": 2, "dtype": "f32", "shape": [1]})
    with pytest.raises(MemoryError, match="4096"):
        buffer.alloc(5000)
    buffer.close()


def test_a_stopped_worker_leaves_no_process(tree: Path, tmp_path: Path) -> None:
    """Stray processes after a run."""
    with Worker.start(ArmSpec("standard"), base_tree=tree, run_dir=tmp_path, threads=1, buffer_bytes=4096) as started:
        pid = started.pid
    assert not Path(f"/proc/{pid}").exists()
