"""Which worker runs which arm, and what a gate that runs kernels answers where there is nothing to run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from harness import sandbox
from harness.records import GateName
from k3_backend.aot.cpu.host import best_arch
from k3_backend.aot.manifest import Artifact
from verify.context import Arms, GateContext
from verify.evaluator.worker import ArmSpec
from verify.gates.common import command_for
from verify.gates.kit import BY_KIT, missing_kit
from verify.protocol.decision import Decision, Finding

__all__ = [
    "UNTIMED_STANDARD_THREADS", "best_arm", "candidate_arm", "identity", "obstacle", "side_by_side", "standard_arm",
]  # fmt: skip

UNTIMED_STANDARD_THREADS = 1
"""Where nothing is timed, the standard arm leaves a CPU to the candidate beside it; its small operations hardly gain
from a second thread."""

T = TypeVar("T")


def standard_arm() -> ArmSpec:
    """The standard path: no candidate code at all."""
    return ArmSpec("standard")


def candidate_arm(ctx: GateContext) -> ArmSpec:
    """The candidate's kernels and schedules."""
    assert ctx.arms is not None
    return _specialized(ctx.arms.candidate, ctx.arms.candidate_schedules, ctx.arms.runtime)


def best_arm(ctx: GateContext) -> ArmSpec:
    """The current best's kernels and schedules."""
    assert ctx.arms is not None
    return _specialized(ctx.arms.best, ctx.arms.best_schedules, ctx.arms.runtime)


def _specialized(artifacts: Mapping[str, Artifact], schedules: Path, runtime: Artifact) -> ArmSpec:
    paths = {op: artifact.path for op, artifact in artifacts.items()} | {"runtime": runtime.path}
    return ArmSpec("specialized", paths, schedules)


def side_by_side(work: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Results of several pieces of work, each done in a thread of its own at the same time.

    Not for anything timed. Ends when all have ended, and then raises what one of them raised. The threads are daemons:
    an interrupted evaluator ends at once, and the sandboxes that its threads have started die with it.
    """
    results: dict[str, T] = {}
    errors: list[BaseException] = []

    def run(name: str, function: Callable[[], T]) -> None:
        try:
            results[name] = function()
        except BaseException as error:  # handed on to the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, name=item[0], daemon=True) for item in work.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def obstacle(gate: GateName, ctx: GateContext) -> Decision | None:
    """Why a gate that runs kernels cannot be evaluated here: another kind of machine, no sandbox, no artifacts."""
    again = command_for(gate, ctx)
    if ctx.target.device != "cpu" and gate in BY_KIT:
        return missing_kit(gate, ctx)
    if ctx.target.device != "cpu" or best_arch(ctx.target.archs) is None:
        what = f"this machine cannot run the kernels of {', '.join(ctx.target.archs)}"
        finding = Finding(f"{gate}.device", what, f"target {ctx.target.name}", "a machine of the target's kind", again)
    elif (reason := sandbox.unavailable()) is not None:
        finding = Finding(f"{gate}.environment", reason.message, reason.where, reason.expected, reason.next)
    elif ctx.arms is None:
        what = "there are no built artifacts to run"
        finding = Finding(f"{gate}.no_artifacts", what, "build", "a passed build gate", again)
    else:
        return None
    return Decision("not_evaluated", (finding,))


def identity(arms: Arms) -> dict[str, str]:
    """Op -> digest of the candidate's artifact: what a raw file's header says it is about."""
    return {op: artifact.digest for op, artifact in sorted(arms.candidate.items())}
