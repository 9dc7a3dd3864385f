"""Which worker runs which arm, and the answer of a gate when there is nothing to run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from harness import sandbox
from harness.records import GateName
from k3_backend.aot.manifest import Artifact
from verify.context import GateContext
from verify.evaluator.worker import ArmSpec
from verify.protocol.decision import Decision, Finding

__all__ = ["UNTIMED_STANDARD_THREADS", "best_arm", "candidate_arm", "missing_arms", "side_by_side", "standard_arm"]

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


def missing_arms(gate: GateName, ctx: GateContext) -> Decision | None:
    """Why a gate that runs kernels cannot be evaluated here; None if it can."""
    if ctx.target.device != "cpu":
        return _blocked(
            gate,
            "device",
            f"target {ctx.target.name} needs a device of kind {ctx.target.device} with {', '.join(ctx.target.archs)}",
            "a machine of the target's kind, and kernels for it",
            f"on such a machine: fasttrack verify --target {ctx.target.name} --gates {gate}",
        )
    unavailable = sandbox.unavailable()
    if unavailable is not None:
        return _blocked(gate, "sandbox", unavailable.message, unavailable.expected, unavailable.next)
    if ctx.arms is None:
        return _blocked(
            gate,
            "no_artifacts",
            "there are no built artifacts to run",
            "gate build passed, on a machine that runs one of the target's architectures",
            "fasttrack verify --gates build",
        )
    return None


def _blocked(gate: GateName, code: str, message: str, expected: str, next_command: str) -> Decision:
    return Decision("not_evaluated", (Finding(f"{gate}.{code}", message, "this machine", expected, next_command),))
