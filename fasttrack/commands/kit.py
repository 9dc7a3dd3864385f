"""`fasttrack kit build|import`: carry a verification to a GPU machine, and take its results in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fasttrack.commands.verify import Judging, judge, parse_gates
from fasttrack.console import Json, Output
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from verify.kit.artifacts import require_covered
from verify.kit.build import KIT_GATES, KIT_SECTIONS, kit_files, make_kit
from verify.kit.importing import arm_of, arms_of, manifest_of, mutant_arms, require_ours
from verify.kit.receive import read_results
from verify.pipeline import make_candidate, require_own_base
from verify.snapshots import JUDGING_PATHS, export_tree

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    group = typer.Typer(help="Evaluate on a GPU machine that has no compiler, index or network.", no_args_is_help=True)
    group.command("build")(build)
    group.command("import")(import_results)
    app.add_typer(group, name="kit")


def build(
    out: Annotated[Path, typer.Option(help="New folder, or new archive ending in .tar.gz.")],
    target: Annotated[str, typer.Option(help="Target of harness.toml.")] = "h200",
    candidate: Annotated[str, typer.Option(help="Commit to judge.")] = "HEAD",
    base: Annotated[str, typer.Option(help="Commit whose protected code judges.")] = "HEAD",
    tier: Annotated[str, typer.Option(help="smoke, pr or full.")] = "pr",
    gates: Annotated[str | None, typer.Option(help="Only these gates, comma-separated.")] = None,
    ops: Annotated[str | None, typer.Option(help="Only these ops, comma-separated.")] = None,
    mutants: Annotated[Path | None, typer.Option(help="Folder of NAME.patch files: faults that must be found.")] = None,
    bench: Annotated[
        bool, typer.Option("--bench", help="Also carry the peer table (`fasttrack bench --peers`).")
    ] = False,
    json: Json = False,
) -> None:
    """Build the kit of a candidate. Exit code: 0 built, 2 usage or environment."""
    output, workspace = Output(json), Workspace.here()
    settings, repo, cache = workspace.settings, workspace.repo, workspace.cache
    chosen, _ = settings.target(target), settings.tier(tier)
    if chosen.device == "cpu":
        raise FasttrackError(
            f"target {target} needs no kit", where="--target", expected="a target with another device",
            next=f"fasttrack verify --target {target}",
        )  # fmt: skip
    start, head = repo.resolve(base), repo.resolve(candidate)
    require_own_base(repo, start, settings.scope)
    selected = _kit_gates(gates) + (tuple(KIT_SECTIONS) if bench else ())
    named = None if ops is None else tuple(op.strip() for op in ops.split(",") if op.strip())
    arm = arm_of(repo, head, settings, target, cache, ops=named)
    planted = mutant_arms(repo, head, mutants, settings, target, cache, arm)
    arms = arms_of(repo, settings, cache, base=start, target=target, gates=selected, candidate=arm)
    manifest = manifest_of(
        repo, settings, cache, base=start, head=head, target=target, tier=tier, gates=selected,
        arms=arms, mutants=planted,
    )  # fmt: skip
    files = kit_files(export_tree(repo, start, JUDGING_PATHS, cache / "trees"), {**arms, **planted})
    run = make_kit(out, manifest, files)
    rows = [(key, digest[:16]) for key, digest in manifest.arms["candidate"].items()]
    output.table(f"kit {manifest.digest[:12]}", ("artifact", "digest"), rows)
    again = "" if mutants is None else f" --mutants {mutants}"
    output.say(f"on the GPU machine: {run}\nthen here: fasttrack kit import R{again}")
    output.document({
        "kit": manifest.digest, "path": str(out), "base": start, "head": head, "target": target, "tier": tier,
        "gates": list(selected), "mutants": sorted(planted), "artifacts": dict(manifest.arms["candidate"]),
        "bytes": sum(int(file["size"]) for file in manifest.files.values()),
    })  # fmt: skip


def import_results(
    results: Annotated[Path, typer.Argument(metavar="R", help="Folder that kit.py wrote with --out.")],
    allow: Annotated[list[str] | None, typer.Option(help="Protected path that this human change may touch.")] = None,
    mutants: Annotated[Path | None, typer.Option(help="The folder that the kit's mutants were built from.")] = None,
    json: Json = False,
) -> None:
    """Check results of a kit, decide them, and write the bundle. Exit code: as for `verify`."""
    out, workspace = Output(json), Workspace.here()
    settings, repo = workspace.settings, workspace.repo
    received = read_results(results)
    theirs = received.manifest
    start = repo.resolve(theirs.base)
    require_own_base(repo, start, settings.scope)
    record = make_candidate(repo, start, repo.resolve(theirs.head), f"rev:{theirs.head[:12]}")
    imported = require_ours(received, repo, settings, workspace.cache, mutants)
    require_covered(repo, theirs, imported.missing)
    out.say(f"results of kit {theirs.digest[:12]}: the kit is ours, its lines are whole")
    asked = {
        "command": "kit import", "target": theirs.target, "tier": theirs.tier, "base": start, "head": theirs.head,
        "kit": theirs.digest, "nonce": received.nonce,
    }  # fmt: skip
    judging = Judging(
        record=record, target=settings.target(theirs.target), tier=settings.tier(theirs.tier), gates=None,
        allow=tuple(allow or ()), asked=asked, kit=imported,
    )  # fmt: skip
    raise typer.Exit(judge(workspace, out, judging))


def _kit_gates(text: str | None) -> tuple[str, ...]:
    asked = parse_gates(text)
    unknown = [gate for gate in asked or () if gate not in KIT_GATES]
    if unknown:
        raise FasttrackError(
            f"gate {unknown[0]} needs no kit, or no kit can evaluate it", where="--gates",
            expected=f"some of {', '.join(KIT_GATES)}", next="fasttrack gates",
        )  # fmt: skip
    return tuple(KIT_GATES) if asked is None else tuple(asked)
