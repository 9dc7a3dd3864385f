"""What import-linter cannot hold: the editable folders hold no Python package that it could name."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JUDGES = ("fasttrack", "agents", "reports", "verify", "harness")
EDITABLE = ("k3_backend.kernels", "k3_backend.schedules")


def test_judging_code_does_not_import_the_editable_part_of_k3_backend() -> None:
    """A judge that imports what it judges runs the candidate's code in its own process."""
    seen = 0
    for package in JUDGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                seen += len(names)
                assert not [name for name in names if name.startswith(EDITABLE)], path
    assert seen > 500
