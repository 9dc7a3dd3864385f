"""Which secret cases the kernels gate runs: every input class, every declared batch, every schedule bucket's edges.

The plan is drawn after the artifacts' digests are fixed, from the operating system's randomness, and stored in the
header of the raw file, so that an interrupted gate goes on with the same cases and anybody can replay them.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verify.evaluator.inputs import Case, kinds, smallest_batch

__all__ = ["Planned", "draw_plan", "from_json"]

MAX_BATCH = 64
"""Largest batch in the scope of the specialised path."""
SMALL_TIER_DRAWS = 4
"""Tiers with fewer draws per class than this stay within `SMALL_TIER_ROWS` rows, to end within a minute."""
SMALL_TIER_ROWS = 64
SMALL_TIER_FREE_ROWS = 16
"""Largest rows there of cases whose size is free: the declared sizes are covered, the classes need no size."""
WITH_DRAFTS = frozenset({"padding"})
"""Classes whose first draw has several tokens per request where any are in scope: null slots behind the first one."""


@dataclass(frozen=True)
class Planned:
    """One case of the plan."""

    case: Case
    contended: bool
    """Run while other processes keep all CPUs busy."""

    def to_json(self) -> dict[str, Any]:
        """As the header carries it."""
        return {**asdict(self.case), "id": self.case.id, "contended": self.contended}


def from_json(data: Mapping[str, Any]) -> Planned:
    """Inverse of `Planned.to_json`."""
    fields = {name: data[name] for name in Case.__dataclass_fields__}
    return Planned(Case(**fields), bool(data["contended"]))


def draw_plan(
    ops: Iterable[str],
    *,
    geometry: str,
    batches: Sequence[int],
    tokens: Sequence[int],
    draws: int,
    edges: Mapping[str, Sequence[int]],
    threads: Sequence[int] = (1, 2, 2),
) -> list[Planned]:
    """Draw the cases of a gate run.

    Args:
        ops: ops to evaluate.
        geometry: the target's geometry.
        batches: the tier's declared batches.
        tokens: T values in scope (1 + drafts).
        draws: secret draws per op and input class.
        edges: per op, the row counts at which its schedule changes bucket.
        threads: workers of the launch pool, one of them per case.

    Returns:
        Per op: at least `draws` cases of every class, and at least one case at every declared batch with T = 1, at
        every T, on both sides of every bucket edge, and at two batches that nobody declared.
    """
    chooser = random.SystemRandom()
    small = draws < SMALL_TIER_DRAWS
    limit = SMALL_TIER_ROWS if small else MAX_BATCH * max(tokens)
    free = SMALL_TIER_FREE_ROWS if small else limit
    plan: list[Planned] = []
    for op in ops:
        points = _points(chooser, batches, tokens, edges.get(op, ()), limit)
        chooser.shuffle(points)
        wanted = [kind for kind in kinds(op) for _ in range(draws)]
        chooser.shuffle(wanted)
        for kind, (batch, count) in _pairs(chooser, wanted, points, kinds(op), tokens, free):
            case = Case(op, kind, batch, count, chooser.choice(threads), secrets.token_hex(16), geometry)
            plan.append(Planned(case, contended=chooser.random() < 1 / 3))
    return plan


def _points(
    chooser: random.Random, batches: Sequence[int], tokens: Sequence[int], edges: Sequence[int], limit: int
) -> list[tuple[int, int]]:
    """(batch, tokens) that must occur."""
    points = {(batch, 1) for batch in batches}
    points |= {(chooser.randint(1, max(1, min(MAX_BATCH, limit // count))), count) for count in tokens}
    points |= {(chooser.randint(1, MAX_BATCH), 1) for _ in range(2)}
    for rows in {row for edge in edges for row in (edge, edge + 1)}:
        fitting = [count for count in tokens if rows % count == 0 and rows // count <= MAX_BATCH]
        if rows <= limit and fitting:
            count = chooser.choice(fitting)
            points.add((rows // count, count))
    return sorted(points)


def _pairs(
    chooser: random.Random,
    wanted: Sequence[str],
    points: Sequence[tuple[int, int]],
    known: Sequence[str],
    tokens: Sequence[int],
    limit: int,
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every wanted class once and every point once, each class at a point that is large enough for it."""
    left = list(points)
    drafted = [count for count in tokens if count > 1]
    missing = set(WITH_DRAFTS) if drafted else set()
    for kind in sorted(wanted, key=smallest_batch, reverse=True):  # stable: the order is random but for these
        counts = drafted if kind in missing else (1, *tokens)
        missing.discard(kind)
        fitting = (i for i, (batch, count) in enumerate(left) if batch >= smallest_batch(kind) and count in counts)
        at = next(fitting, None)
        yield kind, _any_point(chooser, counts, limit, smallest_batch(kind)) if at is None else left.pop(at)
    for point in left:
        yield chooser.choice([kind for kind in known if point[0] >= smallest_batch(kind)]), point


def _any_point(chooser: random.Random, tokens: Sequence[int], limit: int, smallest: int) -> tuple[int, int]:
    """Any point in scope; small ones more often, since every class must be seen there and they cost little."""
    count = chooser.choice(tokens)
    largest = max(smallest, min(MAX_BATCH, limit // count))
    return max(smallest, round(largest ** chooser.random())), count
