"""Compare what a timed chain left behind with the other arms' chains, and a sampled call with the reference.

The numbers are those that `verify.protocol.perf_checks.TOLERANCES` bounds. They answer whether the timed calls did the
work, not how precise it was: the kernels gate does that on the same artifacts. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Left", "against_best", "against_reference", "against_standard"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Left:
    """What one leg left behind, copied out of the worker's reach."""

    outputs: Mapping[str, Array] = field(default_factory=dict)
    """Output -> [calls, rows, ...] f32, or integer for chosen ids."""
    states: Mapping[str, Array] = field(default_factory=dict)
    """State -> written part, f32."""
    known_start: bool = True
    """Whether call i of the outputs is the i-th call from the start state; not so if a series with states repeats."""


def against_standard(left: Left, standard: Left) -> dict[str, float]:
    """Distances of a leg's outputs from the standard arm's, on the first calls of the chain, which both ran.

    Returns:
        `nonfinite`: elements that are not finite where the standard's are; `output_row`: largest relative l2 distance
        of a row of any call; `output_mean`: largest sum |a - b| / sum |b| of a tensor; `choice_rows`, only where ids
        are chosen: share of rows whose chosen sets differ.
    """
    return _outputs(left, standard, "output")


def against_best(left: Left, best: Left) -> dict[str, float]:
    """Distances of a leg from the current best's on the whole chain: `chain_row`, `chain_mean`, and `state_mean` of
    the final states; `nonfinite` and `choice_rows` as above.

    Raises:
        ValueError: the two legs hold different tensors.
    """
    found = _outputs(left, best, "chain")
    for name, want in best.states.items():
        got = left.states[name]
        found["nonfinite"] += float((np.isfinite(want) & ~np.isfinite(got)).sum())
        found["state_mean"] = max(found.get("state_mean", 0.0), _mean(got, want))
        if not best.outputs:  # an op that only changes state
            found["chain_row"] = max(found["chain_row"], _row(got, want))
    return found


def _outputs(left: Left, other: Left, prefix: str) -> dict[str, float]:
    if set(left.outputs) != set(other.outputs):
        raise ValueError(f"legs hold {sorted(left.outputs)} and {sorted(other.outputs)}; expected the same tensors")
    found: dict[str, float] = {"nonfinite": 0.0, f"{prefix}_row": 0.0, f"{prefix}_mean": 0.0}
    for name in other.outputs:
        common = min(len(left.outputs[name]), len(other.outputs[name]))
        got, want = left.outputs[name][:common], other.outputs[name][:common]
        if np.issubdtype(want.dtype, np.integer):
            differs = (np.sort(got, axis=-1) != np.sort(want, axis=-1)).any(axis=-1)
            found["choice_rows"] = max(found.get("choice_rows", 0.0), float(differs.mean()))
            continue
        found["nonfinite"] += float((np.isfinite(want) & ~np.isfinite(got)).sum())
        # Weights of chosen ids are in the order of the choice, so a near-tie moves whole rows: the mean must do.
        if name != "topk_weights":
            found[f"{prefix}_row"] = max(found[f"{prefix}_row"], _row(got, want))
        found[f"{prefix}_mean"] = max(found[f"{prefix}_mean"], _mean(got, want))
    return found


def against_reference(got: Mapping[str, Array], want: Mapping[str, Array]) -> dict[str, float]:
    """Distances of one call's outputs from the evaluator's own expected values (float outputs only)."""
    floats = [name for name, value in want.items() if not np.issubdtype(value.dtype, np.integer)]
    rows = [_row(got[name], want[name]) for name in floats if name != "topk_weights"]
    return {
        "reference_row": max(rows, default=0.0),
        "reference_mean": max((_mean(got[name], want[name]) for name in floats), default=0.0),
    }


_TINY = 1e-30


def _row(got: Array, want: Array) -> float:
    """Largest ||a - b|| / ||b|| over rows (last dimension); NaN counts as infinite."""
    difference = np.sqrt(np.square(got - want, dtype=np.float64).sum(axis=-1))
    size = np.sqrt(np.square(want, dtype=np.float64).sum(axis=-1))
    usual = float(size.mean()) if size.size else 0.0
    # A row of almost nothing (a fully masked one) is judged on the scale of the others.
    return _worst(difference / np.maximum(size, max(usual * 1e-3, _TINY)))


def _mean(got: Array, want: Array) -> float:
    return _worst(np.abs(got - want, dtype=np.float64).sum() / max(float(np.abs(want).sum()), _TINY))


def _worst(values: Any) -> float:
    worst = float(np.max(values, initial=0.0))
    # Raw lines are JSON, which has no infinity; anything above every tolerance says the same.
    return worst if np.isfinite(worst) else 1e9
