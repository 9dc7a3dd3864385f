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
from verify.protocol.sanitizers import verdicts

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
        key = (_judged(case), str(value["tensor"]))
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
    lines = loaded.raw["kernels"]
    return [Paragraph(lead), _table(rows), *_coverage(cases), *_beside(lines), *_machine(lines[0])]


def _judged(case: Mapping[str, Any]) -> str:
    """An op; in records of a GPU machine, which hold several shapes of it, with its geometry."""
    return f"{case['op']} on {case['geometry']}" if case.get("replays") else str(case["op"])


def _beside(lines: list[dict[str, Any]]) -> list[Block]:
    """Memory checkers and planted faults of a record that a GPU machine made."""
    blocks: list[Block] = []
    checks: list[tuple[Content, ...]] = [
        (Code(str(v.line["unit"])), str(v.line["tool"]), v.status, v.reason or str(v.line["summary"] or "–"))
        for v in verdicts(lines)
    ]
    if checks:
        table = Table("Memory checkers on small calls", ("artifact", "tool", "status", "what it said"), checks)
        blocks.append(Details(count(len(checks), "memory check"), (table,)))
    tried: dict[str, list[dict[str, Any]]] = {name: [] for name in lines[0].get("mutants", {})}
    for line in lines:
        if line.get("kind") == "mutant":
            tried[str(line["mutant"])].append(line)
    protocol = protocols.implementation("kernels", str(lines[0]["protocol"]))
    rows: list[tuple[Content, ...]] = []
    for name, cases in tried.items():
        failing = next((case for case in cases if protocol.case_fails(case)), None)
        seen = "–" if failing is None else str(protocol.first_finding(failing))
        rows.append((Code(name), "passed" if failing is None else "rejected", f"{len(cases)}", _case_of(failing), seen))
    if rows:
        columns = ("planted fault", "verdict", "cases run", "first in case", "what the gate saw first")
        blocks.append(Table("Planted faults", columns, rows, frozenset({2})))
    return blocks


def _case_of(case: Mapping[str, Any] | None) -> Content:
    return "–" if case is None else Code(str(case["id"]))


def _machine(header: Mapping[str, Any]) -> list[Block]:
    """The machine that measured, where it is not the one that wrote the bundle."""
    machine = header.get("machine")
    if not isinstance(machine, Mapping):
        return []
    gpu = dict(machine.get("gpu", {}))
    rows: list[tuple[Content, ...]] = [
        (Code(name), str(value)) for name, value in sorted(gpu.items()) if value is not None
    ]
    rows += [(Code(name), str(machine[name])) for name in ("cuda", "python", "cores") if machine.get(name) is not None]
    rows += [(Code(name), str(version)) for name, version in sorted(dict(machine.get("packages", {})).items())]
    return [Table("Measured on this machine, through a kit", ("what", "it says"), rows)]


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
        entry = counts.setdefault(_judged(case), [0, 0, 0])
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
