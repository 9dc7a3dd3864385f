"""The plan: every condition refuses with its own code, and a refusal lists them all."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from spy_kernels import ARCH, PICO, spy_kernels, spy_source, write_kernel, write_schedule
from step_inputs import decode_batch, pico_state, pico_weights

from k3_backend.aot.build import build
from k3_backend.aot.cpu.launch import KernelSet, LoadedOp
from k3_backend.geometry import geometry
from k3_backend.model.batch import Batch
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.step import plan as plan_module
from k3_backend.step.plan import CAPTURED_REQUESTS, Layout, Mode, PlanError, Planner, Refusal, Step, captured_requests


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spies")


@pytest.fixture(scope="module")
def kernels(root: Path) -> KernelSet:
    return spy_kernels(root)


def _planner(
    kernels: KernelSet | None,
    *,
    mode: Mode = "auto",
    state: DecodeState | None = None,
    weights: ModelWeights | None = None,
    layout: Layout = Layout(),  # noqa: B008
) -> Planner:
    return Planner(mode, weights or pico_weights(), kernels, state or pico_state(), layout)


def _codes(outcome: Step | Refusal) -> tuple[str, ...]:
    return outcome.codes if isinstance(outcome, Refusal) else ()


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_uniform_decode_is_planned_into_the_next_captured_size(kernels: KernelSet, tokens: int) -> None:
    """A batch in scope is refused, or planned into a capture that is too small or larger than needed."""
    planner = _planner(kernels)
    for requests in range(1, 65):
        step = planner.plan(decode_batch(requests, tokens))
        assert isinstance(step, Step)
        assert (step.captured, step.tokens) == (captured_requests(requests), tokens)
        assert step.captured >= requests
        assert not any(requests <= size < step.captured for size in CAPTURED_REQUESTS)


def _replaced(batch: Batch, **fields: object) -> Batch:
    return dataclasses.replace(batch, **fields)  # type: ignore[arg-type]


def test_batch_refusals(kernels: KernelSet) -> None:
    """A batch outside the specialised path's scope reaches it."""
    planner = _planner(kernels)
    two = decode_batch(2, 2)
    assert _codes(planner.plan(_replaced(two, decode=(True, False)))) == ("batch.not_decode",)
    ragged = _replaced(
        two,
        token_ids=two.token_ids[:3],
        slot_mapping=two.slot_mapping[:3],
        query_lens=torch.tensor([2, 1], dtype=torch.int32),
    )
    assert _codes(planner.plan(ragged)) == ("batch.ragged",)
    assert _codes(planner.plan(decode_batch(65))) == ("batch.too_many_requests",)
    assert _codes(planner.plan(decode_batch(1, 9))) == ("batch.too_many_tokens", "state.too_few_taps")
    assert _codes(planner.plan(decode_batch(1, pages=81))) == ("batch.block_table",)
    assert _codes(_planner(kernels, state=pico_state(tokens=2)).plan(decode_batch(1, 3))) == ("state.too_few_taps",)


def test_a_refusal_lists_every_reason(kernels: KernelSet) -> None:
    """Causes have to be removed one by one because only the first is reported."""
    prefill = _replaced(decode_batch(65, pages=81), decode=(False,) * 65)
    refusal = _planner(kernels, mode="off", layout=Layout(tp=8, dcp=8)).plan(prefill)
    assert _codes(refusal) == (
        "mode.off",
        "layout.unsupported",
        "batch.not_decode",
        "batch.too_many_requests",
        "batch.block_table",
    )
    assert isinstance(refusal, Refusal)
    assert "TP 8, DCP 8" in str(refusal.reasons[1])


