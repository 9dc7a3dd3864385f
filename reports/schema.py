"""Records of a bundle, version 3: what `bundle.json`, `environment.json` and `manifest.json` hold.

The files and the compatibility rule are described in docs/bundle.md. Gate results are `harness.records.GateResult`, one
file each; this module adds what ties them together: whose candidate, judged by which commit, for which target, on which
machine, among which other candidates, and how to run it again. Nothing here decides anything.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from harness.proposals import CandidateOutcome
from harness.records import (
    GATES,
    Candidate,
    Cell,
    Commit,
    Digest,
    EvidenceRef,
    GateName,
    Measurement,
    Missing,
    Outcome,
    Record,
    Verdict,
)
from harness.settings import Scope, Target, Tier

__all__ = [
    "BUNDLE_VERSION", "RENDER_VERSION", "Artifact", "Bundle", "BundleInput", "Command", "Commits", "Disclosure",
    "Environment", "GateEntry", "Manifest", "ManifestEntry", "OtherCandidate", "PeersEntry", "RawRef",
]  # fmt: skip

BUNDLE_VERSION = 3
"""Version of the bundle's layout and records; readers refuse every other one."""

RENDER_VERSION = 2
"""Version of the two reports' text; raised with every change of a template: what a reader re-renders."""

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._]{0,63}(-[A-Za-z0-9._]{1,64}){0,6}$")]
"""Part of a folder name: run id or candidate name."""

UtcTime = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]


class Commits(Record):
    """Which code took part."""

    base: Commit
    """Protected code that judged, and the tree that the candidate changes."""
    head: Commit
    """The candidate."""
    evaluator: Commit
    """Checkout of the harness that ran the gates."""
    evaluator_dirty: bool
    """Whether that checkout had uncommitted changes."""


class Disclosure(Record):
    """Who proposed the change and with which help."""

    proposer: Literal["person", "search", "model", "replay"]
    """A person's patch, a search over declared tunables, a language model, or a recorded list of patches."""
    statement: str
    """Plain sentences for a reviewer."""
    model: str | None = None
    """Model id; null when no language model took part."""
    submitter: str | None = None
    """The person who reviewed every changed line and answers for it; null while nobody is named."""
    reviews: tuple[str, ...] = ()
    """Reviews that a model ran, and what they found."""
    cost_usd: float | None = Field(default=None, ge=0)
    """Paid model use for this candidate; null when none."""


class Command(Record):
    """One way to check again."""

    purpose: str
    argv: tuple[str, ...] = Field(min_length=1)


class OtherCandidate(Record):
    """Another candidate of the same run, so that none disappears from the record."""

    name: Label
    origin: str
    note: str
    """What its proposer said it tries."""
    head: Commit
    outcome: CandidateOutcome
    """How it ended, in the run store's words."""
    reason: str | None
    """Why; null only for an accepted one."""
    ratio: Measurement | Missing
    """Its headline ratio in its worst cell, where that was measured."""

    @model_validator(mode="after")
    def _says_why(self) -> OtherCandidate:
        if self.outcome != "accepted" and not self.reason:
            raise ValueError(f"candidate {self.name}: outcome {self.outcome} needs a reason")
        return self


class Environment(Record):
    """The machine that measured, without names of hosts, people or folders. Captured by `reports.environment`."""

    cpu_model: str | Missing
    cpu_flags_sha256: Digest | Missing
    """Digest of the sorted feature flags, one space between them."""
    cpu_features: tuple[str, ...]
    """Those flags that choose between architecture levels."""
    cores: int = Field(ge=1)
    """Logical cores this process may use."""
    memory_bytes: int | Missing
    kernel: str
    python: str
    compiler: str | Missing
    """First line of `g++ --version`."""
    packages: dict[str, str]
    """Installed distributions that take part, by name."""
    container: tuple[str, ...]
    """Signs of a container or of a limit on cores; empty when none was seen."""
    load_average: tuple[float, float, float]
    """1, 5 and 15 minutes, when the run was measured."""


class Artifact(Record):
    """One built kernel object."""

    name: str
    """As in `candidate.artifacts`: `<op>/<arch>`, on GPUs `<op>/<arch>/<geometry>`; its folder below `artifacts/`."""
    op: str
    arch: str
    geometry: str
    digest: Digest
    """The artifact's own digest, as in `candidate.artifacts`."""
    manifest: EvidenceRef
    files: dict[str, Digest] = Field(min_length=1)
    """Object files by name; their digests stand even where the files are not in the bundle."""
    included: bool
    """Whether the object files are in the bundle, beside the manifest."""


