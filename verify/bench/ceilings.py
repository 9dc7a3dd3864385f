"""Measure what this machine can do at most: bandwidth by working set, multiply-add and bf16 rates.

The program `ceilings.cc` is trusted code, built with fixed flags and run as a process of its own. A figure is the best
of several repetitions, because a ceiling that a disturbed moment made too low would fail honest kernels. Ceilings
belong to one run: the floors of a measurement use those measured beside it, never older ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

from harness.errors import FasttrackError
from verify.protocol.floors import Ceilings

__all__ = ["measure_ceilings"]

_SOURCE = Path(__file__).with_name("ceilings.cc")
_FLAGS = ("-std=c++20", "-O3", "-march=x86-64", "-pthread", "-Wno-psabi")
_BUILD_S = 120.0
_RUN_S = 120.0
_COMPILER = "a C++20 compiler (g++ 12 or later)"


def measure_ceilings(threads: int, cache: Path) -> Ceilings:
    """Build and run the program with the threads that arms may use. Takes a few seconds.

    Args:
        threads: as many as arms may use.
        cache: folder that keeps the built program.

    Raises:
        FasttrackError: no compiler, or the program does not run here; says which.
    """
    printed = _run([str(_program(cache)), str(threads)], _RUN_S, "an x86-64 CPU with AVX2 and FMA")
    return Ceilings.from_json(json.loads(printed))


def _program(cache: Path) -> Path:
    """The program, built once per source, flags and compiler."""
    version = _run(["g++", "--version"], _BUILD_S, _COMPILER)
    parts = (_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version.encode())
    program = cache / "ceilings" / hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    if not program.is_file():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as folder:
            _run(["g++", *_FLAGS, "-o", f"{folder}/ceilings", str(_SOURCE)], _BUILD_S, _COMPILER)
            os.replace(f"{folder}/ceilings", program)  # whole or not at all, however many build it
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
