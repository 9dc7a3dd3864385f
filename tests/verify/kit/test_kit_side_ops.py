"""An op without results on a machine without a GPU: the gate still sees what it must not do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fake_card
import pytest
from kit_fixtures import FakeMachine, fake_arm, lines_of, write_fake_kit
from test_kit_run import SETTINGS, case_of, line_of, load, worker_on

from k3_backend.ops import ALL_OPS, OPS, SIDE_OPS
from verify.evaluator.client import Client
from verify.kit import kernels, run
from verify.protocol.kernels import _case_findings, decide

OP = "l2_prefetch"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    arm = fake_arm(tmp_path_factory.mktemp("arm"), {OP: "k3-pico"})
    with worker_on(arm, OP, tmp_path_factory.mktemp("logs")) as running:
        yield load(running, OP)


def test_side_ops_are_no_part_of_a_step_and_have_no_results() -> None:
    """An op that a layer needs, but that is left out where no standard path runs it."""
    assert not set(OPS) & set(SIDE_OPS)
    assert ALL_OPS == OPS | SIDE_OPS
    assert {tensor.role for spec in SIDE_OPS.values() for tensor in spec.tensors} == {"constant"}


@pytest.mark.parametrize("fault", ["overrun", "writes_input"])
def test_what_it_writes_is_found(worker: Client, fault: str) -> None:
    """A prefetch that changes the weights, or writes beside them."""
    codes = {code for code, _, _ in _case_findings(line_of(worker, case_of(fault, OP)))}
    assert codes == {f"kernels.{fake_card.FAULTS[fault]}"}


def test_a_kit_with_it_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that calls an op without results unproven, or fails over it."""
    monkeypatch.setattr(kernels, "BUFFER_BYTES", 1 << 28)
    write_fake_kit(tmp_path / "K", fake_arm(tmp_path / "arm", {OP: "k3-pico"}), SETTINGS)
    assert run.session(tmp_path / "K", tmp_path / "R", machine=FakeMachine(), jobs=1) == run.FINE
    decision = decide(lines_of(tmp_path / "R"))
    assert (decision.outcome, decision.findings) == ("passed", ())
