"""The path gate of a kit on a machine without a GPU: honest half-layers pass, and what it exists to find is found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_half_card
import pytest
from kit_fixtures import ROOT, FakeMachine, fake_arm, lines_of, local_arm, sealed, write_fake_kit

from harness import canonical, settings
from harness.errors import FasttrackError
from verify.kit import half_walk, path, run
from verify.kit.manifest import Unit
from verify.kit.path_plan import read_choices, require_expected
from verify.kit.planning import rank_geometries
from verify.kit.receive import read_results
from verify.protocol.path import decide
from verify.protocol.path_cuda import label
from verify.protocol.path_cuda_record import HALF_LAYERS, judged

SETTINGS = settings.load(ROOT)
BUFFER = 1 << 27
OPS = tuple(dict.fromkeys((*HALF_LAYERS["kda"], *HALF_LAYERS["mla"])))
PICO = dict.fromkeys((*OPS, "l2_prefetch"), "k3-pico")
"""With an op that runs beside a step: no half-layer has a site for it."""
LAST_PROJECTION = 12
"""Rows where the fake schedule of the input projection ends: larger cells have a declared fallback."""
Lines = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "BUFFER_BYTES", BUFFER)


def make_kit(folder: Path, ops: dict[str, str] | None = None, **changes: Any) -> Path:
    """A kit of both half-layers' ops and one beside them; its scope reaches beyond the projection's schedule."""
    arm = fake_arm(folder / "arm", ops or PICO, ends={"input_projection": LAST_PROJECTION})
    scope = {"batches": (1, 13), "contexts": (40,), "tier_batches": (1, 13), **changes}
    write_fake_kit(folder / "K", arm, SETTINGS, gates=("path",), **scope)
    return folder / "K"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture(scope="module")
def kda_kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One half-layer only: what is found in it needs no other."""
    return make_kit(tmp_path_factory.mktemp("kda"), dict.fromkeys(HALF_LAYERS["kda"], "k3-pico"))


@pytest.fixture(scope="module")
def results(kit: Path) -> Path:
    """Results of a whole honest session. Tests must not change them."""
    out = kit.parent / "R"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, "BUFFER_BYTES", BUFFER)
        assert run.session(kit, out, machine=FakeMachine(), jobs=1) == run.FINE
    return out


def test_only_rank_shapes_claim_half_layers() -> None:
    """The MLA core of all heads, which serves DCP shards, counts as a half-layer that lacks its other ops."""
    ranks = rank_geometries(SETTINGS.target("h200"))
    assert ranks == ["k3-slice-tp16", "k3-slice-tp8"]
    held = {f"mla_decode/sm_90a/{name}": "0" * 64 for name in ("k3", "k3-slice-tp8")}
    assert judged(held, ranks) == (("k3-slice-tp8", "mla"),)


ENDS_PROCESS = {"exits", "hangs"}
"""Faults that end or stop the worker's process."""


def with_fault(kit: Path, out: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Lines]:
    """Exit code and lines of a session whose card has a planted fault."""
    monkeypatch.setenv(fake_half_card.FAULT, fault)
    if fault not in ENDS_PROCESS:
        monkeypatch.setattr(path, "started_arm", local_arm)
    code = run.session(kit, out, machine=FakeMachine(), jobs=1)
    return code, lines_of(out, "path")


def test_honest_half_layers_pass(results: Path) -> None:
    """A gate that refuses what is right, or passes without having run its plan."""
    lines = lines_of(results, "path")
    decision = decide(lines)
    assert decision.outcome == "passed", decision.findings
    found = {line["id"] for line in lines if line["kind"] in ("cell", "watermark")}
    assert found == set(lines[0]["planned"])
    assert {line["kind"] for line in lines} == {"header", "load", "cell", "watermark"}
    whole = next(line for line in lines if line.get("id", "").startswith("k3-pico/mla/auto/b1/t1"))
    expected = {f"kernel_{op}": path.REPLAYS for op in HALF_LAYERS["mla"]}
    assert whole["kernels"] == fake_half_card.rows({**expected, fake_half_card.LEDGER: path.REPLAYS})
    assert set(whole["results"]) == {"mla_out.0", "prefix.0", "kv_cache.0"}
    text = b"".join(file.read_bytes() for file in sorted(results.rglob("*")) if file.is_file())
    assert str(Path.home()).encode() not in text
    assert b"/tmp/" not in text


