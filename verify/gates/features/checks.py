"""The checks of the features gate: each runs two modes of one arm's engine and reports how far they differ.

The mode that most of them compare with, all requests at once, is run once per arm and handed to each.

All texts are random bytes from a secret seed, teacher-forced so that a near-tie cannot send two modes down different
paths; only `speculation_greedy` and `sampling` choose tokens freely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any

import numpy as np

from verify.evaluator.engine import Ask, EngineArm, EngineRun, difference, worst_request

__all__ = ["CHECKS", "Plan", "draw_plan", "plain_run"]

VOCAB_BYTES = 256
FORCED = 12
DRAFTS = 3


@dataclass(frozen=True)
class Plan:
    """What a gate run will ask, drawn once and used for both arms."""

    asks: tuple[Ask, ...]
    """Teacher-forced requests of different lengths."""
    longest: int
    """Tokens per request that engines must hold."""
    full: tuple[Ask, ...]
    """Requests at the target's longest context, the last `FORCED` tokens forced."""
    sampled: tuple[Ask, ...]
    """Requests that share a text and draw one token each, with different seeds."""


def draw_plan(seed: int, *, requests: int, context: int, samples: int) -> Plan:
    """Draw texts and seeds.

    Args:
        seed: secret seed, made after the candidate's artifacts are fixed.
        requests: teacher-forced requests.
        context: the target's longest context.
        samples: draws of the sampling test.
    """
    rng = np.random.default_rng(seed)

    def text(length: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(0, VOCAB_BYTES, length))

    lengths = [int(n) for n in rng.integers(17, 97, requests)]
    asks = tuple(Ask(id=f"r{i}", prompt=text(n), max_tokens=FORCED, forced=text(FORCED)) for i, n in enumerate(lengths))
    shared, first = text(9), text(1)
    return Plan(
        asks=asks,
        longest=max(lengths) + FORCED,
        full=tuple(
            Ask(id=f"full{i}", prompt=text(context - FORCED), max_tokens=FORCED, forced=text(FORCED)) for i in range(2)
        ),
        sampled=tuple(
            Ask(
                id=f"s{i}", prompt=shared, max_tokens=2, forced=first, temperature=1.0,
                seed=int(rng.integers(0, 2**31)), record_distribution=i == 0,
            )
            for i in range(samples)
        ),
    )  # fmt: skip


def plain_run(arm: EngineArm, plan: Plan) -> EngineRun:
    """The forced requests all at once on a fresh engine: what most checks compare another mode with."""
    arm.open(tokens=plan.longest, max_requests=len(plan.asks))
    return arm.run(plan.asks)


def _result(one: EngineRun, other: EngineRun, exact: list[dict[str, Any]]) -> dict[str, Any]:
    seen, positions = difference(one, other)
    bad = one.count("nonfinite") + other.count("nonfinite")
    rules = [{"what": "answers with a non-finite logit", "seen": bad, "expected": 0}, *exact]
    return {"difference_nats": seen, "positions": positions, "exact": rules}


def _rule(what: str, seen: object, expected: object) -> dict[str, Any]:
    return {"what": what, "seen": seen, "expected": expected}


def chunked_prefill(arm: EngineArm, plan: Plan, plain: EngineRun) -> dict[str, Any]:
    """Prompts in one chunk each, and cut into chunks that share small steps."""
    arm.open(tokens=plan.longest, max_requests=len(plan.asks), max_step_tokens=len(plan.asks) + 8)
    return _result(plain, arm.run(plan.asks), [])


def mixed_batches(arm: EngineArm, plan: Plan, plain: EngineRun) -> dict[str, Any]:
    """All requests at once, and arriving one by one, so that decode rows share steps with prefill chunks."""
    staggered = [with_fields(ask, arrives=2 * i) for i, ask in enumerate(plan.asks)]
    arm.open(tokens=plan.longest, max_requests=len(plan.asks), max_step_tokens=48)
    mixed = arm.run(staggered)
    exact = [_rule("requests that finished", mixed.count("length"), len(plan.asks))]
    if arm.specialized:
        codes = set(mixed.ledger["fallbacks"])
        exact += [
            _rule("mixed steps fell back as such", "batch.not_decode" in codes, True),
            _rule("other refusals", sorted(codes - {"batch.not_decode", "batch.ragged"}), []),
            _rule("pure decode steps ran specialised", mixed.ledger["steps"]["specialized"] > 0, True),
        ]
    return _result(plain, mixed, exact)


def speculation(arm: EngineArm, plan: Plan, plain: EngineRun) -> dict[str, Any]:
    """Plain decode, and verify steps of 1 + 3 tokens whose drafts are the forced tokens."""
    arm.open(tokens=plan.longest, drafts=DRAFTS, max_requests=len(plan.asks))
    verified = arm.run(plan.asks)
    agreed = sum(answer.accepted for answer in verified.answers.values())
    return _result(plain, verified, [_rule("some drafts were accepted", agreed > 0, True)])


