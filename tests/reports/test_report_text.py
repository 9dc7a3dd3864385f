"""Foreign strings made harmless, and numbers that keep their meaning."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from reports.text import code_span, count, duration, fixed, markdown, quantity, size, visible, visible_line

RENDERER = MarkdownIt("commonmark", {"html": True}).enable("table").enable("strikethrough")
NASTY = st.text(st.sampled_from("<>&|`*_[]()!#~$@:/\\-+=1. \n\t\x1b\u202e\u200bxé'\""), max_size=40)


@given(st.text())
def test_what_is_shown_cannot_act(text: str) -> None:
    """Control, bidirectional and invisible characters move cursors and reorder lines."""
    shown = visible_line(text)
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def test_escapes_are_readable() -> None:
    """A reader has to see what stood there."""
    assert visible("a\x1b[2Jb\u202ec\U000e0001") == "a\\x1b[2Jb\\u202ec\\U000e0001"
    assert visible("a\nb") == "a\nb"
    assert visible("x" * 50, limit=10) == "xxxxxxxxxx… (40 more characters)"


@given(NASTY)
def test_markdown_shows_the_text_itself(text: str) -> None:
    """Rendered, an escaped string is one paragraph of exactly the visible text, without any markup."""
    tokens = RENDERER.parse(f"x{markdown(text)}y")
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    children = tokens[1].children or []
    kinds = {child.type for child in children} - {"text", "text_special", "html_inline"}
    assert not kinds
    assert all(child.content == "<!-- -->" for child in children if child.type == "html_inline")
    shown = "".join(child.content for child in children if child.type != "html_inline")
    assert " ".join(shown.split()) == " ".join(f"x{visible_line(text).strip()}y".split())


@given(NASTY)
def test_markdown_stays_in_its_table_cell(text: str) -> None:
    """A pipe or a line break would move every number behind it into another column."""
    tokens = RENDERER.parse(f"| a | b |\n| --- | --- |\n| {markdown(text)} | {code_span(text)} |\n")
    assert sum(token.type == "td_open" for token in tokens) == 2


@given(NASTY)
def test_code_spans_cannot_be_left(text: str) -> None:
    """Backticks in a name would end the span and let the rest act."""
    tokens = RENDERER.parse("x " + code_span(text) + " x")
    children = tokens[1].children or []
    assert [child.type for child in children] == ["text", "code_inline", "text"]


@pytest.mark.parametrize(
    "start", ["# x", "- x", "+ x", "1. x", "12) x", "> x", "=== x", "    x", "~~~", "```", "| a | b |"]
)
def test_markdown_cannot_start_a_block(start: str) -> None:
    """List items begin with foreign text."""
    tokens = RENDERER.parse(markdown(start))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]


def test_mentions_and_links_do_not_fire() -> None:
    """A report that is pasted into a pull request must not call people or point elsewhere."""
    assert "@team" not in markdown("ask @team")
    assert "https://" not in markdown("see https://example.org")
    assert "#12" not in markdown("fixes #12").replace("\\#12", "")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12.0, "cases", "12 cases"),
        (1.23456, "x", "1.235 x"),
        (0.0, "", "0"),
        (1e-9, "s", "1e-09 s"),
        (2.5e9, "B", "2,500,000,000 B"),
    ],
)
def test_quantities_keep_their_size(value: float, unit: str, text: str) -> None:
    """A small error printed as 0.000 would read as none."""
    assert quantity(value, unit) == text


def test_numbers_with_units() -> None:
    """Each number in the page passes through one of these."""
    assert fixed(0.00001) == "1e-05"
    assert fixed(12345678.9) == "1.23e+07"
    assert [count(1, "file"), count(2, "file"), count(1200, "entry", "entries")] == [
        "1 file",
        "2 files",
        "1,200 entries",
    ]
    assert [duration(0.44), duration(75.2), duration(725)] == ["0.4 s", "75 s", "12 min 5 s"]
    assert [size(10), size(2048), size(8 << 30)] == ["10 B", "2.0 KiB", "8.0 GiB"]