class RawRef(EvidenceRef):
    """Canonical raw lines of one gate."""

    lines: int = Field(ge=1)


class GateEntry(Record):
    """Where one gate's result and raw data are."""

    gate: GateName
    outcome: Outcome
    protocol_id: str
    result: EvidenceRef
    raw: RawRef | None
    """Null only when nothing was measured."""
    derived: EvidenceRef | None
    error: RawRef | None
    """Record of an exception that ended the gate; null when there was none."""

    @model_validator(mode="after")
    def _raw_decides(self) -> GateEntry:
        if self.raw is None and self.outcome is not Outcome.NOT_EVALUATED:
            raise ValueError(f"gate {self.gate}: outcome {self.outcome.value} needs raw lines")
        if (self.raw is None) != (self.derived is None):
            raise ValueError(f"gate {self.gate}: derived data exist exactly when raw lines do")
        return self


class PeersEntry(Record):
    """The peer table: where its raw lines are. It is evidence beside the gates and decides nothing."""

    outcome: Outcome
    """Whether the record is whole, and our results right in it."""
    protocol_id: str
    raw: RawRef


class BundleInput(Record):
    """All that a verification hands over for its bundle, besides its `gates/` and `raw/` folders."""

    run: Label
    name: Label
    """The candidate's name within its run, e.g. `003-4f2a91c07d5e`."""
    task: str | None
    """Optimisation task; null for the verification of a plain patch."""
    candidate: Candidate
    target: Target
    """The target's rules as they stood in harness.toml of the judging commit; likewise `tier` and `scope`."""
    tier: Tier
    scope: Scope
    task_cells: tuple[Cell, ...] = ()
    """Cells in which the task asks for strictly faster than the current best."""
    commits: Commits
    allowed: tuple[str, ...] = ()
    """Protected paths that a person allowed for this verification (--allow)."""
    disclosure: Disclosure
    commands: tuple[Command, ...] = Field(min_length=1)
    limits: tuple[str, ...] = Field(min_length=1)
    """What this evidence does not show, one sentence each."""
    others: tuple[OtherCandidate, ...] = ()
    candidates_planned: int = Field(ge=1)
    """Candidates over which the run's error budget is spent."""
    finished: UtcTime
    seconds: float = Field(ge=0)
    """Wall time of this candidate's verification."""

    @model_validator(mode="after")
    def _agrees(self) -> BundleInput:
        if (self.commits.base, self.commits.head) != (self.candidate.base, self.candidate.head):
            raise ValueError("commits.base and commits.head must be those of the candidate")
        names = [other.name for other in self.others]
        if len({*names, self.name}) != len(names) + 1:
            raise ValueError("every candidate of a run appears exactly once")
        if len(names) + 1 > self.candidates_planned:
            raise ValueError(
                f"{len(names) + 1} candidates, expected at most candidates_planned={self.candidates_planned}"
            )
        return self


class Bundle(BundleInput):
    """Content of bundle.json."""

    schema_version: Literal[3]
    render_version: int = Field(ge=1)
    verdict: Verdict
    cells: tuple[Cell, ...]
    """The performance cells that the tier plans on this target."""
    gates: tuple[GateEntry, ...]
    """In the order of `harness.records.GATES`; gates that did not run are absent."""
    peers: PeersEntry | None
    """Null where no peer table was measured."""
    artifacts: tuple[Artifact, ...]
    patch: EvidenceRef
    environment: EvidenceRef

    @model_validator(mode="after")
    def _ordered(self) -> Bundle:
        if [entry.gate for entry in self.gates] != [gate for gate in GATES if gate in {e.gate for e in self.gates}]:
            raise ValueError("gates must be listed once each, cheapest first")
        verdict = self.verdict
        if (verdict.target, verdict.tier, verdict.required) != (self.target.name, self.tier.name, self.target.required):
            raise ValueError("the verdict must name the bundle's target, tier and required gates")
        return self


class ManifestEntry(Record):
    """One file."""

    sha256: Digest
    size: int = Field(ge=0)


class Manifest(Record):
    """Content of manifest.json: every file of the bundle but itself and manifest.sha256."""

    schema_version: Literal[3]
    files: dict[str, ManifestEntry]
