"""How far a specialised step may be from the standard step: what every path gate holds its results against.

Tolerances are earned: multiples of the standard path's own distance from the fp64 reference, plus one rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verify.protocol.decision import Finding

__all__ = ["FACTORS", "FLOORS", "MEASURES", "grouped", "step_exceeds", "step_tolerance"]

MEASURES = ("median_row_l2", "row_l2", "mean")
"""Distance of two results of shape [rows, width]: median and maximum over rows of the relative l2 distance, and
sum |a - b| / sum |b|."""

FACTORS: Mapping[str, float] = {"median_row_l2": 3.0, "row_l2": 4.0, "mean": 3.0}
"""Allowed distance between specialised and standard step, in distances between standard step and fp64 reference: the
specialised path may be twice as far from the reference as the standard path (2 + 1), its worst row a little more."""

FLOORS: Mapping[str, float] = {"median_row_l2": 2.0**-8, "row_l2": 2.0**-7, "mean": 2.0**-8}
"""One bf16 rounding of the result."""


def step_tolerance(standard: Mapping[str, Any]) -> dict[str, float]:
    """Allowed distances of a specialised step from the standard step.

    Args:
        standard: largest distances of standard steps from the fp64 reference, by measure.
    """
    return {name: FACTORS[name] * float(standard[name]) + FLOORS[name] for name in MEASURES}


def step_exceeds(distance: Mapping[str, Any], allowed: Mapping[str, float]) -> list[str]:
    """What makes a step differ from the standard step: a value that is not finite, measures above their tolerance."""
    wrong = ["nonfinite"] if int(distance["nonfinite"]) > 0 else []
    return wrong + [name for name in MEASURES if not float(distance[name]) <= allowed[name]]


def grouped(findings: Sequence[Finding]) -> Iterable[Finding]:
    """One finding per code and message, with the number of places where the same was seen."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.message), []).append(finding)
    for group in groups.values():
        first = group[0]
        more = f" (in {len(group)} places)" if len(group) > 1 else ""
        yield Finding(first.code, first.message + more, first.where, first.expected, first.next)
