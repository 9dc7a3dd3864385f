"""Finds storage that outlives a call: mutable statics and namespace-scope variables.

Works on tokens, by declaration: a small reader follows namespaces, types and function bodies without expanding macros
or looking up names. What it overlooks ends up in a writable section of the object, where the audit gate's byte budget
of zero catches it; this rule exists to say where in the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verify.gates.scope.cpp_lexer import Token
from verify.gates.scope.observation import Observation

__all__ = ["mutable_storage"]

_OPEN = {"(": ")", "[": "]", "{": "}"}
_NOT_VARIABLES = frozenset({"using", "typedef", "static_assert", "friend", "concept", "template", "namespace"})
_TYPES = frozenset({"class", "struct", "union", "enum"})
_CONTROL = frozenset(
    {"return", "if", "for", "while", "switch", "case", "default", "do", "else", "goto", "break", "continue"}
)
_EXPECTED = "constexpr data, or memory from the caller: an object keeps no state between calls"


def mutable_storage(code: Sequence[Token]) -> Iterator[Observation]:
    """Every declaration of mutable static or namespace-scope storage."""
    yield from _statements(code, 0, len(code), scope="namespace")


def _statements(code: Sequence[Token], start: int, end: int, *, scope: str) -> Iterator[Observation]:
    """Walk the declarations and statements of one scope: namespace, class or function."""
    at = start
    while at < end:
        stop, braces = _statement_end(code, at, end)
        yield from _statement(code, at, stop, braces, scope)
        at = stop + 1


def _statement_end(code: Sequence[Token], start: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """(index of the last token, brace groups at its own level) of the statement that starts at `start`.

    A statement ends at `;`, or at a `}` that is not followed by the rest of a declaration (`;`, a declarator, `)`).
    """
    at = start
    braces: list[tuple[int, int]] = []
    while at < end:
        text = code[at].text
        if text == ";":
            return at, braces
        if text in _OPEN and code[at].kind == "punctuator":
            close = _match(code, at, end)
            if text == "{":
                braces.append((at, close))
                if not _continues(code, start, at, close, end):
                    return close, braces
            at = close
        elif text == ":" and code[at - 1].text in ("public", "private", "protected", "default") and at == start + 1:
            return at, braces
        at += 1
    return end - 1, braces


def _continues(code: Sequence[Token], start: int, opening: int, close: int, end: int) -> bool:
    """Whether the statement goes on behind a brace group: initialisers and type definitions do, bodies do not."""
    if close + 1 >= end:
        return False
    head = [t.text for t in code[start:opening]]
    after = code[close + 1].text
    if after in (";", ",", ")", ".", "->", "[", "(", "?", "+", "-", "*", "/"):
        return True
    # `struct S { … } name;`
    return bool(_TYPES & set(head[:3])) and "(" not in head and code[close + 1].kind == "identifier"


def _match(code: Sequence[Token], opening: int, end: int) -> int:
    depth = 0
    first = code[opening].text
    for at in range(opening, end):
        if code[at].kind != "punctuator":
            continue
        if code[at].text == first:
            depth += 1
        elif code[at].text == _OPEN[first]:
            depth -= 1
            if not depth:
                return at
    return end - 1


def _statement(
    code: Sequence[Token], start: int, stop: int, braces: Sequence[tuple[int, int]], scope: str
) -> Iterator[Observation]:
    head = _head(code, start, stop)
    words = [t.text for t in head]
    if not words or words == [";"]:
        return
    if words[0] == "template":
        head = _after_template(head)
        words = [t.text for t in head]
    if words and words[0] in _CONTROL and "static" in words:
        # `if (x) static int n = 1;`: the declaration stands behind the control part, in the same statement.
        head = head[words.index("static") :]
        words = [t.text for t in head]
    kind = _kind(words)
    inner = {"namespace": "namespace", "type": "class"}.get(kind, "function")
    if kind == "variable" and (scope == "namespace" or "static" in words):
        yield from _variable(head)
    if kind == "type" and braces and scope == "namespace":
        yield from _trailing_variable(code, braces[0][1], stop)
    for opening, close in braces:
        yield from _statements(code, opening + 1, close, scope=inner)
    yield from _inside_parentheses(code, start, stop, braces)


def _inside_parentheses(
    code: Sequence[Token], start: int, stop: int, braces: Sequence[tuple[int, int]]
) -> Iterator[Observation]:
    """Bodies of lambdas that are arguments: their brace groups lie inside parentheses or brackets."""
    at = start
    while at <= stop:
        if code[at].kind == "punctuator" and code[at].text in ("(", "["):
            close = _match(code, at, stop + 1)
            opening = at
            while opening < close:
                if code[opening].text == "{" and code[opening].kind == "punctuator":
                    end = _match(code, opening, close)
                    yield from _statements(code, opening + 1, end, scope="function")
                    opening = end
                opening += 1
            at = close
        elif any(opening == at for opening, _ in braces):
            at = next(close for opening, close in braces if opening == at)
        at += 1


def _head(code: Sequence[Token], start: int, stop: int) -> list[Token]:
    """The statement's tokens with attributes dropped and brace groups reduced to their opening brace."""
    head: list[Token] = []
    at = start
    while at <= stop:
        token = code[at]
        if token.text in ("__attribute__", "alignas", "__declspec") and at + 1 <= stop and code[at + 1].text == "(":
            at = _match(code, at + 1, stop + 1)
        elif token.text == "[" and at + 1 <= stop and code[at + 1].text == "[" and token.kind == "punctuator":
            at = _match(code, at, stop + 1)
        else:
            head.append(token)
            if token.text == "{" and token.kind == "punctuator":
                at = _match(code, at, stop + 1)
        at += 1
    return head


