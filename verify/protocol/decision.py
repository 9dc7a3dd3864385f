"""The result type of every decision function of this package.

`verify.protocol` holds, per gate, a pure function from the raw lines of `raw/<gate>.jsonl` to a `Decision`. The gate
calls it when it has measured; `fasttrack bundle verify` calls it again on the stored lines. It imports numpy and scipy
at most, so that a stranger can re-decide without the harness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Decision", "Finding", "Line", "OutcomeWord"]

OutcomeWord = Literal["passed", "failed", "inconclusive", "not_evaluated"]
Line = Mapping[str, Any]
"""One parsed line of a raw JSONL file. The first line of each file is its header (`kind` = "header")."""


@dataclass(frozen=True)
class Finding:
    """The four parts of a reason, plus its stable code; becomes a `harness.records.Reason`."""

    code: str
    message: str
    where: str
    expected: str
    next: str


@dataclass(frozen=True)
class Decision:
    """Outcome and findings; findings are empty only when passed. Metrics are (value, unit, low, high) tables."""

    outcome: OutcomeWord
    findings: Sequence[Finding] = ()
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome != "passed" and not self.findings:
            raise ValueError(f"outcome {self.outcome} needs at least one finding")
