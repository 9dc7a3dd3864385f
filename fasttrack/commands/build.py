"""`fasttrack build`: compile the kernels of this checkout. Builds that judge are the build gate's, in a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fasttrack.console import Json, Output
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from k3_backend.aot.build import build_all, specialised_ops
from k3_backend.aot.cpu.host import ARCHS
from k3_backend.geometry import geometry

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(build)


def build(
    target: Annotated[str, typer.Option(help="Target whose architectures and geometry are built.")] = "cpu",
    arch: Annotated[str | None, typer.Option(help="Only this architecture level.")] = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the artifacts; the build cache by default.")] = None,
    json: Json = False,
) -> None:
    """Compile kernels into artifacts with digests."""
    output, workspace = Output(json), Workspace.here()
    chosen = workspace.settings.target(target)
    if chosen.device != "cpu":
        raise FasttrackError(
            f"target {target} is for device {chosen.device}, and this version has no kernels for it",
            where="--target",
            expected="a target with device cpu",
            next="fasttrack targets",
        )
    ops = specialised_ops()
    if op is not None and op not in ops:
        raise FasttrackError(
            f"op {op!r} has no kernel", where="--op", expected=f"one of {', '.join(ops)}", next="fasttrack ops"
        )
    if arch is not None and arch not in ARCHS:
        raise FasttrackError(
            f"unknown architecture {arch!r}",
            where="--arch",
            expected=f"one of {', '.join(ARCHS)}",
            next="fasttrack targets",
        )
    folder = out or workspace.cache / "artifacts"
    rows = []
    for level in (arch,) if arch else chosen.archs:
        built = build_all((op,) if op else ops, level, geometry(chosen.geometry), out_dir=folder)
        rows += [(a.op, a.arch, a.geometry, a.digest, str(a.path)) for a in built.values()]
    output.table("artifacts", ("op", "arch", "geometry", "digest"), [(o, a, g, d[:16]) for o, a, g, d, _ in rows])
    columns = ("op", "arch", "geometry", "digest", "path")
    output.document({"artifacts": [dict(zip(columns, row, strict=True)) for row in rows]})
