"""What a gate is given. Gates are functions `run(ctx) -> GateResult`; all they know comes from this object.

The repository object is the only source of the candidate's files; a gate never reads a working tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.git import Repository
from harness.progress import Progress, silent
from harness.records import Candidate, Cell
from harness.settings import Settings, Target, Tier
from harness.store import EvidenceSink
from k3_backend.aot.manifest import Artifact

if TYPE_CHECKING:
    from verify.kit.importing import Imported

__all__ = ["Arms", "GateContext"]


@dataclass(frozen=True)
class Arms:
    """Built artifacts and schedule folders of the arms that gates compare. Paths are read-only snapshots."""

    candidate: dict[str, Artifact]
    """op name -> artifact for the host's best architecture level."""
    candidate_schedules: Path
    best: dict[str, Artifact]
    """The current best: the base commit's specialised kernels, or the best candidate of this run."""
    best_schedules: Path
    runtime: Artifact
    """The trusted launcher, built from the protected sources; the same for both arms."""


@dataclass
class GateContext:
    """One verification."""

    settings: Settings
    target: Target
    tier: Tier
    repo: Repository
    candidate: Candidate
    run_dir: Path
    """Scratch and evidence folder of this verification; private to it."""
    evidence: EvidenceSink
    """Where raw measurements go: append-only JSONL, fsynced per block."""
    base_tree: Path
    """Export of the base commit: the protected code that sandboxed workers import."""
    best_tree: Path
    """Export with the current best's kernels and schedules: `base_tree`, or that of this run's best candidate."""
    task_cells: tuple[Cell, ...] = ()
    """Cells in which the task asks for strictly faster than the current best; empty without a task."""
    allow: tuple[str, ...] = ()
    """Protected paths that a human change may touch (--allow)."""
    candidate_tree: Path | None = None
    """Export of the candidate's editable paths (kernels and schedules); null until the scope gate has let it pass."""
    arms: Arms | None = None
    """Set by the build gate; gates that need it are not_evaluated without."""
    built: tuple[Artifact, ...] = ()
    """Every object of the candidate, for all architectures of the target; set by the build gate."""
    kit: Imported | None = None
    """Results of a kit from a GPU machine; null where none is imported."""
    candidates_tried: int = 1
    """How many candidates this run may try: the error budget is spent over them."""
    progress: Progress = silent
