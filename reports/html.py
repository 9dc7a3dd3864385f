"""The report as one HTML page: offline, without scripts, readable in light and dark, on a phone and on paper.

The template escapes everything; the only markup that passes unescaped is our style sheet and the drawings of
`reports.charts`. The page's content policy forbids every request and every style but the one whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reports.document import Content, Document, Tone
from reports.text import visible

__all__ = ["SIGNS", "html_report"]

SIGNS: dict[Tone, str] = {"good": "✓", "bad": "✗", "unsure": "~", "none": "?"}
"""A sign per tone, so that colour never carries meaning alone."""

_TEMPLATES = Path(__file__).parent / "templates"


def html_report(document: Document) -> str:
    """Render a document; the same document gives the same bytes."""
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        _environment()
        .get_template("report.html.jinja")
        .render(document=document, style=style, style_digest=digest, signs=SIGNS)
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """The template engine; compiling the template takes longer than filling it."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["visible"] = visible
    environment.filters["kind"] = _kind
    environment.filters["pieces"] = _pieces
    return environment


def _kind(value: Any) -> str:
    return type(value).__name__


def _pieces(content: Content) -> tuple[Any, ...]:
    return content if isinstance(content, tuple) else (content,)
