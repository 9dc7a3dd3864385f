from __future__ import annotations

from pathlib import Path

import pytest

from harness import settings
from harness.errors import FasttrackError
from verify.targets import load

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "harness.toml").read_text()


def test_the_committed_file_names_what_exists() -> None:
    """A target of the committed file cannot be built because a name in it is wrong."""
    assert load(ROOT) == settings.load(ROOT)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('geometry = "k3-nano"', 'geometry = "k3-mini"', "unknown geometry 'k3-mini'"),
        ('"x86-64-v4-amx"]', '"x86-64-v9"]', "unknown architecture 'x86-64-v9'"),
        ('archs = ["sm_103a"]', 'archs = ["gfx950"]', "unknown architecture 'gfx950'"),
    ],
)
def test_unknown_names_are_refused_with_their_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    """A mistyped geometry or architecture surfaces minutes later, inside a gate."""
    text = TEXT.replace(old, new, 1)
    (tmp_path / "harness.toml").write_text(text)
    with pytest.raises(FasttrackError) as caught:
        load(tmp_path)
    assert caught.value.where == f"harness.toml:{text[: text.index(new)].count(chr(10)) + 1}"
    assert says in caught.value.what
