"""Shared vocabulary of the sections: tones of outcome words, reasons and metrics as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.records import Measurement, Missing, Outcome, Reason, VerdictWord
from reports.document import Code, Content, Paragraph, Table, Tone, Word
from reports.text import quantity

__all__ = ["OUTCOME_TONES", "VERDICT_TONES", "measured", "metrics_table", "outcome_word", "reasons_table"]

OUTCOME_TONES: dict[Outcome, Tone] = {
    Outcome.PASSED: "good",
    Outcome.FAILED: "bad",
    Outcome.INCONCLUSIVE: "unsure",
    Outcome.NOT_EVALUATED: "none",
}
VERDICT_TONES: dict[VerdictWord, Tone] = {
    VerdictWord.ACCEPT: "good",
    VerdictWord.REJECT: "bad",
    VerdictWord.INCOMPLETE: "unsure",
}


def outcome_word(outcome: Outcome) -> Word:
    """An outcome with its tone."""
    return Word(outcome.value, OUTCOME_TONES[outcome])


def measured(metric: Measurement | Missing) -> str:
    """A number with unit and interval, or why there is none."""
    if isinstance(metric, Missing):
        return f"missing: {metric.missing}"
    text = quantity(metric.value, metric.unit)
    if metric.low is not None and metric.high is not None:
        text += f" [{quantity(metric.low, '')}, {quantity(metric.high, '')}]"
    elif metric.low is not None:
        text += f" (at least {quantity(metric.low, '')})"
    elif metric.high is not None:
        text += f" (at most {quantity(metric.high, '')})"
    return text


def reasons_table(caption: str, reasons: Sequence[Reason]) -> Table | Paragraph:
    """Every finding in its four parts."""
    if not reasons:
        return Paragraph("No findings.")
    rows = [(Code(r.code), r.message, Code(r.where), r.expected, Code(r.next)) for r in reasons]
    return Table(caption, ("code", "what", "where", "expected", "next"), rows)


def metrics_table(caption: str, metrics: Mapping[str, Measurement | Missing]) -> Table:
    """Every metric of a gate."""
    rows: list[tuple[Content, ...]] = []
    for name, metric in sorted(metrics.items()):
        samples = "" if isinstance(metric, Missing) or metric.samples is None else f"{metric.samples:,}"
        rows.append((Code(name), measured(metric), samples))
    return Table(caption, ("metric", "value [interval]", "samples"), rows, numeric=frozenset({1, 2}))