def test_a_gap_of_the_schedule_is_declared_and_nothing_else_is(results: Path) -> None:
    """A fallback that nobody announced passes, or an announced one fails or is not shown."""
    lines = lines_of(results, "path")
    declared = [site for entry in lines[0]["plan"] if entry["batch"] * entry["tokens"] > LAST_PROJECTION
                for site in entry["sites"] if site["path"] == "standard"]  # fmt: skip
    assert declared
    assert {(site["op"], site["code"]) for site in declared} == {("input_projection", "op.no_schedule")}
    assert all("no schedule bucket for" in site["message"] for site in declared)
    assert decide(lines).metrics["declared_fallbacks"]["value"] == len(declared)
    small = [
        entry
        for entry in lines[0]["plan"]
        if entry["mode"] == "auto" and entry["batch"] * entry["tokens"] <= LAST_PROJECTION
    ]
    assert all(site["path"] == "specialized" for entry in small for site in entry["sites"])


FAULTS = {
    "missing_symbol": "path.symbols",
    "extra_kernel": "path.symbols",
    "other_variant": "path.symbols",
    "copies": "path.symbols",
    "silent_ledger": "path.ledger",
    "miscounting_ledger": "path.ledger",
    "falls_back": "path.fallback",
    "wrong": "path.step_mismatch",
    "runs_once": "path.step_mismatch",
    "foreign_state": "path.unowned_state_changed",
    "overrun": "path.unowned_state_changed",
    "unspoilt": "path.watermark_unseen",
    "unspoilt_case": "path.watermark_unseen",
    "other_image": "path.wrong_object",
    "no_images": "path.error",
    "raises": "path.error",
}
"""Fault of the card -> a code that it must lead to."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_for_the_right_reason(
    kda_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Kernels that did not run, ran beside others, were not counted, or whose results are not what was judged."""
    code, lines = with_fault(kda_kit, tmp_path / "R", fault, monkeypatch)
    decision = decide(lines)
    assert (code, decision.outcome) == (run.FALLS_SHORT, "failed")
    assert FAULTS[fault] in {finding.code for finding in decision.findings}
    assert all((finding.message, finding.where, finding.expected, finding.next) for finding in decision.findings)


