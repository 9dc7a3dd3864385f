"""`fasttrack build`: compile the kernels of this checkout. Builds that judge are the build gate's, in a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fasttrack.commands.artifacts import build_checkout
from fasttrack.console import Json, Output
from fasttrack.workspace import Workspace

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(build)


def build(
    target: Annotated[str, typer.Option(help="Target whose architectures and geometry are built.")] = "cpu",
    arch: Annotated[
        str | None, typer.Option(help="One architecture: a level of the target, or sm_90a, sm_100a, sm_103a.")
    ] = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the artifacts; the build cache by default.")] = None,
    json: Json = False,
) -> None:
    """Compile kernels into artifacts with digests."""
    output, workspace = Output(json), Workspace.here()
    built = build_checkout(workspace, target, arch, op, out)
    rows = [(a.op, a.arch, a.geometry, a.digest, str(a.path)) for a in built]
    output.table("artifacts", ("op", "arch", "geometry", "digest"), [(o, a, g, d[:16]) for o, a, g, d, _ in rows])
    columns = ("op", "arch", "geometry", "digest", "path")
    output.document({"artifacts": [dict(zip(columns, row, strict=True)) for row in rows]})
