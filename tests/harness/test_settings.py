from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import globs, settings, toml
from harness.errors import FasttrackError
from harness.records import EvidenceClass

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "harness.toml").read_text()


def load_text(tmp_path: Path, text: str) -> settings.Settings:
    path = tmp_path / "harness.toml"
    path.write_text(text)
    return settings.load(path)


def refused(tmp_path: Path, text: str) -> FasttrackError:
    with pytest.raises(FasttrackError) as caught:
        load_text(tmp_path, text)
    return caught.value


def line_of(text: str, needle: str) -> int:
    return text[: text.index(needle)].count("\n") + 1


def test_the_committed_file_has_the_three_targets() -> None:
    """A target, tier or gate that the design promises is missing from the file."""
    loaded = settings.load(ROOT)
    assert set(loaded.targets) == {"cpu", "h200", "gb300"}
    assert set(loaded.tiers) == {"smoke", "pr", "full"}
    assert loaded.target("cpu").required["perf"] is EvidenceClass.HARDWARE
    assert loaded.target("gb300").required["audit"] is EvidenceClass.STATIC


def test_cpu_matrix_of_the_tiers() -> None:
    """The perf matrix of a tier silently loses or gains cells."""
    loaded = settings.load(ROOT)
    cpu = loaded.target("cpu")
    pr = cpu.cells(loaded.tier("pr"))
    assert [(c.batch, c.context) for c in pr] == [(b, c) for c in (256, 2048) for b in (1, 2, 4, 8, 16, 32, 64)]
    assert {c.scope for c in pr} == {"step"}
    assert {c.key for c in pr} >= {"step/b8/c256/t1/decode"}
    assert len(cpu.cells(loaded.tier("smoke"))) == 3
    assert cpu.cost(loaded.tier("pr")).measurements == 14 * (3 * 8 + 1)
    full = cpu.full_matrix()
    assert full.total == len(full.cells) == 14 * 2 * 4 * 2


def test_gb300_matrix_is_pruned_by_rules_that_account_for_every_cell() -> None:
    """A pruned matrix hides cells without saying which rule removed them."""
    gb300 = settings.load(ROOT).target("gb300")
    matrix = gb300.full_matrix()
    assert matrix.total == 4 * 14 * 5 * 8 * 3 == len(matrix.cells) + sum(matrix.pruned)
    assert all(count > 0 for count in matrix.pruned)
    assert len({c.key for c in matrix.cells}) == len(matrix.cells)
    assert not any(c.batch == 64 and c.context == 1_048_576 and c.layout == "tp8.dcp1" for c in matrix.cells)
    assert any(c.batch == 4 and c.context == 1_048_576 and c.layout == "tp8.dcp1" for c in matrix.cells)


