"""`fasttrack runs`: what was run here and how it ended."""

from __future__ import annotations

import typer

from fasttrack.console import Json, Output
from fasttrack.workspace import Workspace
from harness.store import RunStore

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(runs)


def runs(json: Json = False) -> None:
    """Runs of this checkout, newest last, with their candidates."""
    out, workspace = Output(json), Workspace.here()
    document, rows = [], []
    for run_id in RunStore.list(workspace.runs):
        store = RunStore.read(workspace.runs, run_id)
        spec, candidates = store.spec, store.candidates()
        task = spec["task"]
        subject = task["id"] if isinstance(task, dict) else f"{spec['head'][:12]} against {spec['base'][:12]}"
        open_ones = sum(row.outcome is None for row in candidates)
        ended = "open" if open_ones or not candidates else ", ".join(sorted({str(row.outcome) for row in candidates}))
        rows.append((run_id, spec["command"], subject, len(candidates), ended))
        document.append(
            {
                "run": run_id,
                "command": spec["command"],
                "subject": subject,
                "candidates": [
                    {"name": r.folder, "origin": r.origin, "note": r.note, "outcome": r.outcome, "reason": r.reason}
                    for r in candidates
                ],
                "bundles": sorted(p.name for p in (store.path / "bundles").glob("*-*") if p.is_dir()),
            }
        )
    out.table("runs", ("run", "command", "subject", "candidates", "outcomes"), rows)
    out.document({"runs": document})
