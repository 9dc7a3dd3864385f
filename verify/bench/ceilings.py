"""Measure what this machine can do at most: bandwidth by working set, multiply-add and bf16 rates.

The program `ceilings.cc` is trusted code, built with fixed flags and run as a process of its own. A figure is the best
of several repetitions, because a ceiling that a disturbed moment made too low would fail honest kernels. Ceilings
belong to one run: the floors of a measurement use those measured beside it, never older ones.
"""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from harness.errors import FasttrackError
from verify.protocol.floors import Ceilings

__all__ = ["measure_ceilings"]

_SOURCE = Path(__file__).with_name("ceilings.cc")
_FLAGS = ("-std=c++20", "-O3", "-march=x86-64", "-pthread", "-Wno-psabi")
_BUILD_S = 120.0
_RUN_S = 120.0


def measure_ceilings(threads: int) -> Ceilings:
    """Build and run the program with the threads that arms may use. Takes a few seconds.

    Raises:
        FasttrackError: no compiler, or the program does not run here; says which.
    """
    printed = _run([str(_program()), str(threads)], _RUN_S, "an x86-64 CPU with AVX2 and FMA")
    return Ceilings.from_json(json.loads(printed))


@cache
def _program() -> Path:
    """The program, built once per process in a folder that goes with it."""
    folder = tempfile.mkdtemp(prefix="fasttrack-ceilings-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = Path(folder) / "ceilings"
    _run(["g++", *_FLAGS, "-o", str(program), str(_SOURCE)], _BUILD_S, "a C++20 compiler (g++ 12 or later)")
    return program


def _run(command: list[str], timeout_s: float, needed: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unmeasured(command, str(error), needed) from error
    if done.returncode:
        raise _unmeasured(command, done.stderr.strip() or f"exit status {done.returncode}", needed)
    return done.stdout


def _unmeasured(command: list[str], why: str, needed: str) -> FasttrackError:
    return FasttrackError(
        f"ceilings of this machine cannot be measured: {why}",
        where=Path(command[0]).name,
        expected=needed,
        next="fasttrack doctor",
    )
