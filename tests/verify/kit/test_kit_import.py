"""From a commit to a bundle through a kit: built from the repository, run without a GPU, imported, verified."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from gate_fixtures import commit_all
from kit_fixtures import ROOT, FakeMachine, PeerMachine

import reports
from fasttrack.commands.verify import Judging, judge
from fasttrack.console import EXIT_INCOMPLETE, Output
from fasttrack.workspace import Workspace
from harness import sandbox
from harness.errors import FasttrackError
from verify.gates.build.device import missing_tools
from verify.kit import kernels, run
from verify.kit.artifacts import require_covered
from verify.kit.build import kit_files, make_kit
from verify.kit.importing import arm_of, manifest_of, require_ours
from verify.kit.manifest import read_kit
from verify.kit.receive import read_results
from verify.pipeline import make_candidate
from verify.snapshots import JUDGING_PATHS, export_tree

_REASON = sandbox.unavailable()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_REASON is not None, reason=_REASON.message if _REASON else ""),
    pytest.mark.skipif(missing_tools() is not None, reason="the CuTe DSL is not installed"),
]
OP = "mla_query"
SCHEDULE = f"k3_backend/schedules/h200/k3-slice-tp16/{OP}.toml"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A repository with this checkout's protected code and one op's kernel and schedule."""
    root = tmp_path_factory.mktemp("import") / "repo"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "kernels", "schedules")
    for folder in JUDGING_PATHS:
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for folder in (OP, "common"):
        shutil.copytree(ROOT / "k3_backend" / "kernels" / folder, root / "k3_backend" / "kernels" / folder)
    (root / SCHEDULE).parent.mkdir(parents=True)
    shutil.copy(ROOT / SCHEDULE, root / SCHEDULE)
    shutil.copy(ROOT / "harness.toml", root)
    (root / ".gitignore").write_text("/build/\n/runs/\n__pycache__/\n")
    commit_all(root)
    return Workspace(root)


@pytest.fixture(scope="module")
def results(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a kit whose candidate changes one line of a comment in the schedule."""
    repo, settings = workspace.repo, workspace.settings
    base = repo.resolve("HEAD")
    text = (workspace.root / SCHEDULE).read_bytes() + b"\n# tried again\n"
    head = repo.commit_files(base, {SCHEDULE: ("100644", text)}, "candidate")
    arm = arm_of(repo, head, settings, "h200", workspace.cache)
    manifest = manifest_of(
        repo, settings, workspace.cache, base=base, head=head, target="h200", tier="smoke", gates=("kernels", "bench"),
        arms={"candidate": arm}, mutants={},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("kit")
    make_kit(
        folder / "K",
        manifest,
        kit_files(export_tree(repo, base, JUDGING_PATHS, workspace.cache / "trees"), {"candidate": arm}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BUFFER_BYTES", 1 << 28)
        assert run.session(folder / "K", folder / "R", machine=PeerMachine(), jobs=2) == run.FINE
    return folder / "R"


def test_results_become_a_bundle_that_verifies(
    workspace: Workspace, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measurements that do not arrive, or arrive as something that nobody can check."""
    received = read_results(results)
    theirs = received.manifest
    imported = require_ours(received, workspace.repo, workspace.settings, workspace.cache)
    require_covered(workspace.repo, theirs, imported.missing)
    judging = Judging(
        record=make_candidate(workspace.repo, theirs.base, theirs.head, "rev:test"),
        target=workspace.settings.target("h200"), tier=workspace.settings.tier("smoke"), gates=None, asked={},
        kit=imported,
    )  # fmt: skip
    assert judge(workspace, Output(json_mode=True), judging) == EXIT_INCOMPLETE
    document = json.loads(capsys.readouterr().out)
    gates = {name: result["outcome"] for name, result in document["gates"].items()}
    assert (gates["build"], gates["kernels"], gates["perf"]) == ("passed", "passed", "not_evaluated")
    assert document["gates"]["kernels"]["evidence_class"] == "hardware"
    assert document["gates"]["kernels"]["detail"]["machine"]["gpu"]["name"] == "fake"
    assert {reason["code"] for reason in document["verdict"]["unmet"]} == {"path.kit", "perf.kit"}
    check = reports.verify_bundle(Path(document["bundle"]))
    assert check.word is reports.CheckWord.VERIFIED, check.reasons
    assert any("peer table passed: decided again" in claim.claim for claim in check.claims)
    text = reports.render(Path(document["bundle"]), "md")
    assert "Measured on this machine, through a kit" in text
    assert "Beside peers on the same GPU" in text


def test_results_of_another_kit_are_refused(workspace: Workspace, results: Path, tmp_path: Path) -> None:
    """Results of a kit that this checkout would not build: another evaluator, another candidate's artifacts."""
    kit = results.parent / "K"
    shutil.copytree(kit, tmp_path / "K")
    source = tmp_path / "K" / "code" / "verify" / "evaluator" / "compare.py"
    source.write_text(source.read_text() + "\n# kinder\n")
    manifest = read_kit(kit)
    files = {name: (tmp_path / "K" / name).read_bytes() for name in manifest.files}
    listed = {name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()}
    make_kit(tmp_path / "K2", replace(manifest, files=listed), files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BUFFER_BYTES", 1 << 28)
        run.session(tmp_path / "K2", tmp_path / "R2", machine=FakeMachine(), gates=["kernels"], jobs=2, minutes=0.01)
    with pytest.raises(FasttrackError, match=r"compare\.py differs"):
        require_ours(read_results(tmp_path / "R2"), workspace.repo, workspace.settings, workspace.cache)
