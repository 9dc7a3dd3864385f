"""Charts as inline SVG: ratio by batch with its interval, and a cell's blocks in the order they were measured.

Only what a report needs: no scripts, no fonts, no ids, no style attributes (the page's content policy allows none);
colours come from the page's classes and follow light and dark. Every word has its own marker shape, so that no reading
depends on colour. Charts draw numbers they are given; they compute none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from reports.document import Tone

__all__ = ["Point", "Series", "interval_chart", "legend", "strip_chart"]

_TONE_WORDS: dict[str, tuple[Tone, str]] = {
    "FAST": ("good", "circle"),
    "SAME": ("unsure", "square"),
    "SLOW": ("bad", "triangle"),
    "AMBG": ("unsure", "diamond"),
    "????": ("none", "cross"),
}
_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Point:
    """One measured ratio."""

    x: str
    """Category, e.g. a batch size."""
    value: float
    low: float | None
    high: float | None
    word: str
    """FAST, SAME, SLOW, AMBG or ????."""


@dataclass(frozen=True)
class Series:
    """Points of one panel."""

    title: str
    points: Sequence[Point]


def interval_chart(series: Sequence[Series], *, label: str, reference: float = 1.0) -> str:
    """Side-by-side panels with one shared vertical axis: a marker per category, a whisker for its interval.

    Args:
        series: one panel each; at least one point in all.
        label: accessible name of the drawing.
        reference: value at which a line is drawn (1.0: as fast as the other arm).
    """
    values = [v for s in series for p in s.points for v in (p.value, p.low, p.high) if v is not None]
    ticks = _ticks(min([reference, *values]), max([reference, *values]))
    low, high = ticks[0], ticks[-1]
    step, left, top, plot = 44, 46, 26, 190
    widths = [max(len(s.points) * step + 16, 90) for s in series]
    total = left + sum(widths) + 14 * (len(series) - 1) + 8
    height = top + plot + 42

    def y(value: float) -> float:
        return top + plot * (1 - (value - low) / (high - low))

    out = [_open(total, height, label)]
    x0 = left
    for index, (panel, width) in enumerate(zip(series, widths, strict=True)):
        out.append(_text(x0 + width / 2, 15, panel.title, "panel"))
        for tick in ticks:
            at = y(tick)
            kind = "axis" if tick == reference else "grid"
            out.append(_line(x0, at, x0 + width, at, kind))
            if index == 0:
                out.append(_text(left - 6, at + 4, _number(tick), "tick end"))
        if reference not in ticks:
            out.append(_line(x0, y(reference), x0 + width, y(reference), "axis"))
        for number, point in enumerate(panel.points):
            x = x0 + 8 + step * (number + 0.5)
            out += _marker_with_whisker(x, y(point.value), point, y)
            out.append(_text(x, top + plot + 17, point.x, "tick"))
        out.append(_text(x0 + width / 2, height - 6, "batch", "tick"))
        x0 += width + 14
    return "".join([*out, "</svg>"])


def strip_chart(values: Sequence[float | None], *, label: str, reference: float = 1.0) -> str:
    """A cell's block ratios in the order of measurement; a missing block leaves a gap.

    The axis covers the values only, so that drift and outliers show; the reference line is drawn where it falls inside.
    """
    present = [value for value in values if value is not None]
    ticks = _ticks(min(present, default=reference), max(present, default=reference))
    low, high = ticks[0], ticks[-1]
    left, top, plot, step = 46, 8, 80, 22
    width, height = left + max(step * len(values), 60) + 8, top + plot + 22

    def y(value: float) -> float:
        return top + plot * (1 - (value - low) / (high - low))

    out = [_open(width, height, label)]
    for tick in ticks:
        out.append(_line(left, y(tick), width - 8, y(tick), "axis" if tick == reference else "grid"))
        out.append(_text(left - 6, y(tick) + 4, _number(tick), "tick end"))
    for index, value in enumerate(values):
        x = left + step * (index + 0.5)
        if value is not None:
            out.append(_shape("circle", x, y(value), 3.5, "block"))
        if len(values) <= 12 or index % 5 == 0:
            out.append(_text(x, height - 4, str(index + 1), "tick"))
    return "".join([*out, "</svg>"])


def legend(words: Sequence[str]) -> str:
    """Markers of the words in use, with the words."""
    out = [_open(80 * len(words), 20, "Legend: " + ", ".join(words))]
    for index, word in enumerate(words):
        tone, shape = _TONE_WORDS.get(word, ("none", "cross"))
        out.append(_shape(shape, 80 * index + 10, 10, 5, f"mark {tone}"))
        out.append(_text(80 * index + 22, 14, word, "key"))
    return "".join([*out, "</svg>"])


def _marker_with_whisker(x: float, y: float, point: Point, scale: object) -> list[str]:
    tone, shape = _TONE_WORDS.get(point.word, ("none", "cross"))
    out: list[str] = []
    if point.low is not None and point.high is not None and callable(scale):
        top, bottom = scale(point.high), scale(point.low)
        out.append(_line(x, top, x, bottom, f"whisker {tone}"))
        out += [_line(x - 4, end, x + 4, end, f"whisker {tone}") for end in (top, bottom)]
    out.append(_shape(shape, x, y, 5, f"mark {tone}"))
    return out


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose the range, four to eight of them."""
    span = max(high - low, 0.02)
    raw = span / 4
    scale = 10 ** math.floor(math.log10(raw))
    step = next(scale * s for s in _STEPS if scale * s >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if first == last:
        last += 1
    return [round(step * i, 10) for i in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _open(width: float, height: float, label: str) -> str:
    name = escape(label)
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{name}" xmlns="http://www.w3.org/2000/svg">'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _shape(shape: str, x: float, y: float, r: float, kind: str) -> str:
    points = {
        "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
        "triangle": [(-1.1, -0.8), (1.1, -0.8), (0, 1.1)],
        "diamond": [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
    }
    if shape == "circle":
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"/>'
    if shape == "cross":
        path = f"M{x - r:.1f} {y - r:.1f}L{x + r:.1f} {y + r:.1f}M{x - r:.1f} {y + r:.1f}L{x + r:.1f} {y - r:.1f}"
        return f'<path class="{kind} open" d="{path}"/>'
    corners = " ".join(f"{x + dx * r:.1f},{y + dy * r:.1f}" for dx, dy in points[shape])
    return f'<polygon class="{kind}" points="{corners}"/>'
