"""Canonical JSON: one value has one sequence of bytes, and the reader accepts no other."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import canonical

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_both_forms_survive_a_round_trip(value: Any) -> None:
    """A value that changes when written and read again would make digests meaningless."""
    assert canonical.parse(canonical.document(value)) == value
    assert canonical.parse(canonical.line(value), form="line") == value
    assert canonical.line(value).isascii()


@given(st.data())
def test_any_inserted_space_outside_of_text_is_refused(data: st.DataObject) -> None:
    """Two spellings of one value would let a file change without changing its meaning."""
    raw = canonical.line({"a": [1, 2.5, None], "b": {"c": True}})
    at = data.draw(st.integers(0, len(raw)))
    if at and raw[:at].count(b'"') % 2:
        return
    with pytest.raises(canonical.NotCanonicalError):
        canonical.parse(raw[:at] + b" " + raw[at:], form="line")


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (b'{"a":1,"a":1}', "key twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "Out of range"),
        (b'["\\ud800"]', "surrogate"),
        (b"[" * 100_000, "nested"),
        (b"[" * 40 + b"]" * 40, "nested"),
        (b"[1.00]", "canonical form at byte"),
        (b'{"b":1,"a":2}', "canonical form at byte"),
        ('["é"]'.encode(), "ascii"),
        (b"9" * 5000, "digits"),
        (b"", "not JSON"),
    ],
)
def test_hostile_or_sloppy_json_is_refused_with_its_rule(raw: bytes, rule: str) -> None:
    """Duplicate keys, NaN, deep nesting and second spellings are how a record's meaning gets bent."""
    with pytest.raises(canonical.NotCanonicalError, match=rule):
        canonical.parse(raw, form="line")


def test_what_json_cannot_say_cannot_be_written() -> None:
    """NaN in a record would read as a measured number; a lone surrogate cannot be read back."""
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="Out of range"):
            canonical.document({"a": value})
    with pytest.raises(canonical.NotCanonicalError, match="surrogate"):
        canonical.line({"a": "\ud800"})
    assert canonical.line("\U0001f600") == b'"\\ud83d\\ude00"'


@pytest.mark.parametrize("raw", [b'{"a":1}', b'{"a":1}\n\n', b'{"a":1}\n[1]\n', b'{"a":1}\r\n'])
def test_lines_are_objects_each_ended_by_one_newline(raw: bytes) -> None:
    """A torn last line must not read as a complete one."""
    with pytest.raises(canonical.NotCanonicalError):
        canonical.parse_lines(raw)
    assert canonical.parse_lines(b"") == []