def test_a_hang_is_a_timeout(kda_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that never ends."""
    monkeypatch.setattr(half_walk, "TIMEOUT_S", 1.0)
    _, lines = with_fault(kda_kit, tmp_path / "R", "hangs", monkeypatch)
    assert {finding.code for finding in decide(lines).findings} == {"path.timeout"}


def test_without_a_profiler_nothing_passes(kda_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that nobody saw count as seen."""
    code, lines = with_fault(kda_kit, tmp_path / "R", "no_profiler", monkeypatch)
    decision = decide(lines)
    assert (code, decision.outcome) == (run.INCOMPLETE, "not_evaluated")
    assert [finding.code for finding in decision.findings] == ["path.no_profiler"]
    assert "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in decision.findings[0].message


def test_a_worker_that_ends_is_a_crash_and_costs_little(
    kda_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken kernel that is run again and again, a worker at a time."""
    code, lines = with_fault(kda_kit, tmp_path / "R", "exits", monkeypatch)
    decision = decide(lines)
    assert (code, decision.outcome) == (run.FALLS_SHORT, "failed")
    assert {finding.code for finding in decision.findings} == {"path.crash"}
    assert sum(line["kind"] == "load" for line in lines) == path.MAX_BAD_CELLS
    assert sum(line.get("skipped") is not None for line in lines) == len(lines[0]["planned"]) - path.MAX_BAD_CELLS


def test_a_half_layer_that_lacks_an_op_is_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kit of some ops whose path passes on the others."""
    monkeypatch.setattr(path, "started_arm", local_arm)
    some = {op: "k3-pico" for op in OPS if op != "mla_value"}
    kit = make_kit(tmp_path, some)
    assert run.session(kit, tmp_path / "R", machine=FakeMachine(), jobs=1) == run.INCOMPLETE
    decision = decide(lines_of(tmp_path / "R", "path"))
    assert decision.outcome == "not_evaluated"
    assert "mla half-layer on k3-pico: the plan lacks artifact of mla_value" in decision.findings[0].message


def test_the_evaluators_own_mistake_is_no_pass(kda_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while results are compared that ends the session, or lets the cell count as fine."""
    monkeypatch.setattr(path, "started_arm", local_arm)
    real = path.walk_half

    def broken(worker: Any, planned: Any, *rest: Any, **options: Any) -> dict[str, Any]:
        if planned.mode == "off":
            raise MemoryError("out of memory")
        return real(worker, planned, *rest, **options)

    monkeypatch.setattr(path, "walk_half", broken)
    assert run.session(kda_kit, tmp_path / "R", machine=FakeMachine(), jobs=1) == run.INCOMPLETE
    decision = decide(lines_of(tmp_path / "R", "path"))
    assert decision.outcome == "not_evaluated"
    assert "a cell was skipped: the evaluator failed: MemoryError" in decision.findings[0].message


SESSION = """
import sys
sys.path[:0] = [{root!r}, {fixtures!r}]
from pathlib import Path
from kit_fixtures import FakeMachine
from verify.kit import path, run
path.BUFFER_BYTES = {buffer}
sys.exit(run.session(Path(sys.argv[1]), Path(sys.argv[2]), machine=FakeMachine(), jobs=1, resume=len(sys.argv) > 3))
"""


def test_a_killed_run_goes_on_without_loss_or_repetition(kda_kit: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of a cell, a torn last line, and a finished cell that is run again."""
    program = SESSION.format(root=str(ROOT), fixtures=str(Path(__file__).parent), buffer=BUFFER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(*more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-B", "-c", program, str(kda_kit), str(tmp_path / "R"), *more]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)

    process = start()
    raw = tmp_path / "R" / "raw" / "path.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (raw.is_file() and raw.read_bytes().count(b"\n") >= 4):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = raw.read_bytes()[: raw.read_bytes().rfind(b"\n") + 1]
    before = [json.loads(line) for line in whole.splitlines()]
    with raw.open("ab") as file:
        file.write(b'{"kind":"cell","id":"torn')
    assert start("resume").wait() == run.FINE
    after = lines_of(tmp_path / "R", "path")
    assert after[: len(before)] == before
    found = [line["id"] for line in after if line["kind"] in ("cell", "watermark")]
    assert sorted(found) == sorted(after[0]["planned"])
    assert decide(after).outcome == "passed"


def test_finished_cells_are_judged_the_same_when_a_session_goes_on(
    kda_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest cells of an earlier session that count as failed, so that the rest is skipped."""
    monkeypatch.setattr(path, "started_arm", local_arm)
    assert run.session(kda_kit, tmp_path / "R", machine=FakeMachine(), jobs=1) == run.FINE
    lines = lines_of(tmp_path / "R", "path")
    kept = next(at for at, line in enumerate(lines) if line["kind"] == "watermark")
    assert sum(line["kind"] == "cell" for line in lines[:kept]) > path.MAX_BAD_CELLS
    _rewrite(tmp_path / "R", lines[:kept])
    assert run.session(kda_kit, tmp_path / "R", machine=FakeMachine(), jobs=1, resume=True) == run.FINE
    assert len(lines_of(tmp_path / "R", "path")) == len(lines) + 1  # one more load


# --- records that somebody made or changed ----------------------------------------------------------------------------


def _cell(lines: Lines, name: str = "/auto/") -> dict[str, Any]:
    return next(line for line in lines if name in line.get("id", "") and line["results"])


def _drop_cell(lines: Lines) -> None:
    lines.remove(_cell(lines))


def _twice(lines: Lines) -> None:
    lines.append(dict(_cell(lines)))


def _unplanned(lines: Lines) -> None:
    _cell(lines)["id"] = "k3-pico/kda/auto/b999/t1/c0"


def _no_load(lines: Lines) -> None:
    lines[:] = [line for line in lines if line["kind"] != "load"]


def _one_replay(lines: Lines) -> None:
    _cell(lines)["replays"] = 1


def _no_results(lines: Lines) -> None:
    _cell(lines)["results"] = {}


def _watermark_as_cell(lines: Lines) -> None:
    next(line for line in lines if line["kind"] == "watermark")["kind"] = "cell"


def _smaller_plan(lines: Lines) -> None:
    """Without anything of batch 13."""
    gone = {entry["id"] for entry in lines[0]["plan"] if entry["batch"] == 13 and entry["tokens"] == 1}
    lines[0]["plan"] = [entry for entry in lines[0]["plan"] if entry["id"] not in gone]
    lines[0]["planned"] = [entry["id"] for entry in lines[0]["plan"]]
    lines[:] = [line for line in lines if line.get("id") not in gone]


def _no_watermarks(lines: Lines) -> None:
    gone = {entry["id"] for entry in lines[0]["plan"] if entry["spoil"]}
    lines[0]["plan"] = [entry for entry in lines[0]["plan"] if entry["id"] not in gone]
    lines[0]["planned"] = [entry["id"] for entry in lines[0]["plan"]]
    lines[:] = [line for line in lines if line.get("id") not in gone]


def _all_declared(lines: Lines) -> None:
    """A plan in which every site has a fallback, kept by everything that was measured."""
    off = next(line for line in lines if "/off/" in line.get("id", ""))
    for entry in lines[0]["plan"]:
        for site in entry["sites"]:
            site |= {"path": "standard", "launches": []}
            site["code"] = "op.missing" if entry["mode"] == "off" else "op.no_schedule"
    for line in lines:
        if line["kind"] in ("cell", "watermark"):
            entry = next(entry for entry in lines[0]["plan"] if entry["id"] == line["id"])
            line["sites"] = [{**site, "tunables": {}, "kernels": []} for site in entry["sites"]]
            keys = [site["key"] for site in entry["sites"]]
            line["ledger"] = {"before": {k: [0, 0] for k in keys}, "after": {k: [0, line["replays"]] for k in keys}}
            line["kernels"] = fake_half_card.rows({fake_half_card.LEDGER: 3, fake_half_card.VENDOR: 3 * len(keys)})
    assert off["kernels"]


def _no_ledger_kernel(lines: Lines) -> None:
    cell = _cell(lines)
    cell["kernels"] = [row for row in cell["kernels"] if row["name"] != fake_half_card.LEDGER]


def _undeclared(lines: Lines) -> None:
    """A plan that declares a fallback for another reason than the schedule's."""
    entry = next(entry for entry in lines[0]["plan"] if entry["batch"] == 13 and entry["mode"] == "auto")
    next(site for site in entry["sites"] if site["path"] == "standard")["code"] = "op.missing"


def _own_kernel_in_off(lines: Lines) -> None:
    """The specialised op ran where the standard arm was asked for."""
    _cell(lines, "/off/")["kernels"] += fake_half_card.rows({"kernel_attn_res": 3})


def _idle_standard(lines: Lines) -> None:
    """Nothing ran for the standard path's sites."""
    _cell(lines, "/off/")["kernels"] = fake_half_card.rows({fake_half_card.LEDGER: 3})


def _odd_vendor(lines: Lines) -> None:
    _cell(lines, "/off/")["kernels"] += fake_half_card.rows({"void other()": 4})


def _other_sites(lines: Lines) -> None:
    _cell(lines)["sites"].pop()


def _ledger_of_others(lines: Lines) -> None:
    _cell(lines)["ledger"]["after"].popitem()


def _nan_result(lines: Lines) -> None:
    next(iter(_cell(lines)["results"].values()))["distance"]["nonfinite"] = 1


def _unseen(lines: Lines) -> None:
    _cell(lines)["kernels"] = None


def _lax(lines: Lines) -> None:
    """A standard path so far off that anything would pass."""
    next(iter(_cell(lines)["results"].values()))["standard"]["mean"] = 0.5


RULES: list[tuple[Callable[[Lines], None], str, str]] = [
    (_drop_cell, "not_evaluated", "path.incomplete_record"),
    (_twice, "not_evaluated", "path.incomplete_record"),
    (_unplanned, "not_evaluated", "path.incomplete_record"),
    (_no_load, "not_evaluated", "path.incomplete_record"),
    (_one_replay, "not_evaluated", "path.incomplete_record"),
    (_no_results, "not_evaluated", "path.incomplete_record"),
    (_watermark_as_cell, "not_evaluated", "path.incomplete_record"),
    (_smaller_plan, "not_evaluated", "path.incomplete_record"),
    (_no_watermarks, "not_evaluated", "path.incomplete_record"),
    (_all_declared, "not_evaluated", "path.incomplete_record"),
    (_no_ledger_kernel, "failed", "path.symbols"),
    (_undeclared, "failed", "path.fallback"),
    (_own_kernel_in_off, "failed", "path.symbols"),
    (_idle_standard, "failed", "path.symbols"),
    (_odd_vendor, "failed", "path.symbols"),
    (_other_sites, "failed", "path.ledger"),
    (_ledger_of_others, "failed", "path.ledger"),
    (_nan_result, "failed", "path.step_mismatch"),
    (_unseen, "not_evaluated", "path.no_profiler"),
    (_lax, "inconclusive", "path.no_power"),
]


@pytest.mark.parametrize(("change", "outcome", "code"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_record_that_breaks_a_rule_does_not_pass(
    results: Path, change: Callable[[Lines], None], outcome: str, code: str
) -> None:
    """The protocol decides `passed` on a record whose chain holds and which a rule is missing from."""
    lines = lines_of(results, "path")
    change(lines)
    decision = decide(sealed(results, lines, "path"))
    assert (decision.outcome, decision.findings[0].code) == (outcome, code)


def test_a_broken_chain_is_no_record(results: Path) -> None:
    """Bundle verification that trusts lines which importing would have refused."""
    lines = lines_of(results, "path")
    lines[2]["seconds"] = 0.0
    assert decide(lines).findings[0].code == "path.incomplete_record"


def _edited(folder: Path) -> None:
    lines = lines_of(folder, "path")
    _cell(lines)["kernels"][0]["count"] = 6
    _rewrite(folder, lines)


def _dropped(folder: Path) -> None:
    lines = lines_of(folder, "path")
    del lines[3]
    _rewrite(folder, lines)


def _other_contexts(folder: Path) -> None:
    lines = lines_of(folder, "path")
    lines[0]["contexts"] = [1]
    (folder / "result.json").unlink()
    _rewrite(folder, sealed(folder, lines, "path"))


def _as_kernels(folder: Path) -> None:
    shutil.move(folder / "raw" / "path.jsonl", folder / "raw" / "kernels.jsonl")


def _rewrite(folder: Path, lines: Lines) -> None:
    (folder / "raw" / "path.jsonl").write_bytes(b"".join(canonical.line(line) + b"\n" for line in lines))


@pytest.mark.parametrize("change", [_edited, _dropped, _other_contexts, _as_kernels], ids=lambda c: c.__name__[1:])
def test_hostile_results_are_refused(results: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Counts that nobody measured come in."""
    copy = Path(shutil.copytree(results, tmp_path / "R"))
    change(copy)
    with pytest.raises(FasttrackError):
        read_results(copy)


def test_expected_kernels_are_derived_again(kit: Path, results: Path) -> None:
    """A record whose plan names other kernels than the artifacts have, or declares a gap that no schedule has."""
    header = read_results(results).lines["path"][0]
    folders = {Unit("k3-pico", op, "sm_90a"): kit / "arms/candidate/artifacts/k3-pico" / op for op in OPS}
    arm = read_choices(folders, kit / "arms/candidate/schedules")
    require_expected(header, arm)
    for change in ({"launches": []}, {"path": "standard", "code": "op.no_schedule", "launches": []}):
        forged = json.loads(json.dumps(header))
        forged["plan"][0]["sites"][0] |= change
        with pytest.raises(FasttrackError, match="expects other kernels in cell"):
            require_expected(forged, arm)
    with pytest.raises(FasttrackError, match="names other kernels"):
        require_expected({**header, "symbols": {}}, arm)


def test_labels_name_half_layer_and_geometry() -> None:
    """Findings of two geometries that a reader cannot tell apart."""
    assert label({"half": "kda", "geometry": "k3-pico"}) == "kda half-layer on k3-pico"
