"""The kernels gate: hostile kernels are refused for the right reason, the honest twin passes; what decides."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from gate_fixtures import SETTINGS, make_bench
from measured_fixtures import PICO, build_faults, codes, fault_batch, line_of, plain_context, started

from harness import sandbox
from harness.records import Outcome
from k3_backend.aot.manifest import Artifact
from tests.hostile.kernels.faults import FAULTS, PLAIN, Fault
from verify.context import Arms
from verify.evaluator import device
from verify.evaluator.contention import Competitors
from verify.evaluator.inputs import Case, kinds
from verify.evaluator.plan import Planned, from_json
from verify.evaluator.receipts import receipts
from verify.evaluator.worker import Worker, WorkerCrashed, WorkerTimeout
from verify.gates import kernels, path
from verify.protocol.kernels import PROTOCOL_ID, case_fails, decide

_REASON = sandbox.unavailable()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=_REASON.message if _REASON else "")

KERNEL = "k3_backend/kernels/kda_decode/cpu.cc"
Built = tuple[dict[str, Artifact], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def worker(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with started(*built, tmp_path_factory.mktemp("run")) as running:
        yield running


def case(kind: str = "gaussian", batch: int = 3, tokens: int = 2, threads: int = 2, seed: str = "5eed") -> Case:
    return Case("kda_decode", kind, batch, tokens, threads, seed, PICO.name)


def fault_case(fault: Fault, seed: str = "5eed") -> Case:
    return case(fault.kind, fault_batch(FAULTS.index(fault) + 1), 2, seed=seed)


@pytest.mark.parametrize("kind", kinds("kda_decode"))
def test_the_honest_twin_passes(worker: Worker, kind: str) -> None:
    """A gate that refuses a plain, correct kernel."""
    for batch, tokens, threads in ((1, 1, 1), (4, 2, 2)):
        line = line_of(worker, case(kind, batch, tokens, threads))
        assert codes(line) == set()
        assert {row["run"] for row in line["values"]} >= {"first", "changed"}


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.fatal and not f.lasting], ids=lambda f: f.name)
def test_a_fault_is_found_for_the_right_reason(worker: Worker, fault: Fault) -> None:
    """The named fault passes, or is refused under a reason that sends its author elsewhere."""
    assert {fault.code, fault.also} & codes(line_of(worker, fault_case(fault)))


def test_what_a_kernel_leaves_behind_is_found(built: Built, tmp_path: Path) -> None:
    """A thread that works on after the call, or a changed floating-point unit."""
    with started(*built, tmp_path) as running:
        for fault in (f for f in FAULTS if f.lasting):
            assert fault.code in codes(line_of(running, fault_case(fault))), fault.name


@pytest.mark.parametrize("name", ["crash", "prints-pass"])
def test_a_dying_kernel_is_a_crash(built: Built, tmp_path: Path, name: str) -> None:
    """A kernel that takes its process along, with or without a friendly word and exit status 0."""
    fault = next(f for f in FAULTS if f.name == name)
    with started(*built, tmp_path) as running, pytest.raises(WorkerCrashed) as caught:
        line_of(running, fault_case(fault))
    assert f"kernels.{caught.value.record()['failure']}" == fault.code
    if name == "prints-pass":
        assert "PASS" in caught.value.log
        assert caught.value.detail["status"] == 0


def test_a_hanging_kernel_is_a_timeout(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that never returns and keeps the gate waiting."""
    monkeypatch.setattr(device, "CALL_TIMEOUT_S", 3.0)
    fault = next(f for f in FAULTS if f.name == "hang")
    with started(*built, tmp_path) as running, pytest.raises(WorkerTimeout) as caught:
        line_of(running, fault_case(fault))
    assert f"kernels.{caught.value.record()['failure']}" == fault.code


def test_a_spoiled_kernel_breaks_the_comparison(worker: Worker) -> None:
    """A watermark that no comparison notices, or that stays on afterwards."""
    worker.call("op.spoil", timeout_s=10, op="kda_decode", on=True)
    assert "kernels.mismatch" in codes(line_of(worker, case()))
    worker.call("op.spoil", timeout_s=10, op="kda_decode", on=False)
    assert codes(line_of(worker, case())) == set()


def test_rows_beyond_the_schedule_are_refused_not_failed(worker: Worker) -> None:
    """A missing bucket reported as a wrong number: that is the path gate's finding."""
    line = line_of(worker, case(batch=60, tokens=2))
    assert "no schedule bucket for 120 rows" in line["refused"]
    assert not case_fails(line)


