"""Choosing tokens from logits. Noise is a pure function of seed and position, so a draw is the same token whatever the
batch, chunking or speculation around it; with exact logits, speculative and plain generation are then identical.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify.engine.request import SamplingParams

__all__ = ["Choice", "choose", "gumbel_noise"]


@dataclass(frozen=True)
class Choice:
    """One chosen token."""

    token: int
    logprob: float
    regret: float
    """Best logit minus this token's."""


def gumbel_noise(seed: int, position: int, vocab: int) -> Tensor:
    """Standard Gumbel noise, [vocab] f32, fixed by seed and position."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + position) % 2**63)
    uniform = torch.rand(vocab, generator=generator, dtype=torch.float64).clamp_min(torch.finfo(torch.float64).tiny)
    return -(-uniform.log()).log().float()


def choose(logits: Tensor, params: SamplingParams, position: int, forced: int | None = None) -> Choice | None:
    """Choose one token, or None if any logit is not finite.

    Temperature sampling adds Gumbel noise to logits / temperature and takes the maximum, which draws from the softmax
    exactly. Ties go to the lower id.

    Args:
        logits: [vocab] f32.
        params: temperature, seed and mask.
        position: absolute position of the token that is chosen.
        forced: take this token and only report its log probability.
    """
    if not bool(torch.isfinite(logits).all()):
        return None
    if forced is None:
        scores = logits
        if params.temperature > 0:
            scores = logits / params.temperature + gumbel_noise(params.seed, position, logits.shape[0])
        if params.allowed_ids is not None:
            allowed = torch.tensor(params.allowed_ids)
            masked = torch.full_like(scores, -torch.inf)
            masked[allowed] = scores[allowed]
            scores = masked
        forced = int((scores == scores.max()).nonzero()[0])
    logprob = float(logits[forced] - logits.logsumexp(dim=0))
    return Choice(forced, logprob, float(logits.max() - logits[forced]))
