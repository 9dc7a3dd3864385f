"""`fasttrack bundle verify|show|diff` and `fasttrack report`: evidence, checked and read. A bundle is never trusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

import reports
from fasttrack.console import EXIT_FALLS_SHORT, EXIT_FINE, EXIT_INCOMPLETE, Json, Output
from harness.errors import FasttrackError
from reports import BundleCheck, CheckWord

__all__ = ["register"]

Folder = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder of a bundle.")]

EXITS = {CheckWord.VERIFIED: EXIT_FINE, CheckWord.REFUSED: EXIT_FALLS_SHORT, CheckWord.PARTIAL: EXIT_INCOMPLETE}


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    group = typer.Typer(help="Check, read and compare evidence bundles.", no_args_is_help=True)
    group.command("verify")(verify)
    group.command("show")(show)
    group.command("diff")(diff)
    app.add_typer(group, name="bundle")
    app.command("report")(report)


def verify(bundle: Folder, json: Json = False) -> None:
    """Re-hash every file, recompute outcomes and verdict from raw data. Exit code: 0 verified, 1 refused, 3 partly."""
    out = Output(json)
    check = reports.verify_bundle(_existing(bundle))
    _print(check, out)
    raise typer.Exit(EXITS[check.word])


def show(bundle: Folder, json: Json = False) -> None:
    """The verdict and its gates, after checking the bundle. Exit code as for `verify`."""
    out = Output(json)
    check = reports.verify_bundle(_existing(bundle))
    if check.word is CheckWord.REFUSED:
        _print(check, out)
        raise typer.Exit(EXIT_FALLS_SHORT)
    summary = reports.show(bundle)
    out.say(summary.text())
    out.document({"check": check.model_dump(mode="json"), "bundle": summary.model_dump(mode="json")})
    raise typer.Exit(EXITS[check.word])


def diff(first: Folder, second: Folder, json: Json = False) -> None:
    """What differs between two bundles: change, environment, outcomes, cells."""
    out = Output(json)
    difference = reports.diff(_existing(first), _existing(second))
    out.say(difference.text())
    out.document(difference.model_dump(mode="json"))


def report(
    bundle: Folder,
    format: Annotated[Literal["md", "html"], typer.Option(help="Markdown or one self-contained HTML file.")] = "md",  # noqa: A002
    json: Json = False,
) -> None:
    """Print the reviewer's report of a bundle, rendered anew from its data."""
    out, text = Output(json), reports.render(_existing(bundle), format)
    if json:
        out.document({"format": format, "report": text})
    else:
        out.write(text)


def _existing(bundle: Path) -> Path:
    if not os.path.isdir(bundle):
        raise FasttrackError(
            "no such folder", where=str(bundle), expected="the folder of a bundle", next="fasttrack runs"
        )
    return bundle


def _print(check: BundleCheck, out: Output) -> None:
    out.table("claims", ("claim", "status", "note"), [(c.claim, c.status.value, c.note or "") for c in check.claims])
    for reason in check.reasons:
        out.say(
            f"{reason.code}: {reason.message}; where: {reason.where}; expected: {reason.expected}; next: {reason.next}"
        )
    out.say(
        f"bundle {check.bundle}: {check.word.value}" + (f", verdict {check.verdict.value}" if check.verdict else "")
    )
    out.document(check.model_dump(mode="json"))