def test_receipts_name_the_mapped_objects(worker: Worker, built: Built, tmp_path: Path) -> None:
    """An object that was judged without being loaded, or a copy of it that was."""
    artifacts = built[0]
    found = receipts(worker.tasks(), artifacts)
    assert all(receipt["mapped"] == receipt["object"] for receipt in found.values())
    copied = tmp_path / "kda_decode"
    copied.mkdir()
    for file in artifacts["kda_decode"].path.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    assert receipts(worker.tasks(), {"kda_decode": Artifact.read(copied)})["kda_decode"]["mapped"] is None


def test_a_stored_case_can_be_run_again(worker: Worker) -> None:
    """Evidence whose seed does not bring the finding back."""
    fault = next(f for f in FAULTS if f.name == "layout")
    line = line_of(worker, fault_case(fault))
    stored = json.loads(json.dumps(Planned(fault_case(fault), contended=False).to_json()))
    again = line_of(worker, from_json(stored).case)
    assert again["inputs_sha256"] == line["inputs_sha256"]
    assert again["values"] == line["values"]
    assert codes(again) == codes(line)


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_the_gate_plans_runs_records_and_resumes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A gate that skips its plan, forgets lines, or draws new cases for a candidate it has begun to judge."""
    bench = make_bench(tmp_path_factory, "kernels-gate")
    context = plain_context(bench, tmp_path_factory.mktemp("kernels-arms"))
    result = kernels.run(context)
    assert result.outcome is Outcome.PASSED, result.reasons
    lines = context.evidence.lines("kernels")
    assert lines[0]["ops"] == ["kda_decode"]
    assert {line["class"] for line in lines if line["kind"] == "case"} == set(kinds("kda_decode"))
    assert result.detail["ops"]["kda_decode"]["worst_share"] < 1.0
    assert kernels.run(context).outcome is Outcome.PASSED
    assert context.evidence.lines("kernels") == lines
    assert context.arms is not None
    other = replace(context.arms.candidate["kda_decode"], files={"kda_decode.so": "0" * 64})
    context.arms = replace(context.arms, candidate={"kda_decode": other})
    assert kernels.run(context).reasons[0].code == "kernels.internal_error"


def test_what_cannot_be_run_is_not_evaluated(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A gate that passes without artifacts or on another kind of machine."""
    bench = make_bench(tmp_path_factory, "kernels-none")
    context = bench.context(bench.commit({KERNEL: PLAIN}), export=False)
    for gate, name in ((kernels, "kernels"), (path, "path")):
        assert [r.code for r in gate.run(context).reasons] == [f"{name}.no_artifacts"]
        elsewhere = bench.context(bench.commit({KERNEL: PLAIN}), target="gb300", export=False)
        result = gate.run(elsewhere)
        assert (result.outcome, result.reasons[0].code) == (Outcome.NOT_EVALUATED, f"{name}.kit")


