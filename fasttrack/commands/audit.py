"""`fasttrack audit`: hold compiled objects to the audit rules, this checkout's kernels or any shared object."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fasttrack.console import EXIT_FALLS_SHORT, EXIT_FINE, Json, Output
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from k3_backend.aot.build import build_all, specialised_ops
from k3_backend.geometry import geometry
from k3_backend.ops import OPS
from verify.gates.audit import inspect
from verify.protocol.audit import judge

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(audit)


def audit(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE…", help="Shared objects named <op>.so.")] = None,
    target: Annotated[str, typer.Option(help="Target whose kernels are audited when no FILE is given.")] = "cpu",
    arch: Annotated[str | None, typer.Option(help="Only this architecture level.")] = None,
    op: Annotated[str | None, typer.Option(help="Only this op; for a FILE, the op it claims to be.")] = None,
    json: Json = False,
) -> None:
    """Read machine code and report findings. Exit code: 0 none, 1 findings."""
    out, workspace = Output(json), Workspace.here()
    policy = workspace.settings.audit["cpu"].model_dump(mode="json")
    objects = _given(files, op) if files else _built(workspace, target, arch, op)
    rows, findings = [], []
    for name, where, path in objects:
        facts = inspect(path)
        found = judge(facts, name, policy, where, f"objdump -d {path}")
        rows.append((name, where, len(found)))
        findings += found
    out.table("objects", ("op", "object", "findings"), rows)
    for f in findings:
        out.say(f"{f.code}: {f.message}; where: {f.where}; expected: {f.expected}; next: {f.next}")
    columns = ("op", "object", "findings")
    out.document(
        {
            "objects": [dict(zip(columns, row, strict=True)) for row in rows],
            "findings": [vars(finding) for finding in findings],
        }
    )
    raise typer.Exit(EXIT_FALLS_SHORT if findings else EXIT_FINE)


def _given(files: list[Path], op: str | None) -> list[tuple[str, str, Path]]:
    for path in files:
        if not os.path.isfile(path):
            raise FasttrackError("no such file", where=str(path), expected="a shared object", next="fasttrack build")
    return [(op or path.stem, str(path), path) for path in files]


def _built(workspace: Workspace, target: str, arch: str | None, op: str | None) -> list[tuple[str, str, Path]]:
    chosen = workspace.settings.target(target)
    if chosen.device != "cpu":
        raise FasttrackError(
            f"target {target} is for device {chosen.device}, and this version has no kernels for it",
            where="--target",
            expected="a target with device cpu",
            next="fasttrack targets",
        )
    if op is not None and op not in OPS:
        raise FasttrackError(
            f"unknown op {op!r}", where="--op", expected=f"one of {', '.join(OPS)}", next="fasttrack ops"
        )
    if arch is not None and arch not in chosen.archs:
        raise FasttrackError(
            f"{arch!r} is not an architecture of target {target}",
            where="--arch",
            expected=f"one of {', '.join(chosen.archs)}",
            next="fasttrack targets",
        )
    found = []
    for level in (arch,) if arch else chosen.archs:
        ops = (op,) if op else specialised_ops()
        built = build_all(ops, level, geometry(chosen.geometry), out_dir=workspace.cache / "artifacts")
        found += [(a.op, f"{a.op}/{level}", a.object_path) for a in built.values()]
    return found
