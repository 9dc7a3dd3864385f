"""The nano engine of one arm, driven from the evaluator: what to generate goes in, completions and ledger come out.

The worker behind it runs candidate code, so what comes back is data to be judged, never a judgement: lengths and kinds
are checked here, values by the gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verify.evaluator.worker import Worker

__all__ = ["WEIGHTS_SEED", "Answer", "Ask", "EngineArm", "EngineRun", "difference", "worst_request"]

WEIGHTS_SEED = 20_260_727
"""Seed of the untrained weights that gates use; public, since weights are no secret."""

PAGE_SIZE = 16
_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request as the evaluator states it."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    forced: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    arrives: int = 0
    """Engine step at which the request is queued."""
    record_distribution: bool = False

    def wire(self) -> dict[str, Any]:
        """JSON for the worker."""
        return {
            "id": self.id,
            "prompt": self.prompt,
            "forced": self.forced,
            "arrives": self.arrives,
            "record_distribution": self.record_distribution,
            "params": {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed},
        }


@dataclass(frozen=True)
class Answer:
    """One completion as the worker reported it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    regrets: tuple[float, ...]
    finish: str
    distribution: tuple[float, ...]
    drafted: int
    accepted: int


@dataclass(frozen=True)
class EngineRun:
    """Everything one run of an engine gave."""

    answers: Mapping[str, Answer]
    ledger: Mapping[str, Any]
    steps: int

    def count(self, finish: str) -> int:
        """Completions that ended for this reason."""
        return sum(answer.finish == finish for answer in self.answers.values())


class EngineArm:
    """One arm's engine. `open` gives a fresh engine with empty pools; `run` runs requests on it."""

    def __init__(self, worker: Worker, geometry: str, *, specialized: bool) -> None:
        self.worker = worker
        self.geometry = geometry
        self.specialized = specialized

    def open(self, *, tokens: int, drafts: int = 0, max_requests: int = 8, max_step_tokens: int = 512) -> None:
        """Start a fresh engine whose cache holds `tokens` tokens per running request."""
        pages = 1 + max_requests * -(-(tokens + drafts) // PAGE_SIZE)
        self.worker.call(
            "engine.open",
            timeout_s=_TIMEOUT_S,
            geometry=self.geometry,
            weights_seed=WEIGHTS_SEED,
            drafts=drafts,
            max_requests=max_requests,
            max_step_tokens=max_step_tokens,
            pages=pages,
            page_size=PAGE_SIZE,
        )

    def run(self, asks: Sequence[Ask], abort_at: Mapping[str, int] | None = None) -> EngineRun:
        """Run requests to completion.

        Raises:
            WorkerFailure: the worker died, hung or raised.
            ValueError: an answer is missing or has not the lengths that its request implies.
        """
        reply = self.worker.call(
            "engine.run", timeout_s=_TIMEOUT_S, requests=[ask.wire() for ask in asks], abort_at=dict(abort_at or {})
        )
        answers = {str(c["id"]): _answer(c) for c in reply["completions"]}
        if sorted(answers) != sorted(ask.id for ask in asks):
            raise ValueError(f"{len(answers)} answers for {len(asks)} requests; expected one for each")
        for ask in asks:
            answer = answers[ask.id]
            if answer.finish == "length" and len(answer.tokens) != ask.max_tokens:
                raise ValueError(f"request {ask.id}: {len(answer.tokens)} tokens; expected {ask.max_tokens}")
            if answer.tokens[: len(ask.forced)] != ask.forced[: len(answer.tokens)]:
                raise ValueError(f"request {ask.id}: forced tokens were not fed")
        return EngineRun(answers, reply["ledger"], int(reply["steps"]))


def _answer(fields: Mapping[str, Any]) -> Answer:
    answer = Answer(
        tokens=tuple(int(t) for t in fields["tokens"]),
        logprobs=tuple(float(p) for p in fields["logprobs"]),
        regrets=tuple(float(r) for r in fields["regrets"]),
        finish=str(fields["finish"]),
        distribution=tuple(float(p) for p in fields["distribution"]),
        drafted=int(fields["drafted"]),
        accepted=int(fields["accepted"]),
    )
    if not len(answer.tokens) == len(answer.logprobs) == len(answer.regrets):
        raise ValueError(f"request {fields['id']}: tokens, logprobs and regrets differ in length")
    return answer


def worst_request(values: Mapping[str, Sequence[float]]) -> tuple[float, int]:
    """Largest mean over one request's values, and how many values there are in all; (0, 0) without any.

    A mean over the request, since a single token may move by half a nat when rounding tips an expert choice; the worst
    request, since a fault may hit one of many.
    """
    means = [sum(v) / len(v) for v in values.values() if v]
    return max(means, default=0.0), sum(len(v) for v in values.values())


def difference(one: EngineRun, other: EngineRun) -> tuple[float, int]:
    """How far two runs of the same teacher-forced requests differ, in nats per token.

    It is `worst_request` of absolute differences of log probabilities; requests one run did not finish are left out.
    """
    values = {}
    for name in one.answers.keys() & other.answers.keys():
        a, b = one.answers[name], other.answers[name]
        if a.finish == b.finish == "length":
            values[name] = [abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    return worst_request(values)
