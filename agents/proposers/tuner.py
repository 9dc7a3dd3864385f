"""Proposer `tuner`: a small, explainable search over the tunables that a kernel declares. Uses no model.

It works by coordinates. Around the current best schedule it times every one-tunable change at the task's batches
(advisory: its own clock readings never enter a verdict), then proposes the most promising tunable that has not been
tried from this best, setting each batch bucket to its own best value; when no single tunable is left it proposes the
joint descent, all tunables together. While the task still has candidates it then probes the best change of each tunable
that its own timings hold for no gain: they are rough, and the gate's clock decides. The gatekeeper's answers steer it:
a kept proposal moves the centre of the next sweep, a refused one is never proposed again from the same centre.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agents.proposal import BestView, Exhausted, History, Proposal
from harness.errors import FasttrackError
from harness.records import Cell
from k3_backend.aot.schedule import Bucket, Schedule, Tunable, render

__all__ = ["MIN_GAIN", "Point", "Timer", "Tuner", "uniform_schedule", "with_point"]

Point = Mapping[str, int]
"""One value per tunable."""

Timer = Callable[[int, Sequence[Point]], Sequence[float]]
"""(rows M, points) to seconds per call of each point: medians of interleaved repeats, so that ratios are fair."""

_Sweep = tuple[float, list[tuple[str, Point, float]]]
"""Seconds of a point, and (changed tunable, point, seconds) of its neighbours."""

MIN_GAIN = 1.02
"""Advisory ratio below which a change counts as no gain: about twice the spread of one interleaved median."""


@dataclass(frozen=True)
class _Move:
    """A change of some tunables at some row counts, with its predicted ratio per row count."""

    label: str
    points: Mapping[int, Point]
    ratios: Mapping[int, float]

    @property
    def merit(self) -> tuple[float, float]:
        """Worst cell first, then the geometric mean: a candidate is accepted only if it wins everywhere."""
        logs = [math.log(r) for r in self.ratios.values()]
        return min(logs), sum(logs) / len(logs)


class Tuner:
    """Schedule search for one op on one target.

    Args:
        op: the op whose schedule file is tuned.
        geometry: name of the target's geometry.
        path: repository path of that schedule file.
        space: the kernel's declared tunables.
        cells: the task's cells of this op; their row counts are batch * tokens.
        timer: advisory timing of points.
    """

    name = "tuner"

    def __init__(
        self,
        op: str,
        *,
        geometry: str,
        path: str,
        space: Sequence[Tunable],
        cells: Sequence[Cell],
        timer: Timer,
    ) -> None:
        self.op = op
        self.geometry = geometry
        self.path = path
        self.space = tuple(space)
        self.cells = tuple(cells)
        self.rows = tuple(sorted({cell.batch * cell.tokens for cell in cells}))
        self.timer = timer

    def propose(self, history: History, best: BestView) -> Proposal:
        """The most promising untried move from the current best schedule."""
        schedule = Schedule.load(best.path(self.path), op=self.op, geometry=self.geometry, tunables=self.space)
        tried = {entry.hypothesis for entry in history}
        sweeps = {rows: self._sweep(rows, self._point(schedule, rows)) for rows in self.rows}
        for move in self._moves(schedule, sweeps):
            proposal = self._proposal(schedule, move)
            if proposal is not None and proposal.hypothesis not in tried:
                return proposal
        raise Exhausted(f"no untried change of {', '.join(t.name for t in self.space)}")

    def tuned_for(self, rows: int, hold: Point) -> Point:
        """The point that joint descent finds best at one row count, starting from each tunable's first value.

        Args:
            rows: M.
            hold: tunables that keep a value.

        Raises:
            FasttrackError: a held tunable is not declared, or not with that value.
        """
        declared = {t.name: t.values for t in self.space}
        for name, value in hold.items():
            if value not in declared.get(name, ()):
                raise FasttrackError(
                    f"{self.op} declares no tunable {name} with value {value}",
                    where="baseline.hold",
                    expected="; ".join(f"{known}: {', '.join(map(str, values))}" for known, values in declared.items()),
                    next="correct the task file",
                )
        return self._descend(rows, {t.name: t.values[0] for t in self.space} | dict(hold), frozenset(hold))[0]

    # --- moves -----------------------------------------------------------------------------------------------------

    def _moves(self, schedule: Schedule, sweeps: Mapping[int, _Sweep]) -> Iterator[_Move]:
        """Promising changes of one tunable, then all tunables together, then probes."""
        gaining = [move for move in self._single_moves(schedule, sweeps, MIN_GAIN) if max(move.ratios.values()) > 1.0]
        yield from sorted(gaining, key=lambda move: move.merit, reverse=True)
        yield self._joint_move(schedule)
        yield from sorted(self._single_moves(schedule, sweeps, 0.0), key=lambda move: move.merit, reverse=True)

    def _single_moves(self, schedule: Schedule, sweeps: Mapping[int, _Sweep], least: float) -> list[_Move]:
        """Per tunable: each row count's best other value, where its ratio is at least `least`; the rest as it is."""
        moves = []
        for name in (t.name for t in self.space):
            points, ratios = {}, {}
            for rows, (here, timed) in sweeps.items():
                options = [(seconds, point) for changed, point, seconds in timed if changed == name]
                seconds, point = min(options, key=lambda option: option[0], default=(here, self._point(schedule, rows)))
                gains = here / seconds >= least
                points[rows] = point if gains else self._point(schedule, rows)
                ratios[rows] = here / seconds if gains else 1.0
            moves.append(_Move(name, points, ratios))
        return moves

    def _joint_move(self, schedule: Schedule) -> _Move:
        """All tunables together: coordinate descent at each row count."""
        points, ratios = {}, {}
        for rows in self.rows:
            point, ratio = self._descend(rows, self._point(schedule, rows))
            points[rows], ratios[rows] = point, ratio
        return _Move("all tunables", points, ratios)

    def _sweep(self, rows: int, centre: Point, held: frozenset[str] = frozenset()) -> _Sweep:
        """Seconds of the centre, and of every point that differs from it in one tunable that is not held."""
        changes = [
            (tunable.name, {**centre, tunable.name: value})
            for tunable in self.space
            for value in tunable.values
            if value != centre[tunable.name] and tunable.name not in held
        ]
        seconds = self.timer(rows, [centre, *(point for _, point in changes)])
        return seconds[0], [(name, point, s) for (name, point), s in zip(changes, seconds[1:], strict=True)]

    def _descend(self, rows: int, start: Point, held: frozenset[str] = frozenset()) -> tuple[Point, float]:
        """Repeat the best one-tunable change while it gains MIN_GAIN; the point and its ratio over the start.

        No point is visited twice: two noisy sweeps may each call the other's centre the faster one.
        """
        point, ratio = start, 1.0
        visited = [dict(start)]
        while True:
            here, timed = self._sweep(rows, point, held)
            fresh = [(changed, seconds) for _, changed, seconds in timed if dict(changed) not in visited]
            best, seconds = min(fresh, key=lambda entry: entry[1], default=(point, here))
            if here / seconds < MIN_GAIN:
                return point, ratio
            point, ratio = best, ratio * here / seconds
            visited.append(dict(point))

    # --- writing ---------------------------------------------------------------------------------------------------

    def _point(self, schedule: Schedule, rows: int) -> Point:
        point = schedule.lookup(rows)
        if point is None:
            raise Exhausted(f"the schedule of {self.op} has no bucket for {rows} rows")
        return point

    def _proposal(self, schedule: Schedule, move: _Move) -> Proposal | None:
        """The move as a schedule file; None if it changes nothing."""
        changed = schedule
        for rows, point in move.points.items():
            changed = with_point(changed, rows, point)
        if changed == schedule:
            return None
        text = "; ".join(
            f"rows {rows}: " + ", ".join(f"{name}={value}" for name, value in point.items())
            for rows, point in move.points.items()
            if point != schedule.lookup(rows)
        )
        predicted = {cell.key: move.ratios[cell.batch * cell.tokens] for cell in self.cells}
        return Proposal(
            hypothesis=f"{self.op}: change {move.label} ({text})",
            predicted=predicted,
            files={self.path: render(changed)},
        )


def with_point(schedule: Schedule, rows: int, point: Point) -> Schedule:
    """The schedule with the bucket that covers `rows` set to a point; KeyError if no bucket covers it."""
    for index, bucket in enumerate(schedule.buckets):
        if rows <= bucket.max_rows:
            buckets = (*schedule.buckets[:index], Bucket(bucket.max_rows, dict(point)), *schedule.buckets[index + 1 :])
            return replace(schedule, buckets=buckets)
    raise KeyError(f"schedule of {schedule.op} has no bucket for {rows} rows")


def uniform_schedule(schedule: Schedule, point: Point) -> Schedule:
    """The schedule with every bucket set to the same point."""
    return replace(schedule, buckets=tuple(Bucket(bucket.max_rows, dict(point)) for bucket in schedule.buckets))
