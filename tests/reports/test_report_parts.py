"""Small parts of bundles and reports: patches, tables, charts, the fingerprint, summaries and comparisons."""

from __future__ import annotations

import getpass
import io
import re
import socket
from pathlib import Path
from typing import Any

import bundle_fixtures as fixtures
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reports
from harness.records import GATES, Missing, Outcome
from reports import charts, derive, environment, protocols
from reports.content.gates import detail_blocks
from reports.document import Facts, Table
from reports.folder import CODES, refusal
from reports.patch import read_patch

# --- patches ---------------------------------------------------------------------------------------------------------


def test_a_patch_is_counted_by_its_hunks() -> None:
    """Added text that looks like a diff header must count as one added line."""
    patch = read_patch(
        b"diff --git a/k3_backend/kernels/attn_res/cpu.cc b/k3_backend/kernels/attn_res/cpu.cc\n"
        b"new file mode 100644\nindex 000..111\n--- /dev/null\n+++ b/k3_backend/kernels/attn_res/cpu.cc\n"
        b"@@ -0,0 +1,3 @@\n+diff --git a/x b/x\n+--- a/x\n+last\n\\ No newline at end of file\n"
        b"diff --git a/docs/x.png b/docs/x.png\ndeleted file mode 100644\nGIT binary patch\nliteral 0\n"
    )
    assert [(f.path, f.status, f.added, f.removed, f.binary) for f in patch.files] == [
        ("k3_backend/kernels/attn_res/cpu.cc", "added", 3, 0, False),
        ("docs/x.png", "deleted", 0, 0, True),
    ]
    assert patch.ops == ("attn_res",)
    assert patch.band == "low"
    assert read_patch(fixtures.PATCH).ops == ("kda_decode",)


@pytest.mark.parametrize(("added", "band"), [(49, "low"), (50, "medium"), (250, "medium"), (251, "high")])
def test_complexity_bands(added: int, band: str) -> None:
    """The bands that reviewers know."""
    body = b"+x\n" * added
    assert read_patch(b"diff --git a/f b/f\n@@ -0,0 +1,%d @@\n%s" % (added, body)).band == band


@given(st.binary(max_size=300))
def test_any_bytes_are_a_patch(data: bytes) -> None:
    """The patch comes from a stranger; reading it must not end the check."""
    assert read_patch(b"diff --git a/f b/f\n@@ -1,999999999 +1 @@\n" + data).removed >= 0


# --- derived tables --------------------------------------------------------------------------------------------------

LINES: list[dict[str, Any]] = [
    {"kind": "header", "n": 1, "cell": {"b": 1, "c": None}, "line": "taken"},
    {"kind": "x", "n": 2.5, "us": [1, 2.5], "big": 2**70, "ok": True, "mixed": [1, "a"], "none": None, "empty": {}},
]


def test_columns_take_the_narrowest_type_that_loses_nothing() -> None:
    """Queries need numbers; precision must not depend on a neighbour."""
    table = derive.table(LINES)
    assert table.column_names[0] == "line"
    types = {field.name: field.type for field in table.schema}
    assert types["n"] == pa.float64()
    assert types["cell.b"] == pa.int64()
    assert types["us"] == pa.list_(pa.float64())
    assert types["ok"] == pa.bool_()
    assert types["big"] == pa.string()
    row = table.to_pylist()[1]
    assert row["big"] == str(2**70)
    assert row["mixed"] == '[1,"a"]'
    assert table.to_pylist()[0]["line_"] == "taken"


def test_the_table_is_compared_by_content_across_writers() -> None:
    """Another pyarrow version writes other bytes for the same table."""
    buffer = io.BytesIO()
    pq.write_table(derive.table(LINES), buffer, compression="none")
    assert buffer.getvalue() != derive.parquet_bytes(LINES)
    assert derive.same_table(buffer.getvalue(), LINES)
    assert not derive.same_table(buffer.getvalue(), LINES[:1])
    assert not derive.same_table(buffer.getvalue(), [LINES[0], LINES[1] | {"n": 2.25}])
    with pytest.raises((pa.ArrowException, OSError)):
        derive.same_table(buffer.getvalue()[:-9], LINES)


def test_a_table_that_would_be_too_wide_is_refused() -> None:
    """A few kilobytes of JSON must not become gigabytes of columns."""
    with pytest.raises(ValueError, match="keys"):
        derive.table([{f"k{i}": 1 for i in range(600)}])


# --- charts ----------------------------------------------------------------------------------------------------------


def test_a_chart_escapes_and_shapes_every_word() -> None:
    """Colour never alone: each word has its own shape."""
    words = ("FAST", "SAME", "SLOW", "AMBG", "????")
    points = [charts.Point(str(i), 1.0 + i / 10, 0.9 + i / 10, 1.1 + i / 10, word) for i, word in enumerate(words)]
    svg = charts.interval_chart([charts.Series("<b>&", points)], label='"><x>')
    assert "<b>" not in svg
    assert '"><x>' not in svg
    shapes = re.findall(r'<(circle|polygon|path) class="mark (\w+)', svg)
    assert [shape for shape, _ in shapes] == ["circle", "polygon", "polygon", "polygon", "path"]
    assert len(set(re.findall(r'<polygon class="mark \w+" points="([^"]*)"', svg))) == 3
    assert "style=" not in svg


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=8))
def test_every_value_lies_inside_the_drawing(values: list[float]) -> None:
    """A point outside of the frame is a hidden result."""
    svg = charts.strip_chart([*values, None], label="x")
    height = float(re.search(r'height="([\d.]+)"', svg).group(1))  # type: ignore[union-attr]
    heights = [float(y) for y in re.findall(r'cy="(-?[\d.]+)"', svg)]
    assert len(heights) == len(values)
    assert all(0 <= y <= height for y in heights)