@pytest.mark.parametrize(
    ("old", "new", "at", "says"),
    [
        ("version = 1", "version = 2", "version = 2", "version"),
        ('device = "cpu"', 'device = "cpu"\ncolour = "red"', "colour", "unknown key"),
        ("batches = [1, 8, 64]", "batches = []", "batches = []", "empty"),
        (
            "batches = [1, 8, 64]",
            "batches = [1, 9, 64]",
            "batches = [1, 9, 64]",
            "batch 9 is not in the batches of target cpu",
        ),
        ("batches = [1, 8, 64]", "batches = [1, 8, 8]", "batches = [1, 8, 8]", "lists 8 twice"),
        ("batches = [1, 8, 64]", "batches = [8, 1, 64]", "batches = [8, 1, 64]", "must ascend"),
        ("contexts = 2\n", "contexts = 0\n", "contexts = 0", "contexts"),
        ('archs = ["sm_90a"]', "archs = []", "archs = []", "empty"),
        ("layouts = [{ tp = 1, dcp = 1 }]", "layouts = []", "layouts = []", "empty"),
        (
            "layouts = [{ tp = 1, dcp = 1 }]",
            "layouts = [{ tp = 1, dcp = 1 }, { tp = 1, dcp = 1 }]",
            "layouts = [{ tp = 1, dcp = 1 }, {",
            "listed twice",
        ),
        (
            "layouts = [{ tp = 1, dcp = 1 }]",
            "layouts = [{ tp = 4, dcp = 3 }]",
            "layouts = [{ tp = 4",
            "does not divide",
        ),
        ("perf_drafts = [0]", "perf_drafts = [0, 2]", "perf_drafts = [0, 2]", "2 is not one of the target's drafts"),
        ('scope = "static"', 'scope = "guess"', 'scope = "guess"', "required.scope"),
        ('scope = "static"', 'vibes = "static"', 'vibes = "static"', "required.vibes"),
        ("alpha_per_run = 0.01", "alpha_per_run = 1.5", "alpha_per_run = 1.5", "less than 1"),
        ('"k3_backend/schedules/**",', '"k3_backend/**",', '"k3_backend/**",', "also protected"),
        ('"k3_backend/schedules/**",', '"k3_backend/step/plan.py",', '"k3_backend/step/plan.py",', "also protected"),
        ('"k3_backend/schedules/**",', '"*.toml",', '"*.toml",', "also protected"),
        ('"k3_backend/schedules/**",', '"../elsewhere/**",', '"../elsewhere', "'..' component"),
        (
            '"verify/**",\n',
            '"verify/**",\n  "k3_backend/kernels/common/**",\n',
            '"k3_backend/kernels/**",',
            "also protected",
        ),
        (
            "cached_tokens_above = 4194304",
            "cached_tokens_above = 99999999",
            "[[targets.gb300.prune]]",
            "removes no cell",
        ),
        (
            "[targets.cpu.perf]",
            "[targets.cpu.speed]\nx = 1\n\n[targets.cpu.perf]",
            "[targets.cpu.speed]",
            "unknown key",
        ),
        ('geometry = "k3-nano"\n', "", "[targets.cpu]", "required key is missing"),
        ("kernel_cases = 1 ", 'kernel_cases = "two" ', 'kernel_cases = "two"', "kernel_cases"),
    ],
)
def test_contradictions_name_the_line(tmp_path: Path, old: str, new: str, at: str, says: str) -> None:
    """A wrong settings file is accepted, or its complaint does not say where to edit."""
    text = TEXT.replace(old, new, 1)
    assert text != TEXT
    error = refused(tmp_path, text)
    assert error.where == f"harness.toml:{line_of(text, at)}"
    assert says in error.what
    assert error.next


def test_broken_toml_names_its_own_line(tmp_path: Path) -> None:
    """A syntax error ends in a traceback, or without the line."""
    text = TEXT.replace("contexts = 2\n", "contexts = = 2\n", 1)
    assert refused(tmp_path, text).where == f"harness.toml:{line_of(text, 'contexts = = 2')}"


def test_missing_and_binary_files_are_clear_errors(tmp_path: Path) -> None:
    """A missing or non-text settings file ends in a traceback."""
    with pytest.raises(FasttrackError, match="cannot read"):
        settings.load(tmp_path / "absent.toml")
    (tmp_path / "harness.toml").write_bytes(b"version = 1\n# \xff\n")
    with pytest.raises(FasttrackError, match=r"harness\.toml:2: byte 0xff is not UTF-8"):
        settings.load(tmp_path)


def test_unknown_names_list_the_known_ones() -> None:
    """An unknown target or tier ends in a KeyError."""
    loaded = settings.load(ROOT)
    with pytest.raises(FasttrackError, match="one of cpu, h200, gb300"):
        loaded.target("gb200")
    with pytest.raises(FasttrackError, match="one of smoke, pr, full"):
        loaded.tier("nightly")


def test_records_are_frozen() -> None:
    """Code that holds the settings could change a gate's rule."""
    loaded = settings.load(ROOT)
    with pytest.raises(ValueError, match="frozen"):
        loaded.target("cpu").perf.alpha_per_run = 0.5  # type: ignore[misc]


def test_every_complaint_is_listed(tmp_path: Path) -> None:
    """Errors have to be found one run at a time."""
    text = TEXT.replace('device = "cpu"', 'device = "cpu"\ncolour = 1\nshade = 2')
    error = refused(tmp_path, text)
    assert "colour" in error.what
    assert "shade" in error.what
    assert f"line {line_of(text, 'shade')}" in error.what


