"""Results that come back: whole ones are read, everything else is refused with one message and left as it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_card
import pytest
from kit_fixtures import ROOT, FakeMachine, fake_arm, lines_of, sealed, write_fake_kit

from harness import canonical, settings
from harness.errors import FasttrackError
from verify.kit import kernels, run
from verify.kit.receive import read_results
from verify.protocol.kernels import decide
from verify.protocol.kernels_cuda import REPLAYS

SETTINGS = settings.load(ROOT)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a whole session. Tests must not change them."""
    folder = tmp_path_factory.mktemp("kit")
    write_fake_kit(folder / "K", fake_arm(folder / "arm", {"mla_value": "k3-pico"}, fake_card.FIRST_ROWS - 1), SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BUFFER_BYTES", 1 << 27)
        assert run.session(folder / "K", folder / "R", machine=FakeMachine(), jobs=1) == run.FINE
    return folder / "R"


@pytest.fixture
def copy(results: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(results, tmp_path / "R"))


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def rewrite(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "raw" / "kernels.jsonl").write_bytes(b"".join(canonical.line(line) + b"\n" for line in lines))


def test_whole_results_are_read(results: Path) -> None:
    """Honest results refused, or the machine's description lost."""
    received = read_results(results)
    assert decide(received.lines["kernels"]).outcome == "passed"
    assert received.machine["gpu"]["name"] == "fake"
    assert received.ended


def test_partial_results_are_read_and_are_no_pass(copy: Path) -> None:
    """A killed session's results are thrown away, or count as complete."""
    (copy / "result.json").unlink()
    rewrite(copy, lines_of(copy)[:4])
    with (copy / "raw" / "kernels.jsonl").open("ab") as file:
        file.write(b'{"torn')
    received = read_results(copy)
    assert not received.ended
    assert decide(received.lines["kernels"]).outcome == "not_evaluated"


def _edit_number(folder: Path) -> None:
    path = folder / "raw" / "kernels.jsonl"
    lines = lines_of(folder)
    row = next(line for line in lines if line.get("values"))["values"][0]["candidate"]
    row["element"] += 0.001
    path.write_bytes(b"".join(canonical.line(line) + b"\n" for line in lines))


def _drop_line(folder: Path) -> None:
    lines = lines_of(folder)
    rewrite(folder, lines[:3] + lines[4:])


def _drop_last(folder: Path) -> None:
    rewrite(folder, lines_of(folder)[:-1])


def _exchange(folder: Path) -> None:
    lines = lines_of(folder)
    lines[2], lines[3] = lines[3], lines[2]
    rewrite(folder, lines)


def _nan(folder: Path) -> None:
    path = folder / "raw" / "kernels.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"refused":null', b'"refused":NaN', 1))


def _deep(folder: Path) -> None:
    with (folder / "raw" / "kernels.jsonl").open("ab") as file:
        file.write(b"[" * 200_000 + b"]" * 200_000 + b"\n")


def _spelling(folder: Path) -> None:
    path = folder / "raw" / "kernels.jsonl"
    path.write_bytes(path.read_bytes().replace(b'":', b'": ', 1))


def _other_kit(folder: Path) -> None:
    header = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_bytes(canonical.document({**header, "kit": "0" * 64}))


def _other_nonce(folder: Path) -> None:
    header = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_bytes(canonical.document({**header, "nonce": "1" * 64}))


def _other_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_bytes(canonical.document({**manifest, "draws": 99}))


def _header_of_another(folder: Path) -> None:
    lines = lines_of(folder)
    lines[0]["head"] = "f" * 40
    (folder / "result.json").unlink()
    rewrite(folder, sealed(folder, lines))


def _no_header(folder: Path) -> None:
    (folder / "result.json").unlink()
    (folder / "raw" / "kernels.jsonl").write_bytes(b"")


def _missing(folder: Path) -> None:
    (folder / "run.json").unlink()


def _extra(folder: Path) -> None:
    (folder / "raw" / "..evil.jsonl").write_text("{}\n")


def _folder(folder: Path) -> None:
    (folder / "raw" / "perf.jsonl").mkdir()


def _other_gate(folder: Path) -> None:
    shutil.copy(folder / "raw" / "kernels.jsonl", folder / "raw" / "perf.jsonl")


def _link(folder: Path) -> None:
    (folder / "sessions.jsonl").unlink()
    (folder / "sessions.jsonl").symlink_to("/etc/passwd")


def _link_folder(folder: Path) -> None:
    shutil.move(folder / "raw", folder.parent / "raw")
    (folder / "raw").symlink_to(folder.parent / "raw")


def _huge(folder: Path) -> None:
    (folder / "run.json").write_bytes(b" " * (1 << 20))


def _binary(folder: Path) -> None:
    (folder / "result.json").write_bytes(bytes(range(256)))


def _result_of_another(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_bytes(
        canonical.document({**result, "files": {"kernels": {"lines": 2, "chain": "x"}}})
    )


HOSTILE = [
    _edit_number, _drop_line, _drop_last, _exchange, _nan, _deep, _spelling, _other_kit, _other_nonce, _other_manifest,
    _header_of_another, _no_header, _missing, _extra, _folder, _other_gate, _link, _link_folder, _huge, _binary,
    _result_of_another,
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: change.__name__[1:])
def test_hostile_results_are_refused_with_one_message(copy: Path, change: Callable[[Path], None]) -> None:
    """Numbers that nobody measured come in, or a refusal that is a traceback or destroys the evidence."""
    change(copy)
    before = digest(copy)
    with pytest.raises(FasttrackError) as caught:
        read_results(copy)
    assert all((caught.value.what, caught.value.where, caught.value.expected, caught.value.next))
    assert len(str(caught.value)) < 2000
    assert digest(copy) == before


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    """A traceback for a wrong path."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(FasttrackError, match="no such folder"):
            read_results(path)


def _few_replays(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["kind"] == "case":
            line["replays"] = min(line["replays"], REPLAYS - 1)


def _no_late(lines: list[dict[str, Any]]) -> None:
    case = next(line for line in lines if line["kind"] == "case" and line["runs"])
    case["runs"] = [run for run in case["runs"] if run != "late"]


def _no_contention(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["kind"] == "case":
            line["runs"] = [run for run in line["runs"] if run != "contended"]


def _smaller_plan(lines: list[dict[str, Any]]) -> None:
    header = lines[0]
    gone = {case["id"] for case in header["plan"] if case["kind"] == "captured"}
    header["plan"] = [case for case in header["plan"] if case["id"] not in gone]
    header["planned"] = [case["id"] for case in header["plan"]]
    lines[:] = [line for line in lines if line.get("id") not in gone]


def _plain_copy(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["kind"] == "load":
            line["receipt"]["device"]["late_copy"] = False


def _other_image(lines: list[dict[str, Any]]) -> None:
    load = next(line for line in lines if line["kind"] == "load")
    load["receipt"]["images"] = dict.fromkeys(load["receipt"]["images"], "0" * 64)


def _no_load(lines: list[dict[str, Any]]) -> None:
    lines[:] = [line for line in lines if line["kind"] != "load"]


def _cut_case(lines: list[dict[str, Any]]) -> None:
    lines.remove(next(line for line in lines if line["kind"] == "case"))


def _bad_number(lines: list[dict[str, Any]]) -> None:
    next(line for line in lines if line.get("values"))["values"][0]["candidate"]["mean"] = 1.0


RULES = [
    (_few_replays, "not_evaluated", "kernels.incomplete_record"),
    (_no_late, "not_evaluated", "kernels.incomplete_record"),
    (_no_contention, "not_evaluated", "kernels.incomplete_record"),
    (_smaller_plan, "not_evaluated", "kernels.incomplete_record"),
    (_no_load, "not_evaluated", "kernels.incomplete_record"),
    (_cut_case, "not_evaluated", "kernels.incomplete_record"),
    (_plain_copy, "inconclusive", "kernels.no_late_copy"),
    (_other_image, "failed", "kernels.wrong_object"),
    (_bad_number, "failed", "kernels.mismatch"),
]


@pytest.mark.parametrize(("change", "outcome", "code"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_record_that_lacks_a_rule_does_not_pass(
    results: Path, change: Callable[[list[dict[str, Any]]], None], outcome: str, code: str
) -> None:
    """The protocol decides `passed` on a record whose chain holds and which a rule is missing from."""
    lines = lines_of(results)
    change(lines)
    decision = decide(sealed(results, lines))
    assert (decision.outcome, decision.findings[0].code) == (outcome, code)


def test_a_broken_chain_is_no_record(results: Path) -> None:
    """Bundle verification that trusts lines which importing would have refused."""
    lines = lines_of(results)
    lines[3]["seconds"] = 0.0
    decision = decide(lines)
    assert (decision.outcome, decision.findings[0].code) == ("not_evaluated", "kernels.incomplete_record")
