"""The chunked delta rule: equal to the recurrence, at every decay that the gate can produce."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import relative_error
from torch import Tensor

from k3_backend.model.kda_prefill import CHUNK, delta_rule


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for i in range(q.shape[1]):
        state = state * log_decay[:, i].exp().unsqueeze(2)
        u = beta[:, i] * (v[:, i] - (state @ k[:, i].unsqueeze(-1)).squeeze(-1))
        state = state + u.unsqueeze(-1) * k[:, i].unsqueeze(-2)
        outputs.append((state @ q[:, i].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 1), state


def _inputs(requests: int, length: int, seed: int, least: float, most: float) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    heads, width = 2, 32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    unit = [x / x.norm(dim=-1, keepdim=True) for x in (normal(requests, length, heads, width) for _ in range(2))]
    decay = least + (most - least) * torch.rand(requests, length, heads, width, generator=generator)
    beta = torch.rand(requests, length, heads, 1, generator=generator)
    return (
        unit[0] * width**-0.5, unit[1], normal(requests, length, heads, width), decay, beta,
        normal(requests, heads, width, width),
    )  # fmt: skip


@settings(max_examples=30, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**16),
    chunks=st.integers(1, 4),
    requests=st.integers(1, 3),
    decays=st.sampled_from([(-5.0, -5.0), (-5.0, 0.0), (-0.01, 0.0), (0.0, 0.0), (-5.0, -4.5)]),
)
def test_chunks_equal_the_recurrence(seed: int, chunks: int, requests: int, decays: tuple[float, float]) -> None:
    """A sign or index error in the chunk algebra, or an exponent that leaves fp32."""
    inputs = _inputs(requests, chunks * CHUNK, seed, *decays)
    o, state = delta_rule(*inputs)
    expected_o, expected_state = _recurrence(*(x.double() for x in inputs))
    assert relative_error(o, expected_o) < 1e-5
    assert relative_error(state, expected_state) < 1e-5


def test_mixed_extreme_decays_in_one_chunk_stay_exact_per_channel() -> None:
    """A channel that forgets everything beside one that keeps everything is the worst case for a shared reference."""
    inputs = list(_inputs(1, 2 * CHUNK, 0, 0.0, 0.0))
    inputs[3] = torch.where(torch.arange(32) % 2 == 0, -5.0, 0.0).expand_as(inputs[3]).contiguous()
    inputs[3][:, 7] = -5.0
    o, state = delta_rule(*inputs)
    expected_o, expected_state = _recurrence(*(x.double() for x in inputs))
    assert torch.isfinite(o).all()
    assert relative_error(o, expected_o) < 1e-5
    assert relative_error(state, expected_state) < 1e-5


def test_padding_tokens_leave_the_state_alone() -> None:
    """Ragged chunks are padded with write strength 0 and log decay 0."""
    q, k, v, log_decay, beta, state = _inputs(1, 2 * CHUNK, 1, -2.0, 0.0)
    log_decay[:, 20:], beta[:, 20:] = 0.0, 0.0
    o, got = delta_rule(q, k, v, log_decay, beta, state)
    short = [x[:, :20].double() for x in (q, k, v, log_decay, beta)]
    expected_o, expected = _recurrence(*short, state.double())
    assert relative_error(o[:, :20], expected_o) < 1e-5
    assert relative_error(got, expected) < 1e-5


def test_a_ragged_length_is_refused() -> None:
    """Dropping the last tokens silently would lose context."""
    with pytest.raises(ValueError, match="multiple of 16"):
        delta_rule(*_inputs(1, CHUNK + 1, 0, -1.0, 0.0))
