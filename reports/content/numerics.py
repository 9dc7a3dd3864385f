"""The kernels section's table: per op and tensor, the largest error and how much of its tolerance it uses.

Errors and tolerances come from the raw lines through the protocol's own `tolerance`; nothing is averaged away: each row
shows the worst case of its tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reports import protocols
from reports.document import Block, Code, Content, Details, Paragraph, Table
from reports.load import Loaded
from reports.text import count

__all__ = ["kernels_blocks"]


@dataclass
class _Row:
    cases: set[str]
    dtype: str
    measure: str = ""
    share: float = -1.0
    """Largest error as a share of its tolerance."""
    error: float = 0.0
    allowed: float = 0.0
    standard: float = 0.0
    where: str = ""


def kernels_blocks(loaded: Loaded) -> list[Block]:
    """Tables of the kernels gate; empty where it recorded nothing."""
    cases = [line for line in loaded.raw.get("kernels", ()) if line.get("kind") == "case"]
    if not cases:
        return []
    protocol = protocols.implementation("kernels", loaded.results["kernels"].protocol_id)
    rows: dict[tuple[str, str], _Row] = {}
    for case, value in _values(cases):
        key = (str(case["op"]), str(value["tensor"]))
        row = rows.setdefault(key, _Row(set(), str(value["dtype"])))
        row.cases.add(str(case["id"]))
        allowed = protocol.tolerance(str(value["dtype"]), value["standard"], value["rounding"])
        for measure in protocol.MEASURES:
            error = float(value["candidate"][measure])
            share = error / allowed[measure]
            if share > row.share:
                row.measure, row.share, row.error, row.allowed = measure, share, error, allowed[measure]
                row.standard = float(value["standard"][measure])
                row.where = f"case {case['id']}, {value['tensor']}{value['candidate']['worst']}"
    lead = (
        "Each row is the worst comparison of its tensor over all secret cases. The tolerance is earned on the same "
        "inputs: declared factors times the standard path's error and the definition's own roundings, plus a floor."
    )
    return [Paragraph(lead), _table(rows), *_coverage(cases)]


def _values(cases: list[dict[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    for case in cases:
        for value in case.get("values", ()):
            yield case, value


def _table(rows: Mapping[tuple[str, str], _Row]) -> Table:
    columns = ("op", "tensor", "format", "cases", "measure", "error", "tolerance", "used", "standard path", "where")
    body: list[tuple[Content, ...]] = [
        (
            Code(op),
            Code(tensor),
            row.dtype,
            f"{len(row.cases)}",
            row.measure,
            f"{row.error:.2e}",
            f"{row.allowed:.2e}",
            f"{100 * row.share:.0f} %",
            f"{row.standard:.2e}",
            row.where,
        )
        for (op, tensor), row in sorted(rows.items(), key=lambda item: -item[1].share)
    ]
    return Table("Errors against the fp64 reference, largest share first", columns, body, frozenset({3, 5, 6, 7, 8}))


def _coverage(cases: list[dict[str, Any]]) -> list[Block]:
    """How many cases ran per op, and what was refused or skipped with which reason."""
    counts: dict[str, list[int]] = {}
    left_out: list[tuple[Content, ...]] = []
    for case in cases:
        entry = counts.setdefault(str(case["op"]), [0, 0, 0])
        refused, skipped = case.get("refused"), case.get("skipped")
        entry[1 if refused is not None else 2 if skipped is not None else 0] += 1
        if refused is not None or skipped is not None:
            left_out.append(
                (Code(str(case["id"])), "refused" if refused is not None else "skipped", str(refused or skipped))
            )
    rows = [(Code(op), f"{ran}", f"{refused}", f"{skipped}") for op, (ran, refused, skipped) in sorted(counts.items())]
    table = Table("Cases by op", ("op", "ran", "refused by the launcher", "skipped"), rows, frozenset({1, 2, 3}))
    if not left_out:
        return [table]
    listed = Table("Cases that did not run", ("case", "how", "why"), left_out)
    return [table, Details(f"{count(len(left_out), 'case')} did not run", (listed,))]