def speculation_greedy(arm: EngineArm, plan: Plan, _plain: EngineRun) -> dict[str, Any]:
    """Free greedy text with n-gram drafts, scored by plain decode: how much better would its own choice have been?"""
    free = [with_fields(ask, forced=(), max_tokens=2 * FORCED) for ask in plan.asks]
    arm.open(tokens=plan.longest + FORCED, drafts=DRAFTS, max_requests=len(plan.asks))
    drafted = arm.run(free)
    arm.open(tokens=plan.longest + FORCED, max_requests=len(plan.asks))
    scored = arm.run(
        [with_fields(ask, forced=drafted.answers[ask.id].tokens) for ask in free if drafted.answers[ask.id].tokens]
    )
    regret, positions = worst_request({name: answer.regrets for name, answer in scored.answers.items()})
    exact = [
        _rule("answers with a non-finite logit", drafted.count("nonfinite") + scored.count("nonfinite"), 0),
        _rule("requests that finished", scored.count("length"), len(free)),
    ]
    return {"difference_nats": regret, "positions": positions, "exact": exact}


def full_context(arm: EngineArm, plan: Plan, _plain: EngineRun) -> dict[str, Any]:
    """The last tokens of the longest context, decoded after two different prefills: a short and a long one."""
    longest = len(plan.full[0].prompt) + FORCED
    half = FORCED // 2
    later = [
        with_fields(ask, prompt=(*ask.prompt, *ask.forced[:half]), forced=ask.forced[half:], max_tokens=FORCED - half)
        for ask in plan.full
    ]
    arm.open(tokens=longest, max_requests=len(plan.full), max_step_tokens=1024)
    early_run = arm.run(plan.full)
    arm.open(tokens=longest, max_requests=len(plan.full), max_step_tokens=1024)
    later_run = arm.run(later)
    exact = [
        _rule("requests that finished", early_run.count("length") + later_run.count("length"), 2 * len(plan.full)),
        _rule("answers with a non-finite logit", early_run.count("nonfinite") + later_run.count("nonfinite"), 0),
    ]
    seen, positions = worst_request(
        {
            ask.id: [abs(a - b) for a, b in zip(
                early_run.answers[ask.id].logprobs[half:], later_run.answers[ask.id].logprobs, strict=False
            )]
            for ask in plan.full
        }
    )  # fmt: skip
    return {"difference_nats": seen, "positions": positions, "exact": exact}


def slot_reuse(arm: EngineArm, plan: Plan, plain: EngineRun) -> dict[str, Any]:
    """A fresh engine, and one whose slots and pages were all used by other requests before."""
    arm.open(tokens=plan.longest, max_requests=len(plan.asks))
    arm.run(
        [with_fields(ask, id=f"old-{ask.id}", prompt=ask.forced + ask.prompt[:-FORCED], forced=()) for ask in plan.asks]
    )
    return _result(plain, arm.run(plan.asks), [])


def abort(arm: EngineArm, plan: Plan, plain: EngineRun) -> dict[str, Any]:
    """All requests, and the same with two of them aborted on the way: the others must not notice."""
    arm.open(tokens=plan.longest, max_requests=len(plan.asks))
    victims = [ask.id for ask in plan.asks[:2]]
    cut = arm.run(plan.asks, abort_at={victims[0]: 2, victims[1]: 5})
    return _result(plain, cut, [_rule("aborted requests", cut.count("aborted"), len(victims))])


def sampling(arm: EngineArm, plan: Plan, _plain: EngineRun) -> dict[str, Any]:
    """Many draws of one token at temperature 1 from a decode step's logits, counted, and the arm's own distribution.

    Of the standard arm the distribution is all that is asked.
    """
    arm.open(tokens=len(plan.sampled[0].prompt) + 2, max_requests=64, max_step_tokens=2048)
    asks = plan.sampled if arm.specialized else plan.sampled[:1]
    run = arm.run(asks)
    vocab = len(run.answers["s0"].distribution)
    counts = [0] * vocab
    for answer in run.answers.values():
        if answer.finish == "length":
            counts[answer.tokens[1]] += 1
    exact = [
        _rule("answers with a non-finite logit", run.count("nonfinite"), 0),
        _rule("draws", sum(counts), len(asks)),
    ]
    probabilities = [float(np.exp(p)) for p in run.answers["s0"].distribution]
    return {"counts": counts, "probabilities": probabilities, "exact": exact}


CHECKS: Mapping[str, Callable[[EngineArm, Plan, EngineRun], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        chunked_prefill, mixed_batches, speculation, speculation_greedy, full_context, slot_reuse, abort, sampling,
    )
}  # fmt: skip
