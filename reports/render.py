"""Rendering a bundle's report again from its records: deterministic, so that a check can compare bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from reports.content import build_document
from reports.html import html_report
from reports.load import Loaded, load_bundle
from reports.markdown import markdown_report

__all__ = ["FORMATS", "Format", "render", "render_all"]

Format = Literal["md", "html"]
FORMATS: tuple[Format, ...] = ("md", "html")


def render(path: Path, form: Format) -> str:
    """Render the report of a bundle folder.

    Args:
        path: the bundle.
        form: `md` or `html`.

    Raises:
        BundleRefusedError: the folder is not an intact bundle.
    """
    return render_all(load_bundle(path))[form]


def render_all(loaded: Loaded) -> dict[Format, str]:
    """Render both reports of a bundle in memory. It reads records, raw lines and the patch, never a report file."""
    document = build_document(loaded)
    return {"md": markdown_report(document), "html": html_report(document)}
