"""Rules for any file that a reviewer is asked to read: plain text, no hidden characters, no packed lines."""

from __future__ import annotations

import tomllib
import unicodedata
from collections.abc import Iterator

from verify.gates.scope.observation import Observation

__all__ = ["decode", "scan_lines", "scan_toml"]


def decode(data: bytes) -> tuple[str, list[Observation]]:
    """The text of a file and, where it is not UTF-8, the observation that says so (text is then empty)."""
    try:
        return data.decode("utf-8"), []
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return "", [Observation("scope.text", line, f"byte {data[error.start]:#04x} is not UTF-8", "UTF-8 text")]


def scan_lines(text: str, *, line_chars: int) -> list[Observation]:
    """Control characters (tab and newline aside), bidirectional and invisible formatting, over-long lines."""
    found = list(_characters(text))
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > line_chars:
            found.append(Observation("scope.text", number, f"line of {len(line)} characters", f"at most {line_chars}"))
    return found


def _characters(text: str) -> Iterator[Observation]:
    if text.isascii() and text.isprintable():
        return
    for number, line in enumerate(text.split("\n"), start=1):
        for char in line:
            if char != "\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
                yield Observation(
                    "scope.text", number, f"character U+{ord(char):04X}", "visible characters, tabs and newlines"
                )
                break


def scan_toml(text: str) -> list[Observation]:
    """A TOML file must parse; what it means is checked by the build gate and the planner."""
    try:
        tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        message = str(error)
        head, _, place = message.partition(" (at line ")
        line = int(place.split(",")[0]) if place else text.count("\n") + 1
        return [Observation("scope.toml", line, f"does not parse: {head}", "TOML 1.0")]
    return []
