"""The two reports: complete, deterministic, offline, accessible, and deaf to what foreign strings want."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import bundle_fixtures as fixtures
import pytest
import raw_lines
from markdown_it import MarkdownIt

import reports
from harness.records import GATES
from reports import Command, Disclosure

EVIL = "<script>alert(1)</script>\x1b[31m\u202e\"'><img src=x onerror=y>|`[x](javascript:z)` @all\n# x"


class Page(HTMLParser):
    """Elements, attributes and structure of a page."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.problems: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> closes {self.open[-1:]}")
        else:
            self.open.pop()

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def page(accepted_pr: Path) -> str:
    return (accepted_pr / "report.html").read_text(encoding="utf-8")


def test_rendering_again_gives_the_same_bytes(accepted: Path) -> None:
    """A check compares bytes, so nothing of the moment may enter a report."""
    for form in reports.FORMATS:
        text = reports.render(accepted, form)
        assert text.encode() == (accepted / f"report.{form}").read_bytes()
        assert text == reports.render(accepted, form)


def test_the_page_needs_nothing_and_runs_nothing(page: str) -> None:
    """A report is opened from mail and archives: no script, no request, no style that the policy does not name."""
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & {t for t, _ in parsed.elements}
    for tag, attrs in parsed.elements:
        assert not [name for name in attrs if name.startswith("on") or name in ("style", "src", "srcset")], tag
        assert (attrs.get("href") or "#").startswith("#")
    assert "url(" not in page
    assert "@import" not in page
    policy = next(m["content"] for m in parsed.of("meta") if m.get("http-equiv") == "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style.group(1).encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_the_page_can_be_read_by_a_screen_reader(page: str) -> None:
    """Landmarks, captions, scopes, names of drawings, working links."""
    parsed = Page(page)
    assert parsed.problems == []
    assert parsed.open == []
    assert parsed.of("html")[0]["lang"] == "en"
    for landmark in ("header", "main", "nav", "footer", "title", "h1"):
        assert len(parsed.of(landmark)) == 1, landmark
    assert len(parsed.of("table")) == len(parsed.of("caption")) > 10
    assert {th.get("scope") for th in parsed.of("th")} == {"row", "col"}
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in parsed.of("svg"))
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {(a["href"] or "")[1:] for a in parsed.of("a")} <= set(ids)
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch(r"h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_every_chart_has_its_numbers_in_a_table(page: str) -> None:
    """A chart alone shows nothing to those who cannot see it, and nothing exact to those who can."""
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(figures) > 4
    for figure in figures:
        assert "<svg" in figure
        assert "<table>" in figure


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_in_light_dark_and_print(page: str) -> None:
    """Text needs 4.5:1 against what it stands on, in every scheme."""
    schemes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    ]
    assert len(schemes) == 3
    for colours in schemes:
        for text in ("text", "quiet", "link", "good", "bad", "unsure", "none"):
            for ground in ("bg", "panel"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for tone in ("good", "bad", "unsure", "none"):
            assert contrast(colours[tone], colours[f"{tone}-bg"]) >= 4.5, tone
            assert contrast(colours["text"], colours[f"{tone}-bg"]) >= 4.5, tone


@pytest.mark.parametrize("form", reports.FORMATS)
def test_the_first_screen_answers_the_reviewer(accepted_pr: Path, form: reports.render.__class__) -> None:
    """Verdict, change, place, isolation, worst speed, gaps, proposer: before anything else."""
    text = reports.render(accepted_pr, form)
    first = text[: text.index("The change")]
    for expected in (
        "accept",
        "What changes",
        "kda_decode",
        "Where it applies",
        "14 cells",
        "k3_backend/kernels",
        "worst cell",
        "not shown",
        "tuner",
    ):
        assert expected in first, expected
    for gate in GATES:
        assert gate in first


def test_the_worst_cell_is_marked_in_each_matrix(page: str) -> None:
    """No aggregate without its worst cell."""
    matrices = re.findall(r'<table class="matrix">.*?</table>', page, re.DOTALL)
    assert len(matrices) == 4
    for against in ("standard path", "current best"):
        group = [matrix for matrix in matrices if f"against the {against}" in matrix]
        values = [float(v) for matrix in group for v in re.findall(r'class="value">([\d.]+)×', matrix)]
        worst = [w for matrix in group for w in re.findall(r'>worst</span><span class="value">([\d.]+)×', matrix)]
        assert [float(w) for w in worst] == [min(values)]
        assert len(values) == 16


def test_failures_and_gaps_are_shown_with_their_next_command(tmp_path: Path) -> None:
    """A rejection has to say where, what was expected and what to do."""
    wrong = partial(raw_lines.kernels_lines, factor=50.0)
    rejected = reports.render(fixtures.make_bundle(tmp_path / "r", lines={"kernels": wrong}), "md")
    assert "reject" in rejected
    assert "kernels.mismatch" in rejected
    assert "fasttrack verify --gates kernels" in rejected
    assert rejected.count("not run") >= 4
    assert "Not measured" in rejected
    gap = reports.render(fixtures.make_bundle(tmp_path / "g", not_evaluated="features"), "md")
    assert "incomplete" in gap
    assert "bubblewrap is not installed" in gap
    assert "make setup" in gap


def evil_changes() -> dict[str, Any]:
    return {
        "disclosure": Disclosure(
            proposer="person", statement=EVIL, model=EVIL, submitter=EVIL, reviews=(EVIL,), cost_usd=1.5
        ),
        "commands": (Command(purpose=EVIL, argv=("sh", "-c", EVIL)),),
        "limits": (EVIL,),
        "allowed": (EVIL,),
        "task": EVIL,
    }  # fmt: skip


def evil_scope(artifacts: dict[str, str]) -> list[dict[str, Any]]:
    lines = raw_lines.scope_lines(fixtures.SETTINGS, fixtures.BASE, fixtures.HEAD)
    lines[0] |= {"allow": [EVIL]}
    finding = {"kind": "finding", "code": "scope.text", "message": EVIL, "path": EVIL, "line": 1, "expected": EVIL}
    return [*lines[:-1], finding, lines[-1]]


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with hostile text wherever its author has a say."""
    folder = tmp_path_factory.mktemp("evil")
    return fixtures.make_bundle(folder, changes=evil_changes(), lines={"scope": evil_scope})


def test_hostile_text_stays_text_on_the_page(evil: Path, page: str) -> None:
    """An author's message must not become markup in a reviewer's browser."""
    text = (evil / "report.html").read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.problems == []
    assert {tag for tag, _ in parsed.elements} <= {tag for tag, _ in Page(page).elements}
    assert "&lt;script&gt;" in text
    assert all(char == "\n" or char.isprintable() for char in text)
    assert reports.verify_bundle(evil).ok


def test_hostile_text_stays_text_in_markdown(evil: Path) -> None:
    """The report is pasted into pull requests, where links, images and mentions act."""
    text = (evil / "report.md").read_text(encoding="utf-8")
    assert all(char == "\n" or char.isprintable() for char in text)
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    outside = re.sub(r"<code>.*?</code>|<pre>.*?</pre>", "", rendered, flags=re.DOTALL)
    assert not re.search(r"<(script|img|a)\b", outside)
    assert "@all" not in re.sub(r"<code>.*?</code>|<pre>.*?</pre>", "", text) or "@<!-- -->all" in text
    assert "<h1>x" not in rendered
    rows = re.findall(r"<tr>(.*?)</tr>", rendered, flags=re.DOTALL)
    assert {len(re.findall("<t[dh]", row)) for row in rows} <= {2, 3, 4, 5, 6, 7, 8, 10}


def test_hostile_text_stays_text_in_a_terminal(evil: Path) -> None:
    """Escape sequences can retitle a window, hide lines or fake a verdict."""
    for text in (reports.show(evil).text(), reports.verify_bundle(evil).text(), reports.diff(evil, evil).text()):
        assert all(char == "\n" or char.isprintable() for char in text)
