"""The perf gate: plans from targets and tasks, resumable campaigns, comparisons, and real workers on both paths."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness import sandbox
from harness.evidence import JsonLines
from harness.progress import silent
from harness.records import Cell
from harness.settings import load
from harness.store import EvidenceSink
from k3_backend.aot.build import build_runtime
from k3_backend.geometry import geometry
from k3_backend.ops import OPS
from tests.verify.perf_records import OP_CELL, STEP_CELLS, FakeSampler, begin, make_plan, record, speeds
from verify.bench.traffic import op_traffic, step_traffic
from verify.evaluator.worker import ArmSpec
from verify.gates.perf import plan as planning
from verify.gates.perf.ops import OpCell
from verify.gates.perf.workers import WorkerSampler
from verify.protocol.floors import Traffic
from verify.protocol.perf import decide, state
from verify.protocol.perf_checks import TOLERANCES
from verify.protocol.perf_data import interrupted
from verify.protocol.perf_plan import MIN_SLICE_NS, CellPlan, Claim
from verify.timing.campaign import run_campaign
from verify.timing.compare import BROKEN_SLACK, Left, against_best, against_reference, against_standard
from verify.timing.sampler import ArmFault
from verify.workers.shared import ALIGNMENT

ROOT = Path(__file__).resolve().parents[2]
needs_sandbox = pytest.mark.skipif(sandbox.unavailable() is not None, reason="no bubblewrap on this machine")


def kill_and_resume(folder: Path, kills: int) -> list[dict[str, Any]]:
    """A measurement that is killed again and again in the middle of a block."""
    plan = make_plan()
    evidence = begin(folder, plan)
    for number in range(kills):
        sampler = FakeSampler(speeds(0.1), seed=number, kill_at=7 + 131 * number)
        with pytest.raises(KeyboardInterrupt):
            run_campaign(plan, sampler, evidence, silent)
    run_campaign(plan, FakeSampler(speeds(0.1), seed=99), evidence, silent)
    return evidence.lines("perf")


def test_a_killed_campaign_goes_on_and_every_block_exists_once(tmp_path: Path) -> None:
    """A resumed run repeats or loses blocks, or hides that it was interrupted."""
    lines = kill_and_resume(tmp_path, kills=6)
    blocks = [(line["stage"], line["block"]) for line in lines if line["kind"] == "block"]
    assert blocks == [(stage, number) for stage in ("search", "confirm") for number in range(4)]
    assert interrupted(lines[1:]) == 6
    assert decide(lines).outcome == "passed"


def test_a_finished_campaign_is_not_measured_again(tmp_path: Path) -> None:
    """Running the gate again adds a second end line, or blocks."""
    plan = make_plan()
    lines = record(tmp_path, plan, FakeSampler(speeds(0.1)))
    sampler = FakeSampler(speeds(0.1))
    run_campaign(plan, sampler, EvidenceSink(tmp_path), silent)
    assert EvidenceSink(tmp_path).lines("perf") == lines
    assert sampler.blocks == []
    assert state(lines).stage is None


def test_a_torn_last_line_is_measured_again(tmp_path: Path) -> None:
    """A crash while writing a block makes the record unreadable."""
    plan = make_plan()
    record(tmp_path, plan, FakeSampler(speeds(0.1)))
    path = tmp_path / "raw" / "perf.jsonl"
    text = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(text[:-2]) + text[-2][: len(text[-2]) // 2])
    run_campaign(plan, FakeSampler(speeds(0.1), seed=2), EvidenceSink(tmp_path), silent)
    lines = JsonLines(path).read()
    assert sum(line["kind"] == "block" for line in lines) == 8
    assert decide(lines).outcome == "passed"


def test_every_block_has_its_own_seed_committed_before_it_runs(tmp_path: Path) -> None:
    """A seed is used twice, or known before the candidate is fixed."""
    sampler = FakeSampler(speeds(0.1))
    lines = record(tmp_path, make_plan(), sampler)
    seeds = [line["seed"] for line in lines if line["kind"] == "block"]
    assert len(set(seeds)) == 8
    assert [seed for _, seed in sampler.blocks] == seeds
    digests = [line["seed_sha256"] for line in lines if line["kind"] == "begin"]
    assert digests == [hashlib.sha256(seed.encode()).hexdigest() for seed in seeds]


def test_slices_are_as_long_as_the_protocol_demands_even_if_the_machine_speeds_up(tmp_path: Path) -> None:
    """Calibration on a slow moment leaves slices too short, and the block is refused afterwards."""

    class SpeedsUp(FakeSampler):
        def block(self, arms: Any, seed: str, cells: Any) -> Any:
            self.speed = speeds(0.1, best_ns=200_000.0 / (1 + len(self.blocks)))
            return super().block(arms, seed, cells)

    lines = record(tmp_path, make_plan(), SpeedsUp(speeds(0.1)))
    for line in lines:
        for cell in line["cells"] if line["kind"] == "block" else ():
            assert min(cell["ns"]) >= 0.9 * MIN_SLICE_NS
    assert any(cell["restarts"] for line in lines if line["kind"] == "block" for cell in line["cells"])
    assert decide(lines).outcome == "passed"


def test_all_compared_arms_run_the_same_number_of_calls(tmp_path: Path) -> None:
    """A pair of slices measures different amounts of work."""
    seen: dict[str, list[int]] = {}

    def watch(arm: str, key: str, left: Left) -> Left:
        seen.setdefault(f"{arm}/{key}", []).append(len(left.outputs["hidden"]))
        return left

    lines = record(tmp_path, make_plan(), FakeSampler(speeds(0.1), corrupt=watch))
    cells = [cell for line in lines if line["kind"] == "block" for cell in line["cells"]]
    for key in {cell["key"] for cell in cells}:
        assert sorted(seen[f"best/{key}"]) == sorted(seen[f"candidate/{key}"])
        assert set(seen[f"control/{key}"]) <= set(seen[f"best/{key}"])
    ops = [cell for cell in cells if not cell["key"].startswith("step/")]
    assert all(1 <= cell["again"] <= cell["calls"] for cell in ops)
    assert len({cell["again"] for cell in ops}) > 1, "an op's last run ends at a place of its own"
    assert all(cell["again"] is None for cell in cells if cell not in ops)


ROWS = np.random.default_rng(0).standard_normal((64, 3, 16)).astype(np.float32)


def left(rows: np.ndarray[Any, Any]) -> Left:
    return Left({"hidden": rows}, {"state": rows[-1]})


def exceeded(found: dict[str, float]) -> set[str]:
    return {name for name, value in found.items() if not value <= TOLERANCES[name]}


def test_comparison_lets_rounding_pass_and_near_ties() -> None:
    """An honest arm with another order of summation is refused."""
    rng = np.random.default_rng(1)
    noisy = ROWS * (1 + 0.03 * rng.standard_normal(ROWS.shape).astype(np.float32))
    noisy[:BROKEN_SLACK, 0] *= -1
    assert exceeded(against_standard(left(noisy), left(ROWS[:2]))) == set(), "half of few rows"
    assert exceeded(against_standard(left(noisy), left(ROWS[:10]))) == set()
    assert exceeded(against_best(left(noisy), left(ROWS))) == set()


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_comparison_sees_skipped_calls_stale_rows_and_nan(share: float) -> None:
    """A chain in which calls return the previous call's rows counts as the same work."""
    stale = ROWS.copy()
    calls = range(1, 64, max(1, round(1 / share)))
    for at in calls:
        stale[at] = ROWS[at - 1]
    assert "chain_broken" in exceeded(against_best(left(stale), left(ROWS)))
    assert "output_broken" in exceeded(against_standard(left(stale), left(ROWS)))
    poisoned = ROWS.copy()
    poisoned[5, 1, 3] = np.nan
    assert "nonfinite" in exceeded(against_best(left(poisoned), left(ROWS)))
    drifted = Left({"hidden": ROWS}, {"state": ROWS[-1] * 1.5})
    assert exceeded(against_best(drifted, left(ROWS))) == {"state_mean"}


