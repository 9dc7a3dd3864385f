"""`fasttrack audit`: hold compiled code to the audit rules, this checkout's kernels or any file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fasttrack.commands.artifacts import build_checkout
from fasttrack.console import EXIT_FALLS_SHORT, EXIT_FINE, Json, Output
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from k3_backend.aot.manifest import Artifact
from verify.gates.audit import inspect
from verify.gates.audit.cuda import inspect_file
from verify.gates.audit.device import inspect_artifact
from verify.protocol import audit_cuda
from verify.protocol.audit import judge
from verify.protocol.decision import Finding

__all__ = ["register"]

DEVICE_FILES = (".cubin", ".ptx", ".sass")


@dataclass(frozen=True)
class _Judged:
    op: str
    where: str
    findings: list[Finding]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(audit)


def audit(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE…", help="Shared objects named <op>.so, or .cubin, .ptx, .sass files of any origin."
        ),
    ] = None,
    target: Annotated[str, typer.Option(help="Target whose kernels are audited when no FILE is given.")] = "cpu",
    arch: Annotated[
        str | None, typer.Option(help="One architecture: a level of the target, or sm_90a, sm_100a, sm_103a.")
    ] = None,
    op: Annotated[str | None, typer.Option(help="Only this op; for a shared object, the op it claims to be.")] = None,
    constant: Annotated[
        list[int] | None,
        typer.Option(help="Index of a kernel parameter that no kernel writes; all others are activations."),
    ] = None,
    json: Json = False,
) -> None:
    """Read machine code and report findings. Exit code: 0 none, 1 findings."""
    out, workspace = Output(json), Workspace.here()
    policy = workspace.settings.audit["cpu"].model_dump(mode="json")
    if files:
        judged = [_file(path, op, constant or [], policy) for path in files]
    else:
        built = build_checkout(workspace, target, arch, op)
        judged = [one for artifact in built for one in _artifact(artifact, policy)]
    out.table("objects", ("op", "object", "findings"), [(j.op, j.where, len(j.findings)) for j in judged])
    findings = [finding for one in judged for finding in one.findings]
    for f in findings:
        out.say(f"{f.code}: {f.message}; where: {f.where}; expected: {f.expected}; next: {f.next}")
    out.document(
        {
            "objects": [{"op": j.op, "object": j.where, "findings": len(j.findings)} for j in judged],
            "findings": [vars(finding) for finding in findings],
        }
    )
    raise typer.Exit(EXIT_FALLS_SHORT if findings else EXIT_FINE)


def _file(path: Path, op: str | None, constants: list[int], policy: dict[str, object]) -> _Judged:
    if not os.path.isfile(path):
        raise FasttrackError(
            "no such file", where=str(path), expected="a shared object, .cubin, .ptx or .sass file",
            next="fasttrack build",
        )  # fmt: skip
    if path.suffix in DEVICE_FILES:
        facts = inspect_file(path, constants)
        found = audit_cuda.judge(facts, str(path), f"nvdisasm -c -g {path}")
        return _Judged(op or path.stem, str(path), found)
    found = judge(inspect(path), op or path.stem, policy, str(path), f"objdump -d {path}")
    return _Judged(op or path.stem, str(path), found)


def _artifact(artifact: Artifact, policy: dict[str, object]) -> Iterator[_Judged]:
    if artifact.device == "cuda":
        for kernel in inspect_artifact(artifact):
            next_step = f"nvdisasm -c -g {artifact.path / kernel.image}"
            yield _Judged(artifact.op, kernel.where, audit_cuda.judge(kernel.facts, kernel.where, next_step))
        return
    where = f"{artifact.op}/{artifact.arch}"
    found = judge(inspect(artifact.object_path), artifact.op, policy, where, f"objdump -d {artifact.object_path}")
    yield _Judged(artifact.op, where, found)
