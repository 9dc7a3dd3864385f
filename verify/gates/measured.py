"""What the gates that run candidate code share: why they cannot run it here, and the candidate as workers load it."""

from __future__ import annotations

from harness import sandbox
from harness.records import GateName
from k3_backend.aot.cpu.host import best_arch
from verify.context import Arms, GateContext
from verify.evaluator.worker import ArmSpec
from verify.gates.common import command_for
from verify.protocol.decision import Decision, Finding

__all__ = ["candidate_arm", "identity", "obstacle"]


def obstacle(ctx: GateContext, gate: GateName) -> Decision | None:
    """Why nothing can be measured here: another kind of machine, no sandbox, no artifacts."""
    again = command_for(gate, ctx)
    if ctx.target.device != "cpu" or best_arch(ctx.target.archs) is None:
        what = f"this machine cannot run the kernels of {', '.join(ctx.target.archs)}"
        finding = Finding(f"{gate}.device", what, f"target {ctx.target.name}", "a machine of the target's kind", again)
    elif (reason := sandbox.unavailable()) is not None:
        finding = Finding(f"{gate}.environment", reason.message, reason.where, reason.expected, reason.next)
    elif ctx.arms is None:
        finding = Finding(
            f"{gate}.no_artifacts", "the build gate gave no artifacts", "build", "a passed build gate", again
        )
    else:
        return None
    return Decision("not_evaluated", (finding,))


def candidate_arm(arms: Arms) -> ArmSpec:
    """The candidate as workers load it."""
    artifacts = {op: artifact.path for op, artifact in arms.candidate.items()}
    return ArmSpec("specialized", {**artifacts, "runtime": arms.runtime.path}, arms.candidate_schedules)


def identity(arms: Arms) -> dict[str, str]:
    """Op -> digest of the candidate's artifact: what a raw file's header says it is about."""
    return {op: artifact.digest for op, artifact in sorted(arms.candidate.items())}
