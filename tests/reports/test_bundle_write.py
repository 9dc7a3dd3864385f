"""The writer: atomic, never overwriting, honest about a full disk, and unable to write what would not verify."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import bundle_fixtures as fixtures
import pytest

import reports
from harness import canonical
from harness.errors import FasttrackError
from harness.evidence import disk_error
from harness.records import Measurement, Missing
from reports import write as writer
from reports.write import write_bundle
from verify.protocol import perf


def prepare(folder: Path, **changes: Any) -> tuple[Path, Any, dict[str, Any]]:
    artifacts = fixtures.make_artifacts(folder / "artifacts")
    fixtures.make_evidence(folder / "candidate", artifacts)
    context = fixtures.make_input(artifacts, **changes)
    return folder / "candidate", context, {"environment": fixtures.environment(), "artifacts": artifacts}


def test_the_same_evidence_gives_the_same_bundle(accepted: Path, tmp_path: Path) -> None:
    """Digests are only useful if writing is deterministic."""
    assert fixtures.make_bundle(tmp_path).name == accepted.name


def test_an_existing_bundle_is_never_overwritten(tmp_path: Path) -> None:
    """The second writer must not replace what someone has linked to."""
    evidence, context, rest = prepare(tmp_path)
    first = write_bundle(evidence, tmp_path / "out", context, **rest)
    before = {p: p.stat().st_mtime_ns for p in first.rglob("*")}
    with pytest.raises(FasttrackError, match="exists already"):
        write_bundle(evidence, tmp_path / "out", context, **rest)
    assert {p: p.stat().st_mtime_ns for p in first.rglob("*")} == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Half a bundle looks like a whole one to a file manager."""
    evidence, context, rest = prepare(tmp_path)
    written = 0

    def failing(path: Path, data: bytes) -> None:
        nonlocal written
        written += 1
        if written > 5:
            raise OSError(code, os.strerror(code))
        original(path, data)

    original = writer._write
    monkeypatch.setattr(writer, "_write", failing)
    with pytest.raises(FasttrackError) as caught:
        write_bundle(evidence, tmp_path / "out", context, **rest)
    assert os.strerror(code) in str(caught.value)
    assert caught.value.next == disk_error(OSError(code, ""), caught_path(caught.value)).next
    assert list((tmp_path / "out").iterdir()) == []


def caught_path(error: FasttrackError) -> Path:
    return Path(error.where)


def test_what_a_killed_writer_left_is_no_obstacle(tmp_path: Path) -> None:
    """kill -9 can leave a partial folder; a resumed run has to get past it."""
    evidence, context, rest = prepare(tmp_path)
    stale = tmp_path / "out" / ".partial-20260101T120000Z-0badcafe-003-bbbbbbbbbbbb"
    (stale / "raw").mkdir(parents=True)
    (stale / "raw/perf.jsonl").write_text("half a li")
    bundle = write_bundle(evidence, tmp_path / "out", context, **rest)
    assert list((tmp_path / "out").iterdir()) == [bundle]
    assert reports.verify_bundle(bundle).ok


def test_a_result_that_does_not_follow_from_its_lines_is_not_written(tmp_path: Path) -> None:
    """The writer must not launder a gate's mistake into an official bundle."""
    evidence, context, rest = prepare(tmp_path)
    path = evidence / "gates/perf.json"
    path.write_bytes(path.read_bytes().replace(b'"samples": 2', b'"samples": 20', 1))
    with pytest.raises(FasttrackError, match="would not verify: metric"):
        write_bundle(evidence, tmp_path / "out", context, **rest)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gates/perf.json", "raw/perf.jsonl"])
def test_damaged_evidence_is_named(tmp_path: Path, name: str) -> None:
    """A person has to learn which gate's file is broken."""
    evidence, context, rest = prepare(tmp_path)
    (evidence / name).write_bytes(b'{"half":')
    with pytest.raises(FasttrackError, match="evidence of gate perf is damaged"):
        write_bundle(evidence, tmp_path / "out", context, **rest)


def test_a_missing_patch_is_named(tmp_path: Path) -> None:
    """A bundle without its patch proves nothing about anything."""
    evidence, context, rest = prepare(tmp_path)
    (evidence / "candidate.patch").unlink()
    with pytest.raises(FasttrackError, match=r"candidate\.patch"):
        write_bundle(evidence, tmp_path / "out", context, **rest)


def test_artifacts_must_be_those_of_the_candidate(tmp_path: Path) -> None:
    """Forgetting one would leave a kernel without a digest."""
    evidence, context, rest = prepare(tmp_path)
    rest["artifacts"] = rest["artifacts"][1:]
    with pytest.raises(FasttrackError, match="artifacts differ"):
        write_bundle(evidence, tmp_path / "out", context, **rest)


def test_large_objects_stay_outside_with_their_digests_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle is kept in git; megabytes of objects are not, but which objects were judged must stay checkable."""
    monkeypatch.setattr(writer, "ARTIFACT_BYTES", 100)
    bundle = fixtures.make_bundle(tmp_path)
    assert not list(bundle.rglob("*.so"))
    assert not any(artifact.included for artifact in reports.load_bundle(bundle).bundle.artifacts)
    assert reports.verify_bundle(bundle).ok
    assert "no, digests only" in (bundle / "report.md").read_text()


def test_a_gate_without_raw_lines_cannot_have_passed(tmp_path: Path) -> None:
    """Losing the raw file must not leave the outcome standing."""
    evidence, context, rest = prepare(tmp_path)
    (evidence / "raw/audit.jsonl").unlink()
    with pytest.raises(FasttrackError, match="needs raw lines"):
        write_bundle(evidence, tmp_path / "out", context, **rest)


def test_every_candidate_of_a_run_appears_once() -> None:
    """A best candidate that vanishes from the list without a word, or one counted twice."""
    others = fixtures.make_input([]).others
    with pytest.raises(ValueError, match="exactly once"):
        fixtures.make_input([], others=(*others, others[0]))
    with pytest.raises(ValueError, match="candidates_planned=2"):
        fixtures.make_input([], candidates_planned=2)
    with pytest.raises(ValueError, match="needs a reason"):
        others[0].model_validate({**others[0].model_dump(), "reason": None})


def test_files_on_disk_are_canonical_and_complete(accepted: Path) -> None:
    """What `sha256sum -c` and a plain JSON reader see must be enough for a stranger."""
    for path in accepted.rglob("*.json"):
        if path.parts[-4:-3] != ("artifacts",):
            canonical.parse(path.read_bytes())
    listed = canonical.parse((accepted / "manifest.json").read_bytes())["files"]
    present = {str(p.relative_to(accepted)) for p in accepted.rglob("*") if p.is_file()}
    assert present - set(listed) == {"manifest.json", "manifest.sha256"}
    assert not [p for p in accepted.parent.iterdir() if p.name.startswith(".")]


def test_numbers_are_kept_at_full_precision(accepted: Path) -> None:
    """Three digits are too coarse for a gain of a few per cent."""
    loaded = reports.load_bundle(accepted)
    metric = loaded.results["perf"].metrics["worst_ratio_best"]
    decided = perf.decide(loaded.raw["perf"]).metrics["worst_ratio_best"]["value"]
    assert isinstance(metric, Measurement)
    assert not isinstance(metric, Missing)
    assert metric.value == decided
