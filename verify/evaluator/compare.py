"""Measure how far a tensor is from the reference, in the numbers that the kernels protocol decides on.

A tolerance is earned: the same numbers are measured for the op's standard path on the same inputs, and
`verify.protocol.kernels` allows a declared factor of them plus a floor of the output's own rounding. Nothing is decided
here. Errors are normalised per element by max(|reference|, root mean square of its row), so that neither a large row
hides a small one nor cancellation inside a row counts as error of the kernel.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Discrete", "Errors", "compare_choice", "compare_values", "distance", "reference_choice", "spread",
    "weights_of_choice",
]  # fmt: skip

_TINY = 2.0**-120
"""Smallest normaliser: below it every value counts as zero in all formats in use."""
_CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 25}
"""What fits a processor's cache; on a GPU, few enough chunks that launches do not decide the time."""


@dataclass(frozen=True)
class Errors:
    """Distance of one tensor from its fp64 reference."""

    elements: int
    """Elements compared."""
    nonfinite: int
    """Elements that are not finite where the reference is, or differ from it where it is not (-inf, NaN)."""
    nonzero: int
    """Elements that are not zero in rows whose reference is exactly zero."""
    element: float
    """Largest normalised error of an element; elements counted in `nonfinite` are left out of this and what follows."""
    row_l2: float
    """Largest ||value - reference|| / ||reference|| of a row."""
    mean: float
    """sum |value - reference| / sum |reference|. A rounding that flips here and there hardly moves it; precision that
    is lost everywhere does."""
    worst: tuple[int, ...]
    """Index of the first element of a wrong class (non-finite, nonzero), else of the largest normalised error."""

    def record(self) -> dict[str, Any]:
        """JSON for a raw line."""
        return {**asdict(self), "worst": list(self.worst)}


