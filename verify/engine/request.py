"""What is asked of the engine, what comes back, and what it remembers in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Completion", "FinishReason", "Request", "Running", "SamplingParams"]

FinishReason = Literal["stop", "length", "aborted", "nonfinite"]
"""`nonfinite`: the model gave a NaN or infinite logit; the request ends there and never counts as an answer."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen."""

    max_tokens: int
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """With the position it fixes the noise of each draw, so results do not depend on batching or speculation."""
    stop_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    """Only these tokens may be chosen; all if null."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; expected at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; expected a number >= 0")
        if self.allowed_ids is not None and not self.allowed_ids:
            raise ValueError("allowed_ids is empty; expected at least one token or null")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation.

    The first `len(forced)` generated tokens are given instead of chosen (teacher forcing): they go through the decode
    path like any other and their log probabilities are recorded.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    forced: tuple[int, ...] = ()
    record_distribution: bool = False
    """Also return the log probabilities of all tokens at the last generated position."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id}: the prompt is empty; expected at least one token")
        if len(self.forced) > self.params.max_tokens:
            raise ValueError(
                f"request {self.id}: {len(self.forced)} forced tokens; "
                f"expected at most max_tokens {self.params.max_tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the model at temperature 1, before any mask."""
    regrets: tuple[float, ...]
    """Best logit minus the token's own, at each token: 0 for a greedy choice, small for one that was nearly a tie."""
    finish: FinishReason
    distribution: tuple[float, ...] = ()
    """Log probabilities of all tokens at the last position, if asked for."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    """Draft tokens that the model agreed with."""


@dataclass
class Running:
    """Engine-side state of an admitted request."""

    request: Request
    pages: list[int]
    slots: list[int]
    """Recurrent-state slots, one per query token of a verify step; the first one also holds the conv window."""
    computed: int = 0
    """Tokens whose KV rows and states are valid."""
    accepted: int = 1
    """Query tokens that the last step kept: selects the state slot to read."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    regrets: list[float] = field(default_factory=list)
    distribution: tuple[float, ...] = ()
    drafted: int = 0
    agreed: int = 0

    @property
    def all_tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt, *self.tokens]

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens remain to be computed. The last generated token is always still to be computed."""
        return self.computed < len(self.request.prompt)

    def completion(self, finish: FinishReason) -> Completion:
        """What the request came to."""
        return Completion(
            id=self.request.id,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            regrets=tuple(self.regrets),
            finish=finish,
            distribution=self.distribution,
            drafted=self.drafted,
            accepted=self.agreed,
        )
