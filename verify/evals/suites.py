"""Small evaluation suites for the untrained nano model: its answers carry no skill, but the difference between two arms
on the same texts does carry the numerics of the whole path. All scored tokens go through decode steps.

* `next_token`: text that the standard arm itself sampled, so that log probabilities lie where the model's mass is;
* `recall_short`, `recall_long`: key-value lists and questions about them, at two lengths of context.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from verify.evaluator.engine import Answer, Ask

__all__ = ["SCORED_TOKENS", "SUITES", "forced_text", "own_text_asks", "recall_asks"]

SUITES = ("next_token", "recall_short", "recall_long")

SCORED_TOKENS = 24
"""Teacher-forced tokens per sample."""

PROMPT_TOKENS = 24


def own_text_asks(seed: int, samples: int) -> tuple[Ask, ...]:
    """Requests that let the standard arm write the texts of `next_token`: random prompts, temperature 1."""
    rng = np.random.default_rng(seed)
    return tuple(
        Ask(
            id=f"next_token-{i}",
            prompt=tuple(int(t) for t in rng.integers(0, 256, PROMPT_TOKENS)),
            max_tokens=SCORED_TOKENS,
            temperature=1.0,
            seed=int(rng.integers(0, 2**31)),
        )
        for i in range(samples)
    )


def forced_text(ask: Ask, answer: Answer) -> Ask:
    """The request that scores an arm on the text which the standard arm wrote."""
    return replace(ask, forced=answer.tokens, max_tokens=len(answer.tokens), temperature=0.0)


def recall_asks(suite: str, seed: int, samples: int, context: int) -> tuple[Ask, ...]:
    """Key-value lists that fill `context` tokens, then questions whose answers stand in the list.

    Args:
        suite: name used in ids.
        seed: secret seed.
        samples: requests.
        context: tokens of prompt and scored text together.
    """
    rng = np.random.default_rng(seed)
    return tuple(_recall_ask(f"{suite}-{i}", rng, context) for i in range(samples))


def _recall_ask(name: str, rng: np.random.Generator, context: int) -> Ask:
    entry = "{:03x}={:03x};"
    count = (context - SCORED_TOKENS) // len(entry.format(0, 0))
    keys = rng.choice(4096, size=count, replace=False)
    values = rng.integers(0, 4096, size=count)
    entries = [entry.format(int(k), int(v)) for k, v in zip(keys, values, strict=True)]
    asked = rng.choice(count, size=SCORED_TOKENS // len(entries[0]), replace=False)
    text, questions = "".join(entries).encode(), "".join(entries[i] for i in asked).encode()
    return Ask(id=name, prompt=tuple(text), forced=tuple(questions), max_tokens=len(questions))
