"""Static rules for C++ files of candidates.

Decides nothing about numbers or speed. It refuses constructs that have no place in arithmetic on the caller's buffers:
other includes, names of system interfaces, code that runs at load time, state between calls, and whatever would hide
one of these from a reader (token pasting, redefined keywords, odd characters). It cannot see what macros expand to
across files or what pointer arithmetic reaches; the audit of the object and the sandbox answer for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from verify.gates.scope.cpp_lexer import Directive, Lexed, Token, lex
from verify.gates.scope.cpp_rules import (
    ATTRIBUTES,
    CALLED_WORDS,
    DIRECTIVES,
    KEYWORDS,
    PRAGMAS,
    PROTECTED_MACROS,
    forbidden_identifier,
)
from verify.gates.scope.cpp_state import mutable_storage
from verify.gates.scope.observation import Observation

__all__ = ["scan"]

HasHeader = Callable[[str], bool]


def scan(text: str, *, includes: Sequence[str], has_header: HasHeader) -> list[Observation]:
    """All violated rules of one file, in line order.

    Args:
        text: the file.
        includes: headers that may be included with either form.
        has_header: whether a quoted include names a file of the candidate's own tree.
    """
    lexed = lex(text)
    found = [
        Observation("scope.cpp_lexical", p.line, p.message, "characters and tokens that compiler and reader see alike")
        for p in lexed.problems
    ]
    # The pinned standard has no trigraphs, but a reader may think that this one continues the line.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.rstrip().endswith("??/"):
            found.append(Observation("scope.cpp_lexical", number, "trigraph ??/ at the end of a line", "no trigraphs"))
    for directive in lexed.directives:
        found += _directive(directive, includes, has_header)
    macro_bodies = [d.tokens for d in lexed.directives if d.name in ("define", "if", "elif", "include")]
    defined = _defined_here(lexed)
    for tokens in (lexed.code, *macro_bodies):
        found += _tokens(tokens, defined)
    found += mutable_storage(lexed.code)
    for body in macro_bodies:
        found += [
            Observation("scope.cpp_state", t.line, "static in a macro", "storage classes written where they apply")
            for t in body
            if t.text == "static"
        ]
    return sorted(set(found), key=lambda o: (o.line, o.code, o.message))


def _directive(directive: Directive, includes: Sequence[str], has_header: HasHeader) -> Iterator[Observation]:
    line = directive.line
    if directive.name not in DIRECTIVES:
        yield Observation(
            "scope.cpp_directive", line, f"#{directive.name}", "one of " + ", ".join(sorted(d for d in DIRECTIVES if d))
        )
    elif directive.name == "include":
        yield from _include(directive, includes, has_header)
    elif directive.name == "pragma":
        yield from _pragma(line, " ".join(t.text for t in directive.tokens))
    elif directive.name in ("define", "undef") and directive.tokens:
        name = directive.tokens[0].text
        if name in KEYWORDS or PROTECTED_MACROS.fullmatch(name):
            yield Observation(
                "scope.cpp_macro",
                line,
                f"#{directive.name} {name}",
                "macro names that are no keyword, reserved name or part of the calling convention",
            )


def _include(directive: Directive, includes: Sequence[str], has_header: HasHeader) -> Iterator[Observation]:
    tokens = directive.tokens
    if len(tokens) != 1 or tokens[0].kind != "header":
        seen = " ".join(t.text for t in tokens) or "nothing"
        yield Observation(
            "scope.cpp_include",
            directive.line,
            f"computed include: {seen}",
            "a header name in quotes or angle brackets",
        )
        return
    name = tokens[0].text[1:-1]
    own = tokens[0].text.startswith('"') and has_header(name)
    if name not in includes and not own:
        yield Observation(
            "scope.cpp_include",
            directive.line,
            f"#include {tokens[0].text}",
            "a header of the kernels tree or of harness.toml's cpp_includes",
        )


def _pragma(line: int, content: str) -> Iterator[Observation]:
    if not any(p.fullmatch(content) for p in PRAGMAS):
        yield Observation("scope.cpp_pragma", line, f"#pragma {content}", "once, GCC unroll N or GCC ivdep")


def _tokens(tokens: Sequence[Token], defined: frozenset[str]) -> Iterator[Observation]:
    """Rules on single tokens and their neighbours, in code and macro bodies alike."""
    for index, token in enumerate(tokens):
        after = tokens[index + 1].text if index + 1 < len(tokens) else ""
        if token.text == "##" and token.kind == "punctuator":
            yield Observation("scope.cpp_paste", token.line, "token pasting (##)", "names written out")
        elif token.text == "[" and after == "[":
            yield from _standard_attributes(tokens, index)
        if token.kind != "identifier":
            continue
        if token.text in ("__attribute__", "__attribute"):
            yield from _gnu_attributes(tokens, index)
        elif token.text in ("_Pragma", "__pragma"):
            yield from _pragma_operator(tokens, index)
        elif token.text == "extern":
            yield Observation(
                "scope.cpp_extern",
                token.line,
                f"extern {after}".strip(),
                "K3_EXPORT for the entry point, everything else internal",
            )
        elif code := forbidden_identifier(token.text):
            yield Observation(code, token.line, f"identifier {token.text}", _EXPECTED[code])
        elif token.text in CALLED_WORDS and after == "(" and _is_foreign_call(tokens, index, defined):
            yield Observation(
                "scope.cpp_identifier", token.line, f"call of {token.text}", _EXPECTED["scope.cpp_identifier"]
            )


_EXPECTED = {
    "scope.cpp_asm": "intrinsics or plain C++",
    "scope.cpp_state": "no thread-local storage: workers get what they need as arguments",
    "scope.cpp_identifier": "arithmetic on the caller's buffers only",
}


def _is_foreign_call(tokens: Sequence[Token], index: int, defined: frozenset[str]) -> bool:
    before = tokens[index - 1].text if index else ""
    if before in (".", "->"):
        return False
    if before == "::":
        return index < 2 or tokens[index - 2].kind != "identifier" or tokens[index - 2].text == "std"
    return tokens[index].text not in defined


def _defined_here(lexed: Lexed) -> frozenset[str]:
    """Names that the file itself gives a meaning: `auto name =`, and functions `name(…) {`."""
    code = lexed.code
    names = set()
    for index, token in enumerate(code[:-1]):
        if token.kind != "identifier":
            continue
        if code[index + 1].text == "=" and index and code[index - 1].text in ("auto", "&", "&&"):
            names.add(token.text)
        if code[index + 1].text == "(":
            close = _closing(code, index + 1)
            rest = [t.text for t in code[close + 1 : close + 4]]
            if rest[:1] == ["{"] or rest[:2] == ["const", "{"] or rest[:2] == ["noexcept", "{"]:
                names.add(token.text)
    return frozenset(names)


def _closing(tokens: Sequence[Token], opening: int) -> int:
    """Index of the bracket that closes the one at `opening`; the last token if none does."""
    pairs = {"(": ")", "[": "]", "{": "}"}
    close = pairs[tokens[opening].text]
    depth = 0
    for index in range(opening, len(tokens)):
        if tokens[index].text == tokens[opening].text:
            depth += 1
        elif tokens[index].text == close:
            depth -= 1
            if not depth:
                return index
    return len(tokens) - 1


def _attribute_names(tokens: Sequence[Token], start: int, end: int) -> Iterator[Token]:
    """The attribute names of a list: identifiers at its own level, arguments skipped."""
    index = start
    while index < end:
        token = tokens[index]
        if token.text == "(":
            index = _closing(tokens, index)
        elif token.kind in ("identifier", "string"):
            yield token
        index += 1


def _gnu_attributes(tokens: Sequence[Token], index: int) -> Iterator[Observation]:
    if index + 2 >= len(tokens) or tokens[index + 1].text != "(" or tokens[index + 2].text != "(":
        yield Observation(
            "scope.cpp_attribute", tokens[index].line, "attribute without its list", "__attribute__((name))"
        )
        return
    end = _closing(tokens, index + 2)
    for token in _attribute_names(tokens, index + 3, end):
        yield from _attribute(token)


def _standard_attributes(tokens: Sequence[Token], index: int) -> Iterator[Observation]:
    end = _closing(tokens, index + 1)
    if end + 1 >= len(tokens) or tokens[end + 1].text != "]":
        return  # a subscript of a lambda or an array, not an attribute
    names = [t for t in _attribute_names(tokens, index + 2, end) if t.text != "gnu"]
    for token in names:
        yield from _attribute(token)


def _attribute(token: Token) -> Iterator[Observation]:
    name = token.text.removeprefix("__").removesuffix("__")
    if name not in ATTRIBUTES:
        yield Observation(
            "scope.cpp_attribute",
            token.line,
            f"attribute {token.text}",
            "an attribute that changes neither linkage, sections, load-time code nor code generation",
        )


def _pragma_operator(tokens: Sequence[Token], index: int) -> Iterator[Observation]:
    operand = tokens[index + 2] if index + 2 < len(tokens) and tokens[index + 1].text == "(" else None
    if operand is None or operand.kind != "string":
        yield Observation(
            "scope.cpp_pragma",
            tokens[index].line,
            f"{tokens[index].text} of something other than one string",
            '_Pragma("GCC unroll 4") written out',
        )
    else:
        yield from _pragma(operand.line, operand.text[1:-1])
