from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
from verify.evaluator.contention import Competitors
with Competitors() as competitors:
    print(*(process.pid for process in competitors._processes), flush=True)
    input()
"""


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_competitors_die_with_the_evaluator(number: signal.Signals) -> None:
    """A killed verification leaves processes behind that can take every CPU."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert pids
        assert all(map(_runs, pids))
        holder.send_signal(number)
        holder.wait()
    deadline = time.monotonic() + 5
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_runs, pids))
