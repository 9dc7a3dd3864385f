"""Taking a kit's results in: only those of a kit that this checkout would build itself, byte for byte.

The kit is described again from the commits it names: trusted sources of the base, artifacts built here from the
candidate, schedules, plan. Its manifest must come out the same. So what ran on the GPU machine is known down to each
file, and results of any other kit are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from harness import canonical
from harness.errors import FasttrackError
from harness.git import Repository
from harness.settings import Settings
from k3_backend.aot.manifest import Artifact
from verify.kit.artifacts import build_units, units_of
from verify.kit.build import Arm, describe, kit_files
from verify.kit.manifest import BEST, CANDIDATE, KitManifest, Unit
from verify.kit.path_plan import read_choices, require_expected
from verify.kit.planning import perf_plan, rank_geometries
from verify.kit.planning_bench import bench_plan
from verify.kit.receive import Received
from verify.snapshots import JUDGING_PATHS, export_tree

__all__ = [
    "EDITABLE_ROOTS",
    "Imported",
    "arm_of",
    "arms_of",
    "best_arm_of",
    "manifest_of",
    "mutant_arms",
    "require_ours",
]

COMPARING = frozenset({"perf"})
"""Gates that compare the candidate with the current best."""
EDITABLE_ROOTS = ("k3_backend/kernels", "k3_backend/schedules")


@dataclass(frozen=True)
class Imported:
    """Results of a kit that is ours."""

    received: Received
    artifacts: tuple[Artifact, ...]
    """The candidate's, built here, with the digests that the kit names."""
    missing: tuple[Unit, ...] = ()
    """Artifacts of the candidate that the kit does not hold."""


def arm_of(
    repo: Repository, commit: str, settings: Settings, target: str, cache: Path, units: tuple[Unit, ...] | None = None,
    ops: tuple[str, ...] | None = None,
) -> Arm:  # fmt: skip
    """A commit's artifacts and schedules, built in the sandbox.

    Args:
        repo: holds the commit.
        commit: whose kernels and schedules.
        settings: targets and build limits.
        target: its name.
        cache: folder for exports and artifacts.
        units: exactly these; those of the target if null.
        ops: only these ops.
    """
    tree = export_tree(repo, commit, EDITABLE_ROOTS, cache / "trees")
    chosen = units_of(settings.target(target), tree, ops)
    if units is not None:
        if unknown := set(units) - set(chosen):
            raise FasttrackError(
                f"{min(unknown).key} is not an artifact of the candidate", where="kit",
                expected=f"some of {', '.join(unit.key for unit in chosen)}", next="fasttrack kit build",
            )  # fmt: skip
        chosen = units
    return Arm(build_units(chosen, tree, cache / "artifacts", settings.build), tree / EDITABLE_ROOTS[1])


def best_arm_of(repo: Repository, base: str, settings: Settings, target: str, cache: Path, candidate: Arm) -> Arm:
    """The current best: the base commit's artifacts for the candidate's ops, as many as it has kernels for.

    Args:
        repo: holds the commit.
        base: the base commit.
        settings: targets and build limits.
        target: its name.
        cache: folder for exports and artifacts.
        candidate: its arm; its ops are compared.
    """
    tree = export_tree(repo, base, EDITABLE_ROOTS, cache / "trees")
    ops = sorted({unit.op for unit in candidate.artifacts})
    units = tuple(u for u in units_of(settings.target(target), tree, ops, none_is_fine=True))
    built = build_units(units, tree, cache / "artifacts", settings.build) if units else {}
    return Arm(built, tree / EDITABLE_ROOTS[1])


def mutant_arms(
    repo: Repository, head: str, patches: Path | None, settings: Settings, target: str, cache: Path, candidate: Arm
) -> dict[str, Arm]:
    """Arms with one planted fault each, built from the candidate with a patch applied.

    Args:
        repo: holds the candidate.
        head: the candidate.
        patches: folder of `<name>.patch` files against the candidate; none if null.
        settings: targets and build limits.
        target: its name.
        cache: folder for exports and artifacts.
        candidate: its artifacts; units that a patch leaves as they are do not belong to the mutant.

    Raises:
        FasttrackError: no patches in the folder, one that does not apply, or one that changes no artifact.
    """
    if patches is None:
        return {}
    files = sorted(patches.glob("*.patch")) if patches.is_dir() else []
    if not files:
        raise FasttrackError(
            "no patches", where=str(patches), expected="a folder with <name>.patch files",
            next="git diff CANDIDATE > DIR/NAME.patch",
        )  # fmt: skip
    arms = {}
    for file in files:
        commit = repo.commit_patch(head, file.read_bytes(), f"mutant {file.stem}", str(file))
        touched = {change.path.split("/")[2] for change in repo.changes(head, commit) if change.path.count("/") > 2}
        ops = None if "common" in touched else tuple(sorted(touched & {unit.op for unit in candidate.artifacts}))
        arm = arm_of(repo, commit, settings, target, cache, ops=ops) if ops != () else Arm({}, patches)
        changed = {
            unit: artifact
            for unit, artifact in arm.artifacts.items()
            if unit in candidate.artifacts and artifact.digest != candidate.artifacts[unit].digest
        }
        if not changed:
            raise FasttrackError(
                "changes no artifact of the kit", where=str(file), expected="a fault in a kernel of the kit",
                next=f"rm {file}",
            )  # fmt: skip
        arms[file.stem] = Arm(changed, arm.schedules)
    return arms


