"""Peer tables that this repository publishes: whole records, decided again, and pages that say what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verify.bench.peer_table import markdown, short
from verify.kit.receive import read_results
from verify.protocol.peers import PROTOCOL_ID, decide, read_table

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted(path.parent.parent for path in (ROOT / "reports" / "published").glob("*/raw/bench.jsonl"))


def test_a_table_is_published() -> None:
    """A folder that was renamed, so that nothing is checked below."""
    assert PUBLISHED


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda path: path.name)
def test_a_published_table_is_what_its_lines_say(folder: Path) -> None:
    """An edited line, or a page with other numbers than the record."""
    received = read_results(folder)
    lines = received.lines["bench"]
    assert decide(lines).outcome == "passed"
    assert lines[0]["protocol"] == PROTOCOL_ID
    head, begun = received.manifest.head, json.loads((folder / "run.json").read_text())["begun"]
    table = read_table(lines)
    page = (ROOT / "docs" / "measurements" / f"{folder.name}.md").read_text(encoding="utf-8")
    assert page.endswith(markdown(table, head, begun))
    assert short(table, head, begun) in (ROOT / "README.md").read_text(encoding="utf-8")
