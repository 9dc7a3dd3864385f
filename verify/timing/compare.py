"""Compare what a timed chain left behind with the other arms' chains, and a sampled call with the reference.

The numbers are those that `verify.protocol.perf_checks.TOLERANCES` bounds. They answer whether the timed calls did the
work, not how precise it was: the kernels gate does that on the same artifacts. Nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BROKEN_SLACK", "Left", "against_best", "against_reference", "against_standard"]

Array = npt.NDArray[Any]

BROKEN_SLACK = 3
"""Rows that may be off by more than their own size: in a short chain one near-tie is already some per cent."""
MIN_ROWS = 64
"""Rows from which on their median and mean are compared; of a few rows, near-ties can move both far."""


@dataclass(frozen=True)
class Left:
    """What one leg left behind, copied out of the worker's reach."""

    outputs: Mapping[str, Array] = field(default_factory=dict)
    """Output -> [calls, rows, ...] f32, or integer for chosen ids."""
    states: Mapping[str, Array] = field(default_factory=dict)
    """State -> written part, f32."""
    known_start: bool = True
    """Whether call i of the outputs is the i-th from the start state; not so of an op with states that ran before."""


def against_standard(left: Left, standard: Left) -> dict[str, float]:
    """Distances of a leg's outputs from the standard arm's, on the first calls of the chain, which both ran.

    Returns:
        `nonfinite`: elements that are not finite where the standard's are; `output_broken`: share of rows whose
        relative l2 distance is above 1, not counting `BROKEN_SLACK` of them; `output_median`: median of that distance;
        `output_mean`: sum |a - b| / sum |b| (each the worst of the output tensors; the last two only over `MIN_ROWS`
        rows or more); `choice_rows`, only where ids are chosen: share of rows whose chosen sets differ.
    """
    return _outputs(left.outputs, standard.outputs, "output")


def against_best(left: Left, best: Left) -> dict[str, float]:
    """Distances of a leg from the current best's on the whole chain: `chain_*` as above, for an op without outputs of
    its states; and `state_mean` of the final states.

    Raises:
        ValueError: the two legs hold different tensors.
    """
    found = _outputs(left.outputs or left.states, best.outputs or best.states, "chain")
    for name, want in best.states.items():
        got = left.states[name]
        found["nonfinite"] += float((np.isfinite(want) & ~np.isfinite(got)).sum())
        found["state_mean"] = max(found.get("state_mean", 0.0), _mean(got, want))
    return found


def _outputs(ours: Mapping[str, Array], others: Mapping[str, Array], prefix: str) -> dict[str, float]:
    if set(ours) != set(others):
        raise ValueError(f"legs hold {sorted(ours)} and {sorted(others)}; expected the same tensors")
    broken, median, mean = f"{prefix}_broken", f"{prefix}_median", f"{prefix}_mean"
    found: dict[str, float] = {"nonfinite": 0.0, broken: 0.0}
    for name in others:
        common = min(len(ours[name]), len(others[name]))
        got, want = ours[name][:common], others[name][:common]
        if np.issubdtype(want.dtype, np.integer):
            differs = (np.sort(got, axis=-1) != np.sort(want, axis=-1)).any(axis=-1)
            found["choice_rows"] = max(found.get("choice_rows", 0.0), float(differs.mean()))
            continue
        found["nonfinite"] += float((np.isfinite(want) & ~np.isfinite(got)).sum())
        enough = math.prod(want.shape[:-1]) >= MIN_ROWS
        # Weights of chosen ids are in the order of the choice, so a near-tie moves whole rows: the mean must do.
        if name != "topk_weights":
            rows = _rows(got, want)
            off = int((~(rows <= 1.0)).sum())
            found[broken] = max(found[broken], max(0, off - BROKEN_SLACK) / rows.size)
            if enough:
                found[median] = max(found.get(median, 0.0), _number(np.median(rows)))
        if enough:
            found[mean] = max(found.get(mean, 0.0), _mean(got, want))
    return found


def against_reference(got: Mapping[str, Array], want: Mapping[str, Array]) -> dict[str, float]:
    """Distances of one call's outputs from the evaluator's own expected values (float outputs only)."""
    floats = [name for name, value in want.items() if not np.issubdtype(value.dtype, np.integer)]
    rows = [_number(_rows(got[name], want[name]).max()) for name in floats if name != "topk_weights"]
    return {
        "reference_row": max(rows, default=0.0),
        "reference_mean": max((_mean(got[name], want[name]) for name in floats), default=0.0),
    }


def _rows(got: Array, want: Array) -> Array:
    """||a - b|| / ||b|| of every row (last dimension)."""
    difference = np.sqrt(np.square(got - want, dtype=np.float64).sum(axis=-1))
    size = np.sqrt(np.square(want, dtype=np.float64).sum(axis=-1))
    usual = float(size.mean()) if size.size else 0.0
    # A row of almost nothing (a fully masked one) is judged on the scale of the others.
    distances: Array = difference / np.maximum(size, max(usual * 1e-3, _TINY))
    return distances


def _mean(got: Array, want: Array) -> float:
    return _number(np.abs(got - want, dtype=np.float64).sum() / max(float(np.abs(want).sum()), _TINY))


def _number(value: Any) -> float:
    """A JSON number; raw lines have no infinity, and anything above every tolerance says the same."""
    return float(value) if np.isfinite(value) else 1e9


_TINY = 1e-30
