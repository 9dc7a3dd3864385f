"""`fasttrack targets | gates | tasks | ops`: what exists here. These commands read data and run nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from agents.task import load_task, task_files
from fasttrack.console import EXIT_FALLS_SHORT, Json, Output
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from harness.records import GATES
from k3_backend.ops import OPS
from verify.pipeline import gate_module

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(targets)
    app.command()(gates)
    app.command()(tasks)
    app.command()(ops)


def targets(json: Json = False) -> None:
    """Targets: architecture, geometry, matrix, required gates, cost per tier."""
    out, settings = Output(json), Workspace.here().settings
    document = {}
    for target in settings.targets.values():
        matrix = target.full_matrix()
        costs = {name: target.cost(tier) for name, tier in settings.tiers.items()}
        document[target.name] = {
            **target.model_dump(mode="json"),
            "cells": len(matrix.cells),
            "cells_before_pruning": matrix.total,
            "tiers": {
                name: {"cells": c.cells, "blocks": c.blocks, "measurements": c.measurements, "minutes": c.minutes}
                for name, c in costs.items()
            },
        }
        out.table(
            f"{target.name}: {target.geometry} on {', '.join(target.archs)}",
            ("what", "value"),
            [
                ("layouts", ", ".join(layout.key for layout in target.layouts)),
                ("batches", ", ".join(map(str, target.batches))),
                ("contexts", ", ".join(map(str, target.contexts))),
                ("drafts", ", ".join(map(str, target.drafts))),
                ("workloads", ", ".join(target.workloads)),
                ("cells", f"{len(matrix.cells)} of {matrix.total} ({matrix.total - len(matrix.cells)} pruned by rule)"),
                *((f"rule: {rule.reason}", f"-{n} cells") for rule, n in zip(target.prune, matrix.pruned, strict=True)),
                ("accept needs", ", ".join(f"{gate} ({kind.value})" for gate, kind in target.required.items())),
                *(
                    (f"tier {name}", f"{c.cells} perf cells, {c.blocks} blocks, at most {c.minutes} min")
                    for name, c in costs.items()
                ),
            ],
        )
    out.document({"targets": document})


def gates(json: Json = False) -> None:
    """Gates in the order in which they run, with the protocol each one follows."""
    out = Output(json)
    rows = []
    for gate in GATES:
        module = gate_module(gate)
        summary = (module.__doc__ or "").strip().splitlines()[0]
        rows.append((gate, module.PROTOCOL_ID, summary))
    out.table("gates, cheapest first", ("gate", "protocol", "decides"), rows)
    out.document({"gates": [{"gate": g, "protocol_id": p, "decides": s} for g, p, s in rows]})


def tasks(
    action: Annotated[
        str, typer.Argument(help="`list`, or `lint` to check every task against schema and settings")
    ] = "list",
    json: Json = False,
) -> None:
    """Optimisation tasks of this checkout."""
    out, workspace = Output(json), Workspace.here()
    if action not in ("list", "lint"):
        raise FasttrackError(
            f"unknown action {action!r}", where="tasks", expected="list or lint", next="fasttrack tasks list"
        )
    _ = workspace.settings  # a problem of harness.toml is none of the tasks'
    rows, problems = [], []
    for path in task_files(workspace.root):
        try:
            task = load_task(path)
            workspace.check(task, path)
        except FasttrackError as error:
            if action == "list":
                raise
            problems.append({"what": error.what, "where": error.where, "expected": error.expected, "next": error.next})
            continue
        rows.append((task.id, task.target, ", ".join(task.ops), len(task.all_cells()), task.objective))
    out.table("tasks", ("id", "target", "ops", "cells", "objective"), rows)
    for problem in problems:
        out.say(f"{problem['where']}: {problem['what']}; expected {problem['expected']}; next: {problem['next']}")
    columns = ("id", "target", "ops", "cells", "objective")
    out.document({"tasks": [dict(zip(columns, row, strict=True)) for row in rows], "problems": problems})
    if problems:
        raise typer.Exit(EXIT_FALLS_SHORT)


def ops(json: Json = False) -> None:
    """Ops of a decode step: tensors with shape symbols, dtype and role, attributes."""
    out = Output(json)
    document = {}
    for spec in OPS.values():
        document[spec.name] = {
            "summary": spec.summary,
            "tensors": [
                {"name": t.name, "dims": list(t.dims), "dtype": t.dtype, "role": t.role, "optional": t.optional}
                for t in spec.tensors
            ],
            "attrs": [{"name": a.name, "kind": a.kind, "meaning": a.meaning} for a in spec.attrs],
        }
        out.table(
            f"{spec.name}: {spec.summary}",
            ("tensor", "shape", "dtype", "role"),
            [(t.name, "[" + ", ".join(map(str, t.dims)) + "]", t.dtype, t.role) for t in spec.tensors],
        )
    out.document({"ops": document})
