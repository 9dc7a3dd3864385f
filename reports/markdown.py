"""The report as Markdown (GitHub flavour), for pull requests and terminals.

Foreign strings pass through `reports.text`: they cannot open markup, mention people, link, or leave a table cell.
Charts appear as their tables; what the page folds away is written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.document import (
    Block,
    Chart,
    Code,
    Commands,
    Content,
    Details,
    Document,
    Facts,
    Inline,
    Items,
    Matrix,
    MatrixCell,
    Paragraph,
    Section,
    Strong,
    Table,
    Word,
)
from reports.html import SIGNS
from reports.text import code_span, markdown, visible

__all__ = ["markdown_report"]


def markdown_report(document: Document) -> str:
    """Render a document; the same document gives the same text."""
    lines = [f"# {markdown(document.title)}", ""]
    lines += [f"**{SIGNS[document.verdict.tone]} {markdown(document.verdict.text)}** {markdown(document.sentence)}", ""]
    lines += ["| question | answer |", "| --- | --- |"]
    for question, answers in document.summary:
        lines.append(f"| {markdown(question)} | {'<br>'.join(_content(answer) for answer in answers)} |")
    lines += ["", "| gate | outcome | required | in short |", "| --- | --- | --- | --- |"]
    for gate, word, line, required in document.gates:
        lines.append(f"| {gate} | {_inline(word)} | {'yes' if required else 'no'} | {markdown(line)} |")
    lines.append("")
    for section in document.sections:
        lines += _section(section)
    lines += ["---", ""]
    lines += [_content(line) + "  " for line in document.footer]
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"## {markdown(section.title)}"
    yield ""
    yield from _blocks(section.blocks)


def _blocks(blocks: Sequence[Block], level: int = 3) -> Iterator[str]:
    for block in blocks:
        match block:
            case Paragraph():
                yield _content(block.content)
            case Items():
                yield from (f"- {_content(item)}" for item in block.items)
            case Facts():
                yield from (f"- {markdown(name)}: {_content(value)}" for name, value in block.pairs)
            case Table():
                yield from _table(block)
            case Matrix():
                yield from _matrix(block)
            case Chart():
                yield from _table(block.data)
            case Commands():
                for purpose, command in block.commands:
                    yield f"{markdown(purpose)}:"
                    yield ""
                    yield from (f"    {line}" for line in visible(command).split("\n"))
                    yield ""
            case Details():
                yield f"{'#' * min(level, 6)} {_content(block.summary)}"
                yield ""
                yield from _blocks(block.blocks, level + 1)
        yield ""


def _table(table: Table) -> Iterator[str]:
    yield f"**{markdown(table.caption)}**"
    yield ""
    yield "| " + " | ".join(markdown(column) for column in table.columns) + " |"
    yield "|" + "|".join(" ---: " if i in table.numeric else " --- " for i in range(len(table.columns))) + "|"
    for row in table.rows:
        yield "| " + " | ".join(_content(cell) for cell in row) + " |"


def _matrix(matrix: Matrix) -> Iterator[str]:
    yield f"**{markdown(matrix.caption)}**"
    yield ""
    yield "| " + " | ".join(markdown(name) for name in (matrix.corner, *matrix.columns)) + " |"
    yield "|" + " --- |" + " :---: |" * len(matrix.columns)
    for name, cells in matrix.rows:
        yield "| " + " | ".join((markdown(name), *(_matrix_cell(cell) for cell in cells))) + " |"


def _matrix_cell(cell: MatrixCell | None) -> str:
    if cell is None:
        return "not planned"
    parts = [f"**{markdown(cell.value)}**", markdown(cell.interval), _inline(cell.word)]
    parts += ["**worst**"] if cell.worst else []
    parts += [markdown(cell.note)] if cell.note else []
    return "<br>".join(part for part in parts if part)


def _content(content: Content) -> str:
    pieces = content if isinstance(content, tuple) else (content,)
    return "".join(_inline(piece) for piece in pieces)


def _inline(item: Inline) -> str:
    match item:
        case Code():
            return code_span(item.text)
        case Strong():
            return f"**{markdown(item.text)}**"
        case Word():
            return f"{SIGNS[item.tone]} {markdown(item.text)}"
    return markdown(item) if item.strip() == item else _spaced(item)


def _spaced(text: str) -> str:
    """Keep the blanks that separate a string from its neighbours; `markdown` strips them."""
    before = " " if text[:1].isspace() else ""
    after = " " if text[-1:].isspace() and text.strip() else ""
    return f"{before}{markdown(text)}{after}"