def test_comparison_of_chosen_ids_and_of_the_reference() -> None:
    """Another set of experts, or a wrong value against the evaluator's own, goes unseen."""
    ids = np.arange(64 * 4, dtype=np.int32).reshape(64, 1, 4)
    same = against_standard(Left({"topk_ids": ids[:, :, ::-1]}), Left({"topk_ids": ids}))
    assert same["choice_rows"] == 0.0, "order is not part of the choice"
    other = ids.copy()
    other[:8] += 1
    assert "choice_rows" in exceeded(against_standard(Left({"topk_ids": other}), Left({"topk_ids": ids})))
    good = against_reference({"out": ROWS[0]}, {"out": ROWS[0]})
    assert exceeded(good) == set()
    assert exceeded(against_reference({"out": ROWS[0] * 1.2}, {"out": ROWS[0]})) == {"reference_row", "reference_mean"}
    with pytest.raises(ValueError, match="same tensors"):
        against_standard(Left({"a": ROWS}), Left({"b": ROWS}))


def context(tmp_path: Path, task: tuple[Cell, ...] = (), tier: str = "pr") -> Any:
    settings = load(ROOT)
    return SimpleNamespace(
        target=settings.target("cpu"),
        tier=settings.tier(tier),
        task_cells=task,
        candidates_tried=4,
        candidate=SimpleNamespace(base="b" * 40, head="h" * 40),
    )


