"""Hash chain over raw lines that travelled: each line carries the digest of all lines up to it.

`seal` is used while measuring, `broken` when anybody decides. A chain shows lines that were edited, dropped, added or
exchanged by somebody who did not compute all digests anew; whoever owns the measuring machine can always do that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["KEY", "broken", "seal", "start"]

KEY = "chain"


def start(kit: str, nonce: str, name: str) -> str:
    """First value of a file's chain: binds it to a kit, to one run of it, and to the file."""
    return hashlib.sha256(f"{kit}|{nonce}|{name}".encode()).hexdigest()


def seal(previous: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """The line with its chain value.

    Raises:
        ValueError: NaN or infinity in the line, or it has a chain value already.
    """
    if KEY in line:
        raise ValueError(f"a line must not have a key {KEY!r} of its own")
    return {**line, KEY: _next(previous, line)}


def broken(first: str, lines: Sequence[Mapping[str, Any]]) -> int | None:
    """Number of the first line, counted from 1, whose chain value does not follow; None if all do."""
    value = first
    for number, line in enumerate(lines, start=1):
        value = _next(value, {key: item for key, item in line.items() if key != KEY})
        if line.get(KEY) != value:
            return number
    return None


def _next(previous: str, line: Mapping[str, Any]) -> str:
    text = json.dumps(line, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(f"{previous}{text}".encode()).hexdigest()
