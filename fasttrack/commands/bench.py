"""`fasttrack bench`: the specialised path beside peers, paired in one run, with floors.

On the `cpu` target the run happens here. For a GPU the table comes from a kit's results (`--from R`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fasttrack.commands.peers import needs_kit, show_peers
from fasttrack.console import Json, Output
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError

__all__ = ["register"]

DEFAULT_PEERS = ("eager", "compile")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(bench)


def bench(
    op: Annotated[str | None, typer.Option(help="One op instead of whole decode steps.")] = None,
    target: Annotated[str | None, typer.Option(help="Target of harness.toml; `cpu` without --from.")] = None,
    peers: Annotated[bool, typer.Option(help="Also time peers: on `cpu` eager torch and torch.compile.")] = True,
    batches: Annotated[str | None, typer.Option(help="For example 1,8,64; those of the pr tier by default.")] = None,
    contexts: Annotated[str | None, typer.Option(help="For example 256,2048; all of the target by default.")] = None,
    results: Annotated[
        Path | None, typer.Option("--from", metavar="R", help="Results of a kit that was built with --bench.")
    ] = None,
    mutants: Annotated[Path | None, typer.Option(help="The folder that the kit's mutants were built from.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="With --from: also write the table to this file.")] = None,
    short: Annotated[bool, typer.Option(help="With --markdown: a few rows of every op.")] = False,
    json: Json = False,
) -> None:
    """Measure speed and share of the floor. Decides nothing about a candidate; `verify` does."""
    if results is not None:
        raise typer.Exit(
            show_peers(Output(json), results, target=target, op=op, mutants=mutants, markdown=markdown, shortened=short)
        )
    target = target or "cpu"
    from verify.bench.run import bench as run_bench  # torch takes seconds, which other commands need not wait for
    from verify.timing.sampler import ArmFault

    out, workspace = Output(json), Workspace.here()
    settings = workspace.settings
    if settings.target(target).device != "cpu":
        raise needs_kit(target)
    try:
        report = run_bench(
            workspace.root,
            settings,
            settings.target(target),
            op=op,
            batches=_numbers("--batches", batches),
            contexts=_numbers("--contexts", contexts),
            peers=DEFAULT_PEERS if peers else (),
            progress=out.say,
        )
    except ArmFault as fault:
        raise FasttrackError(
            f"the {fault.arm} arm failed ({fault.code}): {fault}",
            where="build/bench/logs",
            expected="an arm that runs every cell",
            next="fasttrack bench --no-peers, then look at the log",
        ) from fault
    rows = report.rows()
    out.table(
        f"{report.geometry} on {report.arch}, {report.threads} threads",
        list(rows[0]),
        [tuple(r.values()) for r in rows],
    )
    worst = report.worst()
    if worst is not None:
        out.say(f"worst ratio to the better peer: {worst.value:.2f} ({worst.low:.2f}–{worst.high:.2f})")
    out.say(f"other processes used {report.foreign_cpu_share:.0%} of the machine meanwhile")
    out.document(report.model_dump(mode="json"))


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise FasttrackError(
            f"{text!r} is not a list of numbers",
            where=option,
            expected="for example 1,8,64",
            next="fasttrack bench --help",
        ) from None
