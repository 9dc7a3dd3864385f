"""The decode backend: which path ran, on which state, and what the ledger says about it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from spy_kernels import PICO, spy_kernels
from step_inputs import decode_batch, pico_state, pico_weights

from k3_backend.aot.cpu.launch import KernelSet
from k3_backend.model import standard
from k3_backend.model.batch import Batch
from k3_backend.model.program import decode_program
from k3_backend.model.state import DecodeState
from k3_backend.step.plan import PlanError, Refusal, Step
from k3_backend.step.run import DecodeBackend


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelSet:
    return spy_kernels(tmp_path_factory.mktemp("spies"))


def _prefill(tokens: int) -> Batch:
    """One request's first chunk, in slot 1 and page 1."""
    return Batch(
        token_ids=torch.arange(tokens),
        query_lens=torch.tensor([tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        slots=torch.tensor([[1]], dtype=torch.int32),
        accepted=torch.ones(1, dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.arange(4, 4 + tokens),
        decode=(False,),
    )


def _equal(left: DecodeState, right: DecodeState) -> bool:
    theirs = right.tensors()
    return all(torch.equal(pool, theirs[name]) for name, pool in left.tensors().items())


def test_prefill_falls_back_and_decode_does_not(kernels: KernelSet) -> None:
    """A prefill chunk reaches decode kernels, a decode step silently takes the standard path, or neither is counted."""
    state, expected_state = pico_state(), pico_state()
    backend = DecodeBackend(pico_weights(), kernels, "auto", 1, state)
    chunk, decode = _prefill(3), decode_batch(2, first=5)
    assert isinstance(backend.plan(chunk), Refusal)
    assert isinstance(backend.plan(decode), Step)
    hidden = backend.forward(chunk)
    assert torch.equal(hidden, standard.forward(pico_weights(), expected_state, chunk))
    assert _equal(state, expected_state)
    assert torch.equal(backend.forward(decode), pico_weights().embed[decode.token_ids])  # what the spies compute
    snapshot = backend.ledger.snapshot()
    assert snapshot["steps"] == {"specialized": 1, "standard": 1}
    assert snapshot["fallbacks"] == {"batch.not_decode": 1, "batch.ragged": 1}
    assert len(snapshot["sites"]) == len(decode_program(PICO))
    assert all((row["specialized"], row["standard"]) == (1, 1) for row in snapshot["sites"])


def test_off_is_the_standard_path_and_starts_nothing(kernels: KernelSet) -> None:
    """The default mode runs specialised code."""
    state, expected_state = pico_state(), pico_state()
    backend = DecodeBackend(pico_weights(), kernels, "off", 1, state)
    batch = decode_batch(3, 2)
    assert torch.equal(backend.forward(batch), standard.decode(pico_weights(), expected_state, batch))
    assert _equal(state, expected_state)
    snapshot = backend.ledger.snapshot()
    assert snapshot["fallbacks"] == {"mode.off": 1}
    assert all(row["specialized"] == 0 for row in snapshot["sites"])
    with pytest.raises(PlanError, match=r"mode\.off"):
        backend.capture(1, 1)


def test_captures_are_made_once_per_shape(kernels: KernelSet) -> None:
    """Every step binds seventy launches anew."""
    backend = DecodeBackend(pico_weights(), kernels, "auto", 1, pico_state())
    capture = backend.capture(12, 1)
    for requests in (9, 10, 12):
        backend.forward(decode_batch(requests))
    assert backend.capture(12, 1) is capture
    assert list(backend._captures) == [(12, 1)]


def test_rebind_drops_captures_of_the_old_pools(kernels: KernelSet) -> None:
    """A step writes into pools that the engine has given up."""
    old, new = pico_state(), pico_state()
    backend = DecodeBackend(pico_weights(), kernels, "auto", 1, old)
    backend.forward(decode_batch(2))
    before = old.clone()
    backend.rebind(new)
    assert backend.state is new
    backend.forward(decode_batch(2))
    assert _equal(old, before)
    assert _equal(new, before)
    assert backend.ledger.snapshot()["steps"]["specialized"] == 2


def test_rebind_keeps_the_promise_of_the_strict_mode(kernels: KernelSet) -> None:
    """New pools quietly turn the strict mode into the standard path."""
    state = pico_state()
    backend = DecodeBackend(pico_weights(), kernels, "latency_specialized", 1, state)
    half = dataclasses.replace(state, state={layer: pool.bfloat16() for layer, pool in state.state.items()})
    with pytest.raises(PlanError, match=r"dtype\.mismatch"):
        backend.rebind(half)
    assert backend.state is state
    backend.forward(decode_batch(1))
    assert backend.ledger.snapshot()["steps"] == {"specialized": 1, "standard": 0}


def test_close_stops_the_workers_and_a_later_step_starts_new_ones(kernels: KernelSet) -> None:
    """A closed backend replays on freed memory."""
    backend = DecodeBackend(pico_weights(), kernels, "auto", 2, pico_state())
    first = backend.forward(decode_batch(2)).clone()
    backend.close()
    backend.close()
    assert torch.equal(backend.forward(decode_batch(2)), first)
