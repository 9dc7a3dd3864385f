"""Captured steps: what a replay reads, writes and leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spy_kernels import ARCH, PICO, TRACES, spy_kernels, spy_source, write_kernel
from step_inputs import PAGE, decode_batch, pico_state, pico_weights

from k3_backend.aot.build import build
from k3_backend.aot.cpu.launch import KernelSet, LaunchError, LoadedOp, Pool
from k3_backend.model.program import decode_program
from k3_backend.model.state import DecodeState
from k3_backend.step.capture import Capture, Shared, launchable_constants
from k3_backend.step.ledger import Ledger


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelSet:
    return spy_kernels(tmp_path_factory.mktemp("spies"))


@pytest.fixture(scope="module")
def pool(kernels: KernelSet) -> Pool:
    return kernels.runtime.pool(1)


def _shared(kernels: KernelSet, pool: Pool, state: DecodeState) -> Shared:
    program = decode_program(PICO)
    weights = pico_weights()
    return Shared(weights.embed, launchable_constants(weights, program), kernels, pool, state, Ledger(program))


def _capture(shared: Shared, requests: int, tokens: int) -> Capture:
    return Capture(shared, decode_program(PICO, tokens), requests=requests, tokens=tokens)


@pytest.mark.parametrize(("captured", "requests", "tokens"), [(4, 4, 1), (4, 3, 1), (12, 9, 2), (1, 1, 8)])
def test_one_replay_touches_exactly_what_the_batch_names(
    kernels: KernelSet, pool: Pool, captured: int, requests: int, tokens: int
) -> None:
    """Padding rows update a neighbour's state or write a cache row; a real row is dropped; a launch runs twice."""
    state = pico_state()
    shared = _shared(kernels, pool, state)
    batch = decode_batch(requests, tokens)
    hidden = _capture(shared, captured, tokens).run(batch)
    assert torch.equal(hidden, pico_weights().embed[batch.token_ids])
    used_slots = set(batch.slots.flatten().tolist())
    used_rows = set(batch.slot_mapping.tolist())
    for layer in PICO.kda_layers:
        for slot in range(state.slots):
            assert torch.all(state.state[layer][slot] == (1.0 if slot in used_slots else 0.0))
    for layer in PICO.mla_layers:
        rows = state.kv_cache[layer].view(-1, PICO.mla_row)
        for row in range(rows.shape[0]):
            assert torch.all(rows[row] == (1.0 if row in used_rows else 0.0))
    assert {row["specialized"] for row in shared.ledger.snapshot()["sites"]} == {1}


def test_a_smaller_batch_after_a_larger_one(kernels: KernelSet, pool: Pool) -> None:
    """Rows of the previous batch run again as ghosts in the padding of the next one."""
    state = pico_state()
    capture = _capture(_shared(kernels, pool, state), 8, 2)
    capture.run(decode_batch(8, 2))
    before = state.clone()
    small = decode_batch(5, 2, first=40)
    hidden = capture.run(small)
    assert hidden.shape == (10, PICO.hidden)
    for layer in PICO.kda_layers:
        changed = (state.state[layer] != before.state[layer]).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == small.slots.flatten().tolist()
    capture.run(decode_batch(8, 2))
    for layer in PICO.kda_layers:
        assert torch.all(state.state[layer][1:17] == 2.0)


def test_a_narrower_block_table_keeps_only_rows_behind_every_length(kernels: KernelSet, pool: Pool) -> None:
    """Columns of the batch land in the wrong request because the static table is wider."""
    capture = _capture(_shared(kernels, pool, pico_state()), 4, 1)
    capture.run(decode_batch(4, pages=7))
    capture.run(decode_batch(3, pages=2))
    table = capture._metadata["block_table"]
    assert table[:3, :2].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert not table[3].any()
    assert capture._metadata["seq_lens"].tolist() == [1, 1, 1, 0]
    assert capture._metadata["slot_mapping"].tolist() == [PAGE, 2 * PAGE, 3 * PAGE, -1]
    assert capture._metadata["accepted"].tolist() == [1, 1, 1, 1]


def test_padding_does_not_grow_from_step_to_step(kernels: KernelSet, pool: Pool) -> None:
    """A null request's prefix is the last step's and overflows after many steps."""
    capture = _capture(_shared(kernels, pool, pico_state()), 4, 1)
    capture.run(decode_batch(4))
    capture._buffers["prefix"].fill_(float("inf"))
    capture.run(decode_batch(2))
    assert torch.all(capture._buffers["prefix"][2:] == 0)


def test_constants_that_kernels_cannot_take_are_copied_once(kernels: KernelSet, pool: Pool) -> None:
    """Weights of a loaded file lie at odd addresses and no step can be captured; or aligned ones are copied too."""
    weights = pico_weights()
    site = next(s for s in decode_program(PICO) if s.name == "input_projection")
    constants = weights.constants(site.layer, site.name)
    original = constants["w"]
    memory = torch.empty(original.numel() + 1, dtype=original.dtype)
    odd = memory[1:].view(original.shape).copy_(original)
    fitted = launchable_constants(weights, (site,))[site.layer, site.name]["w"]
    assert fitted.data_ptr() == original.data_ptr()
    constants["w"] = odd
    try:
        fitted = launchable_constants(weights, (site,))[site.layer, site.name]["w"]
    finally:
        constants["w"] = original
    assert fitted.data_ptr() % 64 == 0
    assert torch.equal(fitted, original)


def test_captures_of_different_tokens_share_counters(kernels: KernelSet, pool: Pool) -> None:
    """Verify steps are missing from the ledger."""
    shared = _shared(kernels, pool, pico_state())
    _capture(shared, 1, 1).run(decode_batch(1))
    _capture(shared, 2, 4).run(decode_batch(2, 4))
    assert {row["specialized"] for row in shared.ledger.snapshot()["sites"]} == {2}


def test_failed_kernel_stops_the_step_and_names_the_site(tmp_path: Path, pool: Pool) -> None:
    """A failed launch is skipped, counted, or hidden behind the standard path."""
    kernels = dict(spy_kernels(tmp_path).items())
    broken = 'TVMFFIErrorSetRaisedFromCStr("RuntimeError", "cannot"); return -1;'
    write_kernel(tmp_path / "broken", "mla_query", spy_source("mla_query", TRACES["mla_query"] + broken))
    schedule = tmp_path / "schedules-512-" / "cpu" / PICO.name / "mla_query.toml"
    kernels["mla_query"] = LoadedOp(
        build("mla_query", ARCH, PICO, tmp_path / "broken", tmp_path / "out"), PICO, schedule
    )
    runtime = spy_kernels(tmp_path).runtime
    shared = _shared(KernelSet(kernels, PICO, runtime), pool, pico_state())
    with pytest.raises(LaunchError, match=r"op mla_query \(layer 3 mla_query\): RuntimeError: cannot"):
        _capture(shared, 1, 1).run(decode_batch(1))
    counts = {(r["layer"], r["site"]): r["specialized"] for r in shared.ledger.snapshot()["sites"]}
    assert counts[3, "input_projection"] == 1
    assert counts[3, "mla_query"] == 0
    assert counts[None, "attn_res.final"] == 0
