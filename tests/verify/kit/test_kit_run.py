"""A kit on a machine without a GPU: honest kernels pass, planted faults are found, nothing is lost or repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_card
import numpy as np
import pytest
import torch
from kit_fixtures import ARCH, BOOTSTRAP, ROOT, FakeMachine, fake_arm, lines_of, write_fake_kit

from harness import settings
from harness.errors import FasttrackError
from verify.evaluator.client import Client
from verify.evaluator.execute import run_on
from verify.evaluator.failures import WorkerCrashed, WorkerTimeout
from verify.evaluator.inputs import Case
from verify.kit import kernels, run
from verify.kit.build import Arm
from verify.kit.card import CardDevice
from verify.kit.child import started
from verify.protocol.kernels import _case_findings, decide
from verify.protocol.kernels_cuda import REPLAYS

SETTINGS = settings.load(ROOT)
BUFFER = 1 << 28
FATAL = {"illegal_address", "exits", "hangs"}
HONEST_ROWS = fake_card.FIRST_ROWS - 1


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BUFFER_BYTES", BUFFER)


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Arm:
    return fake_arm(tmp_path_factory.mktemp("arm"), {"mla_query": "k3-pico"})


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit")
    units = {"mla_query": "k3-pico", "mla_value": "k3-pico"}
    write_fake_kit(folder / "K", fake_arm(folder / "arm", units, HONEST_ROWS), SETTINGS)
    return folder / "K"


@pytest.fixture(scope="module")
def finished(kit: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A whole session on honest kernels."""
    out = tmp_path_factory.mktemp("results") / "R"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BUFFER_BYTES", BUFFER)
        return run.session(kit, out, machine=FakeMachine(), jobs=2), out


def worker_on(arm: Arm, op: str, folder: Path) -> Any:
    unit = next(unit for unit in arm.artifacts if unit.op == op)
    return started(
        op, arm.artifacts[unit].path, arm.schedules, code=ROOT, logs=folder, buffer_bytes=BUFFER, bootstrap=BOOTSTRAP
    )


def load(worker: Client, op: str) -> Client:
    worker.call("card.load", timeout_s=120, op=op, arch=ARCH, geometry_name="k3-pico", nbytes=BUFFER)
    return worker


