"""Canonical JSON: one value, one sequence of bytes; and a reader that accepts nothing else.

Two forms: `line` (compact, one line, for JSONL) and `document` (indented, for files that people open). Keys are
sorted, text is ASCII with escapes, numbers are what Python's shortest round-trip prints, NaN and infinity do not
exist. The reader refuses duplicate keys, non-finite numbers, lone surrogates, deep nesting and every byte sequence
that the writer would not have produced, so that a file's digest and its meaning cannot drift apart. It says nothing
about schemas: pydantic records do that.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["NotCanonicalError", "document", "line", "parse", "parse_lines"]

MAX_DEPTH = 32
"""Containers within containers; our records need fewer than ten."""


class NotCanonicalError(ValueError):
    """Bytes that the canonical writer would not have produced; the message says which rule and where."""


def line(value: Any) -> bytes:
    """Serialise to one line without the newline.

    Raises:
        ValueError: NaN, infinity or a lone surrogate in the value.
        TypeError: a type that JSON does not have.
    """
    return _encode(value, json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False))


def document(value: Any) -> bytes:
    """Serialise to an indented file that ends with a newline. Raises as `line` does."""
    return _encode(value, json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False)) + b"\n"


def parse(data: bytes, *, form: str = "document") -> Any:
    """Read one canonical value.

    Args:
        data: bytes of a whole file (`document`) or of one line without its newline (`line`).
        form: "document", "line", or "any" for strict JSON in any layout.

    Raises:
        NotCanonicalError: the bytes are not the canonical form of a JSON value.
    """
    try:
        value = json.loads(data.decode("ascii"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
        _check(value)
        canonical = data if form == "any" else (document if form == "document" else line)(value)
    except NotCanonicalError:
        raise
    except RecursionError:
        raise NotCanonicalError(f"nested deeper than {MAX_DEPTH} containers") from None
    except ValueError as error:
        raise NotCanonicalError(f"not JSON of our dialect: {error}") from None
    if canonical != data:
        raise NotCanonicalError(f"differs from its canonical form at byte {_first_difference(canonical, data)}")
    return value


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Read canonical JSONL: every line an object in `line` form, the last one ended by a newline, no empty lines.

    Raises:
        NotCanonicalError: names the first offending line, counted from 1.
    """
    if not data:
        return []
    if not data.endswith(b"\n"):
        raise NotCanonicalError("the last line has no newline: it was cut")
    parsed: list[dict[str, Any]] = []
    for number, raw in enumerate(data[:-1].split(b"\n"), start=1):
        try:
            value = parse(raw, form="line")
        except NotCanonicalError as error:
            raise NotCanonicalError(f"line {number}: {error}") from None
        if not isinstance(value, dict):
            raise NotCanonicalError(f"line {number}: expected an object, found {type(value).__name__}")
        parsed.append(value)
    return parsed


def _encode(value: Any, text: str) -> bytes:
    if "\\ud" in text:
        _check(value)
    return text.encode("ascii")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise NotCanonicalError("an object has a key twice")
    return value


def _refuse_constant(word: str) -> Any:
    raise NotCanonicalError(f"{word} is not a number")


def _check(value: Any) -> None:
    """Walk without recursion: depth, and text that cannot be encoded (lone surrogates)."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH and isinstance(item, dict | list):
            raise NotCanonicalError(f"nested deeper than {MAX_DEPTH} containers")
        if isinstance(item, dict):
            stack.extend((key, depth) for key in item)
            stack.extend((child, depth + 1) for child in item.values())
        elif isinstance(item, list):
            stack.extend((child, depth + 1) for child in item)
        elif isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise NotCanonicalError("text holds a lone surrogate") from None


def _first_difference(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
