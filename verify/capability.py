"""What this machine can evaluate: for every gate of a target, nothing, or the reason against it and what to do.

It looks at the machine (compiler, sandbox, processor, GPU) and at what this version has (kernels per device), never at
a candidate. Gates check the same again when they run; this answers before anybody waits for them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from harness import sandbox
from harness.errors import FasttrackError
from harness.records import GATES, GateName, Reason
from harness.sandbox_command import PATH, tool
from harness.settings import Target
from k3_backend.aot.cpu.host import best_arch
from verify.gates.build.device import missing_tools
from verify.gates.kit import BY_KIT

__all__ = ["gpus", "obstacles", "require_compiler"]

_NEEDS_RUN: frozenset[GateName] = frozenset({"kernels", "path", "features", "evals", "perf"})


def gpus() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that the driver lists; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607 - the driver's own tool, read only
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip()) if done.returncode == 0 else ()


def obstacles(target: Target, root: Path) -> dict[GateName, Reason | None]:
    """Per gate that the target requires: None if it can be evaluated here, else why not."""
    return {gate: _obstacle(gate, target, root) for gate in GATES if gate in target.required}


def require_compiler(target: Target) -> None:
    """Refuse to start what has to build, before anything is stored.

    Raises:
        FasttrackError: the target's kernels need g++, and the sandbox has none.
    """
    if target.device == "cpu" and tool("g++") is None:
        raise FasttrackError("g++ is not installed", where=PATH, expected="g++ 12 or newer", next="apt-get install g++")


def _obstacle(gate: GateName, target: Target, root: Path) -> Reason | None:
    def reason(code: str, message: str, expected: str, next_command: str) -> Reason:
        return Reason(
            code=f"{gate}.{code}", message=message, where="this machine", expected=expected, next=next_command
        )

    if gate == "scope":
        return None
    if target.device != "cpu":
        seen = ", ".join(gpus()) or "no GPU"
        if gate in BY_KIT:
            return reason(
                "kit",
                f"needs {', '.join(target.archs)}, through a kit; this machine has {seen}",
                f"a kit built here, run on a machine with {', '.join(target.archs)}, and imported here",
                f"fasttrack kit build --target {target.name} --candidate REV --out K; there: python3 K/kit.py run "
                "--out R; here: fasttrack kit import R",
            )
        if gate in _NEEDS_RUN:
            return reason(
                "device",
                f"needs {', '.join(target.archs)}; this machine has {seen}",
                f"a machine with {', '.join(target.archs)}",
                f"there: fasttrack verify --target {target.name} --gates {gate}",
            )
        return _device_obstacle(gate, reason)
    if tool("g++") is None:
        return reason("compiler", "g++ is not installed", f"g++ 12 or newer in {PATH}", "apt-get install g++")
    unavailable = sandbox.unavailable()
    if unavailable is not None:
        return reason("sandbox", unavailable.message, unavailable.expected, unavailable.next)
    if gate in _NEEDS_RUN and best_arch(target.archs) is None:
        return reason(
            "arch", "the processor runs none of the target's levels", f"one of {', '.join(target.archs)}",
            "run on a newer x86-64 machine",
        )  # fmt: skip
    if not any((root / "k3_backend" / "kernels").glob("*/cpu.cc")):
        return reason("no_kernels", "the checkout has no CPU kernels", "k3_backend/kernels/<op>/cpu.cc", "git status")
    return None


def _device_obstacle(gate: GateName, reason: Callable[[str, str, str, str], Reason]) -> Reason | None:
    """Why machine code for a GPU cannot be built (and so not audited) here."""
    missing = missing_tools()
    if missing is not None:
        return reason("environment", missing["message"], missing["expected"], missing["next"])
    unavailable = sandbox.unavailable()
    if unavailable is not None and gate in ("build", "audit"):
        return reason("sandbox", unavailable.message, unavailable.expected, unavailable.next)
    return None
