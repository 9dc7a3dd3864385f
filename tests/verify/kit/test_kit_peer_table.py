"""What becomes of an imported kit's peer table: its raw lines lie beside the gates', once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from harness.store import EvidenceSink
from verify.context import GateContext
from verify.gates.kit import keep_peer_table

LINES: list[dict[str, Any]] = [{"kind": "header"}, {"kind": "ceilings"}]


def context(folder: Path, lines: dict[str, list[dict[str, Any]]] | None) -> GateContext:
    """As much of a gate's context as is asked for."""
    kit = None if lines is None else SimpleNamespace(received=SimpleNamespace(lines=lines))
    return cast(GateContext, SimpleNamespace(kit=kit, evidence=EvidenceSink(folder)))


def test_the_lines_are_stored_once(tmp_path: Path) -> None:
    """A resumed import that doubles the record, which then breaks its chain."""
    for _ in range(2):
        keep_peer_table(context(tmp_path, {"bench": LINES, "kernels": [{"kind": "header"}]}))
    assert EvidenceSink(tmp_path).lines("bench") == LINES
    assert EvidenceSink(tmp_path).lines("kernels") == []


def test_no_table_leaves_no_file(tmp_path: Path) -> None:
    """An empty file that a bundle would have to explain."""
    keep_peer_table(context(tmp_path, None))
    keep_peer_table(context(tmp_path, {"kernels": []}))
    assert not (tmp_path / "raw").exists()
