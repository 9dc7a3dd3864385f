"""The statistics under the performance decision: what a visit is worth, confidence bounds, words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.protocol.bounds import MOST_BORROWED, bounds, moderate, trimmed, word
from verify.protocol.perf_data import midmean, visit_value


def test_a_visit_is_worth_the_middle_of_its_rounds() -> None:
    """One disturbed slice moves the block, or drift that hits a whole round does."""
    drift = np.exp(np.linspace(0, 1, 40))
    best, candidate = 1.1 * drift, drift.copy()
    candidate[:9] *= 5
    slices = {"best": best, "candidate": candidate, "standard": np.full(4, 3 * math.exp(0.5))}
    assert visit_value(slices, "best", "candidate") == pytest.approx(math.log(1.1))
    assert visit_value(slices, "standard", "best") == pytest.approx(math.log(3 / 1.1), abs=0.02)
    assert midmean(np.array([0.0, 1.0, 2.0, 100.0])) == 1.5


@given(
    values=st.lists(st.floats(-1, 1), min_size=2, max_size=30),
    shift=st.floats(-1, 1),
    alpha=st.floats(1e-4, 0.4),
)
@settings(max_examples=60, deadline=None)
def test_bounds_enclose_the_mean_and_move_with_the_data(values: list[float], shift: float, alpha: float) -> None:
    """Bounds cross, or depend on where zero is."""
    data = np.array([values])
    found = bounds(data, alpha)
    assert found.low[0] <= found.mean[0] <= found.high[0]
    moved = bounds(data + shift, alpha)
    assert moved.low[0] == pytest.approx(found.low[0] + shift, abs=1e-9)
    assert bounds(-data, alpha).high[0] == pytest.approx(-found.low[0], abs=1e-9)


def test_bounds_have_their_level_on_normal_noise() -> None:
    """The stated error probability is not the real one (3 sigma of 20,000 trials)."""
    rng = np.random.default_rng(5)
    for blocks in (3, 4, 8, 10, 20):
        for alpha in (0.1, 0.0224):
            for cells in (1, 20):
                lows = [bounds(rng.standard_normal((cells, blocks)), alpha).low for _ in range(20_000 // cells)]
                rate = float((np.concatenate(lows) > 0).mean())
                assert rate == pytest.approx(alpha, abs=3 * math.sqrt(alpha / 20_000) + 0.1 * alpha), (blocks, cells)


def test_cells_borrow_from_each_other_what_they_have_in_common() -> None:
    """A cell whose few blocks happen to agree is believed, or one that is much noisier than the others is."""
    rng = np.random.default_rng(8)
    alike, freedom = moderate(rng.chisquare(3, 200) / 3, 3)
    assert freedom == 3 * (1 + MOST_BORROWED)
    assert alike.min() > 0.5
    assert alike.mean() == pytest.approx(1.0, rel=0.1)
    spread = np.exp(rng.normal(0, 3, 200))
    _, freedom = moderate(spread * rng.chisquare(3, 200) / 3, 3)
    assert freedom < 4
    one, freedom = moderate(np.array([2.0]), 3)
    assert (one[0], freedom) == (2.0, 3.0)
    assert moderate(np.zeros(14), 3)[1] == 3.0, "a rig without noise has nothing to share"


def test_one_outlier_block_does_not_undo_the_evidence_of_ten() -> None:
    """One disturbed block in ten makes a clear gain ambiguous."""
    rng = np.random.default_rng(6)
    values = 0.05 + 0.005 * rng.standard_normal((1, 10))
    values[0, 3] = -0.8
    assert trimmed(10) == 1
    assert bounds(values, 0.0224).low[0] > 0


def test_words_need_evidence_to_leave_ambiguity() -> None:
    """A wide interval reads as the same speed."""
    assert word(0.01, 0.5, 0.02) == "FAST"
    assert word(-0.5, -0.03, 0.02) == "SLOW"
    assert word(-0.01, 0.015, 0.02) == "SAME"
    assert word(-0.3, 0.3, 0.02) == "AMBG"
    assert word(-0.3, 0.01, 0.02) == "AMBG"