def compare_values(value: Tensor, reference: Tensor, *, row_dims: int = 1) -> Errors:
    """Errors of `value` against `reference`.

    Args:
        value: [..., *row] any real dtype.
        reference: [..., *row] f64, the same shape.
        row_dims: how many trailing dimensions form one row (2 for a state matrix).

    Raises:
        ValueError: shapes differ, or there is nothing to compare.
    """
    if value.shape != reference.shape or reference.numel() == 0:
        raise ValueError(
            f"compared {tuple(value.shape)} with {tuple(reference.shape)}; expected equal, non-empty shapes"
        )
    shape = reference.shape
    width = math.prod(shape[len(shape) - row_dims :])
    got, want = value.reshape(-1, width), reference.reshape(-1, width)
    step = max(1, _CHUNK_ELEMENTS[want.device.type] // width)
    chunks = [_chunk(got[at : at + step], want[at : at + step]) for at in range(0, len(want), step)]
    broken = [at for at, chunk in enumerate(chunks) if chunk.nonfinite or chunk.nonzero]
    worst = broken[0] if broken else max(range(len(chunks)), key=lambda at: chunks[at].element)
    flat = worst * step * width + chunks[worst].worst
    total = sum(chunk.total for chunk in chunks)
    return Errors(
        elements=want.numel(),
        nonfinite=sum(chunk.nonfinite for chunk in chunks),
        nonzero=sum(chunk.nonzero for chunk in chunks),
        element=max(chunk.element for chunk in chunks),
        row_l2=max(chunk.row_l2 for chunk in chunks),
        mean=sum(chunk.difference for chunk in chunks) / max(total, _TINY),
        worst=tuple(int(i) for i in np.unravel_index(flat, shape)),
    )


class _Chunk(NamedTuple):
    """What `Errors` is put together from."""

    nonfinite: int
    nonzero: int
    element: float
    row_l2: float
    difference: float
    """Sum of absolute differences."""
    total: float
    """Sum of absolute reference values."""
    worst: int
    """Flat index inside the chunk of the first element of a wrong class, else of the largest error."""


def _chunk(value: Tensor, reference: Tensor) -> _Chunk:
    got, want = value.to(torch.float64), reference.to(torch.float64)
    regular, finite = want.isfinite(), got.isfinite()
    usable = regular & finite
    count: Tensor | int = want.shape[1]
    other_class: Tensor | None = None
    if bool(usable.all()):
        clean, signed = want, got - want
    else:
        other_class = torch.where(regular, ~finite, (got != want) & ~(got.isnan() & want.isnan()))
        clean, signed = torch.where(usable, want, 0.0), torch.where(usable, got - want, 0.0)
        count = usable.sum(1, keepdim=True).clamp(min=1)
    difference, size = signed.abs(), clean.abs()
    squares = clean.square().sum(1, keepdim=True)
    zero_row = squares.squeeze(1) == 0
    nonzero = torch.zeros((), dtype=torch.int64)
    wrong = other_class
    if bool(zero_row.any()):
        stray = (difference != 0) & zero_row.unsqueeze(1)
        nonzero = stray.sum()
        wrong = stray if wrong is None else wrong | stray
        difference = torch.where(zero_row.unsqueeze(1), 0.0, difference)
    error = difference / torch.maximum(size, (squares / count).sqrt()).clamp(min=_TINY)
    marked = wrong if wrong is not None and bool(wrong.any()) else error
    return _Chunk(
        nonfinite=0 if other_class is None else int(other_class.sum()),
        nonzero=int(nonzero),
        element=float(error.max()),
        row_l2=float((difference.square().sum(1) / squares.squeeze(1).clamp(min=_TINY**2)).sqrt().max()),
        difference=float(difference.sum()),
        total=float(size.sum()),
        worst=int(marked.to(torch.float64).argmax()),
    )


def spread(reference: Tensor) -> float:
    """How much of a reference a constant cannot explain: sum |r - median(r)| / sum |r| over its finite elements.

    0 for a constant or all-zero tensor, which a constant output would match; about 1 for zero mean.
    """
    finite = reference.to(torch.float64)[reference.isfinite()]
    total = float(finite.abs().sum())
    return float((finite - finite.median()).abs().sum()) / total if total > 0 else 0.0


@dataclass(frozen=True)
class Discrete:
    """How a chosen list of ids relates to the reference scores."""

    rows: int
    violations: int
    """Rows that break the choice rule."""
    rule: str
    """Which part was broken first: `range`, `repeated`, `not_largest`, `order`, `tie`; empty without violation."""
    slack: float
    """Largest score difference that counted as a near-tie."""
    near_ties: int
    """Rows that the near-tie rule excused: a different choice than the reference's, within the slack."""
    worst: tuple[int, ...]
    """Row of the first violation; empty without."""

    def record(self) -> dict[str, Any]:
        """JSON for a raw line."""
        return {**asdict(self), "worst": list(self.worst)}


def compare_choice(ids: Tensor, scores: Tensor, slack: Tensor) -> Discrete:
    """Check top-k ids against fp64 selection scores with a declared near-tie rule.

    A choice is right if its ids are distinct and in range, no score left out exceeds a chosen one by more than `slack`,
    and each chosen score is not exceeded by a later one by more than `slack`. Where scores are exactly equal and the
    slack is 0 the lower id must be chosen and come first. A NaN score is below every number.

    Args:
        ids: [M, k] integer, the choice, best first.
        scores: [M, E] f64, what the choice is made on.
        slack: [M] f64, per row, how far two scores may be apart and still count as tied; 0 demands the exact order.
    """
    rows, k = ids.shape
    experts = scores.shape[1]
    exact = reference_choice(scores, k)
    broken: dict[int, str] = {}
    near = 0
    for row in range(rows):
        chosen = [int(i) for i in ids[row]]
        if chosen == exact[row].tolist():
            continue
        rule = _broken_rule(chosen, scores[row], float(slack[row]), experts)
        if rule:
            broken[row] = rule
        else:
            near += 1
    first = min(broken) if broken else None
    return Discrete(
        rows=rows,
        violations=len(broken),
        rule="" if first is None else broken[first],
        slack=float(slack.max()) if rows else 0.0,
        near_ties=near,
        worst=() if first is None else (first,),
    )


def reference_choice(scores: Tensor, k: int) -> Tensor:
    """Ids of the k largest scores, [M, k] i64: descending, ties to the lower id, NaN last."""
    ranked = torch.where(scores.isnan(), -torch.inf, scores)
    order = torch.argsort(ranked, dim=1, descending=True, stable=True)
    # A NaN ties with nothing: it goes behind a score of -inf too.
    nan_last = torch.argsort(torch.gather(scores.isnan(), 1, order).to(torch.uint8), dim=1, stable=True)
    return torch.gather(order, 1, nan_last)[:, :k]


def _broken_rule(chosen: list[int], scores: Tensor, slack: float, experts: int) -> str:
    if any(not 0 <= i < experts for i in chosen):
        return "range"
    if len(set(chosen)) != len(chosen):
        return "repeated"
    ranked = torch.where(scores.isnan(), -torch.inf, scores)
    picked = ranked[chosen]
    left = [i for i in range(experts) if i not in set(chosen)]
    if left and float(ranked[left].max()) > float(picked.min()) + slack:
        return "not_largest"
    values = picked.tolist()
    if any(later > earlier + slack for at, earlier in enumerate(values) for later in values[at + 1 :]):
        return "order"
    # Within the slack any choice is right; at slack 0 only exact ties remain, and those go to the lower id.
    return "" if slack > 0 else "tie"


def weights_of_choice(ids: Tensor, scores: Tensor, scale: float) -> Tensor:
    """Routing weights that the definition gives to an arbitrary choice, [M, k] f64.

    Args:
        ids: [M, k] integer in range.
        scores: [M, E] f64 sigmoid scores without the selection bias.
        scale: routed scaling factor.
    """
    chosen = torch.gather(scores, 1, ids.to(torch.int64))
    return scale * chosen / (chosen.sum(1, keepdim=True) + 1e-20)


def distance(value: Tensor, reference: Tensor) -> dict[str, Any]:
    """How far a step's result is from another, [rows, width] each: see `verify.protocol.step_distance.MEASURES`."""
    got, want = value.double(), reference.double()
    finite = got.isfinite() & want.isfinite()
    difference = torch.where(finite, got - want, 0.0)
    norms = want.norm(dim=1).clamp(min=1e-30)
    rows = difference.norm(dim=1) / norms
    return {
        "nonfinite": int((~finite).sum()),
        "median_row_l2": float(rows.median()),
        "row_l2": float(rows.max()),
        "mean": float(difference.abs().sum() / want.abs().sum().clamp(min=1e-30)),
        "worst_row": int(rows.argmax()),
    }
