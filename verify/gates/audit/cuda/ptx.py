"""Reads PTX into the form of `ops`: entry functions, parameters, instructions. PTX ISA 9; what it does not know counts.

PTX is the compiler's output before ptxas: it shows what was asked for, not what will run. Two uses: kernels that exist
as PTX only, and the comparison of what ptxas dropped or moved (`facts.compare`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from k3_backend.aot.cuda.cubin import Kernel, Slot

__all__ = ["Entry", "Statement", "entries"]

_ENTRY = re.compile(r"\.entry\s+([\w$.@?]+)\s*(\(|(?=[.{\n]))")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)(?P<ptr>(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?)\s+"
    r"(?P<name>[\w$.@?]+)\s*(?:\[(?P<count>\d+)\])?"
)
_REGISTERS = re.compile(r"^\.reg\s+\.\w+\s+(.*)$", re.DOTALL)
_LABEL = re.compile(r"^([\w$.@?]+)\s*:(?!:)")
_LOCATION = re.compile(r"^\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_STATEMENT = re.compile(r"^(?:@(?P<guard>!?[%\w$.]+)\s+)?(?P<opcode>[a-z_][\w.:]*)\s*(?P<rest>.*)$", re.DOTALL)
_REQNTID = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_ARRAY = re.compile(r"^\.(local|shared)\b[^;]*?\.(?:b|u|s|f)(\d+)\s+[\w$.@?]+\s*(?:\[([\d\s*+]*)\])?")
_MAX_UNREAD = 8


@dataclass(slots=True)
class Statement:
    """One PTX instruction; names of registers and labels carry the number of the scope that declares them."""

    opcode: str
    guard: str
    operands: tuple[str, ...]
    file: str
    line: int
    row: int
    """Line in the PTX text."""


@dataclass
class Entry:
    """One entry function."""

    kernel: Kernel
    parameter_names: dict[str, Slot]
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Label lists of indirect branches."""
    unread: list[str] = field(default_factory=list)
    unread_lines: int = 0


def entries(text: str) -> list[Entry]:
    """All entry functions with their bodies. Never raises: what is not understood is counted in `unread_lines`."""
    plain = _strip_comments(text)
    files = dict(_FILE.findall(plain))
    return [_entry(plain, found, files) for found in _ENTRY.finditer(plain)]


