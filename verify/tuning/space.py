"""Which points of a kernel's tunables are tried for one call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from harness.errors import FasttrackError
from k3_backend.aot.schedule import Tunable

__all__ = ["Point", "parse_vary", "points"]

Point = dict[str, int]
"""One value per tunable."""


def parse_vary(texts: Sequence[str], tunables: Sequence[Tunable]) -> dict[str, tuple[int, ...]]:
    """Tunables that vary together, from `name` (all declared values) or `name=1,2`.

    Raises:
        FasttrackError: names the first text that fits no declaration.
    """
    declared = {t.name: t.values for t in tunables}
    varied: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        try:
            values = tuple(int(value) for value in listed.split(",")) if listed else declared[name]
            if name in varied or not set(values) <= set(declared[name]) or len(set(values)) != len(values):
                raise ValueError(text)
        except (KeyError, ValueError) as error:
            known = "; ".join(f"{known}: {', '.join(map(str, values))}" for known, values in declared.items())
            raise FasttrackError(
                f"{text!r} names no declared tunable with such values", where="--vary", expected=known,
                next="see kernels/<op>/cute.toml",
            ) from error  # fmt: skip
        varied[name] = values
    return varied


def points(centre: Point | None, tunables: Sequence[Tunable], varied: Mapping[str, Sequence[int]]) -> list[Point]:
    """Points around a centre, the centre first.

    Args:
        centre: what the schedule says; null where it has no bucket yet.
        tunables: as declared.
        varied: their cross product, the rest as in the centre; if empty, every change of one tunable.

    Raises:
        FasttrackError: no centre, and some tunable is not varied.
    """
    missing = [t.name for t in tunables if t.name not in varied]
    if centre is None and missing:
        raise FasttrackError(
            f"no bucket to start from, and no values for {', '.join(missing)}", where="--vary",
            expected="values for all tunables, or rows that the schedule covers", next="fasttrack tune build --help",
        )  # fmt: skip
    start = centre or {}
    if varied:
        crossed = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
    else:
        crossed = [{t.name: value} for t in tunables for value in t.values]
    found = [] if centre is None else [dict(centre)]
    for change in crossed:
        point = {t.name: {**start, **change}[t.name] for t in tunables}
        if point not in found:
            found.append(point)
    return found
