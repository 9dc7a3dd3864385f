"""Which points of a kernel's tunables are tried for one call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from harness.errors import FasttrackError
from k3_backend.aot.schedule import Tunable

__all__ = ["Point", "parse_vary", "points"]

Point = dict[str, int]
"""One value per tunable."""


def parse_vary(texts: Sequence[str], tunables: Sequence[Tunable]) -> list[dict[str, tuple[int, ...]]]:
    """Groups of tunables that vary together, each from a text such as `rows=16,32 stages` (all values of stages).

    Raises:
        FasttrackError: names the first text that fits no declaration.
    """
    declared = {t.name: t.values for t in tunables}
    groups = []
    for text in texts:
        group: dict[str, tuple[int, ...]] = {}
        try:
            for word in text.split():
                name, _, listed = word.partition("=")
                values = tuple(int(value) for value in listed.split(",")) if listed else declared[name]
                if name in group or not set(values) <= set(declared[name]) or len(set(values)) != len(values):
                    raise ValueError(word)
                group[name] = values
            if not group:
                raise ValueError(text)
        except (KeyError, ValueError) as error:
            known = "; ".join(f"{known}: {', '.join(map(str, values))}" for known, values in declared.items())
            raise FasttrackError(
                f"{text!r} names no declared tunable with such values", where="--vary", expected=known,
                next="see kernels/<op>/cute.toml",
            ) from error  # fmt: skip
        groups.append(group)
    return groups


def points(
    centre: Point | None, tunables: Sequence[Tunable], groups: Sequence[Mapping[str, Sequence[int]]]
) -> list[Point]:
    """Points around a centre, the centre first.

    Args:
        centre: what the schedule says; null where it has no bucket yet.
        tunables: as declared.
        groups: the cross product of each, the rest as in the centre; if there are none, every change of one tunable.

    Raises:
        FasttrackError: no centre, and some tunable is not in a group.
    """
    if centre is None:
        for group in groups or [{}]:
            if missing := [t.name for t in tunables if t.name not in group]:
                raise FasttrackError(
                    f"no bucket to start from, and no values for {', '.join(missing)}", where="--vary",
                    expected="values for all tunables, or rows that the schedule covers",
                    next="fasttrack tune build --help",
                )  # fmt: skip
    start = centre or {}
    changes = [
        dict(zip(group, values, strict=True)) for group in groups for values in itertools.product(*group.values())
    ]
    if not groups:
        changes = [{t.name: value} for t in tunables for value in t.values]
    found = [] if centre is None else [dict(centre)]
    for change in changes:
        point = {t.name: {**start, **change}[t.name] for t in tunables}
        if point not in found:
            found.append(point)
    return found
