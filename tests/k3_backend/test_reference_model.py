"""The reference model, and the decode path in reference maths: one definition however the tokens arrive."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import NANO, PICO, TINY, Engine, Work, tokens_of, weights_of, worst_row_error
from torch import Tensor

from k3_backend.geometry import ExpertFormat, Geometry
from k3_backend.model import reference
from k3_backend.model.batch import BatchError
from k3_backend.model.reference import Cache, ReferenceModel

EXACT = 1e-9
"""fp64, apart from the order of sums."""
LENGTH = 18


@lru_cache(maxsize=8)
def _model(g: Geometry, expert_format: ExpertFormat = "bf16") -> ReferenceModel:
    return ReferenceModel(weights_of(g, 0, expert_format))


def _one_shot(g: Geometry, tokens: list[int], expert_format: ExpertFormat = "bf16") -> Tensor:
    hidden, _ = _model(g, expert_format).forward(tokens, Cache.empty(g))
    return hidden


@settings(max_examples=8, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**16), cuts=st.sets(st.integers(1, LENGTH - 1), max_size=5))
def test_chunked_prefill_and_decode_equal_one_shot_prefill(seed: int, cuts: set[int]) -> None:
    """State that is not carried over, or carried over twice, between calls."""
    tokens = tokens_of(TINY, LENGTH, seed)
    model, cache, parts = _model(TINY), Cache.empty(TINY), []
    edges = [0, *sorted(cuts), LENGTH]
    for first, last in pairwise(edges):
        hidden, (cache,) = model.forward(tokens[first:last], cache)
        parts.append(hidden)
    assert cache.length == LENGTH
    assert worst_row_error(torch.cat(parts), _one_shot(TINY, tokens)) < EXACT


@settings(max_examples=8, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**16), data=st.data())
def test_keeping_an_earlier_cache_rejects_drafts(seed: int, data: st.DataObject) -> None:
    """A rejected draft must leave no trace in any layer."""
    tokens = tokens_of(TINY, LENGTH, seed)
    junk = tokens_of(TINY, LENGTH, seed + 1)
    model, cache, parts = _model(TINY), Cache.empty(TINY), []
    while cache.length < LENGTH:
        kept = data.draw(st.integers(1, min(4, LENGTH - cache.length)), label="kept")
        rejected = data.draw(st.integers(0, 3), label="rejected")
        drafts = [*tokens[cache.length : cache.length + kept], *junk[:rejected]]
        hidden, caches = model.forward(drafts, cache, every_cache=True)
        parts.append(hidden[:kept])
        cache = caches[kept - 1]
    assert worst_row_error(torch.cat(parts), _one_shot(TINY, tokens)) < EXACT


@pytest.mark.parametrize(("g", "expert_format"), [(NANO, "bf16"), (PICO, "mxfp4")], ids=["nano", "pico-mxfp4"])
def test_decode_path_in_exact_maths_is_the_reference_model(g: Geometry, expert_format: ExpertFormat) -> None:
    """Packing, absorption, paging, slots, AttnRes program: everything that the model definition does not have."""
    _drive_exact(g, expert_format, seed=1, steps=[(3, 3)] * 4)


@settings(max_examples=5, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**16), steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=2, max_size=3)
)
def test_exact_decode_path_survives_rejected_drafts_and_padding(seed: int, steps: list[tuple[int, int]]) -> None:
    """Two requests accept different numbers of drafts beside a padding request; both continue correctly."""
    _drive_exact(TINY, "bf16", seed, steps)


def _drive_exact(g: Geometry, expert_format: ExpertFormat, seed: int, steps: list[tuple[int, int]]) -> None:
    """Verify steps of 4 tokens from empty state; each step keeps the given counts of the two requests."""
    weights = weights_of(g, 0, expert_format)
    engine = Engine(g, columns=4, seed=seed, dtype=torch.float64)
    texts = {name: tokens_of(g, 4 * len(steps) + 4, seed + i) for i, name in enumerate("ab")}
    for name in texts:
        engine.add(name, zeroed=True)
    kept_rows: dict[str, list[Tensor]] = {"a": [], "b": []}
    for kept in steps:
        works = [Work(name, _drafts(engine, name, text, seed), True) for name, text in texts.items()]
        batch = engine.batch(works, padding=1)
        hidden, engine.state = reference.decode(weights, engine.state, batch, rounding=False)
        for i, name in enumerate(texts):
            kept_rows[name].append(hidden[4 * i : 4 * i + kept[i]])
        engine.commit(works, dict(zip("ab", kept, strict=True)))
    for name, text in texts.items():
        got = torch.cat(kept_rows[name])
        assert worst_row_error(got, _one_shot(g, text[: got.shape[0]], expert_format)) < EXACT


def _drafts(engine: Engine, name: str, text: list[int], seed: int) -> list[int]:
    """The next four true tokens. What follows the kept ones is then a wrong draft for the next step's position."""
    start = engine.requests[name].length
    return [*text[start : start + 4], *tokens_of(engine.g, 4, seed)][:4]


def test_reference_decode_refuses_batches_that_it_cannot_express() -> None:
    """A prefill chunk run as decode would read stale state."""
    engine = Engine(PICO, columns=2)
    engine.add("a")
    for work in (Work("a", [1, 2], False), Work("a", [1], True)):
        with pytest.raises(BatchError, match="expected a pure decode batch"):
            reference.decode(weights_of(PICO), engine.state, engine.batch([work]))


def test_other_block_sizes_and_routed_scales_reach_the_whole_model() -> None:
    """Both are only otherwise seen op by op. The latent norm cancels a routed scale up to its epsilon."""
    g = replace(TINY, name="k3-tiny-variant", routed_scale=2.5, attn_res_block=2)
    tokens = tokens_of(g, 6, 0)
    _drive_exact(g, "bf16", seed=2, steps=[(4, 2)])
    assert worst_row_error(_one_shot(g, tokens), _one_shot(replace(g, routed_scale=1.0), tokens)) > 100 * EXACT
