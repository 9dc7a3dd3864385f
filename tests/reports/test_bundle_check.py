"""A written bundle verifies; a bundle with any byte, file or order changed does not."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

import bundle_fixtures as fixtures
import pytest
import raw_lines
from forger import copy_of

import reports
from harness.records import VerdictWord
from reports import CheckWord, ClaimStatus

WRONG_NUMBERS = partial(raw_lines.kernels_lines, factor=50.0)
SLOWER = partial(raw_lines.perf_lines, fixtures.SETTINGS, gain=-0.08)


def test_a_written_bundle_verifies_and_its_verdict_is_recomputed(accepted: Path) -> None:
    """The happy path: otherwise every refusal below would prove nothing."""
    check = reports.verify_bundle(accepted)
    assert check.word is CheckWord.VERIFIED, check.text()
    assert check.ok
    assert check.verdict is VerdictWord.ACCEPT
    assert {claim.status for claim in check.claims} == {ClaimStatus.HOLDS}
    assert check.assumed
    assert "bundle verified" in check.text()


@pytest.mark.parametrize(
    ("evidence", "word"),
    [
        ({"lines": {"kernels": WRONG_NUMBERS}}, VerdictWord.REJECT),
        ({"lines": {"perf": SLOWER}}, VerdictWord.REJECT),
        ({"not_evaluated": "features"}, VerdictWord.INCOMPLETE),
    ],
)
def test_rejected_and_incomplete_bundles_verify_too(
    tmp_path: Path, evidence: dict[str, object], word: VerdictWord
) -> None:
    """A rejection is evidence like any other; only accepting runs leaving bundles would hide losses."""
    check = reports.verify_bundle(fixtures.make_bundle(tmp_path, **evidence))
    assert check.ok, check.text()
    assert check.verdict is word


def test_a_flipped_bit_in_any_file_is_refused(accepted: Path, tmp_path: Path) -> None:
    """The acceptance rule of bundles: every file, many positions, the manifest included."""
    bundle = copy_of(accepted, tmp_path)
    draw = random.Random(20260101)
    tried = 0
    for path in sorted(p for p in bundle.rglob("*") if p.is_file()):
        data = path.read_bytes()
        positions = {0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(8))}
        for at in positions:
            spoiled = bytearray(data)
            spoiled[at] ^= 1 << draw.randrange(8)
            path.write_bytes(spoiled)
            check = reports.verify_bundle(bundle)
            assert check.word is CheckWord.REFUSED, f"{path.name} at {at}"
            assert check.verdict is None
            tried += 1
        path.write_bytes(data)
    assert tried > 200
    assert reports.verify_bundle(bundle).ok


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256"])
def test_whitespace_in_the_manifest_is_refused(accepted: Path, tmp_path: Path, name: str) -> None:
    """JSON's freedom to add blanks must not be a place to hide a change."""
    bundle = copy_of(accepted, tmp_path)
    path = bundle / name
    path.write_bytes(path.read_bytes() + b"\n")
    assert reports.verify_bundle(bundle).word is CheckWord.REFUSED


def test_extra_missing_renamed_swapped_and_emptied_files_are_refused(accepted: Path, tmp_path: Path) -> None:
    """Each way of changing the set of files leaves every remaining byte intact."""

    def refused(spoil: str) -> None:
        bundle = copy_of(accepted, tmp_path / spoil)
        a, b = bundle / "raw/audit.jsonl", bundle / "raw/features.jsonl"
        match spoil:
            case "extra":
                (bundle / "notes.txt").write_text("trust me")
            case "missing":
                a.unlink()
            case "renamed":
                a.rename(bundle / "raw/other.jsonl")
            case "swapped":
                a.rename(bundle / "raw/spare"), b.rename(a), (bundle / "raw/spare").rename(b)
            case "emptied":
                a.write_bytes(b"")
            case "folder":
                (bundle / "empty").mkdir()
            case "no_manifest":
                (bundle / "manifest.json").unlink()
            case "no_digest":
                (bundle / "manifest.sha256").unlink()
        check = reports.verify_bundle(bundle)
        assert check.word is CheckWord.REFUSED, spoil
        assert check.reasons[0].next

    for spoil in ("extra", "missing", "renamed", "swapped", "emptied", "folder", "no_manifest", "no_digest"):
        refused(spoil)


def test_the_folder_name_carries_the_digest(accepted: Path, tmp_path: Path) -> None:
    """A bundle under another bundle's name would be mistaken for it."""
    renamed = tmp_path / (accepted.name[:-12] + "0" * 12)
    shutil.copytree(accepted, renamed)
    check = reports.verify_bundle(renamed)
    assert check.word is CheckWord.REFUSED
    assert check.reasons[0].code == "bundle.folder_name"
    assert "restore the name" in check.reasons[0].next


def test_the_check_says_how_far_it_came(accepted: Path, tmp_path: Path) -> None:
    """A refusal in an early step must not read as if the later claims had been looked at."""
    bundle = copy_of(accepted, tmp_path)
    (bundle / "candidate.patch").unlink()
    check = reports.verify_bundle(bundle)
    states = [claim.status for claim in check.claims]
    assert states[:2] == [ClaimStatus.HOLDS, ClaimStatus.REFUSED]
    assert set(states[2:]) == {ClaimStatus.NOT_CHECKED}


def test_a_missing_folder_is_a_refusal_not_a_traceback(tmp_path: Path) -> None:
    """The path may be mistyped."""
    assert reports.verify_bundle(tmp_path / "nothing-here").word is CheckWord.REFUSED
