"""The engine's loop: admit, build one batch, run the model, choose tokens, retire.

A step takes every decoding request (with `drafts` draft tokens each) and fills the rest of its token budget with
prefill chunks, so prefill-only, mixed and pure decode batches all occur as in serving. Which implementation runs a
batch is the business of `forward`; the engine does not know and does not care.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_backend.model.batch import Batch, cache_rows
from k3_backend.model.state import DecodeState
from verify.engine.drafting import draft
from verify.engine.pool import Pool
from verify.engine.request import Completion, FinishReason, Request, Running
from verify.engine.sampling import choose

__all__ = ["Engine", "EngineConfig"]

Forward = Callable[[Batch], Tensor]
"""Batch of N rows to final hidden states [N, D] bf16, model norm applied."""

Head = Callable[[Tensor], Tensor]
"""Hidden rows [n, D] to logits [n, vocab] f32."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine."""

    max_requests: int = 64
    """Requests that run at once."""
    max_step_tokens: int = 512
    """Rows of one step: decode rows first, the rest for prefill chunks."""
    drafts: int = 0
    """Draft tokens per request and step; 0 turns speculation off."""

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_requests * (1 + self.drafts):
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}; expected at least max_requests * (1 + drafts) = "
                f"{self.max_requests * (1 + self.drafts)}"
            )


