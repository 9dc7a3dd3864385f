"""What a memory checker's log and exit status come to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.kit.sanitizer import judge
from verify.protocol import chain

ENTRY = "kernel_cutlass_mla_query_0"
FOUND = f"""========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at {ENTRY}+0x1f0
========= ERROR SUMMARY: 3 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
HAZARDS = f"=== Error: Race reported in {ENTRY}\n=== RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
REFUSED = "========= Error: Device not supported\n"
FOREIGN = FOUND.replace(ENTRY, "at_native_copy")


@pytest.mark.parametrize(
    ("text", "status", "problem", "word"),
    [
        (FOUND, 86, None, "errors"),
        (HAZARDS, 86, None, "errors"),
        (FOUND, None, "card.run: CUDA error", "errors"),
        (CLEAN, 0, None, "clean"),
        (CLEAN, 0, "card.run: no answer within 300 s", "not_evaluated"),
        (CLEAN, None, None, "not_evaluated"),
        (CLEAN, 1, None, "not_evaluated"),
        ("", 0, None, "not_evaluated"),
        ("", None, "start: the worker exited with status 255", "not_evaluated"),
        (REFUSED, 255, None, "not_evaluated"),
        (FOREIGN, 86, None, "not_evaluated"),
    ],
)
def test_only_errors_in_the_artifacts_kernels_count(
    text: str, status: int | None, problem: str | None, word: str
) -> None:
    """A tool that cannot run counts as clean, or an error elsewhere as the candidate's."""
    line = judge(text, status, problem, [ENTRY])
    assert line["status"] == word
    assert (line["reason"] is not None) == (word == "not_evaluated")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LINES = st.lists(
    st.dictionaries(st.text().filter(lambda key: key != chain.KEY), VALUES, max_size=4), min_size=1, max_size=5
)


@given(LINES, st.data())
def test_a_chain_notices_every_change(lines: list[dict[str, object]], data: st.DataObject) -> None:
    """A line that was edited, dropped or moved and still follows from those before it."""
    first = chain.start("kit", "nonce", "kernels")
    sealed, value = [], first
    for line in lines:
        sealed.append(chain.seal(value, line))
        value = sealed[-1][chain.KEY]
    assert chain.broken(first, sealed) is None
    assert chain.broken(chain.start("kit", "other", "kernels"), sealed) == 1
    at = data.draw(st.integers(0, len(sealed) - 1))
    assert chain.broken(first, [*sealed[:at], {**sealed[at], "added": 1}, *sealed[at + 1 :]]) == at + 1
    if at < len(sealed) - 1:
        assert chain.broken(first, [*sealed[:at], *sealed[at + 1 :]]) == at + 1
