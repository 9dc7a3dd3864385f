"""Audit gate for host objects: compiled kernels hold allowed symbols, sections, memory and instructions only.

Reads the objects that the build gate made, for every architecture of the target, on any machine; loads and runs none.
What it cannot see: what the arithmetic computes, and instructions hidden inside others. Device code (cubins) has rules
of its own, which come with the CUDA kernels.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.records import EvidenceClass, GateResult
from k3_backend.aot.manifest import Artifact
from verify.context import GateContext
from verify.gates.audit.elf import inspect
from verify.gates.common import command_for, gate_guard, to_result
from verify.protocol.audit import PROTOCOL_ID, decide

__all__ = ["PROTOCOL_ID", "inspect", "run"]


@gate_guard("audit", PROTOCOL_ID)
def run(ctx: GateContext) -> GateResult:
    """Audit every object of the candidate."""
    started = time.monotonic()
    objects = [Artifact.read(artifact.path) for artifact in ctx.built]
    ctx.evidence.append("audit", _header(ctx, objects))
    obstacle = _obstacle(ctx)
    if obstacle is not None:
        ctx.evidence.append("audit", {"kind": "unavailable", **obstacle})
    else:
        ctx.evidence.append_block("audit", [_object_line(a.op, a.arch, a.digest, a.object_path) for a in objects])
    lines = ctx.evidence.lines("audit")
    detail = {"objects": [_row(line) for line in lines if line["kind"] == "object"]}
    return to_result(
        "audit",
        PROTOCOL_ID,
        decide(lines),
        EvidenceClass.STATIC,
        [ctx.evidence.ref("audit")],
        time.monotonic() - started,
        detail,
    )


def _obstacle(ctx: GateContext) -> dict[str, str] | None:
    if ctx.target.device != "cpu":
        archs = ", ".join(ctx.target.archs)
        return {
            "code": "audit.device",
            "message": f"this version has no {ctx.target.device} kernels and no rules for their machine code ({archs})",
            "where": f"target {ctx.target.name}",
            "expected": f"machine code for {archs} read and judged",
            "next": f"with a version that has {ctx.target.device} kernels: {command_for('audit', ctx)}",
        }
    if not ctx.built:
        return {
            "code": "audit.no_objects",
            "message": "the build gate has not passed, so there is no object to read",
            "where": f"candidate {ctx.candidate.head[:12]}",
            "expected": "the objects of a build that passed",
            "next": command_for("build", ctx),
        }
    return None


def _header(ctx: GateContext, objects: list[Artifact]) -> dict[str, Any]:
    policy = ctx.settings.audit[ctx.target.device].model_dump(mode="json") if ctx.target.device == "cpu" else {}
    return {
        "kind": "header", "gate": "audit", "protocol": PROTOCOL_ID,
        "base": ctx.candidate.base, "head": ctx.candidate.head,
        "target": ctx.target.name, "policy": policy, "next": command_for("audit", ctx),
        "objects": [{"op": a.op, "arch": a.arch, "digest": a.digest} for a in objects],
    }  # fmt: skip


def _object_line(op: str, arch: str, digest: str, path: Path) -> dict[str, Any]:
    return {"kind": "object", "op": op, "arch": arch, "digest": digest, "facts": inspect(path)}


def _row(line: dict[str, Any]) -> dict[str, Any]:
    """One row of the report's table."""
    facts = line["facts"]
    row = {"op": line["op"], "arch": line["arch"], "digest": line["digest"]}
    if facts["malformed"] is not None:
        return {**row, "malformed": facts["malformed"]}
    return {**row, **{key: facts[key] for key in ("undefined", "needed", "code_bytes", "writable_bytes")}}
