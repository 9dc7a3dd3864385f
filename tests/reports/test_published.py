"""Bundles that this repository publishes: each verifies here, and the README shows what one of them measured.

The folder comes with its first bundle; from then on it may not be empty, and holds nothing but bundles.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reports
from fasttrack.cli import main
from fasttrack.console import EXIT_FINE
from reports.peer_table import short
from verify.protocol.peers import read_table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "reports" / "published"
FOUND = sorted(FOLDER.iterdir()) if FOLDER.is_dir() else []
GPU_TARGETS = ("h200",)


def test_the_folder_holds_bundles_only() -> None:
    """A renamed folder or a stray file, so that nothing is checked below."""
    assert FOLDER.is_dir() == bool(FOUND), f"{FOLDER} is empty"
    assert [path.name for path in FOUND if not (path / "bundle.json").is_file()] == []


@pytest.mark.parametrize("bundle", FOUND, ids=lambda path: path.name)
def test_a_published_bundle_verifies(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An edited file, a verdict that does not follow, or a bundle that this checkout cannot check any more."""
    check = reports.verify_bundle(bundle)
    assert check.word is reports.CheckWord.VERIFIED, check.text()
    assert main(["bundle", "verify", str(bundle), "--json"]) == EXIT_FINE
    assert json.loads(capsys.readouterr().out)["word"] == "verified"


@pytest.mark.parametrize("bundle", FOUND, ids=lambda path: path.name)
def test_a_published_run_of_a_gpu_is_whole(bundle: Path) -> None:
    """A bundle of a GPU without its planted faults, or without the table of peers that the README quotes."""
    loaded = reports.load_bundle(bundle)
    if loaded.bundle.target.name not in GPU_TARGETS:
        return
    assert loaded.bundle.verdict.word == "accept"
    mutants = loaded.raw["kernels"][0]["mutants"]
    assert mutants
    text = reports.render(bundle, "md")
    rejected = [line for line in text.splitlines() if "| rejected |" in line]
    assert len(rejected) == len(mutants)
    assert all(any(f"`{name}`" in line for line in rejected) for name in mutants)
    assert loaded.bundle.peers is not None
    assert loaded.bundle.peers.outcome == "passed"


def test_the_readme_shows_a_published_table() -> None:
    """A table in the README that no published record gives, or of another machine, date or commit."""
    loaded = [reports.load_bundle(path) for path in FOUND]
    tables = [short(read_table(one.peers)) for one in loaded if one.bundle.peers is not None]
    if tables:
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        assert any(table in readme for table in tables)