def test_setup_refusals(kernels: KernelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on weights, pools or machines they were not made for."""
    batch = decode_batch(1)
    assert _codes(_planner(kernels, mode="off").plan(batch)) == ("mode.off",)
    assert _codes(_planner(None).plan(batch)) == ("kernels.none",)
    assert _codes(_planner(kernels, layout=Layout(tp=2)).plan(batch)) == ("layout.unsupported",)
    fewer = KernelSet(
        {op: k for op, k in kernels.items() if op not in ("mla_value", "attn_res")}, PICO, kernels.runtime
    )
    refusal = _planner(fewer).plan(batch)
    assert isinstance(refusal, Refusal)
    assert [(r.code, r.where) for r in refusal.reasons] == [
        ("op.missing", "op attn_res"),
        ("op.missing", "op mla_value"),
    ]
    other = dataclasses.replace(PICO, eps=1e-6)
    assert _codes(_planner(KernelSet(kernels, other, kernels.runtime)).plan(batch)) == ("geometry.mismatch",)
    nano = DecodeState.allocate(geometry("k3-nano"), 4, 4, 4, 3)
    assert "geometry.mismatch" in _codes(_planner(kernels, state=nano).plan(batch))
    state = pico_state()
    half = dataclasses.replace(state, state={layer: pool.bfloat16() for layer, pool in state.state.items()})
    refusal = _planner(kernels, state=half).plan(batch)
    assert isinstance(refusal, Refusal)
    assert {r.code for r in refusal.reasons} == {"dtype.mismatch"}
    assert refusal.reasons[0].where == "0.kda_decode.state"
    monkeypatch.setattr(plan_module, "best_arch", lambda _: None)
    assert _codes(_planner(None).plan(batch)) == ("arch.unsupported", "kernels.none")


def test_schedules_limit_the_rows(root: Path) -> None:
    """Rows beyond the last bucket run with a guessed schedule."""
    planner = _planner(spy_kernels(root, max_rows=4, without_schedule=("moe_front",)))
    refusal = planner.plan(decode_batch(1))
    assert isinstance(refusal, Refusal)
    assert [(r.code, r.where) for r in refusal.reasons] == [("op.no_schedule", "op moe_front")]
    planner = _planner(spy_kernels(root, max_rows=4))
    assert isinstance(planner.plan(decode_batch(4)), Step)
    assert isinstance(planner.plan(decode_batch(2, 2)), Step)
    assert _codes(planner.plan(decode_batch(2, 3))) == ("op.no_schedule",)
    assert _codes(planner.plan(decode_batch(5))) == ("op.no_schedule",)


def test_kernels_limit_attribute_values(root: Path, kernels: KernelSet, tmp_path: Path) -> None:
    """A kernel without MXFP4 decoding is handed MXFP4 experts."""
    write_kernel(tmp_path / "k", "moe_experts", spy_source("moe_experts"), "[supports]\nexpert_format = [0]\n")
    schedule = write_schedule(tmp_path, "moe_experts", "version = 1\n[[bucket]]\nmax_rows = 512\n")
    plain = LoadedOp(build("moe_experts", ARCH, PICO, tmp_path / "k", tmp_path / "out"), PICO, schedule)
    limited = KernelSet({**kernels, "moe_experts": plain}, PICO, kernels.runtime)
    quantised = ModelWeights.seeded(PICO, 11, "mxfp4")
    assert isinstance(_planner(limited).plan(decode_batch(1)), Step)
    assert isinstance(_planner(kernels, weights=quantised).plan(decode_batch(1)), Step)
    refusal = _planner(limited, weights=quantised).plan(decode_batch(1))
    assert isinstance(refusal, Refusal)
    assert [str(r) for r in refusal.reasons] == [
        "op.unsupported (op moe_experts: expert_format = 1; expected expert_format in [0])"
    ]


def test_latency_specialized_is_a_promise_made_at_construction(root: Path, kernels: KernelSet) -> None:
    """The strict mode silently serves standard steps because a kernel, schedule or tap is missing."""
    assert isinstance(_planner(kernels, mode="latency_specialized").plan(decode_batch(64, 8)), Step)
    with pytest.raises(PlanError) as caught:
        _planner(None, mode="latency_specialized", layout=Layout(dcp=2))
    assert caught.value.refusal.codes == ("kernels.none", "layout.unsupported")
    with pytest.raises(PlanError, match=r"op.no_schedule \(op attn_res: no schedule for 72 rows") as caught:
        _planner(spy_kernels(root, max_rows=64), mode="latency_specialized")
    assert caught.value.refusal.codes == ("op.no_schedule",)
    one_token = pico_state(tokens=1)
    assert _planner(spy_kernels(root, max_rows=64), mode="latency_specialized", state=one_token).static == ()


def test_every_code_is_documented() -> None:
    """A refusal code appears in a report that no page explains."""
    source = Path(plan_module.__file__).read_text()
    used = set(re.findall(r'RefusalReason\(\s*"([a-z_.]+)"', source))
    documented = set(re.findall(r"^\| `([a-z_.]+)`", plan_module.__doc__ or "", re.MULTILINE))
    assert used == documented
    assert len(used) == 15
