"""Reading TOML so that every complaint can name the line.

`tomllib` decides what a document means; this module adds where each key stands. It is no TOML validator of its own:
the position scan runs only on text that `tomllib` has accepted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness.errors import FasttrackError

__all__ = ["TomlDocument", "read", "validate"]

KeyPath = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class TomlDocument:
    """Parsed content and the 1-based line of every key, array element and table header."""

    name: str
    """How the file is called in messages."""
    data: Mapping[str, Any]
    lines: Mapping[KeyPath, int] = field(repr=False)

    def line(self, path: Sequence[str | int]) -> int:
        """Line of a key path, or of its nearest enclosing key; 1 for the document itself."""
        parts = tuple(path)
        while parts:
            if parts in self.lines:
                return self.lines[parts]
            parts = parts[:-1]
        return 1

    def where(self, path: Sequence[str | int]) -> str:
        """`file:line` of a key path."""
        return f"{self.name}:{self.line(path)}"


def read(path: Path, name: str | None = None) -> TomlDocument:
    """Read and parse a TOML file.

    Args:
        path: the file.
        name: how messages call it; the path as given if None.

    Raises:
        FasttrackError: the file cannot be read, is not UTF-8, or is not TOML (names the line).
    """
    name = name or str(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise FasttrackError(
            f"byte {error.object[error.start]:#04x} is not UTF-8",
            where=f"{name}:{line}",
            expected="UTF-8 text",
            next=f"re-encode {name}",
        ) from error
    except OSError as error:
        raise FasttrackError(
            f"cannot read the file ({error.strerror})",
            where=name,
            expected="a readable TOML file",
            next=f"ls -l {name}",
        ) from error
    return parse(text, name)


def parse(text: str, name: str) -> TomlDocument:
    """Parse TOML text; see `read` for the errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = re.search(r"\(at line (\d+), column \d+\)", message)
        line = int(at.group(1)) if at else text.count("\n") + 1
        what = re.sub(r"\s*\(at .*\)$", "", message)
        raise FasttrackError(
            f"broken TOML: {what}", where=f"{name}:{line}", expected="TOML 1.0", next=f"edit {name}"
        ) from error
    return TomlDocument(name=name, data=data, lines=_Positions(text.replace("\r\n", "\n")).scan())


def validate(model: type[Model], document: TomlDocument, *, next: str) -> Model:  # noqa: A002 - the field's name everywhere
    """Turn a document into a pydantic model.

    Raises:
        FasttrackError: names file and line of the first complaint and lists all others.
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        complaints = sorted((_complaint(document, e) for e in error.errors()), key=lambda c: c[0])
        line, what = complaints[0]
        rest = "".join(f"; line {n}: {text}" for n, text in complaints[1:])
        raise FasttrackError(
            f"{what}{rest}",
            where=f"{document.name}:{line}",
            expected=f"a valid {model.__name__.lower()} file",
            next=next,
        ) from error


def _complaint(document: TomlDocument, error: Any) -> tuple[int, str]:
    """(line, text) of one pydantic error. Validators may raise `At` to point at a key below their own model."""
    path = tuple(error["loc"])
    cause = (error.get("ctx") or {}).get("error")
    if isinstance(cause, At):
        path = (*path, *cause.path)
    path = _existing(document.data, path)
    dotted = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    message = str(cause) if cause is not None else _plain(error)
    return document.line(path), f"{dotted}: {message}" if dotted else message


def _existing(data: Any, path: KeyPath) -> KeyPath:
    """The part of a pydantic location that names keys of the document (pydantic appends union tags to it).

    A last missing key is kept, so that "Field required" says which.
    """
    kept: list[str | int] = []
    for part in path:
        if isinstance(data, Mapping) and isinstance(part, str):
            kept.append(part)
            if part not in data:
                break
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            kept.append(part)
            data = data[part]
        else:
            break
    return tuple(kept)


def _plain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    if error["type"] == "missing":
        return "required key is missing"
    return f"{error['msg']}, got {error['input']!r}"


class At(ValueError):  # noqa: N818 - reads as `raise At(path, ...)` in validators
    """A validator's complaint about a key below the model it validates."""

    def __init__(self, path: Sequence[str | int], message: str) -> None:
        super().__init__(message)
        self.path = tuple(path)


class _Positions:
    """Walks valid TOML once and records the line at which each key, element and header starts."""

    _BARE = re.compile(r"[A-Za-z0-9_-]+")
    _STRINGS = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'", re.DOTALL)
    _SCALAR = re.compile(r"[^,\]}#\n]+")
    _BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.found: dict[KeyPath, int] = {}
        self.array_tables: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._blank() < len(self.text):
            if self.text.startswith("[[", self.at):
                table = self._header(2)
            elif self.text[self.at] == "[":
                table = self._header(1)
            else:
                self._pair(table)
        return self.found

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _blank(self) -> int:
        self.at = self._match(self._BLANK).end()
        return self.at

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise AssertionError(f"position scan lost at offset {self.at}: {self.text[self.at : self.at + 40]!r}")
        return match

    def _note(self, path: KeyPath, line: int) -> None:
        for end in range(1, len(path) + 1):
            self.found.setdefault(path[:end], line)

    def _header(self, width: int) -> KeyPath:
        line = self._line()
        self.at += width
        keys = self._key()
        path: KeyPath = ()
        for index, key in enumerate(keys):
            path = (*path, key)
            if path in self.array_tables and (index + 1 < len(keys) or width == 1):
                path = (*path, self.array_tables[path])
        if width == 2:
            self.array_tables[path] = self.array_tables.get(path, -1) + 1
            path = (*path, self.array_tables[path])
        self._note(path, line)
        self._blank()
        self.at += width
        return path

    def _key(self) -> tuple[str, ...]:
        parts: list[str] = []
        while True:
            self._blank()
            quoted = self.text[self.at] in "\"'"
            raw = self._match(self._STRINGS if quoted else self._BARE).group()
            self.at += len(raw)
            parts.append(next(iter(tomllib.loads(f"{raw}=0"))))
            self._blank()
            if not self.text.startswith(".", self.at):
                return tuple(parts)
            self.at += 1

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = (*table, *self._key())
        self._note(path, line)
        self._blank()
        self.at += 1  # "="
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        self._blank()
        char = self.text[self.at]
        if char in "\"'":
            self.at = self._match(self._STRINGS).end()
        elif char == "[":
            self._items(path, "]")
        elif char == "{":
            self._items(path, "}")
        else:
            self.at = self._match(self._SCALAR).end()

    def _items(self, path: KeyPath, close: str) -> None:
        self.at += 1
        index = 0
        while True:
            self._blank()
            if self.text[self.at] == close:
                self.at += 1
                return
            if close == "}":
                self._pair(path)
            else:
                self._note((*path, index), self._line())
                self._value((*path, index))
                index += 1
            self._blank()
            if self.text[self.at] == ",":
                self.at += 1