def arms(tmp_path: Path, changed: tuple[str, ...] = ("kda_decode",), schedule: str | None = None) -> Any:
    """Two arms with digests; `schedule` names an op whose schedule file differs."""
    ops = ("kda_decode", "moe_front", "mla_decode", "attn_res")
    folders = {}
    for arm in ("best", "candidate"):
        folder = tmp_path / arm / "cpu" / "k3-nano"
        folder.mkdir(parents=True, exist_ok=True)
        for op in ops:
            text = f"# {op}" + (arm if op == schedule else "")
            (folder / f"{op}.toml").write_text(text)
        folders[arm] = tmp_path / arm

    def built(arm: str) -> dict[str, Any]:
        digests = dict.fromkeys(ops, "0" * 64)
        if arm == "candidate":
            digests |= dict.fromkeys(changed, "1" * 64)
        return {op: SimpleNamespace(op=op, digest=digest, geometry="k3-nano") for op, digest in digests.items()}

    return SimpleNamespace(
        best=built("best"),
        candidate=built("candidate"),
        best_schedules=folders["best"],
        candidate_schedules=folders["candidate"],
    )


def test_the_plan_of_a_task_asks_for_gains_in_its_cells_and_no_loss_elsewhere(tmp_path: Path) -> None:
    """Task cells are not measured, or nothing is asked of the others."""
    task = tuple(Cell(scope="kda_decode", batch=batch) for batch in (8, 64))
    plan = planning.make_plan(context(tmp_path, task), arms(tmp_path))
    by_key = {cell.key: cell for cell in plan.cells}
    assert len(by_key) == 14 + 2
    assert by_key["kda_decode/b8/c-/t1/decode"].claims == (Claim("best", "faster"),)
    assert by_key["step/b1/c256/t1/decode"].claims == (Claim("standard", "faster"), Claim("best", "not_slower"))
    assert plan.gain_cells == ()
    assert all(cell.traffic.read_bytes > 0 for cell in plan.cells)


def test_the_plan_of_a_plain_patch_adds_cells_of_changed_ops(tmp_path: Path) -> None:
    """A change of one op is judged by whole steps only, in which it drowns."""
    plan = planning.make_plan(context(tmp_path), arms(tmp_path))
    ops = [cell.cell for cell in plan.cells if not cell.is_step]
    assert {cell["scope"] for cell in ops} == {"kda_decode"}
    assert len(ops) == planning.MAX_OP_CELLS
    assert {cell["batch"] for cell in ops} >= {1, 64}
    assert set(plan.gain_cells) == set(plan.keys)
    assert planning.changed_ops(arms(tmp_path / "s", changed=(), schedule="mla_decode")) == ("mla_decode",)
    many = arms(tmp_path / "many", changed=("kda_decode", "moe_front", "mla_decode", "attn_res"))
    assert all(cell.is_step for cell in planning.make_plan(context(tmp_path), many).cells)


def test_plans_survive_the_raw_file(tmp_path: Path) -> None:
    """A resumed gate believes that its header belongs to another plan and starts anew."""
    plan = planning.make_plan(context(tmp_path), arms(tmp_path))
    evidence = EvidenceSink(tmp_path / "e")
    evidence.append("perf", plan.header())
    header = evidence.lines("perf")[0]
    again = planning.make_plan(context(tmp_path), arms(tmp_path))
    assert all(header[name] == value for name, value in again.header().items())


def test_traffic_grows_with_what_moves_it() -> None:
    """The floor of a cell does not depend on the cell."""
    g = geometry("k3-nano")
    small, large = (step_traffic(g, batch=b, tokens=1, context=256) for b in (1, 64))
    assert large.flops == pytest.approx(64 * small.flops)
    assert small.read_bytes > 2 * 5_000_000, "every weight of a step is read"
    longer = step_traffic(g, batch=64, tokens=1, context=2048)
    assert longer.read_bytes - large.read_bytes == 64 * 1792 * g.mla_row * 2 * len(g.mla_layers)
    state_bytes = g.heads * g.kda_head_dim**2 * 4
    kda = op_traffic("kda_decode", g, batch=2, tokens=1, context=None)
    more = op_traffic("kda_decode", g, batch=3, tokens=1, context=None)
    assert more.read_bytes - kda.read_bytes > state_bytes
    with pytest.raises(KeyError):
        op_traffic("softmax", g, batch=1, tokens=1, context=None)


