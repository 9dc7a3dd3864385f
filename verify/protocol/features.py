"""Decision of the features gate: does every engine mode agree with plain decode, on the candidate's kernels?

Raw lines: a header with the planned checks and their rules; one `check` line per check and arm with what was seen; an
end line. Two kinds of rules:

* numeric: how far teacher-forced log probabilities differ between two modes of one arm, as the mean absolute
  difference of the worst request. Its tolerance is earned by the standard arm, which runs the same two modes: `factor`
  times its own difference plus a floor;
* exact: counts that must be equal (finished requests, fallback codes, non-finite answers), and for sampling the p-value
  of a chi-square test against the standard arm's distribution.

It cannot see kernels that agree with themselves in every mode and are wrong in all of them: the kernels gate does.
"""

from __future__ import annotations

from collections.abc import Sequence

from scipy import special

from verify.protocol.decision import Decision, Finding, Line
from verify.protocol.lines import incomplete, last_attempt, of_kind

__all__ = ["CHECKS", "FACTOR", "FLOOR_NATS", "MIN_P", "PROTOCOL_ID", "chi_square_p", "decide"]

PROTOCOL_ID = "features/1"

FACTOR = 3.0
"""Times the standard arm's own difference between the same two modes."""

FLOOR_NATS = 0.3
"""Smallest tolerance: modes may happen to agree bit for bit in the standard arm only, and one tipped expert choice
moves a request of six or twelve tokens by up to a quarter of a nat. A wrong state or row moves it by a nat."""

MIN_P = 1e-4
"""False failures of the sampling test: one honest candidate in ten thousand."""

CHECKS = (
    "chunked_prefill", "mixed_batches", "speculation", "speculation_greedy", "full_context", "slot_reuse", "abort",
    "sampling",
)  # fmt: skip
"""Every check of the gate; a record that lacks one is incomplete."""


def chi_square_p(counts: Sequence[int], probabilities: Sequence[float], minimum: float = 5.0) -> float:
    """p-value of observed counts under probabilities; cells with fewer than `minimum` expected are pooled.

    Raises:
        ValueError: no counts, or probabilities that do not sum to one.
    """
    total = sum(counts)
    if not total or abs(sum(probabilities) - 1) > 1e-3:
        raise ValueError(f"{total} draws, probabilities sum to {sum(probabilities)}; expected draws and a sum of 1")
    observed: list[float] = []
    expected: list[float] = []
    rest_observed = rest_expected = 0.0
    for count, probability in sorted(zip(counts, probabilities, strict=True), key=lambda pair: -pair[1]):
        if probability * total >= minimum:
            observed.append(count)
            expected.append(probability * total)
        else:
            rest_observed += count
            rest_expected += probability * total
    if rest_expected >= minimum:
        observed.append(rest_observed)
        expected.append(rest_expected)
    elif expected:
        observed[-1] += rest_observed
        expected[-1] += rest_expected
    if len(expected) < 2:
        raise ValueError("fewer than two cells with enough expected draws; the test would see nothing")
    scale = total / sum(expected)
    statistic = sum((o - e * scale) ** 2 / (e * scale) for o, e in zip(observed, expected, strict=True))
    return float(special.chdtrc(len(expected) - 1, statistic))


def decide(lines: Sequence[Line]) -> Decision:
    """Outcome from the raw lines of one attempt."""
    attempt = last_attempt(lines)
    if attempt is None:
        return incomplete("features", "the record has no header")
    header, body = attempt
    if not of_kind(body, "end"):
        return incomplete("features", "the record ends before its checks were done")
    findings: list[Finding] = []
    metrics: dict[str, dict[str, object]] = {}
    for failure in of_kind(body, "failure"):
        findings.append(_finding(str(failure["check"]), f"{failure['arm']} arm: {failure['message']}", "no failure"))
    by_check = {(str(line["check"]), str(line["arm"])): line for line in of_kind(body, "check")}
    if not findings:
        missing = [c for c in CHECKS if (c, "candidate") not in by_check or (c, "standard") not in by_check]
        if missing or list(header["checks"]) != list(CHECKS):
            return incomplete(
                "features", f"checks without a result in both arms: {', '.join(missing) or header['checks']}"
            )
    for check in CHECKS:
        candidate, standard = by_check.get((check, "candidate")), by_check.get((check, "standard"))
        if candidate is None or standard is None:
            continue
        findings += _exact(check, candidate)
        if check == "sampling":
            p = chi_square_p(candidate["counts"], standard["probabilities"])
            metrics["sampling_p"] = {"value": p, "unit": "probability", "samples": sum(candidate["counts"])}
            if p < MIN_P:
                findings.append(
                    _finding(check, f"sampled tokens do not follow the distribution (p = {p:.2g})", f"p >= {MIN_P}")
                )
        else:
            tolerance = FACTOR * float(standard["difference_nats"]) + FLOOR_NATS
            seen = float(candidate["difference_nats"])
            metrics[f"{check}_difference"] = {"value": seen, "unit": "nats", "samples": int(candidate["positions"])}
            metrics[f"{check}_tolerance"] = {"value": tolerance, "unit": "nats"}
            if not seen <= tolerance:
                findings.append(
                    _finding(
                        check,
                        f"log probabilities of one request differ by {seen:.3g} nats per token between the two modes",
                        f"at most {tolerance:.3g} nats: {FACTOR:g} times the standard arm's "
                        f"{standard['difference_nats']:.3g} plus {FLOOR_NATS}",
                    )
                )
    return Decision("failed" if findings else "passed", findings, metrics)


def _exact(check: str, line: Line) -> list[Finding]:
    """Rules on counts: each `expect` entry names a count, what it must be, and what it was."""
    return [
        _finding(check, f"{rule['what']}: {rule['seen']}", f"{rule['expected']}")
        for rule in line["exact"]
        if rule["seen"] != rule["expected"]
    ]


def _finding(check: str, message: str, expected: str) -> Finding:
    return Finding(f"features.{check}", message, check, expected, "fasttrack verify --gates features …")
