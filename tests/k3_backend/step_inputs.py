"""Weights, state and batches of k3-pico for the tests of the step."""

from __future__ import annotations

from functools import cache

import torch
from spy_kernels import PICO

from k3_backend.model.batch import Batch
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights

PAGE = 4


@cache
def pico_weights() -> ModelWeights:
    """Seeded bf16 weights, shared by tests that do not change them."""
    return ModelWeights.seeded(PICO, 11)


def pico_state(tokens: int = 8, slots: int = 80, pages: int = 80) -> DecodeState:
    """Zeroed pools for up to `tokens` query tokens per request."""
    return DecodeState.allocate(PICO, slots, pages, PAGE, tokens + 2)


def decode_batch(requests: int, tokens: int = 1, *, pages: int = 2, first: int = 1) -> Batch:
    """A uniform decode batch: request b owns one slot per token from `first` on, and page b + 1 (as often as asked)."""
    rows = requests * tokens
    ids = torch.arange(rows, dtype=torch.int64) % PICO.vocab
    slots = torch.arange(first, first + rows, dtype=torch.int32).view(requests, tokens)
    pages_of = torch.arange(1, requests + 1, dtype=torch.int32).unsqueeze(1).expand(requests, pages).contiguous()
    mapping = (pages_of[:, :1] * PAGE + torch.arange(tokens, dtype=torch.int32) % PAGE).flatten().to(torch.int64)
    return Batch(
        token_ids=ids,
        query_lens=torch.full((requests,), tokens, dtype=torch.int32),
        seq_lens=torch.full((requests,), tokens, dtype=torch.int32),
        slots=slots,
        accepted=torch.ones(requests, dtype=torch.int32),
        block_table=pages_of,
        slot_mapping=mapping,
        decode=(True,) * requests,
    )
