"""The optimisation loop on a real repository and run store, with a scripted judge in place of the gates."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.optimize import Baseline, Optimization, RunResult
from agents.proposal import BestView, Exhausted, History, Proposal
from agents.task import Task
from harness.evidence import DiskError
from harness.git import Repository
from harness.records import EvidenceClass, GateResult, Measurement, Outcome, Reason, decide
from harness.settings import load
from harness.store import RunStore
from verify.pipeline import Job, Verification

ROOT = Path(__file__).parents[2]
FILE = "k3_backend/schedules/cpu/k3-nano/kda_decode.toml"
TASK = Task.model_validate(
    {
        "version": 1, "id": "t", "title": "T", "objective": "O", "conditions": "C", "target": "cpu",
        "ops": ["kda_decode"], "editable": ["k3_backend/schedules/**"], "baseline": {"kind": "head"},
        "cells": [{"scope": "kda_decode", "batches": [8]}],
        "search": {"agent": "tuner", "candidates": 4}, "budget": {"minutes": 1},
    }
)  # fmt: skip


class Killed(BaseException):
    """Stands for kill -9: nothing of the process survives but what is on disk."""


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    root = tmp_path / "repo"
    (root / FILE).parent.mkdir(parents=True)
    (root / FILE).write_text("speed = 0\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *command], cwd=root, check=True)
    return Repository(root)


class Script:
    """Proposes the speeds of a list, each once."""

    name = "tuner"

    def __init__(self, speeds: list[int]) -> None:
        self.speeds = speeds

    def propose(self, history: History, best: BestView) -> Proposal:
        assert best.path(FILE).read_text().startswith("speed")
        if len(history) == len(self.speeds):
            raise Exhausted("script is over")
        speed = self.speeds[len(history)]
        return Proposal(hypothesis=f"speed {speed}", predicted={}, files={FILE: f"speed = {speed}\n"})


def speed_of(repo: Repository, commit: str) -> int:
    return int(repo.read(commit, FILE).split()[-1])


def judge(
    repo: Repository, log: list[tuple[str, str]], broken_in_final: int | None = None
) -> Callable[[Job], Verification]:
    """Passes perf exactly if the candidate is faster than the current best."""

    def verify(job: Job) -> Verification:
        speed = speed_of(repo, job.candidate.head)
        gain = speed - speed_of(repo, job.best or job.candidate.base)
        log.append((job.tier.name, f"{speed}"))
        good = gain > 0 and not (job.tier.name == "pr" and speed == broken_in_final)
        reason = Reason(code="perf.slower", message="not faster", where="cell", expected="faster", next="run")
        results = {
            gate: GateResult(
                gate=gate, protocol_id="x/1", outcome=Outcome.PASSED, evidence_class=EvidenceClass.HARDWARE, seconds=0
            )
            for gate in job.target.required
        }
        results["perf"] = GateResult(
            gate="perf", protocol_id="x/1", outcome=Outcome.PASSED if good else Outcome.FAILED,
            evidence_class=EvidenceClass.HARDWARE, reasons=() if good else (reason,), seconds=0,
            metrics={"ratio_best/kda_decode/b8/c-/t1/decode": Measurement(value=1 + gain / 10, unit="x")},
        )  # fmt: skip
        return Verification(
            job.candidate, results, decide("cpu", job.tier.name, dict(job.target.required), results), 0.0
        )

    return verify


def optimization(store: RunStore, repo: Repository, tmp_path: Path, speeds: list[int], verifier) -> Optimization:
    return Optimization(
        store=store,
        task=TASK,
        settings=load(ROOT / "harness.toml"),
        repo=repo,
        cache=tmp_path / "cache",
        make_baseline=lambda commit: Baseline(commit, "as committed"),
        make_proposer=lambda _: Script(speeds),
        verifier=verifier,
    )


def run(repo: Repository, tmp_path: Path, speeds: list[int], log: list, **options) -> tuple[RunStore, RunResult]:
    with RunStore.create(tmp_path / "runs", {"command": "optimize", "start": repo.resolve("HEAD")}) as store:
        return store, optimization(store, repo, tmp_path, speeds, judge(repo, log, **options)).run()


def outcomes(result: RunResult) -> list[str | None]:
    return [row.outcome for row in result.rows]


def test_best_is_accepted_and_every_other_candidate_has_a_reason(repo: Repository, tmp_path: Path) -> None:
    """Each proposal appears once: kept and beaten, refused, accepted."""
    log: list[tuple[str, str]] = []
    _, result = run(repo, tmp_path, [3, 1, 5, 4], log)
    assert outcomes(result) == ["beaten", "rejected", "accepted", "rejected"]
    assert result.accepted is not None
    assert speed_of(repo, result.accepted.head) == 5
    assert all(row.reason for row in result.rows)
    assert "candidate 3 is faster" in (result.rows[0].reason or "")
    assert log == [("smoke", "3"), ("smoke", "1"), ("smoke", "5"), ("smoke", "4"), ("pr", "5")]


def test_candidates_are_judged_against_the_current_best_and_confirmed_against_the_baseline(
    repo: Repository, tmp_path: Path
) -> None:
    """Speed 4 after a kept 5 is slower than the best although faster than the baseline."""
    _, result = run(repo, tmp_path, [5, 4], [])
    assert outcomes(result) == ["accepted", "rejected"]
    assert "exhausted" in result.ending


def test_a_candidate_that_fails_its_confirmation_gives_way_to_the_one_before(repo: Repository, tmp_path: Path) -> None:
    """Luck in screening must not win; the next best kept candidate still gets its chance."""
    _, result = run(repo, tmp_path, [3, 5], [], broken_in_final=5)
    assert outcomes(result) == ["accepted", "rejected"]
    assert "final verification" in (result.rows[1].reason or "")


def test_same_tree_and_uncommittable_proposals_are_recorded_not_judged(repo: Repository, tmp_path: Path) -> None:
    """The baseline entered as a candidate must never win, and a proposal without change is no candidate."""
    log: list[tuple[str, str]] = []
    _, result = run(repo, tmp_path, [3, 3, 0], log)
    assert outcomes(result) == ["accepted", "invalid", "duplicate"]
    assert [tier for tier, _ in log] == ["smoke", "pr"]


def test_a_repeated_proposal_takes_no_candidates_place(repo: Repository, tmp_path: Path) -> None:
    """A search ends with fewer candidates judged than the task allows, because its proposer came back to old ones."""
    _, result = run(repo, tmp_path, [5, 0, 4, 3, 2, 1], [])
    assert outcomes(result) == ["accepted", "duplicate", "rejected", "rejected", "rejected"]
    assert "4 candidates tried" in result.ending


def test_nothing_better_ends_without_accept(repo: Repository, tmp_path: Path) -> None:
    """A run whose candidates are all slower must not accept the least bad one."""
    _, result = run(repo, tmp_path, [-1, -2], [])
    assert (result.accepted, result.final) == (None, None)
    assert outcomes(result) == ["rejected", "rejected"]


@pytest.mark.parametrize(("gain", "outcome"), [(1, "accepted"), (-1, "beaten")])
def test_screening_by_some_gates_keeps_what_is_measured_faster_only(
    repo: Repository, tmp_path: Path, gain: int, outcome: str
) -> None:
    """Open claims of a screening count as a refusal, a slower candidate is kept, or its reason hides the ratio."""
    screening = ("scope", "build", "audit", "kernels", "perf")
    task = TASK.model_copy(update={"search": TASK.search.model_copy(update={"screen_gates": screening})})
    sure, asked = judge(repo, []), []

    def verify(job: Job) -> Verification:
        done = sure(job)
        if job.tier.name != "smoke":
            return done
        asked.append(job.gates)
        perf = done.results["perf"].model_copy(update={"outcome": Outcome.INCONCLUSIVE, "reasons": (OPEN,)})
        results = {gate: done.results[gate] for gate in screening} | {"perf": perf}
        verdict = decide("cpu", job.tier.name, dict(job.target.required), results)
        return Verification(job.candidate, results, verdict, 0.0)

    with RunStore.create(tmp_path / "runs", {"command": "optimize", "start": repo.resolve("HEAD")}) as store:
        loop = optimization(store, repo, tmp_path, [gain], verify)
        loop.task = task
        result = loop.run()
    assert asked == [screening]
    assert outcomes(result) == [outcome]
    if outcome == "beaten":
        assert "measured 0.9000 times" in (result.rows[0].reason or "")


OPEN = Reason(code="perf.cell_undecided", message="open", where="cell", expected="faster", next="run")


def test_candidate_limit_ends_the_search(repo: Repository, tmp_path: Path) -> None:
    """The perf gate spends its error budget over exactly this many candidates."""
    _, result = run(repo, tmp_path, [1, 2, 3, 4, 5, 6], [])
    assert len(result.rows) == 4
    assert "4 candidates tried" in result.ending


class Reaper:
    """Kills at the n-th call, n growing from session to session, so that every place is hit and the run still ends."""

    def __init__(self, kills: int) -> None:
        self.left = kills

    def calls(self, function: Callable) -> Callable:
        def counted(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("point", ["propose", "put", "finish", "spend", "judge"])
def test_killed_anywhere_and_resumed_gives_the_same_run(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """After kills at successive writes of one kind, the run has every candidate exactly once and the same end."""
    speeds = [3, 1, 5]
    _, straight = run(repo, tmp_path, speeds, [])
    with RunStore.create(tmp_path / "runs", {"command": "optimize", "start": repo.resolve("HEAD")}) as store:
        run_id = store.run_id
    kills = 0
    while True:
        reaper, verifier = Reaper(kills), judge(repo, [])
        with monkeypatch.context() as patch, RunStore.open(tmp_path / "runs", run_id) as store:
            if point == "judge":
                verifier = reaper.calls(verifier)
            else:
                patch.setattr(RunStore, point, reaper.calls(getattr(RunStore, point)))
            try:
                resumed = optimization(store, repo, tmp_path, speeds, verifier).run()
                break
            except Killed:
                kills += 1
        assert kills < 40, "the run never ended"
    assert kills > 0
    assert [(r.number, r.note, r.outcome, r.head) for r in resumed.rows] == [
        (r.number, r.note, r.outcome, r.head) for r in straight.rows
    ]
    assert not (tmp_path / "runs" / run_id / "worktree").exists()


def test_a_full_disk_costs_no_proposal(repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposal is entered as invalid, and the resumed run never tries it."""

    def full(*args: object) -> None:
        raise DiskError("full", where="w", expected="e", next="n")

    with RunStore.create(tmp_path / "runs", {"start": repo.resolve("HEAD")}) as store:
        run = optimization(store, repo, tmp_path, [1], judge(repo, []))
        with monkeypatch.context() as patched:
            patched.setattr(Repository, "commit_worktree", full)
            with pytest.raises(DiskError):
                run.run()
        assert store.candidates() == ()
        assert [row.outcome for row in run.run().rows] == ["accepted"]