# --- the fingerprint -------------------------------------------------------------------------------------------------


def test_the_fingerprint_names_no_host_user_or_path() -> None:
    """Bundles are published."""
    text = environment.capture().model_dump_json()
    words = set(re.findall(r"[\w.-]+", text))
    assert not words & {socket.gethostname(), getpass.getuser()}
    assert not re.search(r"/(home|root|tmp|usr|opt)\b", text)


def test_what_cannot_be_read_is_missing_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default in place of an unknown machine would make machines look alike."""
    monkeypatch.setenv("PATH", "")
    captured = environment.capture(tmp_path, tmp_path)
    for value in (captured.cpu_model, captured.cpu_flags_sha256, captured.memory_bytes, captured.compiler):
        assert isinstance(value, Missing)
        assert value.missing


def test_limits_of_a_container_are_seen(tmp_path: Path) -> None:
    """Two cores of a limited container are not two cores of a machine."""
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    signs = environment.capture(cgroup=tmp_path).container
    assert "cgroup cpu.max 200000 100000" in signs
    assert not [sign for sign in signs if "memory" in sign]


# --- summaries and comparisons ---------------------------------------------------------------------------------------


def test_show_summarises_and_says_that_it_did_not_check(accepted: Path) -> None:
    """A summary must not read like a verification."""
    view = reports.show(accepted)
    assert view.verdict.value == "accept"
    assert [gate.gate for gate in view.gates] == list(GATES)
    assert view.added_lines == 6
    assert "Check it with: fasttrack bundle verify" in view.text()
    assert "worst_ratio_best" in view.text()


def test_diff_shows_what_differs(accepted: Path, tmp_path: Path) -> None:
    """Comparing a bundle with a re-run is how contributors find what changed."""
    other = fixtures.make_bundle(tmp_path, not_evaluated="features", tier="pr")
    found = reports.diff(accepted, other)
    assert {value.what for value in found.values} == {"verdict", "tier"}
    features = next(gate for gate in found.gates if gate.gate == "features")
    assert (features.a, features.b) == (Outcome.PASSED, Outcome.NOT_EVALUATED)
    assert "verdict: accept | incomplete" in found.text()
    assert reports.diff(accepted, accepted).values == ()


def test_details_of_any_gate_become_tables() -> None:
    """A gate may state tables that no report code knows."""
    blocks = detail_blocks(
        {
            "rows": [{"op": "a", "ratio": 1.25}, {"op": "b", "ratio": None, "extra": True}],
            "ledger": {"kda": {"specialized": 3}},
            "plain": {"x": 1},
            "count": 3,
            "odd": [[1], {}],
        }
    )
    facts = next(block for block in blocks if isinstance(block, Facts))
    assert [name for name, _ in facts.pairs] == ["count", "odd"]
    tables = {block.caption: block for block in blocks if isinstance(block, Table)}
    assert tables["rows"].columns == ("op", "ratio", "extra")
    assert list(tables["rows"].rows)[1] == ("b", "–", "yes")
    assert len(tables["ledger"].rows) == 1
    assert len(detail_blocks({"many": [{"i": i} for i in range(500)]})) == 2


# --- protocols -------------------------------------------------------------------------------------------------------


def test_every_gate_names_its_decision_module() -> None:
    """A gate without one could never be checked by a stranger."""
    assert set(protocols.MODULES) == set(GATES)


def test_an_unknown_protocol_is_said_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deciding old lines by new rules would compare what must not be compared."""
    with pytest.raises(protocols.UnknownProtocolError, match="scope/0"):
        protocols.implementation("scope", "scope/0")
    monkeypatch.setitem(protocols.MODULES, "scope", "verify.protocol.nothing")
    with pytest.raises(protocols.UnknownProtocolError, match=r"has no verify\.protocol\.nothing"):
        protocols.implementation("scope", "scope/1")


# --- reason codes ----------------------------------------------------------------------------------------------------


def test_reason_codes_are_documented_and_used() -> None:
    """A code that nobody explains helps nobody; one that nothing raises misleads."""
    page = (fixtures.ROOT / "docs/bundle.md").read_text(encoding="utf-8")
    table = page.partition("## Reasons to refuse")[2].partition("## ")[0]
    assert dict(re.findall(r"^\| `(bundle\.\w+)` \| (.+) \|$", table, re.MULTILINE)) == CODES
    source = "".join(path.read_text(encoding="utf-8") for path in (fixtures.ROOT / "reports").rglob("*.py"))
    raised = {f"bundle.{code}" for code in re.findall(r'refusal\(\s*"(\w+)"', source)}
    assert raised == set(CODES)


def test_a_new_reason_needs_its_code() -> None:
    """A mistyped code would be a reason that no page explains."""
    with pytest.raises(KeyError):
        refusal("no_such_code", "message", "where", "expected")