def _after_template(head: list[Token]) -> list[Token]:
    """What a template declares: everything behind `template <…>` and a requires clause's parentheses."""
    depth = 0
    for index, token in enumerate(head[1:], start=1):
        depth += {"<": 1, ">": -1, ">>": -2}.get(token.text, 0) if token.kind == "punctuator" else 0
        if depth <= 0 and index > 1:
            rest = head[index + 1 :]
            return _after_template(rest) if rest and rest[0].text == "template" else rest
    return []


def _kind(words: Sequence[str]) -> str:
    """namespace, type, function, variable or other, from the words of a statement."""
    if not words:
        return "other"
    lead = [
        w for w in words if w not in ("inline", "static", "constexpr", "const", "constinit", "volatile", "K3_INLINE")
    ]
    first = lead[0] if lead else words[0]
    if first == "namespace":
        return "namespace"
    if first in _NOT_VARIABLES or first in _CONTROL or first in ("public", "private", "protected", "extern", ";", "{"):
        return "other"
    if first in _TYPES and "{" in words and (words.index("{") < _position(words, "(")):
        return "type"
    if first in _TYPES and words[-1] == ";" and len(lead) <= 3:
        return "other"  # forward declaration
    marks = {mark: _position(words, mark) for mark in ("(", "=", "{", "[", ";")}
    if "operator" in words:
        return "function"
    first_mark = min(marks, key=lambda mark: marks[mark])
    return "function" if first_mark == "(" else "variable"


def _position(words: Sequence[str], mark: str) -> int:
    return words.index(mark) if mark in words else len(words)


def _variable(head: Sequence[Token]) -> Iterator[Observation]:
    """One finding unless the declared object cannot change: constexpr, or const behind the last pointer."""
    words = [t.text for t in head]
    stop = min(_position(words, mark) for mark in ("=", "{", "[", ";"))
    declared = words[:stop]
    if "constexpr" in declared or len(declared) < 2:
        return
    pointer = max((i for i, w in enumerate(declared) if w in ("*", "&", "&&")), default=-1)
    if "const" in declared[pointer + 1 :] and pointer < len(declared) - 1:
        return
    yield Observation(
        "scope.cpp_state", head[0].line, f"mutable variable {declared[-1]} with static storage", _EXPECTED
    )


def _trailing_variable(code: Sequence[Token], close: int, stop: int) -> Iterator[Observation]:
    """`struct S { … } name;` declares a variable too."""
    for token in code[close + 1 : stop]:
        if token.kind == "identifier":
            yield Observation(
                "scope.cpp_state", token.line, f"mutable variable {token.text} with static storage", _EXPECTED
            )
            return
