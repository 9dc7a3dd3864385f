"""Confidence bounds on a mean log ratio over blocks, and the word that a cell earns by them.

The unit of replication is the block: fresh processes, fresh data, fresh order. Within a block, measurements share a
process and a moment, so they are first reduced to one number per block. Over blocks a trimmed mean with its winsorised
standard error (Yuen 1974, one sample) and Student's t give one-sided bounds. With fewer than `TRIM_FROM` blocks nothing
is trimmed. Why trimmed: a neighbour on the machine now and then disturbs whole blocks, and one such block would
otherwise widen the interval of its cell beyond use.

Fewer blocks give a poor idea of a cell's spread, but the cells of a plan have much of it in common. So each cell's
variance is then moderated by that of all cells (Smyth 2004, empirical Bayes): the more alike the variances of the
cells are, the more each borrows from the others, up to `MOST_BORROWED` times its own degrees of freedom.
`verify.protocol.simulate` measures the error rates of the whole decision. This module knows no arms, cells or claims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import root_scalar
from scipy.special import digamma, stdtrit, zeta

__all__ = [
    "FEWEST_BLOCKS",
    "FEWEST_CELLS",
    "MOST_BORROWED",
    "TRIM_FROM",
    "Bounds",
    "Floats",
    "bounds",
    "moderate",
    "trimmed",
    "word",
]

Floats = npt.NDArray[np.float64]

TRIM_FROM = 6
"""Blocks from which on the largest and the smallest value are trimmed; one more on each side per further six."""

FEWEST_CELLS = 4
"""Cells from which on variances are moderated; the scatter of fewer says nothing."""
FEWEST_BLOCKS = 3
MOST_BORROWED = 2
"""Degrees of freedom that a cell may borrow from the others, per one of its own. Few, because a block's processes are
common to its cells: what the others say about its spread is not all new."""


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


@lru_cache(maxsize=4096)
def _quantile(alpha: float, freedom: float) -> float:
    return float(-stdtrit(freedom, alpha))


def bounds(values: Floats, alpha: float, *, borrow: bool = True) -> Bounds:
    """One-sided bounds at level `alpha` each.

    Args:
        values: [cells, blocks] f64, one value per block; at least two blocks.
        alpha: probability, per bound, that it lies on the wrong side of the mean.
        borrow: whether cells may borrow from each other what they know of their spread.

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
    variance, freedom = winsorised.var(axis=1, ddof=1), float(kept.shape[1] - 1)
    if borrow and not cut and blocks >= FEWEST_BLOCKS:
        variance, freedom = moderate(variance, blocks - 1)
    reach = _quantile(alpha, freedom) * np.sqrt(variance * blocks) / kept.shape[1]
    return Bounds(mean, mean - reach, mean + reach)


def moderate(variances: Floats, freedom: int) -> tuple[Floats, float]:
    """Draw the variances of cells towards what they have in common.

    Method of moments on log variances (Smyth 2004, section 6.2): their scatter beyond that of chi-squared samples with
    `freedom` degrees tells how far the true variances differ.

    Args:
        variances: [cells] f64, each from a sample with `freedom` degrees of freedom.
        freedom: at least 1.

    Returns:
        The moderated variances, and the degrees of freedom that they have.
    """
    usable = variances[variances > 0]
    if len(usable) < FEWEST_CELLS:
        return variances, float(freedom)
    logs = np.log(usable) - digamma(freedom / 2) + math.log(freedom / 2)
    excess = float(logs.var(ddof=1)) - _trigamma(freedom / 2)
    most = MOST_BORROWED * freedom
    # trigamma(d / 2) falls with d: if the scatter explains fewer degrees than may be borrowed, solve for them.
    if excess <= _trigamma(most / 2):
        borrowed = float(most)
    else:
        solved = root_scalar(lambda half: _trigamma(half) - excess, bracket=(1e-3, most / 2))  # type: ignore[no-untyped-call]
        borrowed = 2 * float(solved.root)
    common = math.exp(float(logs.mean()) + float(digamma(borrowed / 2)) - math.log(borrowed / 2))
    total = freedom + borrowed
    return (freedom * variances + borrowed * common) / total, total


def _trigamma(value: float) -> float:
    return float(zeta(2.0, value))  # type: ignore[no-untyped-call]


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