def test_editable_table_decides_paths() -> None:
    """A protected file counts as editable, or a kernel as protected."""
    scope = settings.load(ROOT).scope
    for path in ("k3_backend/kernels/kda_decode/cpu.cc", "k3_backend/schedules/cpu/k3-nano/kda_decode.toml"):
        assert scope.is_editable(path)
    for path in (
        "k3_backend/kernels",
        "k3_backend/geometry.py",
        "k3_backend/kernelsx/a",
        "harness.toml",
        "k3_backend/ops/x/kernels/a",
    ):
        assert not scope.is_editable(path)


PARTS = st.sampled_from(["a", "b", "ab", "*", "?", "a*", "**"])
NAMES = st.sampled_from(["a", "b", "ab", "c"])


@given(
    st.lists(PARTS, min_size=1, max_size=4),
    st.lists(PARTS, min_size=1, max_size=4),
    st.lists(NAMES, min_size=1, max_size=4),
)
def test_globs_that_share_a_path_overlap(first: list[str], second: list[str], path: list[str]) -> None:
    """An editable glob reaches a protected path although `overlap` says they are disjoint."""
    a, b, p = "/".join(first), "/".join(second), "/".join(path)
    if globs.matches(a, p) and globs.matches(b, p):
        assert globs.overlap(a, b)


def test_globs_stay_inside_components() -> None:
    """`*` crosses a folder border, so a file-level rule opens a whole tree."""
    assert not globs.matches("a/*", "a/b/c")
    assert globs.matches("a/**", "a/b/c")
    assert not globs.matches("a/**", "a")
    assert not globs.overlap("a/b/**", "a/c/**")


KEYS = st.text("abcXYZ019_-", min_size=1, max_size=6)
SCALARS = st.one_of(
    st.integers(-9, 9),
    st.booleans(),
    st.sampled_from(['"x"', "'y'", '"# no comment"', '"a\\"b"', '"""m\nl"""', "'''r\n'''"]),
)


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """TOML text with, for each top-level key, the line on which it was written."""
    out, lines = [], {}
    for key in draw(st.lists(KEYS, unique=True, max_size=8)):
        out += ["# comment ] [ = \" '"] * draw(st.integers(0, 2))
        lines[key] = "\n".join(out).count("\n") + (2 if out else 1)
        kind = draw(st.sampled_from(["scalar", "list", "table"]))
        value = draw(SCALARS)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if kind == "list":
            text = f"[ # first\n  {text},\n  [{text}, 1],\n]"
        elif kind == "table":
            text = f"{{ k = {text.replace(chr(10), ' ') if chr(10) in text else text}, l = [1, 2] }}"
        out.append(f'"{key}" = {text}')
    return "\n".join(out) + "\n", lines


@given(documents())
def test_line_map_follows_every_layout(document: tuple[str, dict[str, int]]) -> None:
    """A complaint names the wrong line because strings, comments or nesting confused the position scan."""
    text, lines = document
    parsed = toml.parse(text, "t.toml")
    assert {key: parsed.line((key,)) for key in lines} == lines


def test_line_map_of_tables() -> None:
    """Headers, dotted keys, arrays of tables and inline tables lose their positions."""
    text = "[a.b]\nc.d = 1\n\n[[x]]\ny = 1\n[[x]]\ny = [\n  1,\n  { z = 2 },\n]\n[x.w]\nv = 3\n"
    parsed = toml.parse(text, "t.toml")
    assert parsed.line(("a", "b")) == 1
    assert parsed.line(("a", "b", "c", "d")) == 2
    assert parsed.line(("x", 0, "y")) == 5
    assert parsed.line(("x", 1)) == 6
    assert parsed.line(("x", 1, "y", 1, "z")) == 9
    assert parsed.line(("x", 1, "w", "v")) == 12
    assert parsed.where(("x", 1, "nope")) == "t.toml:6"


def test_file_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings depend on the caller's environment, so two machines judge differently."""
    before = settings.load(ROOT)
    monkeypatch.setenv("FASTTRACK_ALPHA", "0.5")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert settings.load(ROOT) == before
    assert not re.search(r"(?i)(api_key|token|password|secret)\s*=", TEXT)