@pytest.fixture(scope="module")
def worker(arm: Arm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with worker_on(arm, "mla_query", tmp_path_factory.mktemp("logs")) as running:
        yield load(running, "mla_query")


def line_of(worker: Client, case: Case, replays: int = 3) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": "case", "id": case.id, "op": case.op, "failure": None, "skipped": None}
    on = CardDevice(worker, torch.device("cpu"), replays, 1 << 26, contended=True)
    run_on(on, case, np.random.default_rng(3), line)
    return line


def case_of(fault: str, op: str = "mla_query") -> Case:
    return Case(op, "gaussian", fake_card.rows_of(fault), 1, 1, "5eed", "k3-pico")


@pytest.mark.parametrize("fault", sorted(set(fake_card.FAULTS) - FATAL))
def test_a_fault_is_found_for_the_right_reason(worker: Client, fault: str) -> None:
    """A fault passes on the device's path, or is refused under a reason that sends its author elsewhere."""
    codes = {code for code, _, _ in _case_findings(line_of(worker, case_of(fault)))}
    assert f"kernels.{fake_card.FAULTS[fault]}" in codes


def test_a_fault_shows_in_the_run_that_is_made_for_it(worker: Client) -> None:
    """A run that does not disturb what it is meant to disturb, and a finding that comes from elsewhere."""
    for fault, name in (("early_load", "late"), ("hurried", "contended"), ("drifting", "replayed")):
        runs = {event["run"] for event in line_of(worker, case_of(fault))["events"]}
        assert runs == {name}, fault


def test_an_honest_case_has_every_run(worker: Client) -> None:
    """A case that counts as evaluated without late inputs, contention or replays."""
    line = line_of(worker, Case("mla_query", "padding", 3, 2, 1, "5eed", "k3-pico"), replays=5)
    assert (line["events"], line["refused"], line["replays"]) == ([], None, 5)
    assert line["runs"] == ["first", "again", "nudged", "changed", *["late"] * 3, *["contended"] * 2]
    assert {row["run"] for row in line["values"]} == {"first", "nudged", "changed"}


@pytest.mark.parametrize(("fault", "kind"), [("illegal_address", "crash"), ("exits", "crash"), ("hangs", "timeout")])
def test_a_worker_that_ends_is_a_finding(
    arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, kind: str
) -> None:
    """A kernel that breaks its context, ends its process with status 0, or never returns."""
    monkeypatch.setattr(CardDevice, "timeout_s", 2.0)
    wanted = WorkerTimeout if kind == "timeout" else WorkerCrashed
    with worker_on(arm, "mla_query", tmp_path) as running:
        load(running, "mla_query")
        with pytest.raises(wanted) as caught:
            line_of(running, case_of(fault))
    assert caught.value.record()["failure"] == kind


def test_honest_kernels_pass(finished: tuple[int, Path]) -> None:
    """A kit that refuses plain, correct kernels."""
    code, out = finished
    lines = lines_of(out)
    decision = decide(lines)
    assert (code, decision.outcome) == (run.FINE, "passed"), decision.findings
    cases = [line for line in lines if line["kind"] == "case"]
    assert sorted(case["id"] for case in cases) == sorted(lines[0]["planned"])
    for op in ("mla_query", "mla_value"):
        assert max(case["replays"] for case in cases if case["op"] == op) == REPLAYS
    assert json.loads((out / "result.json").read_text())["outcomes"]["kernels"]["outcome"] == "passed"
    text = b"".join(path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file())
    assert str(Path.home()).encode() not in text
    assert b"/tmp/" not in text


def test_a_bad_unit_fails_alone_and_costs_little(tmp_path: Path) -> None:
    """One op's crash that hides the others, or a broken kernel that is run again and again."""
    units = {"attn_res": "k3-pico", "mla_value": "k3-pico"}
    arm = fake_arm(tmp_path / "arm", units, images={"attn_res": fake_card.REFUSED})
    write_fake_kit(tmp_path / "K", arm, SETTINGS)
    assert run.session(tmp_path / "K", tmp_path / "R", machine=FakeMachine(), jobs=2) == run.FALLS_SHORT
    lines = lines_of(tmp_path / "R")
    loads = {line["unit"].split("/")[0]: line["failure"] for line in lines if line["kind"] == "load"}
    assert loads["mla_value"] is None
    assert loads["attn_res"] is not None
    assert {line["op"] for line in lines if line["kind"] == "case"} == {"mla_value"}


def test_the_evaluators_own_mistake_is_no_pass(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while results are compared that ends the session, or lets the case count as fine."""
    real = kernels.run_on

    def broken(on: CardDevice, case: Case, *rest: Any) -> None:
        if case.kind == "tail":
            raise MemoryError("out of memory")
        real(on, case, *rest)

    monkeypatch.setattr(kernels, "run_on", broken)
    assert run.session(kit, tmp_path / "R", machine=FakeMachine(), jobs=2) == run.INCOMPLETE
    decision = decide(lines_of(tmp_path / "R"))
    assert decision.outcome == "not_evaluated"
    assert "was skipped: the evaluator failed: MemoryError" in decision.findings[0].message


SESSION = """
import sys
sys.path[:0] = [{root!r}, {fixtures!r}]
from pathlib import Path
from kit_fixtures import FakeMachine
from verify.kit import kernels, run
kernels.BUFFER_BYTES = {buffer}
sys.exit(run.session(Path(sys.argv[1]), Path(sys.argv[2]), machine=FakeMachine(), jobs=2, resume=len(sys.argv) > 3))
"""


def start_session(kit: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    program = SESSION.format(root=str(ROOT), fixtures=str(Path(__file__).parent), buffer=BUFFER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-B", "-c", program, str(kit), str(out), *more]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)


def test_a_killed_run_goes_on_without_loss_or_repetition(kit: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of a case, a torn last line, and a finished case that is run again."""
    out = tmp_path / "R"
    process = start_session(kit, out)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done = sum(line["kind"] == "case" for line in lines_of(out)) if (out / "raw").is_dir() else 0
        if done >= 2:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = lines_of(out)
    with (out / "raw" / "kernels.jsonl").open("ab") as file:
        file.write(b'{"kind":"case","id":"torn')
    assert not (out / "result.json").exists()
    assert start_session(kit, out, "resume").wait() == run.FINE
    after = lines_of(out)
    assert after[: len(before)] == before
    found = [line["id"] for line in after if line["kind"] == "case"]
    assert sorted(found) == sorted(after[0]["planned"])
    sessions = [json.loads(line)["kind"] for line in (out / "sessions.jsonl").read_text().splitlines()]
    assert sessions == ["begin", "begin", "end"]


def test_time_that_is_over_leaves_valid_partial_results(kit: Path, tmp_path: Path) -> None:
    """A deadline that throws results away, or partial results that pass."""
    out = tmp_path / "R"
    assert run.session(kit, out, machine=FakeMachine(), jobs=1, minutes=0.02) == run.INCOMPLETE
    decision = decide(lines_of(out))
    assert (decision.outcome, decision.findings[0].code) == ("not_evaluated", "kernels.incomplete_record")
    assert (out / "result.json").exists()
    assert run.session(kit, out, machine=FakeMachine(), jobs=2, resume=True) == run.FINE


def test_misuse_is_one_clear_message(kit: Path, finished: tuple[int, Path], tmp_path: Path) -> None:
    """Results overwritten, mixed with another kit's, or lost for a wrong option."""
    out = finished[1]
    before = (out / "raw" / "kernels.jsonl").read_bytes()
    other = fake_arm(tmp_path / "arm", {"mla_value": "k3-pico"})
    write_fake_kit(tmp_path / "K", other, SETTINGS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    wrong: tuple[tuple[Path, Path, dict[str, Any], str], ...] = (
        (kit, out, {}, "holds results already"),
        (tmp_path / "K", out, {"resume": True}, "belongs to kit"),
        (kit, tmp_path / "full", {}, "is not empty"),
        (kit, tmp_path / "R", {"gates": ["perf"]}, "not in this kit"),
        (kit, tmp_path / "R", {"gates": []}, "not in this kit"),
        (kit, tmp_path / "R", {"minutes": float("nan")}, "nan"),
    )
    for root, folder, options, message in wrong:
        with pytest.raises(FasttrackError, match=message):
            run.session(root, folder, machine=FakeMachine(), **options)
    assert (out / "raw" / "kernels.jsonl").read_bytes() == before
    assert (tmp_path / "full" / "letter.txt").read_text() == "dear"
