"""Bundles made to harm their reader: links, devices, traversal, bombs, and strings that act."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from forger import Forger, copy_of

import reports
from harness import canonical
from reports import BundleRefusedError, CheckWord
from reports.folder import Limits, plain_name, read_folder
from reports.load import load_bundle


def refused(bundle: Path) -> set[str]:
    """Codes of the refusal, which nobody can load around."""
    codes = claims_refused(bundle)
    with pytest.raises(BundleRefusedError):
        load_bundle(bundle)
    return codes


def claims_refused(bundle: Path) -> set[str]:
    """Codes of a refusal that may come from the claims of an intact bundle."""
    check = reports.verify_bundle(bundle)
    assert check.word is CheckWord.REFUSED, check.text()
    assert all(char == "\n" or char.isprintable() for char in check.text())
    return {reason.code for reason in check.reasons}


def test_a_link_in_place_of_a_file_is_refused_unread(accepted: Path, tmp_path: Path) -> None:
    """A link with the right content today may point elsewhere tomorrow, or at a secret."""
    bundle = copy_of(accepted, tmp_path)
    target = bundle / "candidate.patch"
    spare = tmp_path / "spare"
    target.rename(spare)
    target.symlink_to(spare)
    assert refused(bundle) == {"bundle.not_a_file"}


def test_a_linked_folder_is_refused(accepted: Path, tmp_path: Path) -> None:
    """Walking into a linked folder can lead anywhere, or in circles."""
    bundle = copy_of(accepted, tmp_path)
    (bundle / "raw" / "loop").symlink_to(bundle)
    assert refused(bundle) == {"bundle.not_a_file"}


def test_pipes_and_sockets_are_refused_without_waiting(accepted: Path) -> None:
    """Opening a pipe that nobody writes to would hang the check."""
    with tempfile.TemporaryDirectory() as short:
        bundle = copy_of(accepted, Path(short))
        os.mkfifo(bundle / "pipe")
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(bundle / "s"))
            assert refused(bundle) == {"bundle.not_a_file"}


@pytest.mark.parametrize(
    "name", ["..", "a/../../etc/passwd", "/etc/passwd", ".hidden", "a//b", "a b", "é", "a\nb", "", "\x1b[2J", "-" * 200]
)
def test_only_plain_names_are_names(name: str) -> None:
    """Names of a manifest become paths and lines in a terminal."""
    assert not plain_name(name)


def test_a_manifest_cannot_reach_outside(accepted: Path, tmp_path: Path) -> None:
    """A listed `../secret` must not be opened, nor its name printed raw."""
    forger = Forger(accepted)
    bundle = forger.publish(tmp_path)
    manifest = forger.json("manifest.json")
    manifest["files"]["../../secret\x1b[2J"] = {"sha256": "0" * 64, "size": 1}
    forger.put("manifest.json", manifest)
    (bundle / "manifest.json").write_bytes(forger.files["manifest.json"])
    codes = refused(bundle)
    assert "bundle.missing_file" in codes


def test_a_reference_cannot_reach_outside(accepted: Path, tmp_path: Path) -> None:
    """The same for paths in bundle.json."""
    forger = Forger(accepted)
    forger.edit("bundle.json", lambda b: b["environment"].update(path="../environment.json"))
    assert refused(forger.publish(tmp_path, render=False)) == {"bundle.missing_file"}


def test_reading_stops_at_its_limits(tmp_path: Path) -> None:
    """A bundle must not cost its reader the memory or the afternoon."""
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").write_bytes(b"x" * 100)
    (tmp_path / "c/d").mkdir(parents=True)
    (tmp_path / "c/d/e").write_bytes(b"x")

    def codes(**limits: int) -> set[str]:
        return {reason.code for reason in read_folder(tmp_path, Limits(**limits))[1]}

    assert codes() == set()
    assert codes(file_bytes=99) == {"bundle.too_large"}
    assert codes(total_bytes=150) == {"bundle.too_large"}
    assert codes(files=2) == {"bundle.too_many"}
    assert codes(depth=1) == {"bundle.too_deep"}


def test_a_sparse_giant_is_refused_by_its_size(accepted: Path, tmp_path: Path) -> None:
    """A terabyte that takes no disk is easily sent."""
    bundle = copy_of(accepted, tmp_path)
    os.truncate(bundle / "candidate.patch", 1 << 40)
    assert refused(bundle) == {"bundle.too_large"}


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda raw: raw.replace(b'"tier"', b'"tier": 1, "tier"', 1), "twice"),
        (lambda raw: raw.replace(b'"seconds": 287.0', b'"seconds": NaN'), "NaN"),
        (lambda raw: raw.replace(b'"seconds": 287.0', b'"seconds": 1e999'), "Out of range"),
        (lambda _: b"[" * 200_000 + b"]" * 200_000, "nested"),
        (lambda raw: raw.replace(b'"003-bbbbbbbbbbbb"', b'"\\ud800"'), "surrogate"),
        (lambda raw: raw.replace(b'"seconds": 287.0', b'"seconds": 287.00'), "canonical"),
        (lambda raw: b"\xff\xfe" + raw, "ascii"),
        (lambda _: b"null\n", "schema"),
        (lambda _: b"", "JSON"),
    ],
)
def test_json_tricks_are_refused(accepted: Path, tmp_path: Path, spoil: Callable[[bytes], bytes], word: str) -> None:
    """Two readers that understand one file differently are how checks get bypassed."""
    forger = Forger(accepted)
    forger.files["bundle.json"] = spoil(forger.files["bundle.json"])
    bundle = forger.publish(tmp_path, render=False, refresh=False)
    assert word in reports.verify_bundle(bundle).text() + "schema"
    assert refused(bundle) <= {"bundle.not_canonical", "bundle.schema"}


def test_raw_lines_that_break_the_decision_are_refused(accepted: Path, tmp_path: Path) -> None:
    """An exception inside a check must never read as a pass."""
    forger = Forger(accepted)
    lines = forger.lines("scope")
    forger.put_lines("scope", [lines[0], {**lines[1], "added": {"not": "a number"}}, lines[2]])
    assert "bundle.check_failed" in claims_refused(forger.publish(tmp_path / "a", render=False))
    forger = Forger(accepted)
    forger.put_lines("kernels", [line | {"values": [{"tensor": "x"}]} for line in forger.lines("kernels")])
    assert "bundle.check_failed" in claims_refused(forger.publish(tmp_path / "b", render=False))


def test_a_table_bomb_is_refused(accepted: Path, tmp_path: Path) -> None:
    """Few bytes of JSON can ask for a table with a column per key."""
    forger = Forger(accepted)
    lines = forger.lines("audit")
    lines[1] |= {f"key{i}": 1 for i in range(600)}
    forger.files["raw/audit.jsonl"] = b"".join(canonical.line(line) + b"\n" for line in lines)
    assert "bundle.derived" in claims_refused(forger.publish(tmp_path, render=False))
