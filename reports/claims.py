"""What checking a bundle says: claims, each holding, refused or not checked, and the word that follows from them."""

from __future__ import annotations

from enum import StrEnum

from harness.records import Digest, Reason, Record, VerdictWord
from reports.text import visible_line

__all__ = ["ASSUMED", "BundleCheck", "CheckWord", "Claim", "ClaimStatus"]

ASSUMED = (
    "that the raw lines were measured, on the machine of environment.json (measure again: see the report's commands)",
    "that the evaluator was the one of commits.evaluator, and drew its secret inputs after the candidate was fixed",
    "that evidence of class hardware was taken on the target's kind of device",
    "the tables that gates state for readers (`detail`): no outcome rests on them",
    "who proposed and who submitted the change (disclosure)",
    "that the other candidates of the run are all listed",
)
"""What no file can prove about itself."""


class CheckWord(StrEnum):
    """What a check of a bundle concludes."""

    VERIFIED = "verified"
    """Every claim was checked and holds."""
    PARTIAL = "partial"
    """Nothing was found wrong, but this checkout could not check every claim."""
    REFUSED = "refused"
    """At least one claim does not hold."""


class ClaimStatus(StrEnum):
    """State of one claim."""

    HOLDS = "holds"
    NOT_CHECKED = "not_checked"
    REFUSED = "refused"


class Claim(Record):
    """One thing that a bundle says, and whether it holds."""

    claim: str
    status: ClaimStatus
    note: str = ""
    """For not_checked: why."""


class BundleCheck(Record):
    """Result of `verify_bundle`. Text and JSON come from this record."""

    bundle: str
    digest: Digest | None
    """sha256 of manifest.json; null when there is none to hash."""
    word: CheckWord
    verdict: VerdictWord | None
    """The bundle's verdict, only where it was recomputed from raw lines."""
    claims: tuple[Claim, ...]
    reasons: tuple[Reason, ...]
    """Why it is refused; empty otherwise."""
    assumed: tuple[str, ...] = ASSUMED

    @property
    def ok(self) -> bool:
        """Whether every claim was checked and holds."""
        return self.word is CheckWord.VERIFIED

    def text(self) -> str:
        """For a terminal: plain lines, nothing in them can act on it."""
        marks = {ClaimStatus.HOLDS: "ok  ", ClaimStatus.NOT_CHECKED: "??  ", ClaimStatus.REFUSED: "NO  "}
        lines = [f"bundle {self.word.value}: {visible_line(self.bundle)}"]
        if self.verdict is not None:
            lines.append(f"verdict {self.verdict.value}, recomputed from raw data")
        for claim in self.claims:
            note = f" ({claim.note})" if claim.note else ""
            lines.append(visible_line(f"  {marks[claim.status]}{claim.claim}{note}"))
        for reason in self.reasons:
            finding = f"  {reason.code} {reason.where}: {reason.message}"
            lines.append(visible_line(f"{finding}; expected {reason.expected}; next: {reason.next}"))
        lines.append("not checkable from files:")
        lines += [f"  -   {sentence}" for sentence in self.assumed]
        return "\n".join(lines)
