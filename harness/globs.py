"""Path globs of the scope table: `*` and `?` stay within one path component, `**` spans components.

Only what the protected/editable table needs; no character classes, no negation, no file system access.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["matches", "overlap", "problem"]


def problem(glob: str) -> str | None:
    """Why a glob cannot be used, or None."""
    parts = glob.split("/")
    if glob.startswith("/") or "\\" in glob:
        return "must be a relative POSIX path pattern"
    if any(part in ("", ".", "..") for part in parts):
        return "has an empty, '.' or '..' component"
    if any("**" in part and part != "**" for part in parts):
        return "uses ** inside a component"
    if any(char in glob for char in "[]{}!"):
        return "uses [, ], { , } or !, which have no meaning here"
    if parts[0] == "**":
        return "starts with **, which matches every path"
    return None


@lru_cache(maxsize=1024)
def _pattern(glob: str) -> re.Pattern[str]:
    out: list[str] = []
    parts = glob.split("/")
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            out.append(".+" if last else "(?:[^/]+/)*")
        else:
            body = "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else re.escape(c) for c in part)
            out.append(body if last else body + "/")
    return re.compile("".join(out), re.DOTALL)


def matches(glob: str, path: str) -> bool:
    """Whether a path matches. `a/**` matches everything below `a`, not `a` itself."""
    return _pattern(glob).fullmatch(path) is not None


def overlap(first: str, second: str) -> bool:
    """Whether some path could match both globs. Two components with wildcards are assumed to share a name."""
    return _overlap(tuple(first.split("/")), tuple(second.split("/")))


def _overlap(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    if not a or not b:
        # A trailing ** needs at least one component, so nothing is left for it here.
        return not a and not b
    if a[0] == "**":
        if len(a) == 1:
            return True
        return _overlap(a[1:], b) or _overlap(a, b[1:]) or (b[0] == "**" and _overlap(a, b[1:]))
    if b[0] == "**":
        return _overlap(b, a)
    wild_a, wild_b = _is_wild(a[0]), _is_wild(b[0])
    if wild_a and wild_b:
        same = True
    elif wild_a:
        same = matches(a[0], b[0])
    elif wild_b:
        same = matches(b[0], a[0])
    else:
        same = a[0] == b[0]
    return same and _overlap(a[1:], b[1:])


def _is_wild(part: str) -> bool:
    return "*" in part or "?" in part
