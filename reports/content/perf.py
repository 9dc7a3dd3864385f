"""The performance section: matrices of ratios, charts with their data, and every cell's blocks.

It draws what `reports.content.perf_cells` read out of the raw lines; it computes no statistics. Ratios are the other
arm's time divided by the candidate's, so above 1 is faster. The worst cell is always marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from reports import charts
from reports.content.perf_cells import CellResult, Comparison, PerfView
from reports.document import Block, Chart, Code, Content, Details, Matrix, MatrixCell, Paragraph, Table, Tone, Word
from reports.text import fixed

__all__ = ["CELL_TONES", "cell_word", "interval", "perf_blocks", "ratio"]

CELL_TONES: dict[str, Tone] = {"FAST": "good", "SAME": "unsure", "SLOW": "bad", "AMBG": "unsure", "????": "none"}


def ratio(value: float) -> str:
    """`1.253×`."""
    return f"{value:.3f}×"


def interval(comparison: Comparison) -> str:
    """Bounds as the protocol gives them."""
    low, high = comparison.low, comparison.high
    if low is not None and high is not None:
        return f"{low:.3f}–{high:.3f}"
    if low is not None:
        return f"≥ {low:.3f}"
    return f"≤ {high:.3f}" if high is not None else "no interval"


def cell_word(word: str) -> Word:
    """A cell's word with its tone."""
    return Word(word, CELL_TONES.get(word, "none"))


def perf_blocks(view: PerfView) -> list[Block]:
    """All blocks between the gate's findings and its metrics."""
    blocks: list[Block] = []
    for arm in view.arms:
        title = f"Ratio against {view.arm_names[arm]}"
        for group, cells in view.groups():
            blocks.append(_matrix(f"{title}{group}", arm, cells, view))
            chart = _chart(f"{title}{group}, with intervals", arm, cells)
            if chart is not None:
                blocks.append(chart)
    blocks.append(Paragraph(view.note))
    blocks += [_controls(view)] if view.controls else []
    blocks.append(
        Details("Every cell with its blocks", [_cell_details(cell, view) for cell in view.cells], paper=False)
    )
    return blocks


def _matrix(caption: str, arm: str, cells: Sequence[CellResult], view: PerfView) -> Matrix:
    batches = sorted({cell.cell.batch for cell in cells})
    contexts = sorted({-1 if cell.cell.context is None else cell.cell.context for cell in cells})
    found = {(cell.cell.batch, -1 if cell.cell.context is None else cell.cell.context): cell for cell in cells}
    worst = view.worst(arm)
    rows = []
    for context in contexts:
        row: list[MatrixCell | None] = []
        for batch in batches:
            cell = found.get((batch, context))
            row.append(None if cell is None else _matrix_cell(cell, arm, cell is worst))
        rows.append(("any" if context < 0 else f"{context:,}", row))
    return Matrix(caption, "context \\ batch", [str(batch) for batch in batches], rows)


def _matrix_cell(cell: CellResult, arm: str, worst: bool) -> MatrixCell:
    comparison = cell.against.get(arm)
    if comparison is None or comparison.ratio is None:
        return MatrixCell("–", "", cell_word("????" if comparison is None else comparison.word))
    note = "task cell" if cell.in_task else ""
    return MatrixCell(ratio(comparison.ratio), interval(comparison), cell_word(comparison.word), worst, note)


def _chart(title: str, arm: str, cells: Sequence[CellResult]) -> Chart | None:
    series = []
    for context, group in _by_context(cells):
        points = [
            charts.Point(str(cell.cell.batch), c.ratio, c.low, c.high, c.word)
            for cell in group
            if (c := cell.against.get(arm)) is not None and c.ratio is not None
        ]
        if points:
            series.append(charts.Series("any context" if context is None else f"context {context:,}", points))
    if not series:
        return None
    words = [word for word in CELL_TONES if any(p.word == word for s in series for p in s.points)]
    svg = charts.interval_chart(series, label=f"{title}; the table below it has the numbers") + charts.legend(words)
    rows = [(Code(cell.cell.key), *_comparison_columns(cell.against.get(arm))) for cell in cells]
    data = Table(f"{title}: numbers", ("cell", "ratio", "interval", "word"), rows, numeric=frozenset({1, 2}))
    return Chart(title, svg, data)


def _by_context(cells: Iterable[CellResult]) -> Iterator[tuple[int | None, list[CellResult]]]:
    groups: dict[int | None, list[CellResult]] = {}
    for cell in cells:
        groups.setdefault(cell.cell.context, []).append(cell)
    for context in sorted(groups, key=lambda value: -1 if value is None else value):
        yield context, sorted(groups[context], key=lambda cell: cell.cell.batch)


def _comparison_columns(comparison: Comparison | None) -> tuple[Content, Content, Content]:
    if comparison is None or comparison.ratio is None:
        return "–", "–", cell_word("????" if comparison is None else comparison.word)
    return ratio(comparison.ratio), interval(comparison), cell_word(comparison.word)


def _controls(view: PerfView) -> Block:
    rows = [(name, value) for name, value in view.controls]
    return Table("Controls of the measurement", ("control", "value"), rows)


def _cell_details(cell: CellResult, view: PerfView) -> Details:
    summary: list[str | Code | Word] = [Code(cell.cell.key)]
    for arm in view.arms:
        comparison = cell.against.get(arm)
        if comparison is not None and comparison.ratio is not None:
            summary += [f" {ratio(comparison.ratio)} against {view.arm_names[arm]} ", cell_word(comparison.word)]
    blocks: list[Block] = []
    times = [(view.arm_names.get(arm, arm), f"{fixed(us, 1)}") for arm, us in cell.median_us.items()]
    if times:
        blocks.append(Table("Median time per call", ("arm", "µs"), times, numeric=frozenset({1})))
    for arm in view.arms:
        comparison = cell.against.get(arm)
        if comparison is not None and any(value is not None for value in comparison.blocks):
            title = f"Ratio against {view.arm_names[arm]} by block"
            rows = [(str(i + 1), "–" if v is None else ratio(v)) for i, v in enumerate(comparison.blocks)]
            data = Table(title, ("block", "ratio"), rows, numeric=frozenset({1}))
            blocks.append(Chart(title, charts.strip_chart(comparison.blocks, label=f"{title}, {cell.cell.key}"), data))
    return Details(tuple(summary), blocks or (Paragraph("No block of this cell was measured."),), paper=False)
