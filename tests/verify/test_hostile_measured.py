"""Hostile patches that only running them exposes, through the real gates; slow because each is built and run."""

from __future__ import annotations

import pytest
from gate_fixtures import Bench
from measured_fixtures import checkout_bench

from harness import sandbox
from harness.records import GateResult, Outcome
from tests.hostile.kernels.faults import FAULTS
from tests.hostile.make import Expected, expectations, make_commit
from verify.context import GateContext
from verify.evaluator import device, execute
from verify.gates import audit, build, kernels, path, scope

_REASON = sandbox.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(_REASON is not None, reason=_REASON.message if _REASON else "")]

STATIC = (scope, build, audit)
KERNEL = "k3_backend/kernels/kda_decode/cpu.cc"
ALSO = {f"kernels-{fault.name}": fault.also for fault in FAULTS if fault.also}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A checkout whose only kernel is the plain KDA one."""
    return checkout_bench(tmp_path_factory, "plain", plain=True)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A checkout with its real kernels."""
    return checkout_bench(tmp_path_factory, "real", plain=False)


def admitted(bench: Bench, head: str) -> GateContext:
    """A context that the static gates have let pass."""
    context = bench.context(head)
    for gate in STATIC:
        result = gate.run(context)
        assert result.outcome is Outcome.PASSED, (result.gate, result.reasons)
    return context


def codes(result: GateResult) -> set[str]:
    return {reason.code for reason in result.reasons}


@pytest.mark.parametrize("expected", [e for e in expectations() if e.gate == "kernels"], ids=lambda e: e.id)
def test_the_kernels_gate_stops_it(plain: Bench, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong kernel that is admitted, or refused without its reason."""
    monkeypatch.setattr(device, "CALL_TIMEOUT_S", 8.0)
    result = kernels.run(admitted(plain, make_commit(plain.repo, plain.base, expected.id)))
    assert result.outcome is Outcome.FAILED
    assert codes(result) & {expected.code, ALSO.get(expected.id, "")}
    assert all(reason.where and "fasttrack verify" in reason.next for reason in result.reasons)


def test_the_honest_kernel_passes_and_a_killed_gate_goes_on(plain: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that refuses correct kernels, or that after a kill repeats, drops or redraws cases."""
    context = admitted(plain, make_commit(plain.repo, plain.base, "kernels-honest"))
    calls = 0
    plain_run = execute.run_case

    def interrupted(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        plain_run(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "run_case", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels.run(context)
    before = context.evidence.lines("kernels")
    assert sum(line["kind"] == "case" for line in before) == 6
    result = kernels.run(context)
    assert result.outcome is Outcome.PASSED, result.reasons
    lines = context.evidence.lines("kernels")
    assert lines[: len(before)] == before
    found = [line["id"] for line in lines if line["kind"] == "case"]
    assert sorted(found) == sorted(lines[0]["planned"])
    assert result.metrics["refused"].value == 0  # type: ignore[union-attr]


def test_the_path_gate_stops_a_schedule_that_refuses(real: Bench) -> None:
    """A candidate whose steps all take the standard path, and are right for that reason."""
    context = admitted(real, make_commit(real.repo, real.base, "path-refusing-schedule"))
    assert kernels.run(context).outcome is Outcome.PASSED
    result = path.run(context)
    assert result.outcome is Outcome.FAILED
    assert codes(result) == {"path.fallback"}
    assert any("op.no_schedule" in reason.message and "kda_decode" in reason.message for reason in result.reasons)


def test_the_checkouts_own_kernels_pass(real: Bench) -> None:
    """Gates that refuse the kernels they ship with, or watermarks that do not show."""
    head = real.commit({KERNEL: real.repo.read(real.base, KERNEL).decode() + "\n// candidate\n"})
    context = admitted(real, head)
    for gate in (kernels, path):
        result = gate.run(context)
        assert result.outcome is Outcome.PASSED, result.reasons
    marks = [line for line in context.evidence.lines("path") if line["kind"] == "watermark"]
    assert len(marks) == len({mark["spoil"] for mark in marks}) == 10
