"""A minimal engine for tests: it owns slots and pages, builds batches from them and keeps score of accepted drafts.

Slots and pages are handed out in a shuffled order, and every pool starts poisoned with NaN where no request owns it,
so that a read of somebody else's memory shows in the result.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from k3_backend.geometry import ExpertFormat, Geometry, geometry
from k3_backend.model.batch import Batch, cache_rows
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights

PICO = geometry("k3-pico")
NANO = geometry("k3-nano")
# Fewer layers, for tests that run the model often: still two AttnRes blocks, the last one partial, and MLA at the end.
TINY = replace(PICO, name="k3-tiny", layers=6, mla_layers=(3, 5), attn_res_block=4, experts=8, top_k=3)
# Every expert is chosen for every token, so that rounding differences cannot flip a near tie of the router.
PICO_ALL_EXPERTS = replace(PICO, name="k3-pico-all-experts", experts=4, top_k=4)


@lru_cache(maxsize=16)
def weights_of(g: Geometry, seed: int = 0, expert_format: ExpertFormat = "bf16") -> ModelWeights:
    return ModelWeights.seeded(g, seed, expert_format)


def tokens_of(g: Geometry, count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(g.vocab) for _ in range(count)]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over the L2 norm of the expectation."""
    difference = got.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def worst_row_error(got: Tensor, expected: Tensor) -> float:
    """Largest relative L2 error of a row."""
    difference = (got.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1)).max())


@dataclass
class Request:
    """One sequence in the engine."""

    slots: list[int]
    pages: list[int] = field(default_factory=list)
    length: int = 0
    accepted: int = 1


@dataclass(frozen=True)
class Work:
    """Tokens that one request contributes to a step."""

    name: str
    tokens: Sequence[int]
    decode: bool


class Engine:
    """Requests, their memory, and the batches of their steps."""

    def __init__(
        self,
        g: Geometry,
        *,
        columns: int = 1,
        slots: int = 40,
        pages: int = 40,
        page_size: int = 8,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.g = g
        self.columns = columns
        self.page_size = page_size
        shuffled = random.Random(seed)
        self._free_slots = shuffled.sample(range(1, slots), slots - 1)
        self._free_pages = shuffled.sample(range(1, pages), pages - 1)
        state = DecodeState.allocate(g, slots, pages, page_size, columns + 2)
        tensors = {name: pool if dtype is None else pool.to(dtype) for name, pool in state.tensors().items()}
        self.state = DecodeState.of(g, tensors)
        for pool in self.state.tensors().values():
            pool.fill_(torch.nan)
        self.requests: dict[str, Request] = {}

    def add(self, name: str, *, zeroed: bool = False) -> None:
        """Admit a request; `zeroed` clears its state slots, for tests that start by decoding."""
        self.requests[name] = Request([self._free_slots.pop() for _ in range(self.columns)])
        if zeroed:
            for kind in (self.state.conv_state, self.state.state):
                for pool in kind.values():
                    pool[self.requests[name].slots] = 0

    def batch(self, works: Iterable[Work], *, padding: int = 0) -> Batch:
        """The batch of a step; `padding` adds null requests of the first request's query length."""
        works = list(works)
        rows: list[int] = []
        for work in works:
            request = self.requests[work.name]
            end = request.length + len(work.tokens)
            while len(request.pages) * self.page_size < end:
                request.pages.append(self._free_pages.pop())
            rows += cache_rows(request.pages, request.length, len(work.tokens), self.page_size)
        requests = [self.requests[work.name] for work in works]
        width = max(len(request.pages) for request in requests)
        pad_tokens = len(works[0].tokens)
        return Batch(
            token_ids=torch.tensor([*(t for work in works for t in work.tokens), *[0] * (padding * pad_tokens)]),
            query_lens=_i32([*(len(work.tokens) for work in works), *[pad_tokens] * padding]),
            seq_lens=_i32([*(r.length + len(w.tokens) for r, w in zip(requests, works, strict=True)), *[0] * padding]),
            slots=_i32([*(request.slots for request in requests), *[[0] * self.columns] * padding]),
            accepted=_i32([*(request.accepted for request in requests), *[1] * padding]),
            block_table=_i32([*(r.pages + [0] * (width - len(r.pages)) for r in requests), *[[0] * width] * padding]),
            slot_mapping=torch.tensor([*rows, *[-1] * (padding * pad_tokens)]),
            decode=(*(work.decode for work in works), *[works[0].decode] * padding),
        ).check()

    def commit(self, works: Iterable[Work], accepted: dict[str, int] | None = None) -> None:
        """Account for a finished step: all tokens of a chunk, or the accepted ones of a verify step."""
        for work in works:
            request = self.requests[work.name]
            kept = len(work.tokens) if accepted is None or not work.decode else accepted[work.name]
            request.length += kept
            request.accepted = kept if work.decode else 1


def _i32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
