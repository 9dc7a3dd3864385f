"""The performance decision: right on known speeds, closed against every way of not being a complete measurement."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.records import Cell, Measurement
from tests.verify.perf_records import (
    CEILINGS,
    KEYS,
    OP_CELL,
    STEP_CELLS,
    FakeSampler,
    codes,
    make_plan,
    record,
    speeds,
)
from verify.protocol import perf
from verify.protocol.floors import Traffic
from verify.protocol.perf import below_floor, decide, summarise
from verify.protocol.perf_plan import (
    ARMS,
    MIN_ROUNDS,
    Claim,
    Plan,
    PlanError,
    Stage,
    plan_stages,
    slice_order,
)
from verify.timing.compare import Left

ROOT = Path(__file__).resolve().parents[2]


def test_a_faster_candidate_passes_and_its_ratios_are_the_true_ones(accepted: list[dict[str, Any]]) -> None:
    """A real gain is not recognised, or is reported with a wrong size."""
    decision = decide(accepted)
    assert decision.outcome == "passed", decision.findings
    for key in KEYS:
        assert decision.metrics[f"ratio_best/{key}"]["value"] == pytest.approx(1.1, rel=0.01)
        assert decision.metrics[f"ratio_standard/{key}"]["value"] == pytest.approx(2.2, rel=0.01)
        Measurement(**decision.metrics[f"ratio_best/{key}"])
    assert decision.metrics["worst_ratio_best"]["value"] <= decision.metrics[f"ratio_best/{KEYS[0]}"]["value"]


def test_identical_speed_is_never_accepted(tmp_path: Path) -> None:
    """A change that gains nothing reaches a reviewer."""
    for number in range(5):
        lines = record(tmp_path / str(number), make_plan(), FakeSampler(speeds(0.0), seed=number))
        assert decide(lines).outcome in ("failed", "inconclusive")


def test_a_precise_measurement_of_the_same_speed_is_a_failure(tmp_path: Path) -> None:
    """The same speed stays `inconclusive` for ever, however well it is measured."""
    plan = make_plan(task=STEP_CELLS[:1])
    lines = record(tmp_path, plan, FakeSampler(speeds(1e-4), noise=0.0005, seed=3))
    decision = decide(lines)
    assert decision.outcome in ("failed", "inconclusive")
    if decision.outcome == "failed":
        assert codes(lines) <= {"perf.cell_not_faster", "perf.cell_slower"}


def test_one_cell_ten_percent_slower_fails_by_name(tmp_path: Path) -> None:
    """A loss in one cell hides behind gains in all others."""
    slow = STEP_CELLS[1].key
    gains = dict.fromkeys(KEYS, 0.3) | {slow: -0.1}
    lines = record(tmp_path, make_plan(), FakeSampler(speeds(gains)))
    decision = decide(lines)
    assert decision.outcome == "failed"
    assert [(f.code, f.where) for f in decision.findings] == [("perf.cell_slower", slow)]
    assert sum(line["kind"] == "block" for line in lines) == perf.FUTILITY_BLOCKS, "two blocks show it"


def test_a_step_slower_than_the_standard_path_fails(tmp_path: Path) -> None:
    """A candidate that beats a bad current best, but not the standard path, is accepted."""
    lines = record(tmp_path, make_plan(), FakeSampler(speeds(0.2, standard=0.7)))
    assert decide(lines).outcome == "failed"
    assert codes(lines) == {"perf.cell_slower"}


def test_a_loss_inside_the_band_passes_only_where_not_slower_is_asked(tmp_path: Path) -> None:
    """The declared band is ignored, or is applied to cells that must gain."""
    gains = dict.fromkeys(KEYS, -0.005) | {OP_CELL.key: 0.2}
    sampler = FakeSampler(speeds(gains), noise=0.001)
    assert decide(record(tmp_path / "a", make_plan(), sampler)).outcome == "passed"
    everywhere = make_plan(task=(*STEP_CELLS, OP_CELL))
    assert decide(record(tmp_path / "b", everywhere, FakeSampler(speeds(gains), noise=0.001))).outcome != "passed"


def test_without_a_task_one_gain_is_needed_and_is_enough(tmp_path: Path) -> None:
    """A plain patch that is only not slower is accepted, or one that gains in a single cell is refused."""
    plan = make_plan(task=())
    gains = dict.fromkeys(KEYS, 0.0) | {KEYS[2]: 0.2}
    assert decide(record(tmp_path / "gain", plan, FakeSampler(speeds(gains), noise=0.002))).outcome == "passed"
    lines = record(tmp_path / "none", plan, FakeSampler(speeds(0.0), noise=0.002))
    assert decide(lines).outcome == "failed"
    assert codes(lines) == {"perf.no_gain"}


def test_a_candidate_with_the_bests_digests_is_not_measured() -> None:
    """Noise decides about a change that changes nothing."""
    plan = make_plan()
    lines = [{**plan.header(), "arms": {"standard": {}, "best": {"digest": "b"}, "candidate": {"digest": "b"}}}]
    assert codes(lines) == {"perf.identical"}
    assert decide(lines).outcome == "failed"


def test_wrong_outputs_of_timed_calls_fail_whatever_the_speed(tmp_path: Path) -> None:
    """Skipped work is fast work."""

    def skip(arm: str, key: str, left: Any) -> Any:
        if arm == "candidate" and key == KEYS[0]:
            left.outputs["hidden"][1::2] = left.outputs["hidden"][0:-1:2][: len(left.outputs["hidden"][1::2])]
        return left

    lines = record(tmp_path, make_plan(), FakeSampler(speeds(0.5), corrupt=skip))
    assert decide(lines).outcome == "failed"
    assert codes(lines) == {"perf.output_mismatch"}
    assert sum(line["kind"] == "block" for line in lines) == 1, "nothing more is measured"


def test_wrong_outputs_of_the_best_are_the_rigs_problem(tmp_path: Path) -> None:
    """A candidate is refused because the arm that it is compared with misbehaves."""

    def spoil(arm: str, key: str, left: Any) -> Any:
        return type(left)({"hidden": left.outputs["hidden"][::-1].copy()}, left.states) if arm == "best" else left

    lines = record(tmp_path, make_plan(), FakeSampler(speeds(0.5), corrupt=spoil))
    assert "perf.output_mismatch" in codes(lines) or "perf.baseline_mismatch" in codes(lines)
    assert decide(lines).outcome != "passed"


def test_timed_steps_on_the_standard_path_fail(tmp_path: Path) -> None:
    """A schedule that makes the planner refuse is timed as if it were specialised."""
    lines = record(tmp_path, make_plan(), FakeSampler(speeds(0.2), fallback=True))
    assert codes(lines) == {"perf.fallback"}


def test_faster_than_the_machine_fails_and_a_broken_floor_is_inconclusive(tmp_path: Path) -> None:
    """Physics is not checked, or a wrong floor rejects honest work."""
    reads_150_us = Traffic(0.0, 0.0, 150e6)  # operations at 1000 GFLOP/s
    lines = record(tmp_path / "a", make_plan(traffic=reads_150_us), FakeSampler(speeds(0.5)))
    assert codes(lines) == {"perf.below_floor"}
    assert below_floor(lines)
    faster = dataclasses.replace(CEILINGS, bf16_gflops=2000.0)
    lines.insert(2, {"kind": "ceilings", "ceilings": faster.record()})
    assert decide(lines).outcome == "passed", "the highest ceiling of the record counts"
    lines = record(tmp_path / "b", make_plan(traffic=reads_150_us), FakeSampler(speeds(0.1, standard=0.5)))
    assert decide(lines).outcome == "inconclusive"
    assert "perf.floor_wrong" in codes(lines)
    lines = record(tmp_path / "c", make_plan(), FakeSampler(speeds(0.1)), ceilings=None)
    assert codes(lines) == {"perf.floor_missing"}
    assert decide(lines).outcome == "inconclusive"


def test_a_control_that_does_not_read_one_makes_everything_inconclusive(tmp_path: Path) -> None:
    """A rig that favours the second process of a kind passes its candidates."""
    slow_second = speeds(0.3) | {"control": lambda _key: 200_000.0 * 1.05}
    lines = record(tmp_path, make_plan(), FakeSampler(slow_second, noise=0.002))
    assert decide(lines).outcome == "inconclusive"
    assert codes(lines) == {"perf.control"}


def test_the_two_clocks_must_agree(tmp_path: Path) -> None:
    """Work done outside the timed call, or a forged clock, goes unseen."""
    late = record(tmp_path / "a", make_plan(), FakeSampler(speeds(0.1), worker_factor=0.5))
    assert codes(late) == {"perf.clock_disagrees"}
    forged = record(tmp_path / "b", make_plan(), FakeSampler(speeds(0.1), worker_factor=1.2))
    assert "perf.clock_forged" in codes(forged)
    assert decide(forged).outcome == "inconclusive"


@pytest.mark.parametrize("code", ["crash", "timeout", "error", "protocol"])
def test_a_candidate_that_dies_fails_and_another_arm_that_dies_does_not(tmp_path: Path, code: str) -> None:
    """A crash counts as a missing measurement, or somebody else's crash as the candidate's."""
    lines = record(tmp_path / "candidate", make_plan(), FakeSampler(speeds(0.1), fault=(1, "candidate", code)))
    assert decide(lines).outcome == "failed"
    assert codes(lines) == {f"perf.{code}"}
    lines = record(tmp_path / "best", make_plan(), FakeSampler(speeds(0.1), fault=(1, "best", code)))
    assert decide(lines).outcome == "inconclusive"
    assert codes(lines) == {"perf.rig_fault"}


def test_both_stages_must_agree(tmp_path: Path) -> None:
    """A lucky search stage is enough."""

    class Fading(FakeSampler):
        def block(self, arms: Any, seed: str, cells: Any) -> Any:
            if len(self.blocks) == 4:
                self.speed = speeds(0.0)
            return super().block(arms, seed, cells)

    lines = record(tmp_path, make_plan(), Fading(speeds(0.2), noise=0.002))
    assert sum(line["kind"] == "block" for line in lines) == 8
    assert decide(lines).outcome in ("failed", "inconclusive")


def test_summary_has_every_cell_with_words_blocks_and_controls(accepted: list[dict[str, Any]]) -> None:
    """The report cannot show what was decided on."""
    summary = summarise(accepted)
    assert [Cell(**cell["cell"]).key for cell in summary["cells"]] == KEYS
    for cell in summary["cells"]:
        assert {c["word"] for c in cell["against"].values()} == {"FAST"}
        assert {base: len(c["blocks"]) for base, c in cell["against"].items()}.items() <= {
            "standard": 4,
            "best": 8,
        }.items()
        assert all(c["low"] < c["ratio"] < c["high"] for c in cell["against"].values())
        assert cell["median_us"]["best"] == pytest.approx(200.0, rel=0.02)
    assert dict(summary["controls"])["blocks interrupted and repeated"] == "0"
    begun = summarise([line for line in accepted if line["kind"] in ("header", "begin", "end")])
    assert {c["word"] for cell in begun["cells"] for c in cell["against"].values()} == {"????"}


def test_decisions_survive_a_round_trip_through_json(accepted: list[dict[str, Any]]) -> None:
    """A stranger decides differently from the gate."""
    again = [json.loads(json.dumps(line)) for line in accepted]
    assert decide(again) == decide(accepted)


def test_stage_levels_multiply_to_the_candidates_share() -> None:
    """The error of a run is spent twice, or not at all."""
    for blocks in (2, 3, 4, 8, 20):
        for candidates in (1, 20):
            stages = plan_stages(blocks, 0.01, candidates)
            assert math.prod(stage.alpha for stage in stages) == pytest.approx(0.01 / candidates)
            assert sum(stage.blocks for stage in stages) == blocks
            assert stages[0].control
    with pytest.raises(PlanError, match="at least 1"):
        plan_stages(0, 0.01, 1)


def test_one_block_is_a_look_that_accepts_nothing(tmp_path: Path) -> None:
    """A candidate is accepted on one block, or a look hides the ratio that a search goes by."""
    for gain in (0.0, 0.3, 5.0):
        plan = make_plan(blocks=1)
        lines = record(tmp_path / str(gain), plan, FakeSampler(speeds(gain), noise=0.0))
        assert [line["kind"] for line in lines].count("block") == 1
        decision = decide(lines)
        assert decision.outcome == "inconclusive"
        assert codes(lines) == {"perf.look"}
        found = decision.metrics[f"ratio_best/{OP_CELL.key}"]
        assert found["value"] == pytest.approx(1 + gain, rel=1e-6)
        assert (found["low"], found["high"], found["samples"]) == (None, None, 1)
        assert "missing" in decision.metrics["worst_ratio_standard"]
        summary = summarise(lines)
        assert [cell["against"]["best"]["ratio"] is None for cell in summary["cells"]] == [False] * len(plan.cells)
        assert {cell["against"]["best"]["word"] for cell in summary["cells"]} == {"????"}
    wrong = FakeSampler(speeds(0.3), corrupt=lambda arm, _key, left: blank(left) if arm == "candidate" else left)
    assert decide(record(tmp_path / "wrong", make_plan(blocks=1), wrong)).outcome == "failed"


def blank(left: Left) -> Left:
    return Left({name: 0 * value for name, value in left.outputs.items()}, left.states)


def test_slices_come_in_secret_turns_and_no_arm_follows_itself() -> None:
    """An arm always has the same neighbour, finds its own data in the caches, or knows when it is its turn."""
    assert len({slice_order(f"{seed:032x}", "step/b1", MIN_ROUNDS, ARMS) for seed in range(40)}) == 40
    for arms in (ARMS, ("best", "candidate")):
        compared = set(arms) - {"standard"}
        firsts = set()
        for seed in range(40):
            order = slice_order(f"{seed:032x}", "step/b1", 40, arms)
            assert order.count("standard") == 4 * ("standard" in arms)
            assert order[-4:] == ("standard",) * 4 or "standard" not in arms
            turns = [arm for arm in order if arm != "standard"]
            rounds = [turns[at : at + len(compared)] for at in range(0, len(turns), len(compared))]
            assert len(rounds) == 40
            assert all(set(each) == compared for each in rounds)
            assert all(one != other for one, other in pairwise(turns))
            firsts.add(turns[0])
        assert firsts == compared
    assert "standard" not in slice_order("00", "step/b1", 40, ARMS[1:])


def test_futility_needs_the_loss_in_both_blocks(tmp_path: Path) -> None:
    """One disturbed block ends a good candidate's measurement."""

    class Disturbed(FakeSampler):
        def block(self, arms: Any, seed: str, cells: Any) -> Any:
            self.speed = speeds(-0.2 if not self.blocks else 0.2)
            return super().block(arms, seed, cells)

    lines = record(tmp_path, make_plan(blocks=20), Disturbed(speeds(0.2), noise=0.002))
    assert sum(line["kind"] == "block" for line in lines) > perf.FUTILITY_BLOCKS


def test_plans_read_back_as_they_were_written() -> None:
    """The decision reads another plan than the gate followed."""
    plan = make_plan(task=())
    assert Plan.from_header(json.loads(json.dumps(plan.header()))) == plan
    broken = make_plan().header()
    broken["cells"][0]["claims"][0]["rule"] = "perhaps"
    with pytest.raises(PlanError, match="unknown claim"):
        Plan.from_header(broken)
    assert Stage("search", 2, 0.1, control=False).arms == ("best", "candidate")
    assert Claim("best", "faster") != Claim("best", "not_slower")


def test_every_code_is_listed_with_its_meaning() -> None:
    """A finding's code cannot be looked up, or the page lists codes that nothing raises."""
    page = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(perf\.[a-z_]+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows == dict(perf.CODES)
    sources = [*(ROOT / "verify" / "protocol").glob("perf*.py"), *(ROOT / "verify" / "gates" / "perf").glob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources if path.name != "perf_codes.py")
    raised = set(re.findall(r'"perf\.([a-z_]+)"', text))
    assert raised <= {code.removeprefix("perf.") for code in perf.CODES}
