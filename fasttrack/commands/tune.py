"""`fasttrack tune build|import`: schedules of GPU kernels from points timed on a GPU machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fasttrack.console import Json, Output
from fasttrack.workspace import Workspace
from harness.durable import write_atomic
from harness.errors import FasttrackError
from k3_backend.aot.cuda.arch import ARCHS
from k3_backend.aot.cuda.build import specialised_values
from k3_backend.aot.schedule import Schedule, load_declarations, render
from k3_backend.geometry import geometry
from verify.building import KERNELS, SCHEDULES
from verify.kit.build import make_archive
from verify.tuning.build import Asked, archive
from verify.tuning.choose import choose, schedule_of
from verify.tuning.receive import read_results
from verify.tuning.summary import raw_lines, summary

__all__ = ["register"]

MEASUREMENTS = Path("docs/measurements")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    group = typer.Typer(
        help="Choose schedules of GPU kernels from points timed on a GPU machine.", no_args_is_help=True
    )
    group.command("build")(build)
    group.command("import")(import_results)
    app.add_typer(group, name="tune")


def build(
    op: Annotated[str, typer.Argument(metavar="OP", help="Op whose schedules are tuned.")],
    out: Annotated[Path, typer.Option(help="New folder, or new archive ending in .tar.gz.")],
    rows: Annotated[str, typer.Option(help="Rows M to time, comma-separated; they become buckets.")],
    target: Annotated[str, typer.Option(help="GPU target of harness.toml.")] = "h200",
    commit: Annotated[str, typer.Option(help="Commit of the kernels and schedules.")] = "HEAD",
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="'a=1,2 b': cross product of these values, once per option; else every change of one tunable."
        ),
    ] = None,
    geometries: Annotated[str | None, typer.Option(help="Only these, comma-separated.")] = None,
    json: Json = False,
) -> None:
    """Build the archive of an op's points. Exit code: 0 built, 2 usage or environment."""
    output, workspace = Output(json), Workspace.here()
    asked = Asked(
        op, target, workspace.repo.resolve(commit), _rows(rows), tuple(vary or ()),
        None if geometries is None else tuple(geometries.split(",")),
    )  # fmt: skip
    manifest, files = archive(asked, workspace.settings, workspace.repo, workspace.cache, output.say)
    run = make_archive(out, f"tuning-{manifest.digest[:12]}", {**files, "manifest.json": manifest.document()})
    table = [(timed.key, str(len(timed.points))) for timed in manifest.calls]
    output.table(f"tuning archive {manifest.digest[:12]}", ("call", "points"), table)
    reasons = sorted({str(entry["reason"]) for entry in manifest.left_out})
    output.say(f"left out: {len(manifest.left_out)} points" + "".join(f"\n  {reason}" for reason in reasons[:20]))
    output.say(f"on the GPU machine: {run}\nthen here: fasttrack tune import R")
    output.document({
        "archive": manifest.digest, "path": str(out), "commit": asked.commit, "op": op, "target": target,
        "calls": {timed.key: len(timed.points) for timed in manifest.calls},
        "left_out": [dict(entry) for entry in manifest.left_out],
    })  # fmt: skip


def import_results(
    results: Annotated[Path, typer.Argument(metavar="R", help="Folder that kit.py wrote with --out.")],
    write: Annotated[bool, typer.Option(help="Write schedules and measurements into this checkout.")] = False,
    json: Json = False,
) -> None:
    """Choose schedules from results; with --write, put them in place. Exit code: 0 chosen, 3 some call is missing."""
    output, workspace = Output(json), Workspace.here()
    received = read_results(results)
    manifest = received.manifest
    choices = choose(manifest, received.lines)
    family = ARCHS[manifest.arch].schedules
    declared = load_declarations(workspace.root / KERNELS / manifest.op / "cute.toml")
    written: list[Path] = []
    texts: dict[Path, str] = {}
    for name in dict.fromkeys(choice.timed.geometry for choice in choices):
        path = workspace.root / SCHEDULES / family / name / f"{manifest.op}.toml"
        current = Schedule.load(
            path, op=manifest.op, geometry=name, tunables=declared.tunables,
            specialised=specialised_values(declared, geometry(name)),
        )  # fmt: skip
        own = [choice for choice in choices if choice.timed.geometry == name]
        texts[path] = render(schedule_of(current, own))
    stem = f"tuning-{manifest.op}-{manifest.target}-{manifest.digest[:12]}"
    texts[workspace.root / MEASUREMENTS / f"{stem}.md"] = summary(received, choices)
    texts[workspace.root / MEASUREMENTS / f"{stem}.jsonl"] = raw_lines(received)
    if write:
        for path, text in texts.items():
            write_atomic(path, text.encode())
            written.append(path.relative_to(workspace.root))
    output.say(summary(received, choices))
    output.say("\n".join(f"written: {path}" for path in written) or "nothing written; --write puts it in place")
    missing = [timed.key for timed in manifest.calls if timed.key not in {choice.timed.key for choice in choices}]
    output.document({
        "archive": manifest.digest, "written": [str(path) for path in written], "missing": missing,
        "choices": [
            {"call": c.timed.key, "tunables": dict(c.point), "us": list(c.us), "standard_us": list(c.standard)}
            for c in choices
        ],
    })  # fmt: skip
    raise typer.Exit(3 if missing else 0)


def _rows(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(int(part) for part in text.split(","))
        if not rows or list(rows) != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(text)
    except ValueError as error:
        raise FasttrackError(
            f"is {text!r}", where="--rows", expected="ascending numbers of rows: 1,8,16,64",
            next="fasttrack tune build --help",
        ) from error  # fmt: skip
    return rows
