"""Fields of raw lines that a stranger's machine may have written: right in type and range, or a ValueError.

Every function takes the number of the line, which its message names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["count", "mapping", "number_of", "objects", "samples", "text"]

MOST_SAMPLES = 1000
MOST = 1e7
"""Times in us and speeds in GB/s beyond it are no measurements."""


def samples(arm: Mapping[str, Any], number: int) -> list[float]:
    """Times of an arm, at least one."""
    values = arm.get("samples_us")
    if not isinstance(values, list) or not 0 < len(values) <= MOST_SAMPLES:
        raise ValueError(f"line {number}: an arm without samples")
    return [number_of(value, number) for value in values]


def number_of(value: object, number: int) -> float:
    """A number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"line {number}: {str(value)[:40]!r} is no number")
    if not 0.0 < value <= MOST:
        raise ValueError(f"line {number}: {value!r} is out of range")
    return float(value)


def count(line: Mapping[str, Any], name: str, number: int) -> int:
    """An integer that is not negative."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"line {number}: {name} is {str(value)[:40]!r}")
    return value


def text(line: Mapping[str, Any], name: str, number: int) -> str:
    """A text."""
    value = line.get(name)
    if not isinstance(value, str):
        raise ValueError(f"line {number}: {name} is no text")
    return value


def objects(line: Mapping[str, Any], name: str, number: int) -> list[Mapping[str, Any]]:
    """A list of objects."""
    value = line.get(name)
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"line {number}: {name} is no list of objects")
    return value


def mapping(line: Mapping[str, Any], name: str, number: int) -> Mapping[str, Any]:
    """An object."""
    value = line.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"line {number}: {name} is no object")
    return value