class Engine:
    """Runs requests to completion on one model instance.

    Args:
        config: sizes.
        state: pools of KV pages and state slots; the engine decides who owns what in them.
        forward: runs one batch.
        head: logits of hidden rows.
    """

    def __init__(self, config: EngineConfig, state: DecodeState, forward: Forward, head: Head) -> None:
        if 1 + config.drafts > state.max_tokens:
            raise ValueError(f"drafts is {config.drafts}; the state's conv taps allow {state.max_tokens - 1}")
        self.config = config
        self.state = state
        self.forward = forward
        self.head = head
        self.pages = Pool(state.pages)
        self.slots = Pool(state.slots)
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []
        self.steps = 0
        """Steps run so far."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never run in this engine's pools, or its id is taken.
        """
        if any(r.id == request.id for r in self.waiting) or any(r.request.id == request.id for r in self.running):
            raise ValueError(f"request {request.id}: the id is in use")
        if self._pages_needed(request) >= self.state.pages or 1 + self.config.drafts >= self.state.slots:
            raise ValueError(
                f"request {request.id}: needs {self._pages_needed(request)} pages and {1 + self.config.drafts} slots; "
                f"the pools have {self.state.pages - 1} and {self.state.slots - 1}"
            )
        self.waiting.append(request)

    def abort(self, request_id: str) -> Completion | None:
        """End a request at once and free what it owns; None if it is unknown or finished."""
        for request in self.waiting:
            if request.id == request_id:
                self.waiting.remove(request)
                return Running(request, [], []).completion("aborted")
        for running in self.running:
            if running.request.id == request_id:
                return self._retire(running, "aborted")
        return None

    def run(self, requests: Iterable[Request] = ()) -> dict[str, Completion]:
        """Queue requests and step until nothing is left; completions by request id."""
        for request in requests:
            self.add(request)
        done: dict[str, Completion] = {}
        while self.waiting or self.running:
            done |= {completion.id: completion for completion in self.step()}
        return done

    def step(self) -> list[Completion]:
        """Run one batch and return what it finished."""
        self._admit()
        scheduled = self._schedule()
        if not scheduled:
            raise RuntimeError(
                f"nothing can run: {len(self.waiting)} requests wait, "
                f"{len(self.pages)} pages and {len(self.slots)} slots are free"
            )
        batch = self._batch(scheduled)
        hidden = self.forward(batch)
        self.steps += 1
        finished = []
        for (running, queries), first in zip(scheduled, batch.row_starts, strict=False):
            finish = self._advance(running, queries, hidden[first : first + len(queries)])
            if finish is not None:
                finished.append(self._retire(running, finish))
        return finished

    # --- scheduling ------------------------------------------------------------------------------------------------

    def _pages_needed(self, request: Request) -> int:
        longest = len(request.prompt) + request.params.max_tokens + self.config.drafts
        return -(-longest // self.state.page_size)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_requests:
            request = self.waiting[0]
            slots = self.slots.take(1 + self.config.drafts)
            pages = self.pages.take(self._pages_needed(request)) if slots is not None else None
            if slots is None or pages is None:
                if slots is not None:
                    self.slots.give(slots)
                return
            self.waiting.popleft()
            self.running.append(Running(request, pages, slots))

    def _schedule(self) -> list[tuple[Running, list[int]]]:
        """Requests of the step with their query tokens, decode rows first."""
        decoding = [r for r in self.running if not r.prefilling]
        scheduled = [(r, [r.all_tokens[-1], *self._drafts(r)]) for r in decoding]
        left = self.config.max_step_tokens - sum(len(queries) for _, queries in scheduled)
        for running in self.running:
            if running.prefilling and left > 0:
                chunk = list(running.request.prompt[running.computed : running.computed + left])
                scheduled.append((running, chunk))
                left -= len(chunk)
        return scheduled

    def _drafts(self, running: Running) -> list[int]:
        forced = running.request.forced
        # Teacher-forced tokens are certain: as drafts they exercise the verify path without changing the text.
        certain = list(forced[len(running.tokens) : len(running.tokens) + self.config.drafts])
        return certain + draft([*running.all_tokens, *certain], self.config.drafts - len(certain))

    def _batch(self, scheduled: list[tuple[Running, list[int]]]) -> Batch:
        columns = 1 + self.config.drafts
        lens = [len(queries) for _, queries in scheduled]
        table = max(len(running.pages) for running, _ in scheduled)
        rows: list[int] = []
        for running, queries in scheduled:
            rows += cache_rows(running.pages, running.computed, len(queries), self.state.page_size)
        return Batch(
            token_ids=torch.tensor([token for _, queries in scheduled for token in queries]),
            query_lens=torch.tensor(lens, dtype=torch.int32),
            seq_lens=torch.tensor(
                [r.computed + n for (r, _), n in zip(scheduled, lens, strict=True)], dtype=torch.int32
            ),
            slots=torch.tensor([r.slots[:columns] for r, _ in scheduled], dtype=torch.int32),
            accepted=torch.tensor([r.accepted for r, _ in scheduled], dtype=torch.int32),
            block_table=torch.tensor([r.pages + [0] * (table - len(r.pages)) for r, _ in scheduled], dtype=torch.int32),
            slot_mapping=torch.tensor(rows),
            decode=tuple(not running.prefilling for running, _ in scheduled),
        )

    # --- tokens ----------------------------------------------------------------------------------------------------

    def _advance(self, running: Running, queries: list[int], hidden: Tensor) -> FinishReason | None:
        """Take over one request's rows of a step: choose tokens, count accepted drafts; why it ends, if it does."""
        prompt_tokens = len(running.request.prompt)
        if running.computed < prompt_tokens:
            running.computed += len(queries)
            running.accepted = 1
            return None if running.computed < prompt_tokens else self._choose(running, self.head(hidden[-1:])[0])
        logits = self.head(hidden)
        running.drafted += len(queries) - 1
        kept = 0
        finish: FinishReason | None = None
        while finish is None:
            finish = self._choose(running, logits[kept])
            kept += 1
            agreed = finish is None and kept < len(queries) and running.tokens[-1] == queries[kept]
            if not agreed:
                break
            running.agreed += 1
        running.computed += kept
        running.accepted = kept
        return finish

    def _choose(self, running: Running, logits: Tensor) -> FinishReason | None:
        """Append the next token of a request; why it ends, if it does."""
        request = running.request
        index = len(running.tokens)
        forced = request.forced[index] if index < len(request.forced) else None
        choice = choose(logits, request.params, len(request.prompt) + index, forced)
        if choice is None:
            return "nonfinite"
        running.tokens.append(choice.token)
        running.logprobs.append(choice.logprob)
        running.regrets.append(choice.regret)
        if choice.token in request.params.stop_ids and forced is None:
            return "stop"
        if len(running.tokens) < request.params.max_tokens:
            return None
        if request.record_distribution:
            running.distribution = tuple(logits.log_softmax(dim=0).tolist())
        return "length"

    def _retire(self, running: Running, finish: FinishReason) -> Completion:
        self.running.remove(running)
        self.pages.give(running.pages)
        self.slots.give(running.slots)
        return running.completion(finish)
