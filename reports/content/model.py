"""Tables of the gates that run the whole model: features (modes compared) and evals (arms compared).

Differences, losses and intervals are the gates' metrics, which follow from the raw lines; scores per arm are means of
the raw lines themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from harness.records import GateName, Measurement, Missing
from reports import protocols
from reports.document import Block, Code, Content, Paragraph, Table, Word
from reports.load import Loaded
from verify.protocol.lines import last_attempt, of_kind

__all__ = ["evals_blocks", "features_blocks"]


def features_blocks(loaded: Loaded) -> list[Block]:
    """One row per check: the difference between two modes of the candidate, what it may be, and the exact rules."""
    body = _body(loaded, "features")
    if not body:
        return []
    result = loaded.results["features"]
    metrics, protocol = result.metrics, protocols.implementation("features", result.protocol_id)
    rows: list[tuple[Content, ...]] = []
    for line in of_kind(body, "check"):
        if line["arm"] != "candidate":
            continue
        check = str(line["check"])
        wrong = [rule for rule in line["exact"] if rule["seen"] != rule["expected"]]
        holds = f"{len(line['exact'])} of {len(line['exact'])} hold"
        counts: Content = Word(f"{len(wrong)} wrong", "bad") if wrong else holds
        if check == "sampling":
            seen, allowed = f"p = {_value(metrics, 'sampling_p', '.3g')}", f"p ≥ {protocol.MIN_P:g}"
        else:
            seen, allowed = _value(metrics, f"{check}_difference", ".4f"), _value(metrics, f"{check}_tolerance", ".4f")
        positions = line.get("positions", sum(line["counts"]) if "counts" in line else "–")
        rows.append((Code(check), seen, allowed, f"{positions}", counts))
    lead = (
        "Each check runs the same requests in two modes of one arm. The mean difference of log probabilities of the "
        "worst request may be a declared factor of the standard arm's own, plus a floor; sampling is a chi-square test."
    )
    columns = ("check", "difference (nats)", "at most", "positions", "exact rules")
    return [Paragraph(lead), Table("Modes of the candidate against each other", columns, rows, frozenset({1, 2, 3}))]


def evals_blocks(loaded: Loaded) -> list[Block]:
    """One row per suite: both arms' scores, the paired loss with its bounds, and the noise of the standard arm."""
    body = _body(loaded, "evals")
    samples = of_kind(body, "sample")
    if not samples:
        return []
    metrics = loaded.results["evals"].metrics
    rows: list[tuple[Content, ...]] = []
    for suite in dict.fromkeys(str(line["suite"]) for line in samples):
        lines = [line for line in samples if line["suite"] == suite]
        good = [line for line in lines if set(line["classes"].values()) == {"ok"}]
        rows.append(
            (
                Code(suite),
                f"{len(good)} of {len(lines)}",
                _mean(good, "standard"),
                _mean(good, "candidate"),
                _interval(metrics, f"{suite}_loss"),
                _interval(metrics, f"{suite}_noise"),
                _value(metrics, f"{suite}_agreement", ".1%"),
            )
        )
    lead = (
        "Mean log probability per token of the same texts (nats; nearer to 0 is better). Loss is standard minus "
        "candidate, paired by sample; noise is the standard arm against itself in another batch."
    )
    columns = ("suite", "pairs", "standard", "candidate", "loss [bounds]", "noise [bounds]", "same greedy token")
    return [Paragraph(lead), Table("Both arms on the same samples", columns, rows, frozenset(range(1, 7)))]


def _body(loaded: Loaded, gate: GateName) -> Sequence[Mapping[str, Any]]:
    attempt = last_attempt(loaded.raw.get(gate, ()))
    return () if attempt is None else attempt[1]


def _mean(lines: Sequence[Mapping[str, Any]], arm: str) -> str:
    return f"{fmean(line[arm] for line in lines):.4f}" if lines else "–"


def _value(metrics: Mapping[str, Measurement | Missing], name: str, form: str) -> str:
    metric = metrics.get(name)
    return format(metric.value, form) if isinstance(metric, Measurement) else "–"


def _interval(metrics: Mapping[str, Measurement | Missing], name: str) -> str:
    metric = metrics.get(name)
    if not isinstance(metric, Measurement) or metric.low is None or metric.high is None:
        return "–"
    return f"{metric.value:.5f} [{metric.low:.5f}, {metric.high:.5f}]"
