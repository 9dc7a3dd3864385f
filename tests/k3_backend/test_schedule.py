"""Schedules and tunables: strict, with the line of every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_backend.aot.build import KERNELS_DIR, SCHEDULES_DIR, specialised_ops
from k3_backend.aot.schedule import (
    Bucket,
    Schedule,
    ScheduleError,
    Tunable,
    load_declarations,
    load_tunables,
    render,
)
from k3_backend.ops import OPS

TUNABLES = (Tunable("tile_n", (16, 32), "columns per step"), Tunable("workers", (1, 2), "workers of the region"))
GOOD = """version = 1

[[bucket]]
max_rows = 4
tile_n = 16
workers = 1

[[bucket]]
max_rows = 64
workers = 2
tile_n = 32
"""


def _load(path: Path, text: str) -> Schedule:
    path.write_text(text)
    return Schedule.load(path, op="dense_mlp", geometry="k3-pico", tunables=TUNABLES)


def test_lookup_takes_the_first_bucket_that_holds_the_rows(tmp_path: Path) -> None:
    """Rows get another bucket's choice, or a guess beyond the last one; order follows the declaration."""
    schedule = _load(tmp_path / "s.toml", GOOD)
    assert schedule.lookup(1) == schedule.lookup(4) == {"tile_n": 16, "workers": 1}
    assert list((schedule.lookup(5) or {}).items()) == [("tile_n", 32), ("workers", 2)]
    assert schedule.lookup(64) is not None
    assert schedule.lookup(65) is None
    with pytest.raises(ValueError, match="at least 1"):
        schedule.lookup(0)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("version = 1\n[[bucket]\n", 2, "not TOML"),
        ("version = 2\n" + GOOD.partition("\n")[2], 1, "version is 2"),
        (GOOD.partition("\n")[2], None, "version is None"),
        ("version = true\n" + GOOD.partition("\n")[2], 1, "version is True"),
        (GOOD + "[extra]\n", 12, "unknown key 'extra'"),
        ("version = 1\n", None, "no buckets"),
        ("version = 1\nbucket = 3\n", 2, "no buckets"),
        (GOOD.replace("tile_n = 32", "tile_m = 32"), 11, "unknown tunable 'tile_m'"),
        (GOOD.replace("tile_n = 32", "tile_n = 24"), 11, r"tile_n = 24; expected one of \[16, 32\]"),
        (GOOD.replace("tile_n = 32", "tile_n = true"), 11, "tile_n = True"),
        (GOOD.replace("workers = 2", "workers = 2.0"), 10, "workers = 2.0"),
        (GOOD.replace("workers = 2\n", ""), 9, "no value for workers"),
        (GOOD.replace("max_rows = 64", "max_rows = 4"), 9, "max_rows is 4; expected an integer above 4"),
        (GOOD.replace("max_rows = 64", "max_rows = 2"), 9, "max_rows is 2"),
        (GOOD.replace("max_rows = 4\n", "max_rows = 0\n"), 4, "max_rows is 0"),
        (GOOD.replace("max_rows = 4\n", ""), 3, "max_rows is None"),
        (GOOD.replace("max_rows = 4\n", "max_rows = 4\nmax_rows = 5\n"), 5, "not TOML"),
    ],
)
def test_mistakes_name_their_line(tmp_path: Path, text: str, line: int | None, message: str) -> None:
    """A reviewer or the tuner has to guess which line of a schedule is wrong, or it is accepted."""
    path = tmp_path / "s.toml"
    with pytest.raises(ScheduleError, match=message) as caught:
        _load(path, text)
    assert caught.value.where == (f"{path}:{line}" if line else str(path))


def test_missing_file(tmp_path: Path) -> None:
    """A missing schedule ends in a traceback."""
    with pytest.raises(ScheduleError, match="cannot be read"):
        Schedule.load(tmp_path / "none.toml", op="dense_mlp", geometry="k3-pico", tunables=TUNABLES)


@given(
    rows=st.lists(st.integers(1, 10_000), min_size=1, max_size=8, unique=True).map(sorted),
    choices=st.lists(st.tuples(st.sampled_from((16, 32)), st.sampled_from((1, 2))), min_size=8, max_size=8),
)
def test_render_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], choices: list[tuple[int, int]]
) -> None:
    """The tuner writes a schedule that loads as something else."""
    buckets = tuple(Bucket(r, {"tile_n": n, "workers": w}) for r, (n, w) in zip(rows, choices, strict=False))
    schedule = Schedule("dense_mlp", "k3-pico", TUNABLES, buckets)
    text = render(schedule)
    assert _load(tmp_path_factory.mktemp("s") / "s.toml", text) == schedule
    assert text.startswith("# dense_mlp on k3-pico")


def test_declarations_keep_their_order(tmp_path: Path) -> None:
    """Tunables are passed in another order than the kernel reads them."""
    path = tmp_path / "cpu.toml"
    path.write_text(
        '[tunables.z]\nvalues = [2, 1]\nmeaning = "last letter first"\n[tunables.a]\nvalues = [0]\nmeaning = "one"\n'
        "[supports]\nexpert_format = [0]\n"
    )
    assert [t.name for t in load_tunables(path)] == ["z", "a"]
    assert load_declarations(path).supports == {"expert_format": (0,)}
    path.write_text("# no choices\n")
    assert load_tunables(path) == ()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[tunable.a]\nvalues=[1]\nmeaning='x'\n", 1, "unexpected 'tunable'"),
        ("tunables = 1\n", 1, "unexpected 'tunables'"),
        ("\n[tunables.a]\nvalues=[]\nmeaning='x'\n", 2, "values \\[\\]"),
        ("\n[tunables.a]\nvalues=[1, 1]\nmeaning='x'\n", 2, "values"),
        ("\n[tunables.a]\nvalues=[1.5]\nmeaning='x'\n", 2, "values"),
        ("\n[tunables.a]\nvalues=[true]\nmeaning='x'\n", 2, "values"),
        ("\n[tunables.a]\nvalues=[1]\nmeaning=' '\n", 2, "empty meaning"),
        ("\n[tunables.a]\nvalues=[1]\n", 2, r"\['values'\]"),
        ("\n[tunables.a]\nvalues=[1]\nmeaning='x'\ndefault=1\n", 2, "default"),
        ("\n[tunables.max_rows]\nvalues=[1]\nmeaning='x'\n", 2, "tunable name 'max_rows'"),
        ("\n[tunables.Tile]\nvalues=[1]\nmeaning='x'\n", 2, "tunable name 'Tile'"),
        ("[supports]\nexpert_format = []\n", 2, "supports.expert_format"),
    ],
)
def test_declaration_mistakes_name_their_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    """A kernel's declaration is misread instead of refused."""
    path = tmp_path / "cpu.toml"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message) as caught:
        load_declarations(path)
    assert caught.value.where == f"{path}:{line}"


def test_schedules_in_the_tree_load() -> None:
    """A committed schedule does not fit its kernel's declaration, or belongs to no kernel."""
    for path in SCHEDULES_DIR.glob("cpu/*/*.toml"):
        op, name = path.stem, path.parent.name
        tunables = load_tunables(KERNELS_DIR / op / "cpu.toml")
        assert Schedule.load(path, op=op, geometry=name, tunables=tunables).buckets


def test_declarations_in_the_tree_load() -> None:
    """A committed kernel declares attributes that its op does not have."""
    for op in specialised_ops():
        known = {attr.name for attr in OPS[op].attrs if attr.kind == "int"}
        assert set(load_declarations(KERNELS_DIR / op / "cpu.toml").supports) <= known
