"""Gates that a GPU machine evaluates: their results come in through a kit, or they say which commands would bring them.

The raw lines of an imported kit become this verification's own, and are decided here by the same function as anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.errors import FasttrackError
from harness.records import EvidenceClass, GateName, GateResult
from verify.context import GateContext
from verify.gates.common import to_result
from verify.kit.importing import Imported
from verify.protocol.decision import Decision, Finding, Line

__all__ = ["BY_KIT", "from_kit", "keep_peer_table", "missing_kit"]

BY_KIT: tuple[GateName, ...] = ("kernels", "path", "perf")
"""Gates that a kit is the way for; others need an engine on the GPU machine."""
PEER_TABLE = "bench"
"""Name of its raw lines, as a kit has it."""


def missing_kit(gate: GateName, ctx: GateContext) -> Decision:
    """The decision where no kit was imported: the commands that would evaluate the gate."""
    judged = f"--candidate {ctx.candidate.head[:12]} --base {ctx.candidate.base[:12]}"
    build = f"fasttrack kit build --target {ctx.target.name} --tier {ctx.tier.name} {judged} --out K"
    finding = Finding(
        f"{gate}.kit",
        f"needs {', '.join(ctx.target.archs)}; this machine takes part through a kit",
        f"target {ctx.target.name}",
        "a kit built here, run on a GPU machine, and imported here",
        f"{build}; there: python3 K/kit.py run --out R; here: fasttrack kit import R",
    )
    return Decision("not_evaluated", (finding,))


def from_kit(
    gate: GateName,
    protocol_id: str,
    ctx: GateContext,
    decide: Callable[[Sequence[Line]], Decision],
    detail: Callable[[Sequence[Line]], Mapping[str, Any]],
) -> GateResult:
    """A gate's result from the imported kit.

    Raises:
        FasttrackError: the kit holds other artifacts than the build gate built.
    """
    started = time.monotonic()
    kit = ctx.kit
    if kit is None or gate not in kit.received.lines:
        return to_result(
            gate, protocol_id, missing_kit(gate, ctx), EvidenceClass.STATIC, [], time.monotonic() - started
        )
    _take_artifacts(ctx, kit)
    lines = kit.received.lines[gate]
    if not ctx.evidence.lines(gate):
        ctx.evidence.append_block(gate, lines)
    decision = decide(lines)
    table = {**detail(lines), "kit": kit.received.manifest.digest, "machine": dict(kit.received.machine)}
    seconds = sum(float(line.get("seconds", 0.0)) for line in lines)
    return to_result(gate, protocol_id, decision, EvidenceClass.HARDWARE, [ctx.evidence.ref(gate)], seconds, table)


def keep_peer_table(ctx: GateContext) -> None:
    """Store the raw lines of an imported kit's peer table beside the gates' evidence."""
    lines = () if ctx.kit is None else ctx.kit.received.lines.get(PEER_TABLE, ())
    if lines and not ctx.evidence.lines(PEER_TABLE):
        ctx.evidence.append_block(PEER_TABLE, lines)


def _take_artifacts(ctx: GateContext, kit: Imported) -> None:
    """Hold the kit's artifacts against what the build gate built; where it built nothing, they are what was judged."""
    judged = dict(kit.received.manifest.arms["candidate"])
    if not ctx.built:
        ctx.built = kit.artifacts
        ctx.candidate = ctx.candidate.model_copy(update={"artifacts": judged})
    built = {artifact.name: artifact.digest for artifact in ctx.built}
    for name, digest in judged.items():
        if built.get(name) != digest:
            raise FasttrackError(
                f"the kit judged artifact {digest[:12]} of {name}; the build gate built {str(built.get(name))[:12]}",
                where="kit", expected="the artifacts of this candidate", next="fasttrack kit build, and run it again",
            )  # fmt: skip
