"""One section per gate: outcome, findings, metrics, and the tables that the gate stated for readers.

Everything here is laid out from `GateResult` without knowing the gate, so that a new gate needs no new report code. The
performance matrix is the exception and has its own module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import canonical
from harness.records import GateName, GateResult
from reports.content.words import metrics_table, outcome_word, reasons_table
from reports.document import Block, Code, Content, Details, Facts, Inline, Paragraph, Section, Table
from reports.load import Loaded
from reports.text import count, duration, fixed

__all__ = ["GATE_QUESTIONS", "detail_blocks", "gate_section", "why_not_run"]

GATE_QUESTIONS: dict[GateName, tuple[str, str]] = {
    "scope": ("Scope", "Does the change touch only what it may, with allowed constructs only?"),
    "build": ("Build", "Do the artifacts build from the clean tree, twice, to the same digests?"),
    "audit": ("Audit", "Does the compiled code contain only what it may?"),
    "kernels": ("Kernel numerics", "Are outputs and state right for secret inputs, and everything else untouched?"),
    "path": ("Path proof", "Did the claimed kernels run in the very run that was judged, and do wrong numbers show?"),
    "features": ("Features", "Do prefill, mixed batches, sampling and speculation still work and agree?"),
    "evals": ("Evals", "Are the model's answers no worse than the standard path's?"),
    "perf": ("Performance", "Is it faster, with no cell worse, by a method that the candidate cannot bend?"),
}
_METRICS_SHOWN = 8
"""More than these are folded away."""
_ROWS_SHOWN = 400
"""A table with more rows than this is cut; the raw lines have them all."""


def gate_section(gate: GateName, loaded: Loaded, extra: Sequence[Block] = ()) -> Section:
    """The section of one gate; `extra` blocks come before its generic tables."""
    title, question = GATE_QUESTIONS[gate]
    result = loaded.results.get(gate)
    if result is None:
        return Section(gate, title, (Paragraph(question), Paragraph(f"Not run: {why_not_run(loaded)}.")))
    blocks: list[Block] = [Paragraph(question), _facts(result, loaded)]
    if result.reasons:
        blocks.append(reasons_table(f"Findings of gate {gate}", result.reasons))
    blocks += extra
    if result.metrics:
        metrics = metrics_table(f"Metrics of gate {gate}, as its raw lines give them", result.metrics)
        many = len(result.metrics) > _METRICS_SHOWN
        blocks.append(Details(count(len(result.metrics), "metric"), (metrics,)) if many else metrics)
    detail = detail_blocks(result.detail)
    if detail:
        summary = f"Tables stated by gate {gate} (for reading; no outcome rests on them)"
        blocks.append(Details(summary, detail))
    return Section(gate, title, tuple(blocks))


def why_not_run(loaded: Loaded) -> str:
    """Why a gate has no result."""
    failed = loaded.bundle.verdict.failed
    return f"gate {failed[0]} had failed before it" if failed else "this verification did not ask for it"


def detail_blocks(detail: Mapping[str, Any]) -> list[Block]:
    """Lay out a gate's detail: lists of objects as tables, objects as facts, the rest as text."""
    blocks: list[Block] = []
    loose: list[tuple[str, Content]] = []
    for key, value in sorted(detail.items()):
        name = key.replace("_", " ")
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            blocks += _object_table(name, value)
        elif isinstance(value, dict) and value and all(isinstance(item, dict) for item in value.values()):
            blocks += _object_table(name, [{"name": row, **item} for row, item in value.items()])
        elif isinstance(value, dict) and value:
            blocks.append(Table(name, ("name", "value"), [(Code(str(k)), _cell(v)) for k, v in sorted(value.items())]))
        else:
            loose.append((name, _cell(value)))
    return [Facts(loose), *blocks] if loose else blocks


def _facts(result: GateResult, loaded: Loaded) -> Paragraph:
    """Outcome, evidence, protocol, raw data and time in one line."""
    needed = loaded.bundle.target.required.get(result.gate)
    evidence = "no evidence" if result.evidence_class is None else f"{result.evidence_class.value} evidence"
    required = "not required by the target" if needed is None else f"the target requires {needed.value}"
    lines = len(loaded.raw.get(result.gate, ()))
    raw: tuple[Inline, ...] = (f"{lines:,} lines in ", Code(f"raw/{result.gate}.jsonl")) if lines else ("no raw lines",)
    time = f", {duration(result.seconds)}"
    return Paragraph(
        (
            outcome_word(result.outcome),
            f" {evidence} ({required}), protocol ",
            Code(result.protocol_id),
            ", ",
            *raw,
            time,
        )
    )


def _object_table(name: str, items: Sequence[Mapping[str, Any]]) -> list[Block]:
    columns = list(dict.fromkeys(key for item in items for key in item))
    rows = [tuple(_cell(item.get(column)) for column in columns) for item in items[:_ROWS_SHOWN]]
    numeric = frozenset(i for i, c in enumerate(columns) if i and all(_is_number(item.get(c)) for item in items))
    headings = tuple(column.replace("_", " ") for column in columns)
    blocks: list[Block] = [Table(name, headings, rows, numeric=numeric)]
    if len(items) > _ROWS_SHOWN:
        blocks.append(Paragraph(f"{len(items) - _ROWS_SHOWN} more rows are in the gate's result file."))
    return blocks


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> Content:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return fixed(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(fixed(item) if isinstance(item, float) else str(item) for item in value) or "–"
    return Code(canonical.line(value).decode())
