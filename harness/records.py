"""The records that everything else exchanges: frozen, strict, versioned.

A record never holds a default in place of a measurement: a number that could not be had is a `Missing` with its
reason. Outcome words are `passed`, `failed`, `inconclusive`, `not_evaluated`; verdict words are accept, reject,
incomplete. Provenance (who, from which commit) and merit (gate outcomes) are separate fields.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

__all__ = [
    "GATES", "SCHEMA_VERSION", "Candidate", "Cell", "Commit", "Digest", "EvidenceClass", "EvidenceRef", "GateName",
    "GateResult", "Measurement", "Missing", "Outcome", "Reason", "Record", "Verdict", "VerdictWord", "decide",
]  # fmt: skip

SCHEMA_VERSION = 1
"""Version of all records of this module as they appear in bundles."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Lower-case hex sha256."""

Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]

GateName = Literal["scope", "build", "audit", "kernels", "path", "features", "evals", "perf"]
GATES: tuple[GateName, ...] = ("scope", "build", "audit", "kernels", "path", "features", "evals", "perf")
"""Cheapest first: the order in which a verification runs them."""


class Record(BaseModel):
    """Base of all records: immutable, no unknown fields, no NaN or infinity (validators refuse them)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Outcome(StrEnum):
    """What a gate says."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    NOT_EVALUATED = "not_evaluated"


class VerdictWord(StrEnum):
    """What a run concludes from its gates."""

    ACCEPT = "accept"
    REJECT = "reject"
    INCOMPLETE = "incomplete"


class EvidenceClass(StrEnum):
    """How a gate knows."""

    HARDWARE = "hardware"
    """Measured on the target's kind of device."""
    STATIC = "static"
    """Read off code or compiled artifacts."""


class Reason(Record):
    """One finding, in the four parts every message has."""

    code: Annotated[str, StringConstraints(pattern=r"^[a-z_]+\.[a-z0-9_]+$")]
    """Stable identifier `<gate or area>.<finding>`, listed in docs/reasons.md."""
    message: str
    """One sentence for a reviewer."""
    where: str
    """File and line, cell key, symbol or artifact digest."""
    expected: str
    """The rule, with its number and unit where it has one."""
    next: str
    """Command that reproduces or resolves this."""


class Measurement(Record):
    """A number with its unit and, where it was estimated, its interval."""

    value: float
    unit: str
    low: float | None = None
    """Lower confidence bound, null for exact numbers."""
    high: float | None = None
    samples: int | None = None


class Missing(Record):
    """A number that does not exist, and why."""

    missing: str


class EvidenceRef(Record):
    """A file of the bundle from which a result can be recomputed."""

    path: str
    """Relative POSIX path inside the bundle."""
    sha256: Digest


class GateResult(Record):
    """The one result type of every gate."""

    gate: GateName
    protocol_id: str
    """Names the method and its version; results with different ids are never compared."""
    outcome: Outcome
    evidence_class: EvidenceClass | None = None
    """Null exactly when nothing was evaluated."""
    reasons: tuple[Reason, ...] = ()
    """Empty only when the outcome is passed."""
    metrics: dict[str, Measurement | Missing] = Field(default_factory=dict)
    evidence: tuple[EvidenceRef, ...] = ()
    detail: dict[str, Any] = Field(default_factory=dict)
    """Gate-specific tables for the report (JSON values); never needed to recompute the outcome."""
    seconds: float

    @model_validator(mode="after")
    def _outcome_decides_fields(self) -> GateResult:
        if self.outcome is not Outcome.PASSED and not self.reasons:
            raise ValueError(f"gate {self.gate}: outcome {self.outcome.value} needs at least one reason")
        if (self.outcome is Outcome.NOT_EVALUATED) != (self.evidence_class is None):
            raise ValueError(f"gate {self.gate}: evidence_class is null exactly when the outcome is not_evaluated")
        return self


class Candidate(Record):
    """What is judged."""

    base: Commit
    """Commit whose protected code judges the candidate."""
    head: Commit
    """Commit holding the candidate's tree."""
    tree: Commit
    """Git tree id of `head`."""
    patch_sha256: Digest
    """Digest of the canonical diff base..head (candidate.patch)."""
    artifacts: dict[str, Digest] = Field(default_factory=dict)
    """`<op>/<arch>` to artifact digest, once built."""
    origin: str
    """Who proposed it: `patch:<file>`, `rev:<rev>`, `tuner`, `replay`."""


class Cell(Record):
    """One point of a target's matrix."""

    scope: str
    """`step` for a whole decode step, else the op's name."""
    batch: int = Field(ge=1)
    context: int | None = Field(default=None, ge=0)
    """Cached tokens per request; null for ops whose cost does not depend on it."""
    tokens: int = Field(default=1, ge=1)
    """Query tokens per request (1 + drafts)."""
    workload: str = "decode"
    layout: str | None = None
    """Parallel layout such as `tp8.dcp1`; null on targets that have one layout."""

    @property
    def key(self) -> str:
        """Stable text key, e.g. `step/b8/c256/t1/decode`."""
        context = "c-" if self.context is None else f"c{self.context}"
        layout = "" if self.layout is None else f"/{self.layout}"
        return f"{self.scope}/b{self.batch}/{context}/t{self.tokens}/{self.workload}{layout}"


class Verdict(Record):
    """The conclusion and what it rests on."""

    word: VerdictWord
    target: str
    tier: str
    required: dict[GateName, EvidenceClass]
    """Gates that the target requires for accept, with the class of evidence."""
    failed: tuple[GateName, ...] = ()
    unmet: tuple[Reason, ...] = ()
    """For incomplete: what was not evaluated or stayed inconclusive, with the command that would do it."""


def decide(
    target: str, tier: str, required: dict[GateName, EvidenceClass], results: dict[GateName, GateResult]
) -> Verdict:
    """Derive the verdict: reject if any gate failed; accept only if every required gate passed with evidence of its
    class (hardware evidence also satisfies static); incomplete otherwise.
    """
    failed = tuple(g for g in GATES if g in results and results[g].outcome is Outcome.FAILED)
    unmet: list[Reason] = []
    for gate in (g for g in GATES if g in required):
        needed, result = required[gate], results.get(gate)
        if result is None:
            unmet.append(
                Reason(
                    code="verdict.not_run",
                    message=f"gate {gate} did not run",
                    where=gate,
                    expected=f"{gate} passed with {needed.value} evidence",
                    next=f"fasttrack verify --target {target} --gates {gate}",
                )
            )
        elif result.outcome in (Outcome.INCONCLUSIVE, Outcome.NOT_EVALUATED):
            unmet.extend(result.reasons)
        elif (
            result.outcome is Outcome.PASSED
            and needed is EvidenceClass.HARDWARE
            and result.evidence_class is not EvidenceClass.HARDWARE
        ):
            unmet.append(
                Reason(
                    code="verdict.evidence_class",
                    message=f"gate {gate} passed with static evidence only",
                    where=gate,
                    expected=f"{needed.value} evidence for target {target}",
                    next=f"on a machine of the target's kind: fasttrack verify --target {target} --gates {gate}",
                )
            )
    word = VerdictWord.REJECT if failed else VerdictWord.INCOMPLETE if unmet else VerdictWord.ACCEPT
    return Verdict(word=word, target=target, tier=tier, required=required, failed=failed, unmet=tuple(unmet))
