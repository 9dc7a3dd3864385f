"""Rules of launch descriptors: a closed language of integers."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_backend.aot.cuda.expression import MAX_LENGTH, ExpressionError, evaluate, names


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("M + 2 * H - 1", 64 + 24 - 1),
        ("ceil_div(M, 48)", 2),
        ("min(H * B, max(1, sms * 2 // 4))", 66),
        ("M // 5 % 4", 0),
        ("M <= 64 and T == 1", 1),
        ("M > 64 or taps >= T + 2", 1),
        ("M != 64", 0),
    ],
)
def test_values(text: str, value: int) -> None:
    assert evaluate(text, {"M": 64, "H": 12, "B": 64, "T": 1, "taps": 3, "sms": 132}) == value


def test_names_are_what_a_rule_reads() -> None:
    assert names("ceil_div(M, rows) * min(H, 4)") == {"M", "rows", "H"}


@pytest.mark.parametrize(
    "text",
    [
        "", "M +", "__import__('os')", "M.real", "M[0]", "lambda: 1", "1.5", "'M'", "True", "M ** 9", "M << 60",
        "ceil_div(M)", "min()", "abs(M)", "min(M, key=M)", "1 < M < 3", "M if M else 1", "[M]", "(M := 3)", "not M",
        "-M", "f'{M}'", "M\nM", "M;M", "1" * (MAX_LENGTH + 1), "(" * 150 + "M" + ")" * 150,
    ],
)  # fmt: skip
def test_everything_else_is_refused_before_any_value_is_at_hand(text: str) -> None:
    with pytest.raises(ExpressionError, match="expected names, integers"):
        names(text)


@pytest.mark.parametrize("text", ["M // 0", "M % (H - H)", "ceil_div(M, 0)", "N"])
def test_no_value_is_an_error_that_quotes_the_rule(text: str) -> None:
    with pytest.raises(ExpressionError) as error:
        evaluate(text, {"M": 1, "H": 1})
    assert repr(text) in str(error.value)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_ceil_div_is_the_smallest_count_that_covers(rows: int, tile: int) -> None:
    blocks = evaluate("ceil_div(M, t)", {"M": rows, "t": tile})
    assert blocks * tile >= rows > (blocks - 1) * tile


@given(st.text(max_size=60))
def test_hostile_text_raises_the_one_error_or_parses(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        assert isinstance(evaluate(text, {"M": 3}), int)
