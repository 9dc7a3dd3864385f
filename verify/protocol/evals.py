"""Decision of the evals gate: paired non-inferiority of the candidate arm per suite, margin declared beforehand.

Raw lines: a header with suites, planned samples, margin and level; one `sample` line per suite and sample with each
arm's mean log probability of the same text (nats per token) and its class; an end line. The standard arm runs twice,
the second time in another batch composition: that A/A difference is the noise which any arm has.

Per suite, with d = standard - candidate (loss of the candidate): `passed` if the upper bound of mean d lies below the
margin, `failed` if the lower bound lies above it, else `inconclusive`. Samples that did not end regularly are a class
of their own: non-finite answers of the candidate fail at once, other request errors make the suite not evaluated above
the declared rate; neither is ever scored as a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from verify.protocol.decision import Decision, Finding, Line
from verify.protocol.lines import incomplete, last_attempt, of_kind

__all__ = ["ALPHA", "MARGIN_NATS", "MAX_ERROR_RATE", "PROTOCOL_ID", "decide", "mean_bounds"]

PROTOCOL_ID = "evals/1"

MARGIN_NATS = 0.1
"""Largest mean loss per token that non-inferiority allows. The untrained model makes it this wide: its router has many
near-ties, rounding tips them, and the standard arm differs from itself by up to 0.05 nats per token over 16 samples."""

ALPHA = 0.01
"""Level of each one-sided bound over all suites; each suite gets an equal share."""

MAX_ERROR_RATE = 0.005
"""Share of request errors above which a suite says nothing."""


def mean_bounds(values: Sequence[float], alpha: float) -> tuple[float, float, float]:
    """Mean and its one-sided lower and upper Student-t bounds, each at level alpha.

    Raises:
        ValueError: fewer than two values.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"{n} paired samples; expected at least 2")
    mean = float(np.mean(values))
    half = float(special.stdtrit(n - 1, 1 - alpha)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def decide(lines: Sequence[Line]) -> Decision:
    """Outcome from the raw lines of one attempt."""
    attempt = last_attempt(lines)
    if attempt is None:
        return incomplete("evals", "the record has no header")
    header, body = attempt
    if not of_kind(body, "end"):
        return incomplete("evals", "the record ends before its samples were done")
    failures = of_kind(body, "failure")
    if failures:
        return Decision(
            "failed", [_finding("worker", str(f["arm"]), str(f["message"]), "no failure") for f in failures]
        )
    if (header["margin_nats"], header["alpha"]) != (MARGIN_NATS, ALPHA):
        return incomplete("evals", f"margin and level of the header are not those of protocol {PROTOCOL_ID}")
    margin, suites = float(header["margin_nats"]), list(header["suites"])
    metrics: dict[str, dict[str, object]] = {}
    outcomes: list[str] = []
    findings: list[Finding] = []
    for suite in suites:
        samples = [line for line in of_kind(body, "sample") if line["suite"] == suite]
        outcome, found = _suite(
            suite, samples, int(header["samples"]), margin, float(header["alpha"]) / len(suites), metrics
        )
        outcomes.append(outcome)
        findings += found
    for word in ("failed", "not_evaluated", "inconclusive"):
        if word in outcomes:
            return Decision(word, findings, metrics)
    return Decision("passed", (), metrics)


def _suite(
    suite: str,
    samples: Sequence[Line],
    planned: int,
    margin: float,
    alpha: float,
    metrics: dict[str, dict[str, object]],
) -> tuple[str, list[Finding]]:
    if len({line["id"] for line in samples}) != planned or len(samples) != planned:
        return "not_evaluated", [_finding("coverage", suite, f"{len(samples)} samples", f"{planned} different samples")]
    bad = [line for line in samples if line["classes"]["candidate"] == "nonfinite"]
    if bad:
        return "failed", [
            _finding("nonfinite", suite, f"{len(bad)} answers with a non-finite logit, first {bad[0]['id']}", "none")
        ]
    good = [line for line in samples if set(line["classes"].values()) == {"ok"}]
    if 1 - len(good) / planned > MAX_ERROR_RATE:
        return "not_evaluated", [
            _finding(
                "errors", suite, f"{planned - len(good)} of {planned} requests failed", f"at most {MAX_ERROR_RATE:.1%}"
            )
        ]
    noise = mean_bounds([line["standard"] - line["repeat"] for line in good], alpha)
    loss = mean_bounds([line["standard"] - line["candidate"] for line in good], alpha)
    for name, (mean, low, high) in (("loss", loss), ("noise", noise)):
        metrics[f"{suite}_{name}"] = {
            "value": mean,
            "unit": "nats/token",
            "low": low,
            "high": high,
            "samples": len(good),
        }
    agreement = float(np.mean([line["agreement"] for line in good]))
    metrics[f"{suite}_agreement"] = {"value": agreement, "unit": "share of greedy tokens", "samples": len(good)}
    rule = f"upper bound of the mean loss below {margin} nats per token ({planned} pairs, one-sided alpha {alpha:.4f})"
    if noise[2] > margin or noise[1] < -margin:
        return "not_evaluated", [
            _finding("noise", suite, f"the standard arm differs from itself by {noise[0]:.3g}", rule)
        ]
    if loss[2] < margin:
        return "passed", []
    seen = f"loss {loss[0]:.4g} nats per token, bounds {loss[1]:.4g} to {loss[2]:.4g}"
    if loss[1] > margin:
        return "failed", [_finding("inferior", suite, seen, rule)]
    return "inconclusive", [_finding("undecided", suite, seen, rule)]


def _finding(code: str, where: str, message: str, expected: str) -> Finding:
    return Finding(f"evals.{code}", message, where, expected, "fasttrack verify --gates evals --tier full …")
