"""From raw lines to a schedule: per call the fastest right point, and the buckets that follow.

A point replaces the current one only if its median is lower by `MIN_GAIN` and its slowest tenth is below the current
one's median, so that noise does not move schedules about. Buckets end at the rows that were timed; calls with fewer or
more rows than were timed keep their buckets. Where no schedule was and, from some number of rows on, the best point is
not faster than the standard path by `MIN_GAIN`, none begins: the planner then declares the standard path.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3_backend.aot.schedule import Bucket, Schedule
from verify.tuning.manifest import Timed, TuningManifest

__all__ = ["MIN_GAIN", "Choice", "choose", "schedule_of", "spread"]

MIN_GAIN = 1.01


@dataclass(frozen=True)
class Choice:
    """What one call's lines say."""

    timed: Timed
    point: Mapping[str, int]
    us: tuple[float, float, float]
    """Tenth percentile, median, ninetieth of the chosen point."""
    before: tuple[float, float, float] | None
    """The same of the point that the schedule had; null if it had none or it was wrong."""
    standard: tuple[float, float, float]
    right: int
    """Points with right numbers."""
    bytes: int

    @property
    def worth_a_bucket(self) -> bool:
        """Whether a schedule had one, or the point is faster than the standard path."""
        return self.timed.current is not None or self.us[1] * MIN_GAIN < self.standard[1]


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """(10th percentile, median, 90th) of at least ten samples."""
    ordered = sorted(samples)
    at = len(ordered) // 10
    return ordered[at], statistics.median(ordered), ordered[-1 - at]


def choose(manifest: TuningManifest, lines: Sequence[Mapping[str, Any]]) -> tuple[Choice, ...]:
    """The choice of every call that was timed and has a right point, in the archive's order.

    A call that was begun again after a killed session counts with its last lines.
    """
    points: dict[str, dict[str, Mapping[str, Any]]] = {}
    usual: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        if line["kind"] == "standard":
            usual[line["call"]] = line
        elif line["kind"] == "point":
            points.setdefault(line["call"], {})[str(sorted(line["tunables"].items()))] = line
    choices = []
    for timed in manifest.calls:
        found = points.get(timed.key, {})
        right = [(spread(line["us"]), line) for line in found.values() if line["us"] is not None]
        if len(found) < len(timed.points) or not right or timed.key not in usual:
            continue
        us, best = min(right, key=lambda entry: entry[0][1])
        now = next((spread_ for spread_, line in right if line["tunables"] == timed.current), None)
        if now is not None and not (us[1] * MIN_GAIN < now[1] and us[2] < now[1]):
            assert timed.current is not None
            us, point = now, timed.current
        else:
            point = best["tunables"]
        choices.append(Choice(timed, point, us, now, spread(usual[timed.key]["us"]), len(right), int(best["bytes"])))
    return tuple(choices)


def schedule_of(current: Schedule, choices: Sequence[Choice]) -> Schedule:
    """The schedule with the choices of its geometry in place.

    Args:
        current: as it stands.
        choices: of this geometry; every combination of specialised sizes at the same rows.
    """
    groups: dict[tuple[tuple[str, int], ...], list[Choice]] = {}
    for choice in choices:
        groups.setdefault(tuple(sorted(choice.timed.sizes.items())), []).append(choice)
    ladders = {sizes: _ladder(current, dict(sizes), group) for sizes, group in groups.items()}
    shared = len({repr(ladder) for ladder in ladders.values()}) == 1
    buckets: list[Bucket] = []
    for sizes, ladder in ladders.items():
        when = {} if shared else dict(sizes)
        buckets += [replace(bucket, when=when) for bucket in ladder]
        if shared:
            break
    return replace(current, buckets=tuple(buckets))


def _ladder(current: Schedule, sizes: Mapping[str, int], choices: Sequence[Choice]) -> list[Bucket]:
    """Ascending buckets of calls with these sizes; neighbours with the same values become one.

    A bucket covers all rows below it that no other does, so only the last ones can be left out.
    """
    ordered = sorted(choices, key=lambda choice: choice.timed.rows)
    while ordered and not ordered[-1].worth_a_bucket:
        ordered.pop()
    kept = [Bucket(b.max_rows, b.values) for b in current.buckets if b.applies(sizes)]
    if ordered:
        first, last = ordered[0].timed.rows, ordered[-1].timed.rows
        buckets = [b for b in kept if b.max_rows < first]
        buckets += [Bucket(choice.timed.rows, dict(choice.point)) for choice in ordered]
        buckets += [b for b in kept if b.max_rows > last]
    else:
        buckets = kept
    merged: list[Bucket] = []
    for bucket in buckets:
        if merged and dict(merged[-1].values) == dict(bucket.values):
            merged.pop()
        merged.append(bucket)
    return merged
