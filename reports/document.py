"""The report as data: sections of tables, charts, facts and commands, before they become HTML or Markdown.

Both formats are made from one `Document`, so that they cannot say different things. All strings here are plain text;
escaping belongs to the two renderers (`reports.html`, `reports.markdown`), never to the code that builds a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Block", "Chart", "Code", "Commands", "Content", "Details", "Document", "Facts", "Inline", "Items", "Matrix",
    "MatrixCell", "Paragraph", "Section", "Strong", "Table", "Tone", "Word",
]  # fmt: skip

Tone = Literal["good", "bad", "unsure", "none"]
"""passed/FAST, failed/SLOW, inconclusive/AMBG, not_evaluated/????; each also has a sign and its word."""


@dataclass(frozen=True)
class Code:
    """A name that stands for itself: path, symbol, digest, command."""

    text: str


@dataclass(frozen=True)
class Strong:
    """Words that a skimming reader should see."""

    text: str


@dataclass(frozen=True)
class Word:
    """An outcome, verdict or cell word, with its tone."""

    text: str
    tone: Tone


Inline = str | Code | Strong | Word
Content = Inline | tuple[Inline, ...]
"""What a table cell, list item or paragraph holds."""


@dataclass(frozen=True)
class Paragraph:
    """A sentence or two."""

    content: Content


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[Content]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    pairs: Sequence[tuple[str, Content]]


@dataclass(frozen=True)
class Table:
    """A table with a caption; the first column heads its row."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Content]]
    numeric: frozenset[int] = frozenset()
    """Columns that are aligned as numbers."""


@dataclass(frozen=True)
class MatrixCell:
    """One cell of a matrix: a headline number, its interval, its word, and whether it is the worst."""

    value: str
    interval: str
    word: Word
    worst: bool = False
    note: str = ""


@dataclass(frozen=True)
class Matrix:
    """Context by batch; cells that the tier does not plan are None."""

    caption: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[MatrixCell | None]]]


@dataclass(frozen=True)
class Chart:
    """A drawing and the table with the same numbers."""

    title: str
    svg: str
    """Markup from `reports.charts`, which escapes what it draws."""
    data: Table


@dataclass(frozen=True)
class Commands:
    """Shell commands with their purposes."""

    commands: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Details:
    """Something to open."""

    summary: Content
    blocks: Sequence[Block]
    paper: bool = True
    """Whether paper shows it opened; long per-cell detail stays on the screen."""


Block = Paragraph | Items | Facts | Table | Matrix | Chart | Commands | Details


@dataclass(frozen=True)
class Section:
    """A heading with blocks below it."""

    id: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    verdict: Word
    sentence: str
    """The conclusion in one sentence."""
    summary: Sequence[tuple[str, Sequence[Content]]]
    """The first screen: short answers under a question each."""
    gates: Sequence[tuple[str, Word, str, bool]]
    """Gate, outcome, one line, whether the target requires it."""
    sections: Sequence[Section]
    footer: Sequence[Content]
