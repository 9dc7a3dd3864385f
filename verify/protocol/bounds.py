"""Confidence bounds on a mean log ratio over blocks, and the word that a cell earns by them.

The unit of replication is the block: fresh processes, fresh data, fresh order. Within a block, measurements share a
process and a moment, so they are first reduced to one number per block. Over blocks a trimmed mean with its winsorised
standard error (Yuen 1974, one sample) and Student's t give one-sided bounds. With fewer than `TRIM_FROM` blocks nothing
is trimmed and this is the ordinary t bound. Why trimmed: a neighbour on the machine now and then disturbs whole blocks,
and one such block would otherwise widen the interval of its cell beyond use; `verify.protocol.simulate` measures the
error rates of the whole decision. This module knows no arms, cells or claims.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

__all__ = ["TRIM_FROM", "Bounds", "Floats", "bounds", "trimmed", "word"]

Floats = npt.NDArray[np.float64]

TRIM_FROM = 6
"""Blocks from which on the largest and the smallest value are trimmed; one more on each side per further six."""


@dataclass(frozen=True)
class Bounds:
    """Estimates of several cells, each array [cells] f64."""

    mean: Floats
    """Trimmed mean of the block values."""
    low: Floats
    """One-sided lower confidence bound."""
    high: Floats
    """One-sided upper confidence bound."""


def trimmed(blocks: int) -> int:
    """Values trimmed on each side for a number of blocks."""
    return blocks // TRIM_FROM


@lru_cache(maxsize=256)
def _quantile(alpha: float, freedom: int) -> float:
    return float(-stdtrit(freedom, alpha))


def bounds(values: Floats, alpha: float) -> Bounds:
    """One-sided bounds at level `alpha` each.

    Args:
        values: [cells, blocks] f64, one value per block; at least two blocks.
        alpha: probability, per bound, that it lies on the wrong side of the mean.

    Raises:
        ValueError: fewer than two blocks.
    """
    blocks = values.shape[1]
    if blocks < 2:
        raise ValueError(f"{blocks} blocks; a bound needs at least 2")
    cut = trimmed(blocks)
    ordered = np.sort(values, axis=1)
    kept = ordered[:, cut : blocks - cut]
    mean = kept.mean(axis=1)
    winsorised = np.clip(ordered, kept[:, :1], kept[:, -1:])
    spread = winsorised.std(axis=1, ddof=1) * np.sqrt(blocks) / kept.shape[1]
    reach = _quantile(alpha, kept.shape[1] - 1) * spread
    return Bounds(mean, mean - reach, mean + reach)


def word(low: float, high: float, margin: float) -> str:
    """FAST, SLOW, SAME or AMBG from bounds on log(baseline / candidate).

    Args:
        low: lower bound.
        high: upper bound.
        margin: largest log loss that still counts as the same speed, >= 0.
    """
    if low > 0.0:
        return "FAST"
    if high < -margin:
        return "SLOW"
    return "SAME" if low > -margin and high < margin else "AMBG"
