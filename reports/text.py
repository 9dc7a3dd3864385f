"""Text that is safe to show: numbers with units, and foreign strings in a terminal, in Markdown and in HTML.

Strings of a bundle were written by others. `visible` makes control, bidirectional and invisible characters readable, so
that no string can move a terminal's cursor or reorder a line; `markdown` also takes away every meaning that Markdown or
a forge gives to characters. HTML escaping itself is left to the template engine, which escapes everything.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["code_span", "count", "duration", "fixed", "markdown", "quantity", "size", "visible", "visible_line"]

_KEPT = frozenset("\n")
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_MARKUP = re.compile(r"[\\`*\[\]#~$]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.|^[-+=]|(?<=^\d)[.)]|(?<=^\d\d)[.)]")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "|": "&#124;", "@": "@<!-- -->"}


def visible(text: str, limit: int = 4000) -> str:
    """Replace characters that act instead of showing by their escapes, and cut overlong text visibly.

    Args:
        text: any string.
        limit: characters to keep.
    """
    cut = text[:limit]
    shown = "".join(
        char if char in _KEPT or unicodedata.category(char) not in _HIDDEN_CATEGORIES else _escape(char) for char in cut
    )
    return shown if len(text) <= limit else f"{shown}… ({len(text) - limit} more characters)"


def visible_line(text: str, limit: int = 4000) -> str:
    """As `visible`, on one line."""
    return visible(text, limit).replace("\n", " ⏎ ")


def markdown(text: str) -> str:
    """Make a foreign string literal inside a Markdown sentence or cell: one line, no markup, mention or link."""
    flat = visible_line(text).strip()
    escaped = _MARKUP.sub(lambda match: "\\" + match.group(), flat)
    return "".join(_ENTITIES.get(char, char) for char in escaped)


def code_span(text: str) -> str:
    """Make a foreign string a Markdown code span that its own backticks and pipes cannot leave."""
    flat = visible_line(text).replace("|", "¦")
    longest = max((len(run) for run in re.findall(r"`+", flat)), default=0)
    fence = "`" * (longest + 1)
    padding = " " if not flat.strip() or flat[0] in " `" or flat[-1] in " `" else ""
    return f"{fence}{padding}{flat}{padding}{fence}"


def fixed(value: float, digits: int = 3) -> str:
    """A number with a fixed number of decimals, or in exponent form where that would hide it."""
    if value and (abs(value) >= 10**7 or abs(value) < 10 ** (1 - digits)):
        return f"{value:.{digits}g}"
    return f"{value:.{digits}f}"


def quantity(value: float, unit: str) -> str:
    """A measured value with its unit; whole numbers without decimals."""
    number = f"{value:,.0f}" if value == int(value) and abs(value) < 10**15 else fixed(value)
    return f"{number} {unit}".strip()


def count(number: int, singular: str, plural: str | None = None) -> str:
    """`1 file`, `3 files`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def duration(seconds: float) -> str:
    """`0.4 s`, `75 s`, `12 min 5 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def size(number: int) -> str:
    """Bytes in binary units."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
