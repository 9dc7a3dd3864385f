"""Task files: what is refused, and where the message points."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agents.task import load_task, task_files
from harness.errors import FasttrackError

GOOD = """
version = 1
id = "t"
title = "T"
objective = "O"
conditions = "C"
target = "cpu"
ops = ["kda_decode"]
editable = ["k3_backend/schedules/**"]
[baseline]
kind = "tuned_at_batch"
batch = 1
[[cells]]
scope = "kda_decode"
batches = [8, 64]
[search]
agent = "tuner"
candidates = 4
[budget]
minutes = 8
"""


def load(tmp_path: Path, text: str):
    path = tmp_path / "t.toml"
    path.write_text(text)
    return load_task(path)


def test_good_task_gives_its_cells(tmp_path: Path) -> None:
    """The perf gate takes its strict cells from here."""
    assert [c.key for c in load(tmp_path, GOOD).all_cells()] == [
        "kda_decode/b8/c-/t1/decode",
        "kda_decode/b64/c-/t1/decode",
    ]


@pytest.mark.parametrize(
    ("old", "new", "key", "says"),
    [
        ("version = 1", "version = 2", "version", "1"),
        ('target = "cpu"', 'target = "cpu"\ncolour = "red"', "colour", "unknown key"),
        ("batch = 1", "", "baseline", "belongs to kind"),
        ("batches = [8, 64]", "batches = []", "cells[0].batches", "at least 1"),
        ("batches = [8, 64]", "batches = [8, 8]", "", "named twice"),
        ("batches = [8, 64]", "batches = [65]", "cells[0].batches[0]", "64"),
        ('agent = "tuner"', 'agent = "replay"', "", "replay"),
        ("minutes = 8", "minutes = 0", "budget.minutes", "greater than 0"),
        ('ops = ["kda_decode"]', 'ops = ["kda_decode", "attn_res"]', "", "exactly one"),
    ],
)
def test_bad_task_names_file_and_key(tmp_path: Path, old: str, new: str, key: str, says: str) -> None:
    """Bad input gets one clear message, never a traceback."""
    with pytest.raises(FasttrackError) as caught:
        load(tmp_path, GOOD.replace(old, new))
    assert re.fullmatch(re.escape(str(tmp_path / "t.toml")) + r":\d+", caught.value.where)
    assert key in caught.value.what
    assert says in caught.value.what


def test_broken_toml_and_missing_file_are_clear(tmp_path: Path) -> None:
    """TOML errors carry the line; a missing file says so."""
    with pytest.raises(FasttrackError, match=r"t\.toml:1: broken TOML"):
        load(tmp_path, "version = = 1")
    with pytest.raises(FasttrackError, match="cannot read the file"):
        load_task(tmp_path / "absent.toml")


def test_every_task_in_the_repository_loads() -> None:
    """A committed task that does not load is a broken promise."""
    files = task_files(Path(__file__).parents[2])
    assert files
    assert all(load_task(path).id == path.stem for path in files)
