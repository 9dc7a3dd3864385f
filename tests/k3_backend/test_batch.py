"""Batches: contradictions are refused with the field's name, positions map to the right cache rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import PICO, Engine, Work

from k3_backend.model.batch import Batch, BatchError, cache_rows, local_position
from k3_backend.model.state import DecodeState


def _batch(columns: int = 3) -> Batch:
    engine = Engine(PICO, columns=columns)
    engine.add("a")
    engine.add("b")
    return engine.batch([Work("a", [1] * columns, True), Work("b", [2] * columns, True)])


def test_uniform_decode_is_recognised() -> None:
    """The specialised path takes exactly the batches that its ops can express."""
    batch = _batch()
    assert batch.pure_decode
    assert batch.uniform_tokens == 3
    assert (batch.rows, batch.requests, batch.row_starts) == (6, 2, [0, 3, 6])


def test_ragged_prefill_and_short_verify_batches_are_not_uniform() -> None:
    """A batch whose query length differs from its slot columns would read the wrong state slot."""
    engine = Engine(PICO, columns=3)
    engine.add("a")
    engine.add("b")
    short = engine.batch([Work("a", [1], True), Work("b", [1], True)])
    ragged = engine.batch([Work("a", [1, 2, 3], True), Work("b", [1], True)])
    mixed = engine.batch([Work("a", [1, 2, 3], True), Work("b", [1, 2, 3], False)])
    assert short.uniform_tokens is None
    assert ragged.uniform_tokens is None
    assert mixed.uniform_tokens == 3
    assert not mixed.pure_decode


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": torch.zeros(6, dtype=torch.int32)}, "token_ids"),
        ({"slots": torch.zeros(3, 3, dtype=torch.int32)}, "slots"),
        ({"seq_lens": torch.zeros(2, 1, dtype=torch.int32)}, "seq_lens"),
        ({"slot_mapping": torch.zeros(5, dtype=torch.int64)}, "slot_mapping"),
        ({"decode": (True,)}, "query_lens"),
    ],
)
def test_contradicting_shapes_are_refused_by_name(change: dict[str, object], field: str) -> None:
    """A wrong shape would otherwise surface inside a kernel."""
    with pytest.raises(BatchError, match=f"batch.{field}"):
        replace(_batch(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("query_lens", [3, 2]),
        ("query_lens", [6, 0]),
        ("seq_lens", [3, 2]),
        ("accepted", [0, 1]),
        ("accepted", [1, 4]),
    ],
)
def test_contradicting_values_are_refused_by_name(field: str, values: list[int]) -> None:
    """Out-of-range lengths and accept counts would read out of bounds."""
    with pytest.raises(BatchError, match=f"batch.{field}"):
        replace(_batch(), **{field: torch.tensor(values, dtype=torch.int32)}).check()


def test_decode_rows_may_not_exceed_their_slot_columns() -> None:
    """Token t stores its state in column t."""
    batch = _batch()
    with pytest.raises(BatchError, match="slot columns"):
        replace(batch, slots=batch.slots[:, :2].contiguous()).check()


@settings(max_examples=60, deadline=None, print_blob=True)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 60))
def test_shards_partition_positions_in_order(size: int, interleave: int, length: int) -> None:
    """Every position lives on one shard, and a shard's local positions are dense and ordered."""
    owners = [[] for _ in range(size)]
    for position in range(length):
        homes = [
            (rank, local)
            for rank in range(size)
            if (local := local_position(position, rank=rank, size=size, interleave=interleave)) is not None
        ]
        assert len(homes) == 1
        owners[homes[0][0]].append(homes[0][1])
    for locals_ in owners:
        assert locals_ == list(range(len(locals_)))


def test_cache_rows_follow_the_pages_and_refuse_a_short_block_table() -> None:
    """An unallocated page must not alias page 0."""
    assert cache_rows([7, 2], 2, 4, 4) == [30, 31, 8, 9]
    assert cache_rows([7], 0, 6, 4, rank=1, size=2) == [-1, 28, -1, 29, -1, 30]
    with pytest.raises(BatchError, match="position 8 needs page 2"):
        cache_rows([7, 2], 7, 2, 4)


def test_state_pools_have_the_documented_shapes_and_refuse_useless_sizes() -> None:
    """Slot 0 and page 0 are null, so a pool of one can serve nobody."""
    state = DecodeState.allocate(PICO, slots=3, pages=5, page_size=4, taps=5)
    assert (state.slots, state.pages, state.page_size, state.taps, state.max_tokens) == (3, 5, 4, 5, 3)
    assert set(state.kv_cache) == {3, 7, 8}
    assert state.state[0].shape == (3, 6, 32, 32)
    assert state.conv_state[0].shape == (3, 5, 3 * 192)
    for wrong in ({"slots": 1}, {"pages": 1}, {"page_size": 0}, {"taps": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DecodeState.allocate(PICO, **{"slots": 3, "pages": 5, "page_size": 4, "taps": 5, **wrong})


def test_state_copies_are_independent_and_copy_back_keeps_addresses() -> None:
    """Captured steps hold addresses of the pools."""
    state = DecodeState.allocate(PICO, slots=3, pages=5, page_size=4, taps=3)
    copy = state.clone()
    state.state[0].fill_(1.0)
    assert copy.state[0].abs().sum() == 0
    address = copy.state[0].data_ptr()
    copy.copy_(state)
    assert copy.state[0].data_ptr() == address
    assert all(torch.equal(pool, copy.tensors()[name]) for name, pool in state.tensors().items())
