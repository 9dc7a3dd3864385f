"""Proposer `tuner` on a synthetic machine whose optimum is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agents.proposal import Exhausted, Tried
from agents.proposers.tuner import Tuner, uniform_schedule
from harness.errors import FasttrackError
from harness.records import Cell
from k3_backend.aot.schedule import Bucket, Schedule, Tunable, render

PATH = "k3_backend/schedules/cpu/k3-nano/kda_decode.toml"
SPACE = (
    Tunable("threads", (1, 2), "workers"),
    Tunable("prefetch", (0, 2, 4), "rows ahead"),
    Tunable("v_block", (8, 16), "rows at a time"),
)
CELLS = tuple(Cell(scope="kda_decode", batch=b) for b in (8, 32))


def machine(rows: int, points: Sequence[Mapping[str, int]]) -> list[float]:
    """Seconds on a machine where threads help everywhere, prefetch only at many rows, v_block never."""
    return [
        rows
        * (0.55 if p["threads"] == 2 else 1.0)
        * (1 - 0.05 * p["prefetch"] * (rows >= 16))
        * (1 + p["v_block"] / 1e4)
        for p in points
    ]


class Best:
    def __init__(self, folder: Path, schedule: Schedule) -> None:
        self.file = folder / "kda_decode.toml"
        self.file.write_text(render(schedule))

    def path(self, path: str) -> Path:
        assert path == PATH
        return self.file


@pytest.fixture
def start() -> Schedule:
    point = {"threads": 1, "prefetch": 0, "v_block": 8}
    return Schedule("kda_decode", "k3-nano", SPACE, tuple(Bucket(rows, point) for rows in (1, 8, 16, 64)))


@pytest.fixture
def tuner() -> Tuner:
    return Tuner("kda_decode", geometry="k3-nano", path=PATH, space=SPACE, cells=CELLS, timer=machine)


def tried(number: int, hypothesis: str, outcome: str) -> Tried:
    return Tried(number=number, hypothesis=hypothesis, outcome=outcome, reason="test", measured={})


def test_first_proposal_is_the_tunable_that_helps_every_cell(tuner: Tuner, start: Schedule, tmp_path: Path) -> None:
    """The search must lead with what can be accepted: a gain in every cell of the task."""
    proposal = tuner.propose((), Best(tmp_path, start))
    assert "change threads" in proposal.hypothesis
    assert proposal.predicted == pytest.approx({cell.key: 1 / 0.55 for cell in CELLS})


def test_proposal_changes_only_buckets_of_the_tasks_cells(tuner: Tuner, start: Schedule, tmp_path: Path) -> None:
    """Rows that no cell of the task measures keep their schedule: nothing is changed unmeasured."""
    best = Best(tmp_path, start)
    proposal = tuner.propose((), best)
    assert proposal.files is not None
    (tmp_path / "new.toml").write_text(proposal.files[PATH])
    changed = Schedule.load(tmp_path / "new.toml", op="kda_decode", geometry="k3-nano", tunables=SPACE)
    assert [changed.lookup(rows) == start.lookup(rows) for rows in (1, 8, 16, 32)] == [True, False, True, False]


def test_refused_proposal_is_not_repeated_and_probes_come_last(tuner: Tuner, start: Schedule, tmp_path: Path) -> None:
    """A loop that proposes the same thing again would burn the run's error budget for nothing."""
    best = Best(tmp_path, start)
    history: tuple[Tried, ...] = ()
    for number in range(1, 6):
        proposal = tuner.propose(history, best)
        history = (*history, tried(number, proposal.hypothesis, "rejected"))
    assert max(proposal.predicted.values()) < 1.0, "the last one is against the tuner's own timings, and says so"
    with pytest.raises(Exhausted, match="threads, prefetch, v_block"):
        tuner.propose(history, best)
    assert [h.split("(")[0].strip() for h in (t.hypothesis for t in history)] == [
        "kda_decode: change threads",
        "kda_decode: change prefetch",
        "kda_decode: change all tunables",
        "kda_decode: change prefetch",
        "kda_decode: change v_block",
    ]
    assert len({t.hypothesis for t in history}) == 5


def test_same_history_gives_the_same_proposal(tuner: Tuner, start: Schedule, tmp_path: Path) -> None:
    """A resumed run asks again and must not fork."""
    best = Best(tmp_path, start)
    assert tuner.propose((), best) == tuner.propose((), best)


def test_joint_descent_finds_the_optimum_at_each_batch(tuner: Tuner) -> None:
    """`tuned_for` regenerates the demo's baseline; a wrong optimum would sandbag it."""
    assert tuner.tuned_for(1, {}) == {"threads": 2, "prefetch": 0, "v_block": 8}
    assert tuner.tuned_for(64, {}) == {"threads": 2, "prefetch": 4, "v_block": 8}


def test_a_held_tunable_keeps_its_value_and_must_be_declared(tuner: Tuner) -> None:
    """A baseline that is to run on one thread gets two, or a misspelt tunable is ignored."""
    assert tuner.tuned_for(1, {"threads": 1})["threads"] == 1
    for hold in ({"thread": 1}, {"threads": 99}):
        with pytest.raises(FasttrackError, match="declares no tunable"):
            tuner.tuned_for(1, hold)


def test_descent_ends_when_every_sweep_calls_another_point_faster() -> None:
    """Contradicting noise must not send the descent round in circles for ever."""

    def contradicting(rows: int, points: Sequence[Mapping[str, int]]) -> list[float]:
        return [2.0] + [1.0] * (len(points) - 1)

    tuner = Tuner("kda_decode", geometry="k3-nano", path=PATH, space=SPACE, cells=CELLS, timer=contradicting)
    assert set(tuner.tuned_for(1, {})) == {"threads", "prefetch", "v_block"}


def test_uniform_schedule_keeps_buckets(start: Schedule) -> None:
    """The baseline must refuse exactly where the committed schedule does."""
    point = {"threads": 2, "prefetch": 4, "v_block": 16}
    uniform = uniform_schedule(start, point)
    assert [b.max_rows for b in uniform.buckets] == [b.max_rows for b in start.buckets]
    assert all(dict(b.values) == point for b in uniform.buckets)
