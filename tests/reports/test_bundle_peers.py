"""The peer table of a bundle: on the page, decided again from its lines, and refused where those were touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundle_fixtures as fixtures
import pytest
from forger import Forger

import reports
from harness.errors import FasttrackError
from reports import CheckWord
from tests.verify.peer_fixtures import arm, ceilings, cell_line, half, half_line, header
from verify.bench.gpu.cells import PeerCell
from verify.protocol import chain
from verify.protocol.peers import PROTOCOL_ID

KIT, NONCE = "1" * 64, "2" * 64
GEMV = PeerCell("input_projection", "k3-slice-tp8", 8, site="kda")
HALF = half("mla_half_layer", "k3-slice-tp8", 8, 32_768)
Lines = list[dict[str, Any]]


def sealed(lines: Lines) -> Lines:
    """The lines with a chain that holds."""
    value, done = chain.start(KIT, NONCE, "bench"), []
    for line in lines:
        done.append(chain.seal(value, {key: item for key, item in line.items() if key != chain.KEY}))
        value = done[-1][chain.KEY]
    return done


def recorded(digests: dict[str, str]) -> Lines:
    """A whole record of two cells."""
    own = {
        "gate": "bench", "protocol": PROTOCOL_ID, "base": fixtures.BASE, "head": fixtures.HEAD, "target": "cpu",
        "tier": "smoke", "kit": KIT, "nonce": NONCE, "artifacts": digests, "standard": {"torch": "2.11"},
    }  # fmt: skip
    return sealed([
        {**header(GEMV, HALF), **own},
        ceilings(),
        cell_line(GEMV, ours=arm(22.0), cublas=arm(26.4), triton=arm(None, "no <b>triton</b> | here")),
        half_line(HALF, 20.0, 31.0, "mla_decode: no schedule bucket for 8 rows"),
    ])  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An accepted bundle with a peer table."""
    return fixtures.make_bundle(tmp_path_factory.mktemp("peers"), peers=recorded)


def claims(check: reports.BundleCheck) -> list[str]:
    return [claim.claim for claim in check.claims]


def test_the_table_is_in_the_bundle_and_on_the_page(bundle: Path) -> None:
    """A table that was measured and that nobody sees, or whose machine, date or commit is missing."""
    check = reports.verify_bundle(bundle)
    assert check.word is CheckWord.VERIFIED, check.text()
    assert "peer table passed: decided again from 4 raw lines" in claims(check)
    text = reports.render(bundle, "md")
    assert "1x H200, driver 580.1, CUDA 13.0, torch 2.11, 2026-11-30T00:00:00Z, commit bbbbbbbbbbbb" in text
    assert "6288 x 7168, M 8" in text
    assert "12 heads, B 8, 32k (standard path in mla_decode)" in text
    assert "1.550 (1.550-1.550) in 1 of 84 cells" in text
    page = reports.render(bundle, "html")
    assert "<b>triton</b>" not in page
    assert "no &lt;b&gt;triton&lt;/b&gt; | here" in page


def test_no_table_is_no_section(accepted: Path) -> None:
    """A bundle without a table that claims one."""
    check = reports.verify_bundle(accepted)
    assert check.word is CheckWord.VERIFIED
    assert not any("peer table" in claim for claim in claims(check))
    assert "Beside peers" not in reports.render(accepted, "md")


def _faster(lines: Lines) -> Lines:
    lines[2]["arms"]["ours"]["samples_us"] = [11.0] * 30
    return lines


def _of(key: str, value: object) -> Callable[[Lines], Lines]:
    return lambda lines: sealed([{**lines[0], key: value}, *lines[1:]])


HOSTILE: dict[str, Callable[[Lines], Lines]] = {
    "edited sample": _faster,
    "dropped cell": lambda lines: [*lines[:2], lines[3]],
    "dropped last cell": lambda lines: lines[:-1],
    "exchanged lines": lambda lines: [*lines[:2], lines[3], lines[2]],
    "another candidate": _of("head", "d" * 40),
    "another base": _of("base", "d" * 40),
    "another target": _of("target", "gb300"),
    "another protocol": _of("protocol", "bench-cuda/1"),
    "another's artifacts": _of("artifacts", {"kda_decode/x86-64-v3": "e" * 64}),
    "another nonce": _of("nonce", "3" * 64),
    "no table at all": lambda lines: sealed([lines[0], {"kind": "poem"}]),
    "a header that is none": lambda lines: sealed([{"kind": lines[0]["kind"]}]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_touched_lines_are_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    """Numbers, cells or a whole record that somebody exchanged, all digests and reports made anew."""
    forger = Forger(bundle)
    forger.files["raw/bench.jsonl"] = b"".join(
        fixtures.canonical_line(line) for line in HOSTILE[name](forger.lines("bench"))
    )
    check = reports.verify_bundle(forger.publish(tmp_path))
    assert check.word is CheckWord.REFUSED, check.text()
    assert {reason.code for reason in check.reasons} == {"bundle.peers"}


def test_an_outcome_follows_from_the_lines(bundle: Path, tmp_path: Path) -> None:
    """A table with a wrong result that says it is whole."""
    forger = Forger(bundle)
    forger.edit("bundle.json", lambda content: content["peers"].update(outcome="failed"))
    check = reports.verify_bundle(forger.publish(tmp_path))
    assert [reason.message for reason in check.reasons] == ["claims failed"]


def test_a_table_of_another_run_of_the_kit_is_refused(bundle: Path, tmp_path: Path) -> None:
    """The kernels gate of one run beside the table of a better one."""
    forger = Forger(bundle)
    lines = forger.lines("kernels")
    lines[0] |= {"kit": KIT, "nonce": "9" * 64}
    forger.put_lines("kernels", lines)
    check = reports.verify_bundle(forger.publish(tmp_path))
    assert {reason.message for reason in check.reasons} == {"its header names another nonce"}


def test_a_table_cannot_be_left_in_the_folder_only(bundle: Path, tmp_path: Path) -> None:
    """Lines that no record names."""
    forger = Forger(bundle)
    forger.edit("bundle.json", lambda content: content.update(peers=None))
    check = reports.verify_bundle(forger.publish(tmp_path, render=False))
    assert {reason.code for reason in check.reasons} == {"bundle.extra_file"}


def test_lines_of_another_protocol_make_a_check_partial(bundle: Path, tmp_path: Path) -> None:
    """A future table that counts as verified, or as a forgery."""
    forger = Forger(bundle)
    forger.edit("bundle.json", lambda content: content["peers"].update(protocol_id="bench-cuda/9"))
    assert reports.verify_bundle(forger.publish(tmp_path)).word is CheckWord.PARTIAL


@pytest.mark.parametrize(("name", "value"), [("op", "dream"), ("geometry", "k9")])
def test_an_unknown_op_or_geometry_is_text_on_the_page(bundle: Path, tmp_path: Path, name: str, value: str) -> None:
    """A stranger's table that ends the renderer with a traceback."""
    forger = Forger(bundle)
    lines = forger.lines("bench")
    lines[0]["planned"][1][name] = value
    forger.files["raw/bench.jsonl"] = b"".join(fixtures.canonical_line(line) for line in sealed(lines))
    assert "no peer table that can be shown" in reports.render(forger.publish(tmp_path), "md")


def test_the_writer_refuses_what_a_reader_would(tmp_path: Path) -> None:
    """A malformed table that ends the writer with a traceback, or becomes a bundle."""
    with pytest.raises(FasttrackError, match="would not verify"):
        fixtures.make_bundle(tmp_path, peers=lambda digests: sealed([recorded(digests)[0], {"kind": "poem"}]))