@pytest.mark.parametrize("op", list(OPS))
def test_every_op_can_be_a_cell(op: str) -> None:
    """An op's banks have other optional tensors or widths than its call, or lose the alignment that kernels need."""
    cell = step_plan(Cell(scope=op, batch=3, context=40 if op == "mla_decode" else None))
    made = OpCell(cell, geometry("k3-pico"), "ab" * 16)
    shift = made._shift
    for spec in OPS[op].tensors:
        if spec.role == "output":
            continue
        first, second = made._input(spec, 0, 3), made._input(spec, shift, 3)
        if first is None:
            assert second is None
            assert spec.optional
        elif spec.role == "activation" and "M" in spec.dims:
            assert second is not None
            assert first.shape == second.shape
            assert second.data_ptr() % ALIGNMENT == first.data_ptr() % ALIGNMENT
            assert not torch.equal(first, second), "neighbouring calls see different rows"
    assert made.most >= 1000


def step_plan(cell: Cell) -> CellPlan:
    return CellPlan(cell.key, cell.model_dump(mode="json"), (Claim("standard", "faster"),), Traffic(1.0, 1.0, 1.0))


@needs_sandbox
def test_workers_of_the_standard_path_agree_call_by_call_on_steps_and_ops(tmp_path: Path) -> None:
    """Arms see different data, a chain does not depend on its calls, or a shorter chain is not a prefix of a longer."""
    step, op = step_plan(Cell(scope="step", batch=2, context=32)), step_plan(Cell(scope="kda_decode", batch=2))
    sampler = WorkerSampler(
        {"standard": ArmSpec("standard"), "best": ArmSpec("standard")},
        geometry("k3-pico"),
        base_tree=ROOT,
        run_dir=tmp_path,
        threads=1,
    )
    with sampler.block(("standard", "best"), "5e" * 16, (step, op)) as block:
        for cell in (step, op):
            results = {}
            slices = 3 if cell.is_step else 1  # an op's slices are the same calls, on other states
            for arm, calls in (("standard", 1), ("best", 2)):
                results[arm] = run_chain(block, arm, cell, calls, slices)
            steps = len(next(iter(results["best"].outputs.values())))
            assert block.paths("best", cell) == (0, steps)
            block.reset("best", cell)
            for _ in range(slices):
                block.slice("best", cell)
            repeated = block.left("best", cell)
            for name, values in repeated.outputs.items():
                assert np.array_equal(values, results["best"].outputs[name]), "chains start from one state"
                shorter = results["standard"].outputs[name]
                assert np.array_equal(values[: len(shorter)], shorter)
                rows = values.reshape(steps, -1)
                assert len(np.unique(rows, axis=0)) == steps, "every call has contents of its own"
            assert exceeded(against_best(repeated, results["best"])) == set()
            assert exceeded(dict(block.reference(cell, results["best"]))) == set()
        assert 0 <= block.foreign_share() <= 1


def run_chain(block: Any, arm: str, cell: CellPlan, calls: int, slices: int) -> Left:
    block.prepare(arm, cell, calls, slices)
    block.reset(arm, cell)
    for _ in range(slices):
        taken = block.slice(arm, cell)
        assert 0 < taken.worker_ns <= taken.evaluator_ns
    found: Left = block.left(arm, cell)
    assert found.known_start
    return found


@needs_sandbox
def test_an_arm_without_kernels_is_a_fault_of_that_arm(tmp_path: Path) -> None:
    """A candidate that cannot be loaded ends the gate with an error of the gate."""
    runtime = build_runtime()
    cell = step_plan(Cell(scope="step", batch=1, context=16))
    broken = ArmSpec("specialized", {"runtime": runtime.path}, ROOT / "k3_backend" / "schedules")
    sampler = WorkerSampler({"candidate": broken}, geometry("k3-pico"), base_tree=ROOT, run_dir=tmp_path, threads=1)
    with pytest.raises(ArmFault) as fault, sampler.block(("candidate",), "00" * 16, (cell,)):
        pass
    assert (fault.value.arm, fault.value.code) == ("candidate", "error")


def test_the_fake_sampler_has_the_speeds_it_claims(tmp_path: Path) -> None:
    """Tests of the decision rest on a sampler that is wrong itself."""
    lines = record(tmp_path, make_plan(), FakeSampler(speeds(0.1), noise=0.0))
    block = next(line for line in lines if line["kind"] == "block")
    for cell in block["cells"]:
        times = dict(zip(cell["order"], cell["ns"], strict=True))
        assert math.isclose(times["1"] / times["2"], 1.1, rel_tol=1e-6)
    assert {cell["key"] for cell in block["cells"]} == {cell.key for cell in (*STEP_CELLS, OP_CELL)}
    assert dataclasses.is_dataclass(make_plan())
