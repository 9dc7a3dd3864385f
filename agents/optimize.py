"""The optimisation loop: propose, judge, keep the best, confirm it, and never lose or repeat a candidate.

Everything that decides what happens next is in the run store, so a killed run goes on where it stopped: the baseline,
each proposal with its commit before anything judges it, finished gates, and the kept candidates. The loop measures
nothing itself and decides nothing about merit; `verify.pipeline` does both.

Each candidate is a commit on top of the current best and is screened at the task's screening tier against that best.
Screening only chooses, maybe by some of the gates: it keeps a candidate that none of them refuses and whose measured
ratio is above 1 in every cell of the task, even where so few blocks cannot prove it. At the end the last kept candidate
is verified at the final tier against the run's baseline, with fresh processes and seeds; only that verdict accepts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agents.proposal import Exhausted, History, Proposal, Proposer, Tried
from agents.task import Task
from harness.errors import FasttrackError
from harness.evidence import DiskError
from harness.git import Repository
from harness.progress import Progress, silent
from harness.proposals import CandidateOutcome, CandidateRow
from harness.records import GateName, GateResult, Measurement, Outcome, VerdictWord
from harness.settings import Settings
from harness.store import RunStore
from verify.pipeline import EDITABLE_ROOTS, Job, Verification, make_candidate, verify
from verify.snapshots import export_tree

__all__ = ["Baseline", "ExportedBest", "Optimization", "RunResult"]


@dataclass(frozen=True)
class Baseline:
    """Where a run starts."""

    commit: str
    note: str
    """How it was made, for the report."""


@dataclass(frozen=True)
class ExportedBest:
    """Read access to the editable files of a commit."""

    folder: Path

    def path(self, path: str) -> Path:
        """Exported copy of a repository file."""
        file = self.folder / path
        if not file.is_file():
            raise FasttrackError(
                "no such file in the current best", where=path, expected="an editable file", next="fasttrack tasks lint"
            )
        return file


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    run_id: str
    baseline: Baseline
    rows: tuple[CandidateRow, ...]
    accepted: CandidateRow | None
    final: Verification | None
    """Verification at the final tier of the accepted candidate, else of the last one that was tried; null if no
    candidate was ever kept."""
    final_row: CandidateRow | None
    ending: str
    """Why the search stopped."""


@dataclass(kw_only=True)
class Optimization:
    """One run of one task. Call `run` again after a crash with the reopened store to go on."""

    store: RunStore
    task: Task
    settings: Settings
    repo: Repository
    cache: Path
    make_baseline: Callable[[str], Baseline]
    """From the start commit to the run's baseline; called once per run."""
    make_proposer: Callable[[str], Proposer]
    """From the baseline commit to a proposer."""
    verifier: Callable[[Job], Verification] = verify
    progress: Progress = silent

    def run(self) -> RunResult:
        """Search within the budget, then confirm the best candidate."""
        baseline = self._baseline()
        ending = self._search(baseline)
        accepted, final, row = self._confirm(baseline)
        return RunResult(self.store.run_id, baseline, self.store.candidates(), accepted, final, row, ending)

    # --- search ----------------------------------------------------------------------------------------------------

    def _baseline(self) -> Baseline:
        stored = self.store.get("baseline")
        if stored is None:
            made = self.make_baseline(self.store.spec["start"])
            self.repo.keep(f"{self.store.run_id}/baseline", made.commit)
            self.store.put("baseline", {"commit": made.commit, "note": made.note})
            self.progress(f"baseline {made.commit[:12]}: {made.note}")
            return made
        return Baseline(stored["commit"], stored["note"])

    def _search(self, baseline: Baseline) -> str:
        """Try candidates until the budget ends or the proposer is exhausted; says which."""
        if (ending := self.store.get("ending")) is not None:
            return str(ending)
        proposer = self.make_proposer(baseline.commit)
        while True:
            pending = next((row for row in self.store.candidates() if self._is_pending(row)), None)
            if pending is None:
                ending = self._budget_ending()
                if ending is None:
                    try:
                        pending = self._propose(proposer, baseline)
                    except Exhausted as end:
                        ending = f"proposer {proposer.name} is exhausted: {end}"
            if ending is not None or pending is None:
                self.store.put("ending", ending)
                self.progress(f"search ends: {ending}")
                return str(ending)
            self._judge(pending, baseline)

    def _is_pending(self, row: CandidateRow) -> bool:
        return row.outcome is None and row.number not in self._kept()

    def _kept(self) -> list[int]:
        return list(self.store.get("kept", []))

    def _best_commit(self, baseline: Baseline) -> str:
        kept = self._kept()
        return self.store.candidates()[kept[-1] - 1].head if kept else baseline.commit

    def _budget_ending(self) -> str | None:
        rows, limit = self.store.candidates(), self.task.search.candidates
        # A repeated proposal is not judged, so it takes no candidate's place.
        repeated = sum(row.outcome == "duplicate" for row in rows)
        if len(rows) - repeated >= limit:
            return f"{limit} candidates tried, the task's limit"
        if repeated >= limit:
            return f"{repeated} proposals repeated earlier ones"
        if self.store.spent("seconds") >= 60 * self.task.budget.minutes:
            return f"{self.task.budget.minutes:g} minutes used, the task's budget"
        return None

    def _propose(self, proposer: Proposer, baseline: Baseline) -> CandidateRow:
        """Ask for the next proposal and enter it, as a commit, into the run's history.

        Raises:
            Exhausted: the proposer has nothing new.
        """
        started = time.monotonic()
        best = self._best_commit(baseline)
        view = ExportedBest(export_tree(self.repo, best, EDITABLE_ROOTS, self.cache))
        proposal = proposer.propose(self._history(), view)
        number = len(self.store.candidates()) + 1
        head, problem = self._commit(proposal, best, number)
        self.repo.keep(f"{self.store.run_id}/{number:03d}", head)
        self.store.put(
            f"proposal/{number}",
            {**proposal.model_dump(mode="json", exclude={"files", "patch"}), "parent": best, "problem": problem},
        )
        row = self.store.propose(f"{number:03d}", head=head, origin=proposer.name, note=proposal.hypothesis)
        self.store.spend("seconds", time.monotonic() - started)
        self.progress(f"candidate {number}: {proposal.hypothesis}")
        return row

    def _commit(self, proposal: Proposal, best: str, number: int) -> tuple[str, str | None]:
        """Commit a proposal on top of the best; a proposal that cannot be committed gives the best and the problem."""
        message = f"{self.task.id}: candidate {number}\n\n{proposal.hypothesis}"
        try:
            if proposal.patch is not None:
                return self.repo.commit_patch(best, proposal.patch.encode(), message), None
            return self._commit_files(proposal.files or {}, best, message), None
        except DiskError:
            raise
        except FasttrackError as error:
            return best, str(error)

    def _commit_files(self, files: dict[str, str], best: str, message: str) -> str:
        folder = self.store.path / "worktree"
        self._remove_worktree(folder)
        self.repo.add_worktree(folder, best)
        for name, text in files.items():
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise FasttrackError(
                    "the proposal leaves its worktree",
                    where=name,
                    expected="a path inside the repository",
                    next="propose another file",
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        head = self.repo.commit_worktree(folder, message)
        self._remove_worktree(folder)
        if head is None:
            raise FasttrackError(
                "the proposal changes nothing", where="files", expected="a change", next="propose another"
            )
        return head

    def _remove_worktree(self, folder: Path) -> None:
        if folder.exists():
            self.repo.remove_worktree(folder)

    # --- judgement -------------------------------------------------------------------------------------------------

    def _judge(self, row: CandidateRow, baseline: Baseline) -> None:
        """Screen one candidate against the current best and record what became of it."""
        problem = self.store.get(f"proposal/{row.number}")["problem"]
        if problem is not None:
            self.store.finish(row.number, "invalid", problem)
            return
        trees = {self.repo.tree(baseline.commit): 0}
        trees |= {self.repo.tree(r.head): r.number for r in self.store.candidates() if r.number < row.number}
        twin = trees.get(self.repo.tree(row.head))
        if twin is not None:
            self.store.finish(
                row.number, "duplicate", f"same tree as {f'candidate {twin}' if twin else 'the baseline'}"
            )
            return
        started = time.monotonic()
        parent = self.store.get(f"proposal/{row.number}")["parent"]
        done = self.verifier(
            self._job(
                row,
                baseline,
                best=parent,
                tier=self.task.search.screen_tier,
                folder=self.store.candidate_dir(row),
                gates=self.task.search.screen_gates,
            )
        )
        self.store.spend("seconds", time.monotonic() - started)
        self.store.put(f"measured/{row.number}", _ratios(done.results))
        if self._is_better(done):
            self.store.put("kept", [*self._kept(), row.number])
            self.progress(f"candidate {row.number}: kept, measured faster than the best in every cell of the task")
            return
        outcome, reason = self._refusal(done)
        self.store.finish(row.number, outcome, reason)
        self.progress(f"candidate {row.number}: {outcome}, {reason}")

    def _refusal(self, done: Verification) -> tuple[CandidateOutcome, str]:
        """What became of a screened candidate that is not kept, and why."""
        if done.verdict.word is VerdictWord.REJECT:
            return "rejected", _first_reason(done)
        ratios = _ratios(done.results)
        measured = [cell.key for cell in self.task.all_cells() if cell.key in ratios]
        slow = {key: ratios[key] for key in measured if ratios[key] <= 1.0}
        if slow:
            key = min(slow, key=slow.__getitem__)
            return "beaten", f"measured {slow[key]:.4f} times as fast as the current best in {key}"
        return "incomplete", _first_reason(done)

    def _is_better(self, done: Verification) -> bool:
        """Whether a screened candidate becomes the current best."""
        open_gates = [gate for gate, result in done.results.items() if result.outcome is not Outcome.PASSED]
        ratios = _ratios(done.results)
        return (
            "perf" in done.results
            and open_gates in ([], ["perf"])
            and done.results["perf"].outcome in (Outcome.PASSED, Outcome.INCONCLUSIVE)
            and all(ratios.get(cell.key, 0.0) > 1.0 for cell in self.task.all_cells())
        )

    def _confirm(self, baseline: Baseline) -> tuple[CandidateRow | None, Verification | None, CandidateRow | None]:
        """Verify kept candidates at the final tier against the baseline, the best one first, until one is accepted."""
        accepted, last, last_row = None, None, None
        for number in reversed(self._kept()):
            row = self.store.candidates()[number - 1]
            if accepted is not None:
                self.store.finish(number, "beaten", f"candidate {accepted.number} is faster in every cell of the task")
                continue
            self.progress(
                f"candidate {number}: final verification at tier {self.task.search.final_tier} against the baseline"
            )
            last_row = row
            last = self.verifier(
                self._job(
                    row, baseline, best=baseline.commit, tier=self.task.search.final_tier, folder=self.final_folder(row)
                )
            )
            match last.verdict.word:
                case VerdictWord.ACCEPT:
                    accepted = self.store.finish(number, "accepted", "accepted in final verification")
                case VerdictWord.REJECT:
                    self.store.finish(number, "rejected", f"final verification: {_first_reason(last)}")
                case VerdictWord.INCOMPLETE:
                    self.store.finish(number, "incomplete", f"final verification: {_first_reason(last)}")
        return accepted, last, last_row

    def final_folder(self, row: CandidateRow) -> Path:
        """Evidence folder of a candidate's final verification."""
        return self.store.candidate_dir(row) / "final"

    def _job(
        self,
        row: CandidateRow,
        baseline: Baseline,
        *,
        best: str,
        tier: str,
        folder: Path,
        gates: tuple[GateName, ...] | None = None,
    ) -> Job:
        return Job(
            settings=self.settings,
            repo=self.repo,
            candidate=make_candidate(self.repo, baseline.commit, row.head, row.origin),
            target=self.settings.target(self.task.target),
            tier=self.settings.tier(tier),
            folder=folder,
            cache=self.cache,
            best=best,
            gates=gates,
            task_cells=self.task.all_cells(),
            candidates_tried=self.task.search.candidates,
            progress=self.progress,
        )

    def _history(self) -> History:
        kept = self._kept()
        return tuple(
            Tried(
                number=row.number,
                hypothesis=row.note,
                outcome="kept" if row.number in kept else str(row.outcome),
                reason=row.reason or "",
                measured=self.store.get(f"measured/{row.number}", {}),
            )
            for row in self.store.candidates()
        )


def _first_reason(done: Verification) -> str:
    for result in done.results.values():
        if result.outcome is not Outcome.PASSED:
            reason = result.reasons[0]
            return f"{result.gate}: {reason.message} ({reason.where})"
    return done.verdict.unmet[0].message if done.verdict.unmet else done.verdict.word.value


def _ratios(results: dict[GateName, GateResult]) -> dict[str, float]:
    """Measured ratios over the current best by cell, from the perf gate if it ran."""
    perf = results.get("perf")
    if perf is None:
        return {}
    return {
        name.removeprefix("ratio_best/"): m.value
        for name, m in perf.metrics.items()
        if name.startswith("ratio_best/") and isinstance(m, Measurement)
    }
