"""Audit gate: compiled kernels hold what they may hold, and CUDA kernels order every access that others may write.

Reads the objects that the build gate made, for every architecture of the target, on any machine; loads and runs none.
Host objects: allowed symbols, sections, memory and instructions only (`elf.py`, rules in `verify.protocol.audit`). CUDA
kernels: waits, polls, spills, cache hints, occupancy (`cuda/`, rules in `verify.protocol.audit_cuda`). What it cannot
see: what the arithmetic computes.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.records import EvidenceClass, GateResult
from k3_backend.aot.manifest import Artifact
from verify.context import GateContext
from verify.gates.audit.device import inspect_artifact
from verify.gates.audit.elf import inspect
from verify.gates.common import command_for, gate_guard, to_result
from verify.protocol import audit_cuda
from verify.protocol.audit import PROTOCOL_ID, decide

__all__ = ["PROTOCOL_ID", "inspect", "run"]

JOBS = 2


@gate_guard("audit", PROTOCOL_ID)
def run(ctx: GateContext) -> GateResult:
    """Audit every object of the candidate."""
    started = time.monotonic()
    device = ctx.target.device == "cuda"
    protocol = audit_cuda.PROTOCOL_ID if device else PROTOCOL_ID
    objects = [Artifact.read(artifact.path) for artifact in ctx.built]
    ctx.evidence.append("audit", _header(ctx, protocol, objects))
    obstacle = _obstacle(ctx)
    if obstacle is not None:
        ctx.evidence.append("audit", {"kind": "unavailable", **obstacle})
    elif device:
        with ThreadPoolExecutor(max_workers=JOBS) as pool:  # nvdisasm runs outside this process
            ctx.evidence.append_block("audit", list(pool.map(_kernels_line, objects)))
    else:
        ctx.evidence.append_block("audit", [_object_line(a.op, a.arch, a.digest, a.object_path) for a in objects])
    lines = ctx.evidence.lines("audit")
    detail = {"objects": [_row(line) for line in lines if line["kind"] == "object"]}
    return to_result(
        "audit", protocol, decide(lines), EvidenceClass.STATIC, [ctx.evidence.ref("audit")],
        time.monotonic() - started, detail,
    )  # fmt: skip


def _obstacle(ctx: GateContext) -> dict[str, str] | None:
    if not ctx.built:
        return {
            "code": "audit.no_objects",
            "message": "the build gate has not passed, so there is no object to read",
            "where": f"candidate {ctx.candidate.head[:12]}",
            "expected": "the objects of a build that passed",
            "next": command_for("build", ctx),
        }
    return None


def _header(ctx: GateContext, protocol: str, objects: list[Artifact]) -> dict[str, Any]:
    policy = ctx.settings.audit[ctx.target.device].model_dump(mode="json") if ctx.target.device == "cpu" else {}
    return {
        "kind": "header", "gate": "audit", "protocol": protocol,
        "base": ctx.candidate.base, "head": ctx.candidate.head,
        "target": ctx.target.name, "policy": policy, "next": command_for("audit", ctx),
        "objects": [{"op": a.op, "arch": _label(a), "digest": a.digest} for a in objects],
    }  # fmt: skip


def _object_line(op: str, arch: str, digest: str, path: Path) -> dict[str, Any]:
    return {"kind": "object", "op": op, "arch": arch, "digest": digest, "facts": inspect(path)}


def _label(artifact: Artifact) -> str:
    """Architecture, with the geometry where a target has several."""
    return artifact.name.removeprefix(f"{artifact.op}/")


def _kernels_line(artifact: Artifact) -> dict[str, Any]:
    kernels = [
        {"where": k.where, "image": k.image.removesuffix(".cubin"), "facts": k.facts}
        for k in inspect_artifact(artifact)
    ]
    return {
        "kind": "object", "op": artifact.op, "arch": _label(artifact), "digest": artifact.digest, "kernels": kernels,
    }  # fmt: skip


def _row(line: dict[str, Any]) -> dict[str, Any]:
    """One row of the report's table."""
    if "kernels" in line:
        facts = [kernel["facts"] for kernel in line["kernels"]]
        return {
            "op": line["op"], "arch": line["arch"], "digest": line["digest"], "kernels": len(facts),
            "registers": max((f["resources"]["registers"] for f in facts if f["malformed"] is None), default=None),
        }  # fmt: skip
    facts = line["facts"]
    row = {"op": line["op"], "arch": line["arch"], "digest": line["digest"]}
    if facts["malformed"] is not None:
        return {**row, "malformed": facts["malformed"]}
    return {**row, **{key: facts[key] for key in ("undefined", "needed", "code_bytes", "writable_bytes")}}
