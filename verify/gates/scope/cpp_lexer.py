"""C++ text to preprocessing tokens, as the compiler would see them, each with the line where it starts.

Comments go, spliced lines join, digraphs become what they stand for, raw strings keep their bytes. Macros are not
expanded: rules look at what is written, macro bodies included. Everything that would let text and compiler disagree
(trigraphs, universal character names, odd characters, unterminated literals) is reported as a problem, not guessed at.
Source of the token grammar: ISO/IEC 14882:2020, clause 5 [lex].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Directive", "Lexed", "Problem", "Token", "lex"]

_DIGRAPHS = {"<%": "{", "%>": "}", "<:": "[", ":>": "]", "%:": "#", "%:%:": "##"}
_PUNCTUATORS = sorted(
    [
        *_DIGRAPHS, "##", "<=>", "<<=", ">>=", "...", "->*", "::", "->", ".*", "<<", ">>", "<=", ">=", "==", "!=", "&&",
        "||", "++", "--", "+=", "-=", "*=", "/=", "%=", "^=", "&=", "|=", *"{}[]()#;:?.~!+-*/%^&|=<>,",
    ],
    key=len,
    reverse=True,
)  # fmt: skip
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"\.?[0-9](?:'[A-Za-z0-9_]|[eEpP][+-]|[A-Za-z0-9_.])*")
_RAW = re.compile(r'(?:u8|[uUL])?R"')
_RAW_OPEN = re.compile(r'([^ ()\\\t\v\f\n"]{0,16})\(')
_QUOTED = re.compile(r"""(?:u8|[uUL])?(["'])""")
_LONGEST_TOKEN = 4096
_SPLICE = re.compile(r"\\[ \t\v\f]*\n")


@dataclass(frozen=True)
class Token:
    """One preprocessing token."""

    kind: str
    """identifier, number, string, character, punctuator, header."""
    text: str
    """Spelling, digraphs replaced; literals without prefix and suffix keep their quotes."""
    line: int
    first: bool = False
    """First token of its logical line."""
    spaced: bool = False
    """White space or a comment stands before it."""


@dataclass(frozen=True)
class Problem:
    """Something that cannot be read with certainty."""

    line: int
    message: str


@dataclass(frozen=True)
class Directive:
    """A preprocessor line: name (empty for a lone #) and the tokens after it."""

    name: str
    line: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Lexed:
    """A file as code tokens and directives."""

    code: tuple[Token, ...]
    directives: tuple[Directive, ...]
    problems: tuple[Problem, ...]


def lex(text: str) -> Lexed:
    """Split a file. Never raises: what cannot be read becomes a problem and reading goes on after it."""
    lexer = _Lexer(text)
    lines = list(lexer.logical_lines())
    code: list[Token] = []
    directives: list[Directive] = []
    for tokens in lines:
        if tokens[0].kind == "punctuator" and tokens[0].text == "#":
            named = len(tokens) > 1 and tokens[1].kind == "identifier"
            directives.append(
                Directive(tokens[1].text if named else "", tokens[0].line, tuple(tokens[2 if named else 1 :]))
            )
        else:
            code.extend(tokens)
    return Lexed(tuple(code), tuple(directives), tuple(lexer.problems))


class _Lexer:
    """One pass over the original text. `at` is an offset into it; splices are skipped where the language does."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.problems: list[Problem] = []

    def logical_lines(self) -> Iterator[list[Token]]:
        line: list[Token] = []
        spaced = False
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\n":
                self._advance(1)
                if line:
                    yield line
                line, spaced = [], False
            elif splice := _SPLICE.match(self.text, self.at):
                self._advance(len(splice.group()))
            elif char in " \t\v\f":
                self._advance(1)
                spaced = True
            elif self._comment():
                spaced = True
            else:
                token = self._token(in_include=_expects_header(line))
                if token is not None:
                    line.append(Token(token.kind, token.text, token.line, first=not line, spaced=spaced))
                spaced = False
        if line:
            yield line

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _problem(self, message: str) -> None:
        self.problems.append(Problem(self.line, message))

    def _spliced(self, limit: int) -> tuple[str, Sequence[int]]:
        """Upcoming characters of the logical line with splices removed, and for each the offset behind it."""
        end = self.text.find("\n", self.at)
        segment = self.text[self.at : min(len(self.text) if end < 0 else end, self.at + limit)]
        if "\\" not in segment:
            return segment, range(self.at + 1, self.at + len(segment) + 1)
        chars: list[str] = []
        ends: list[int] = []
        at = self.at
        while at < len(self.text) and len(chars) < limit:
            if splice := _SPLICE.match(self.text, at):
                at = splice.end()
                continue
            if self.text[at] == "\n":
                break
            at += 1
            chars.append(self.text[at - 1])
            ends.append(at)
        return "".join(chars), ends

    def _comment(self) -> bool:
        ahead, ends = self._spliced(2)
        if ahead == "//":
            self._advance(self._spliced(len(self.text))[1][-1] - self.at)
            return True
        if ahead != "/*":
            return False
        close = self._close_of_block(ends[-1])
        if close is None:
            self._problem("comment without an end")
            close = len(self.text)
        self._advance(close - self.at)
        return True

    def _close_of_block(self, start: int) -> int | None:
        """Offset behind the `*/` that ends a block comment; the two characters may be spliced apart."""
        found = re.compile(r"\*(?:\\[ \t\v\f]*\n)*/").search(self.text, start)
        return found.end() if found else None

    def _token(self, *, in_include: bool) -> Token | None:
        line = self.line
        if raw := _RAW.match(self._spliced(5)[0]):
            return self._raw_string(line, len(raw.group()))
        rest, ends = self._spliced(_LONGEST_TOKEN)
        if in_include and (header := re.match(r'<[^>]*>|"[^"]*"', rest)):
            return self._take("header", header.group(), ends, line)
        if quoted := _QUOTED.match(rest):
            return self._literal(line, quoted)
        if identifier := _IDENTIFIER.match(rest):
            return self._take("identifier", identifier.group(), ends, line)
        if number := _NUMBER.match(rest):
            return self._take("number", number.group(), ends, line)
        # [lex.pptoken]/3.2: <:: is not the digraph <: unless : or > follows.
        if rest.startswith("<::") and rest[3:4] not in (":", ">"):
            return self._take("punctuator", "<", ends, line)
        for spelling in _PUNCTUATORS:
            if rest.startswith(spelling):
                token = self._take("punctuator", spelling, ends, line)
                return Token("punctuator", _DIGRAPHS.get(spelling, spelling), token.line)
        self._problem(f"character {rest[:1]!r} outside a literal")
        self._advance(max(1, (ends[0] if ends else self.at + 1) - self.at))
        return None

    def _take(self, kind: str, text: str, ends: Sequence[int], line: int) -> Token:
        if len(text) >= _LONGEST_TOKEN:
            self._problem(f"token of {_LONGEST_TOKEN} characters or more")
        self._advance(ends[len(text) - 1] - self.at)
        return Token(kind, text, line)

    def _literal(self, line: int, opening: re.Match[str]) -> Token:
        rest, ends = self._spliced(len(self.text))
        quote = opening.group(1)
        found = re.compile(rf"(?:[^\\{quote}]|\\.)*{quote}").match(rest, opening.end())
        if found is None:
            self._problem(f"{quote} without an end on its line")
            return self._take("string", rest, ends, line)
        kind = "string" if quote == '"' else "character"
        self._advance(ends[found.end() - 1] - self.at)
        return Token(kind, rest[opening.end() - 1 : found.end()], line)

    def _raw_string(self, line: int, prefix: int) -> Token:
        """Raw strings are read from the original text: splices inside them are content ([lex.pptoken]/3.1)."""
        _, ends = self._spliced(prefix)
        opening = _RAW_OPEN.match(self.text, ends[prefix - 1])
        close = -1 if opening is None else self.text.find(f'){opening.group(1)}"', opening.end())
        if opening is None or close < 0:
            self._problem("raw string without an end")
            self._advance(len(self.text) - self.at)
            return Token("string", '""', line)
        content = self.text[opening.end() : close]
        self._advance(close + len(opening.group(1)) + 2 - self.at)
        return Token("string", f'"{content}"', line)


def _expects_header(line: list[Token]) -> bool:
    return len(line) == 2 and line[0].text == "#" and line[1].text in ("include", "include_next", "import", "embed")