def test_only_what_changed_is_run_but_never_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An op whose kernel, schedule or shared header changed and that is not run."""
    bench = make_bench(tmp_path_factory, "kernels-changed")
    schedule = "k3_backend/schedules/cpu/k3-nano/attn_res.toml"
    both, fake = ("attn_res", "kda_decode"), cast("Artifact", None)

    def changed(files: dict[str, str], tier: str = "smoke") -> tuple[str, ...]:
        context = bench.context(bench.commit(files), export=False)
        context.tier = SETTINGS.tier(tier)
        context.arms = Arms(dict.fromkeys(both, fake), Path(), {}, Path(), fake)
        return kernels.changed_ops(context)

    assert changed({KERNEL: PLAIN}) == ("kda_decode",)
    assert changed({schedule: "version = 1\n"}) == ("attn_res",)
    assert changed({"k3_backend/kernels/common/scale.h": "#pragma once\n"}) == both
    assert changed({"k3_backend/schedules/cpu/k3-pico/attn_res.toml": "version = 1\n"}) == both
    assert changed({KERNEL: PLAIN}, tier="full") == both


def test_competitors_spin_only_while_asked_to() -> None:
    """Processes that load the machine after the case, or after the gate."""
    with Competitors() as competitors:
        pids = [process.pid for process in competitors._processes]
        with competitors.busy():
            states = {Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in pids}
            assert "T" not in states
        time.sleep(0.05)
        assert {Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in pids} == {"T"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# --- the decision -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(worker: Worker, built: Built) -> list[dict[str, Any]]:
    """Raw lines of a passing gate."""
    cases = [line_of(worker, case(kind)) for kind in ("gaussian", "hold")]
    header = {
        "kind": "header",
        "protocol": PROTOCOL_ID,
        "ops": ["kda_decode"],
        "artifacts": {"kda_decode": built[0]["kda_decode"].digest},
        "planned": [line["id"] for line in cases],
        "command": "fasttrack verify",
    }
    load = {"kind": "load", "failure": None, "receipts": receipts(worker.tasks(), built[0])}
    return [header, load, *cases]


def changed(lines: list[dict[str, Any]], at: int, **fields: Any) -> list[dict[str, Any]]:
    edited = copy.deepcopy(lines)
    edited[at] |= fields
    return edited


def test_complete_and_clean_lines_pass(lines: list[dict[str, Any]]) -> None:
    """A decision that never passes."""
    decision = decide(lines)
    assert decision.outcome == "passed"
    assert decision.metrics["cases"]["value"] == 2


@pytest.mark.parametrize("field", ["element", "row_l2", "mean", "nonfinite", "nonzero"])
def test_every_measure_can_fail(lines: list[dict[str, Any]], field: str) -> None:
    """A number in the record that the decision does not look at."""
    edited = copy.deepcopy(lines)
    edited[2]["values"][0]["candidate"][field] = 10
    decision = decide(edited)
    assert [f.code for f in decision.findings] == ["kernels.mismatch"]
    assert lines[2]["seed"] in decision.findings[0].where


def test_tolerances_are_recomputed(lines: list[dict[str, Any]]) -> None:
    """A tolerance that is believed because the line says so."""
    edited = copy.deepcopy(lines)
    edited[2]["values"][0]["candidate"]["mean"] = 5.0
    edited[2]["values"][0]["tolerance"] = {"element": 1e9, "row_l2": 1e9, "mean": 1e9}
    assert decide(edited).outcome == "failed"


EVENT = {"code": "input_changed", "tensor": "proj", "offset": 4, "nbytes": 2, "run": "first"}
CHOICE = {"run": "first", "tensor": "topk_ids", "violations": 1, "rule": "order", "worst": [0]}


@pytest.mark.parametrize(
    ("at", "fields", "outcome", "code"),
    [
        (2, {"events": [EVENT]}, "failed", "kernels.input_changed"),
        (2, {"failure": {"failure": "crash", "message": "ended by SIGSEGV"}}, "failed", "kernels.crash"),
        (2, {"choices": [CHOICE]}, "failed", "kernels.mismatch"),
        (1, {"failure": {"failure": "error", "message": "undefined symbol"}}, "failed", "kernels.error"),
        (1, {"receipts": {}}, "failed", "kernels.wrong_object"),
        (0, {"planned": ["another", "case"]}, "not_evaluated", "kernels.incomplete_record"),
        (0, {"protocol": "kernels/0"}, "not_evaluated", "kernels.incomplete_record"),
        (0, {"ops": ["kda_decode", "attn_res"]}, "not_evaluated", "kernels.not_run"),
        (3, {"kind": "note"}, "not_evaluated", "kernels.incomplete_record"),
    ],
)
def test_what_decides(lines: list[dict[str, Any]], at: int, fields: dict[str, Any], outcome: str, code: str) -> None:
    """Broken, missing or foreign lines that pass, or that fail a candidate that was not evaluated."""
    decision = decide(changed(lines, at, **fields))
    assert (decision.outcome, decision.findings[0].code) == (outcome, code)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_cut_records_are_not_evaluated(lines: list[dict[str, Any]], cut: int) -> None:
    """A record that ends early and passes."""
    assert decide(lines[:cut]).outcome == "not_evaluated"
    assert decide([*lines, lines[-1]]).outcome == "not_evaluated"


def test_comparisons_without_power_do_not_pass(lines: list[dict[str, Any]]) -> None:
    """A tensor that a constant would match in every case."""
    edited = copy.deepcopy(lines)
    for line in edited[2:]:
        for row in line["values"]:
            if row["tensor"] == "out":
                row["spread"] = 0.0
    decision = decide(edited)
    assert (decision.outcome, decision.findings[0].code) == ("inconclusive", "kernels.no_power")


def test_all_refused_is_not_evaluated(lines: list[dict[str, Any]]) -> None:
    """An op whose every call was refused and that passes on nothing."""
    edited = copy.deepcopy(lines)
    for line in edited[2:]:
        line |= {"refused": "no schedule bucket", "values": []}
    assert decide(edited).findings[0].code == "kernels.not_run"