def arms_of(
    repo: Repository, settings: Settings, cache: Path, *, base: str, target: str, gates: tuple[str, ...], candidate: Arm
) -> dict[str, Arm]:
    """The arms of a kit: the candidate's, and the current best's where a gate compares with it."""
    if not set(gates) & COMPARING:
        return {CANDIDATE: candidate}
    return {CANDIDATE: candidate, BEST: best_arm_of(repo, base, settings, target, cache, candidate)}


def manifest_of(
    repo: Repository, settings: Settings, cache: Path, *, base: str, head: str, target: str, tier: str,
    gates: tuple[str, ...], arms: Mapping[str, Arm], mutants: Mapping[str, Arm],
) -> KitManifest:  # fmt: skip
    """What a kit of these commits is, files included."""
    command = f"fasttrack verify --candidate {head[:12]} --base {base[:12]} --target {target} --tier {tier}"
    plans = {}
    if "perf" in gates:
        plan = perf_plan(
            settings.target(target), settings.tier(tier), base=base, candidate=arms[CANDIDATE], best=arms[BEST],
            command=command,
        )  # fmt: skip
        # As JSON has it, so that a manifest that was read equals one that was made.
        plans["perf"] = json.loads(canonical.line(plan.header()))
    if "path" in gates:
        plans["path"] = {"geometries": rank_geometries(settings.target(target))}
    if "bench" in gates:
        plans["bench"] = bench_plan(arms[CANDIDATE].artifacts)
    described = describe(
        settings.target(target), settings.tier(tier), base=base, head=head,
        trees={"base": repo.tree(base), "head": repo.tree(head)}, gates=gates, arms=arms, mutants=mutants,
        command=command, plans=plans,
    )  # fmt: skip
    base_tree = export_tree(repo, base, JUDGING_PATHS, cache / "trees")
    files = kit_files(base_tree, {**arms, **mutants})
    listed = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in sorted(files.items())
    }
    return replace(described, files=listed)


def require_ours(
    received: Received, repo: Repository, settings: Settings, cache: Path, patches: Path | None = None
) -> Imported:
    """Build the kit again and compare.

    Args:
        received: intact results.
        repo: holds the commits that the kit names.
        settings: of this checkout.
        cache: folder for exports and artifacts.
        patches: the folder of mutants that the kit was built with.

    Raises:
        FasttrackError: unknown commits, or the kit differs; names the first difference. Or the path gate's plan expects
            other kernels than the artifacts have.
    """
    theirs = received.manifest
    for name, commit in (("base", theirs.base), ("head", theirs.head)):
        if repo.resolve(commit) != commit:
            raise FasttrackError(
                f"names {name} {commit[:12]}", where="manifest.json", expected="a full commit id", next="git log"
            )
    arm = arm_of(repo, theirs.head, settings, theirs.target, cache, units=theirs.units("candidate"))
    if bool(theirs.mutants) != (patches is not None):
        raise FasttrackError(
            f"holds {len(theirs.mutants)} mutants", where=f"kit {theirs.digest[:12]}",
            expected="--mutants with the folder that the kit was built with, where it has any",
            next="fasttrack kit import R --mutants DIR",
        )  # fmt: skip
    mutants = mutant_arms(repo, theirs.head, patches, settings, theirs.target, cache, arm)
    arms = arms_of(repo, settings, cache, base=theirs.base, target=theirs.target, gates=theirs.gates, candidate=arm)
    ours = manifest_of(
        repo, settings, cache, base=theirs.base, head=theirs.head, target=theirs.target, tier=theirs.tier,
        gates=theirs.gates, arms=arms, mutants=mutants,
    )  # fmt: skip
    if ours.digest != theirs.digest:
        raise FasttrackError(
            f"is of another kit: {_difference(ours, theirs)}", where=f"kit {theirs.digest[:12]}",
            expected=f"the kit that this checkout builds from the same commits, {ours.digest[:12]}",
            next=f"fasttrack kit build --target {theirs.target} --candidate {theirs.head[:12]} --out K, and run that",
        )  # fmt: skip
    if received.lines.get("path"):
        folders = {unit: artifact.path for unit, artifact in arm.artifacts.items()}
        require_expected(received.lines["path"][0], read_choices(folders, arm.schedules))
    tree = export_tree(repo, theirs.head, EDITABLE_ROOTS, cache / "trees")
    missing = set(units_of(settings.target(theirs.target), tree)) - arm.artifacts.keys()
    return Imported(received, tuple(arm.artifacts.values()), tuple(sorted(missing)))


def _difference(ours: KitManifest, theirs: KitManifest) -> str:
    for name, file in sorted({**ours.files, **theirs.files}.items()):
        if ours.files.get(name) != theirs.files.get(name):
            what = "is missing" if name not in theirs.files else "is added" if name not in ours.files else "differs"
            return f"{name} {what}" if file else name
    for name in (
        "arms", "mutants", "batches", "tokens", "contexts", "draws", "gates", "protocols", "plans", "trees", "command",
        "arch",
    ):  # fmt: skip
        if getattr(ours, name) != getattr(theirs, name):
            return f"its {name} differ"
    return "its manifest differs"
