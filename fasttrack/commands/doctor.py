"""`fasttrack doctor`: what this machine can evaluate, what not, and the next command for each."""

from __future__ import annotations

import os
import platform
import shutil

import typer

from fasttrack.console import EXIT_FINE, EXIT_INCOMPLETE, Json, Output
from fasttrack.workspace import Workspace
from harness import sandbox
from harness.errors import FasttrackError
from k3_backend.aot.cpu.host import ARCHS, best_arch
from verify.capability import gpus, obstacles

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(doctor)


def doctor(json: Json = False) -> None:
    """What can be evaluated here. Exit code: 0 if some target can reach accept, 3 if none can."""
    out, workspace = Output(json), Workspace.here()
    machine = _machine(workspace)
    out.table("this machine", ("what", "found"), machine.items())
    reachable = []
    document = {}
    for target in workspace.settings.targets.values():
        found = obstacles(target, workspace.root)
        if not any(found.values()):
            reachable.append(target.name)
        out.table(
            f"target {target.name}: accept {'can' if target.name in reachable else 'cannot'} be reached here",
            ("gate", "here", "why not", "next"),
            [
                (gate, "yes", "", f"fasttrack verify --target {target.name} --gates {gate} --patch FILE")
                if reason is None
                else (gate, "not_evaluated", reason.message, reason.next)
                for gate, reason in found.items()
            ],
        )
        document[target.name] = {
            "accept_reachable": target.name in reachable,
            "gates": {
                gate: None if reason is None else reason.model_dump(mode="json") for gate, reason in found.items()
            },
        }
    out.document({"machine": machine, "targets": document})
    raise typer.Exit(EXIT_FINE if reachable else EXIT_INCOMPLETE)


def _machine(workspace: Workspace) -> dict[str, str]:
    missing = sandbox.unavailable()
    try:
        dirty = workspace.repo.dirty()
        checkout = f"{len(dirty)} changed files; verify and optimize need a clean tree" if dirty else "clean"
    except FasttrackError as error:
        checkout = f"{error.what}; next: {error.next}"
    return {
        "python": platform.python_version(),
        "g++": shutil.which("g++") or "missing; next: apt-get install g++",
        "git": shutil.which("git") or "missing; next: apt-get install git",
        "sandbox": "bubblewrap works" if missing is None else f"{missing.message}; next: {missing.next}",
        "processor level": best_arch(ARCHS) or "none of this project's levels",
        "cores": str(len(os.sched_getaffinity(0))),
        "GPUs": ", ".join(gpus()) or "none",
        "checkout": checkout,
    }
