"""The committed kernels and schedules, run as whole steps: as close to the reference as the standard path is.

The step's own tests use kernels that compute nothing; these are the tests in which plan, captures and real kernels meet
on k3-nano. Pools are full of NaN wherever no request owns them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from model_engine import NANO, Engine, Work, tokens_of, weights_of

from k3_backend.aot.build import KERNELS_DIR, SCHEDULES_DIR, build_all, build_runtime
from k3_backend.aot.cpu.host import runnable_archs
from k3_backend.aot.cpu.launch import KernelSet
from k3_backend.model import reference, standard
from k3_backend.model.batch import Batch
from k3_backend.model.state import DecodeState
from k3_backend.ops import OPS
from k3_backend.step.run import DecodeBackend

PROMPTS = (40, 1, 17, 33, 9, 2, 8, 5, 21)  # nine requests run in the capture for twelve


@pytest.fixture(scope="module")
def kernels() -> KernelSet:
    artifacts = build_all(OPS, runnable_archs()[0], NANO, KERNELS_DIR)
    return KernelSet.load(artifacts, SCHEDULES_DIR, NANO, build_runtime())


@pytest.fixture(params=[1, 4], ids=["decode", "verify4"])
def served(request: pytest.FixtureRequest, kernels: KernelSet) -> Iterator[tuple[Engine, DecodeBackend]]:
    """Nine prefilled requests on the strict backend, for T = 1 or 4."""
    engine = Engine(NANO, columns=request.param, slots=9 * request.param + 3, pages=100)
    backend = DecodeBackend(weights_of(NANO), kernels, "latency_specialized", 2, engine.state)
    for index, length in enumerate(PROMPTS):
        name = str(index)
        engine.add(name)
        chunk = [Work(name, tokens_of(NANO, length, index), decode=False)]
        backend.forward(engine.batch(chunk))
        engine.commit(chunk)
    yield engine, backend
    backend.close()


def _row_errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative L2 error of each row that anybody has written; NaN marks what nobody has, on both sides."""
    nobody = expected.isnan()
    assert torch.equal(got.isnan(), nobody)
    got, expected = (torch.where(nobody, 0.0, t.double()).flatten(1) for t in (got, expected))
    norms = expected.norm(dim=1)
    return ((got - expected).norm(dim=1) / norms)[norms > 0]


def _owned(pools: DecodeState, batch: Batch) -> dict[str, torch.Tensor]:
    """The rows and slots of every pool that the step writes."""
    slots = batch.slots.flatten().long()
    return {
        name: pool.flatten(0, 1)[batch.slot_mapping] if name.startswith("kv_cache") else pool[slots]
        for name, pool in pools.tensors().items()
    }


def _compare(engine: Engine, backend: DecodeBackend, batch: Batch) -> None:
    """Run one step on both paths and the reference from the same state, and leave the specialised state in place."""
    weights = weights_of(NANO)
    other = engine.state.clone()
    hidden, state = reference.decode(weights, other, batch, dtype=torch.float32)
    expected = {"hidden": hidden, **_owned(state, batch)}
    baseline = {"hidden": standard.decode(weights, other, batch), **_owned(other, batch)}
    got = {"hidden": backend.forward(batch), **_owned(engine.state, batch)}
    for name, wanted in expected.items():
        errors, allowed = _row_errors(got[name], wanted), _row_errors(baseline[name], wanted)
        # A near tie of the router falls either way and moves single rows of either path far, but not the median row.
        assert errors.median() <= 1.5 * allowed.median() + 2e-3, (name, errors, allowed)


def test_steps_agree_with_the_reference(served: tuple[Engine, DecodeBackend]) -> None:
    """A kernel, a binding or a padded capture is wrong where single-op tests cannot see it: in the whole step."""
    engine, backend = served
    tokens = engine.columns
    for step, requests in enumerate((9, 3, 1, 9)):
        works = [Work(str(i), tokens_of(NANO, tokens, 10 * step + i), decode=True) for i in range(requests)]
        _compare(engine, backend, engine.batch(works))
        engine.commit(works, {str(i): 1 + (i + step) % tokens for i in range(requests)})
    snapshot = backend.ledger.snapshot()
    assert snapshot["steps"] == {"specialized": 4, "standard": len(PROMPTS)}
    assert {row["specialized"] for row in snapshot["sites"]} == {4}
    assert set(snapshot["fallbacks"]) <= {"batch.not_decode", "batch.ragged"}


def test_replays_of_one_step_are_bit_identical(served: tuple[Engine, DecodeBackend]) -> None:
    """Results depend on timing: the order of workers, leftovers in scratch, or a buffer of the previous step."""
    engine, backend = served
    works = [Work(str(i), tokens_of(NANO, engine.columns, i), decode=True) for i in range(9)]
    batch = engine.batch(works)
    before = engine.state.clone()
    first = backend.forward(batch).clone()
    after = engine.state.clone().tensors()
    for _ in range(5):
        engine.state.copy_(before)
        assert torch.equal(backend.forward(batch), first)
        for name, pool in engine.state.tensors().items():
            assert torch.equal(pool.nan_to_num(nan=1e30), after[name].nan_to_num(nan=1e30)), name