def _strip_comments(text: str) -> str:
    """Blank out comments, keeping line numbers."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def _entry(text: str, found: re.Match[str], files: dict[str, str]) -> Entry:
    kernel = Kernel(found[1], parameter_base=0)
    at = found.end()
    names: dict[str, Slot] = {}
    if found[2] == "(":
        close = text.find(")", at)
        close = len(text) if close < 0 else close
        names = _parameters(text[at:close], kernel)
        at = close + 1
    start = text.find("{", at)
    if start < 0:
        return Entry(kernel, names, unread=["no body"], unread_lines=1)
    threads = _REQNTID.search(text, at, start)
    if threads:
        kernel.required_threads = tuple(int(n or 1) for n in threads.groups())
    entry = Entry(kernel, names)
    _body(text, start, entry, files)
    return entry


def _parameters(text: str, kernel: Kernel) -> dict[str, Slot]:
    names = {}
    offset = 0
    for index, found in enumerate(_PARAM.finditer(text)):
        unit = max(1, int(re.sub(r"\D", "", found["type"]) or "8") // 8)
        size = unit * int(found["count"] or "1")
        align = int(found["align"] or unit)
        offset = -(-offset // align) * align
        slot = Slot(index, offset, size, True if ".ptr" in found["ptr"] else None)
        kernel.parameters.append(slot)
        names[found["name"]] = slot
        offset += size
    return names


class _Scopes:
    """Nested braces: a name means the innermost declaration around it."""

    def __init__(self) -> None:
        self.stack: list[dict[str, str]] = [{}]
        self.made = 0

    def declare(self, name: str) -> str:
        self.made += 1
        self.stack[-1][name] = f"{name}#{self.made}" if len(self.stack) > 2 else name
        return self.stack[-1][name]

    def find(self, name: str) -> str:
        for scope in reversed(self.stack):
            if name in scope:
                return scope[name]
        return name


def _body(text: str, start: int, entry: Entry, files: dict[str, str]) -> None:
    end, labels_of = _labels(text, start)
    scopes = _Scopes()
    file, line = "", 0
    row = text.count("\n", 0, start) + 1
    for kind, piece, height in _pieces(text, start, end):
        row += height
        if kind == "{":
            scopes.stack.append({})
            for name in next(labels_of.get(len(scopes.stack), iter(())), ()):
                scopes.declare(name)
            continue
        if kind == "}":
            if len(scopes.stack) > 1:
                scopes.stack.pop()
            continue
        rest = piece.strip()
        while rest:
            label, location = _LABEL.match(rest), _LOCATION.match(rest)
            if location:
                file, line = files.get(location[1], ""), int(location[2])
                rest = rest.partition("\n")[2].strip()
                continue
            if label is None:
                break
            rest = rest[label.end() :].strip()
            if rest.startswith(".branchtargets"):
                listed = rest.removeprefix(".branchtargets").split(",")
                entry.targets[scopes.find(label[1])] = tuple(scopes.find(n.strip()) for n in listed)
                rest = ""
            elif not rest.startswith((".callprototype", ".calltargets")):
                entry.labels[scopes.find(label[1])] = len(entry.statements)
        if not rest:
            continue
        if rest.startswith("."):
            _directive(rest, entry, scopes)
            continue
        _statement(rest, entry, scopes, file, line, row)


def _labels(text: str, start: int) -> tuple[int, dict[int, Iterator[list[str]]]]:
    """End of the body, and per nesting depth the labels of each scope in the order in which the scopes open.

    A branch may precede its label, so a scope's labels are declared when it opens.
    """
    found: dict[int, list[list[str]]] = {}
    stack: list[list[str]] = []
    end = len(text)
    for kind, piece, at in _raw_pieces(text, start):
        if kind == "{":
            names: list[str] = []
            stack.append(names)
            found.setdefault(len(stack) + 1, []).append(names)
        elif kind == "}":
            stack.pop()
            if not stack:
                end = at + 1
                break
        elif stack:
            rest = piece.strip()
            while rest:
                label = _LABEL.match(rest)
                if label:
                    stack[-1].append(label[1])
                    rest = rest[label.end() :].strip()
                elif _LOCATION.match(rest):
                    rest = rest.partition("\n")[2].strip()
                else:
                    break
    return end, {depth: iter(scopes) for depth, scopes in found.items()}


def _raw_pieces(text: str, start: int) -> Iterator[tuple[str, str, int]]:
    """Braces of scopes, and statements up to their semicolon. Braces inside a statement are vector operands."""
    begin = at = start
    length = len(text)
    pattern = re.compile(r"[{};]")
    while at < length:
        found = pattern.search(text, at)
        if found is None:
            return
        at = found.start()
        before = text[begin:at]
        if found[0] == ";":
            yield ";", before, at
            begin = at = at + 1
            continue
        if _is_vector(before):
            at += 1
            continue
        if before.strip():
            yield ";", before, at
        yield found[0], "", at
        begin = at = at + 1


def _is_vector(before: str) -> bool:
    """Whether a brace continues a statement: text other than labels and line directives stands before it."""
    rest = before.strip()
    while True:
        rest = rest.strip()
        label = _LABEL.match(rest)
        if label:
            rest = rest[label.end() :]
        elif rest.startswith((".loc", ".pragma")):
            rest = rest.partition("\n")[2]
        else:
            return bool(rest)


def _pieces(text: str, start: int, end: int) -> Iterator[tuple[str, str, int]]:
    """As `_raw_pieces`, with the number of lines since the last one."""
    last = start
    for kind, piece, at in _raw_pieces(text, start):
        if at >= end:
            return
        height = text.count("\n", last, at)
        last = at
        yield kind, piece, height


def _directive(rest: str, entry: Entry, scopes: _Scopes) -> None:
    registers = _REGISTERS.match(rest)
    if registers:
        for name in registers[1].split(","):
            scopes.declare(name.strip().partition("<")[0])
        return
    array = _ARRAY.match(rest)
    if array:
        numbers = [int(n) for n in re.findall(r"\d+", array[3] or "1")]
        size = int(array[2]) // 8 * (numbers[0] if numbers else 0)
        if array[1] == "local":
            entry.kernel.frame_bytes = (entry.kernel.frame_bytes or 0) + size
        else:
            entry.kernel.shared_bytes += size


def _statement(rest: str, entry: Entry, scopes: _Scopes, file: str, line: int, row: int) -> None:
    found = _STATEMENT.match(rest)
    if found is None:
        entry.unread_lines += 1
        if len(entry.unread) < _MAX_UNREAD:
            entry.unread.append(rest[:160])
        return
    guard = found["guard"] or ""
    operands = tuple(_rename(operand, scopes) for operand in _split(found["rest"]))
    entry.statements.append(
        Statement(
            found["opcode"],
            ("!" if guard.startswith("!") else "") + scopes.find(guard.lstrip("!")) if guard else "",
            operands,
            file,
            line,
            row,
        )
    )


def _rename(operand: str, scopes: _Scopes) -> str:
    return re.sub(r"[%A-Za-z_$][\w$]*(?:\.[xyzw]\b)?", lambda m: scopes.find(m[0]), operand)


def _split(text: str) -> list[str]:
    found = []
    depth = start = 0
    for at, char in enumerate(text):
        if char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        elif char == "," and depth <= 0:
            found.append(text[start:at].strip())
            start = at + 1
    tail = text[start:].strip()
    return [*found, tail] if tail else found
