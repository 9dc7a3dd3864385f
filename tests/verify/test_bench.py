"""The benchmark library: paired samples, honest spread, shares of the floor, and refusals that name the mistake."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import FasttrackError
from harness.progress import silent
from harness.records import Cell
from harness.settings import load
from k3_backend.geometry import geometry
from tests.verify.perf_records import CEILINGS, FakeSampler
from verify.bench import run as bench_module
from verify.bench.ceilings import measure_ceilings
from verify.bench.records import BenchReport
from verify.bench.run import MIN_REPEATS, SLICE_NS, bench
from verify.bench.traffic import cell_traffic
from verify.evaluator.worker import ArmSpec
from verify.protocol.floors import floor
from verify.timing.sampler import ArmFault, Paths

ROOT = Path(__file__).resolve().parents[2]


def run_fake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sampler: FakeSampler, peers: tuple[str, ...], **given: Any
) -> BenchReport:
    """The library over arms of known speed, without compiler, workers or ceilings."""
    made: dict[str, Any] = {}

    def fake_sampler(arms: Any, shape: Any, **where: Any) -> FakeSampler:
        made.update(where, arms=arms, shape=shape)
        return sampler

    monkeypatch.setattr(bench_module, "WorkerSampler", fake_sampler)
    monkeypatch.setattr(bench_module, "measure_ceilings", lambda _threads, _cache: CEILINGS)
    monkeypatch.setattr(bench_module, "specialized_arm", lambda *_: ArmSpec("specialized"))
    settings = load(ROOT)
    report = bench(tmp_path, settings, settings.target("cpu"), peers=peers, progress=silent, **given)
    assert set(made["arms"]) == {"specialized", *peers}
    assert made["compiled"] == {p: m for p in peers if (m := bench_module.PEERS[p]) is not None}
    return report


def fixed(**ns: float) -> Any:
    return {arm: (lambda _key, value=value: value) for arm, value in ns.items()} | {"best": lambda _key: 1e6}


def test_the_ratio_is_against_the_better_peer_and_has_the_true_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The slower peer flatters the kernels, or pairing distorts the ratio."""
    sampler = FakeSampler(fixed(specialized=200_000.0, eager=700_000.0, compile=500_000.0))
    report = run_fake(monkeypatch, tmp_path, sampler, ("eager", "compile"), batches=(1, 64), contexts=(256,))
    assert [cell.cell.key for cell in report.cells] == ["step/b1/c256/t1/decode", "step/b64/c256/t1/decode"]
    for cell in report.cells:
        assert cell.ratio is not None
        assert cell.ratio.against == "compile"
        assert cell.ratio.value == pytest.approx(2.5, rel=0.02)
        assert cell.ratio.low < cell.ratio.value < cell.ratio.high
        for arm in cell.arms:
            assert len(arm.samples_us) == MIN_REPEATS
            assert arm.fastest_us <= arm.quartile_low_us <= arm.median_us <= arm.quartile_high_us <= arm.slowest_us
            assert arm.floor_share == pytest.approx(cell.floor_us / arm.median_us)
            assert arm.calls * arm.fastest_us * 1e3 >= 0.9 * SLICE_NS
    assert report.worst() is not None
    again = BenchReport.model_validate(json.loads(report.model_dump_json()))
    assert again.model_dump(mode="json") == report.model_dump(mode="json")
    assert all("ratio to the better peer (95 %)" in row for row in report.rows())


def test_without_peers_there_is_no_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A ratio to nothing is printed as 1."""
    sampler = FakeSampler(fixed(specialized=200_000.0))
    report = run_fake(monkeypatch, tmp_path, sampler, (), op="kda_decode", batches=(8,))
    assert [cell.cell for cell in report.cells] == [Cell(scope="kda_decode", batch=8)]
    assert report.cells[0].ratio is None
    assert report.worst() is None
    assert "ratio to the better peer (95 %)" not in report.rows()[0]


def test_a_specialised_arm_on_the_standard_path_is_not_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A refused step is timed and shown as the kernels' speed."""

    class Falls(FakeSampler):
        def block(self, arms: Any, seed: str, cells: Any) -> Any:
            made = super().block(arms, seed, cells)
            original = made.__enter__()
            original.paths = lambda arm, _cell: Paths(1, int(arm == "specialized"))
            return dataclasses.make_dataclass("Held", [], namespace={
                "__enter__": lambda _self: original, "__exit__": lambda *_: None,
            })()  # fmt: skip

    with pytest.raises(ArmFault, match="standard path"):
        run_fake(monkeypatch, tmp_path, Falls(fixed(specialized=2e5, eager=4e5)), ("eager",), batches=(1,))


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"op": "softmax"}, "--op"),
        ({"peers": ("cuda",)}, "--peers"),
        ({"repeats": 3}, "--repeats"),
        ({"batches": (65,)}, "--batches"),
        ({"contexts": (77,)}, "--contexts"),
    ],
)
def test_bad_input_names_the_option(given: dict[str, Any], where: str, tmp_path: Path) -> None:
    """A mistyped option ends in a traceback, or in a benchmark of something else."""
    settings = load(ROOT)
    with pytest.raises(FasttrackError) as error:
        bench(tmp_path, settings, settings.target("cpu"), **given)
    assert error.value.where == where


def test_targets_of_other_devices_are_refused(tmp_path: Path) -> None:
    """A CPU is timed under the name of a GPU."""
    settings = load(ROOT)
    with pytest.raises(FasttrackError, match="this machine runs none of"):
        bench(tmp_path, settings, settings.target("gb300"))


def test_without_a_compiler_ceilings_are_missing_and_not_guessed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A default bandwidth stands in for one that could not be measured."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FasttrackError, match="cannot be measured"):
        measure_ceilings(1, tmp_path)
    assert not (tmp_path / "ceilings").exists()


def test_floors_of_cells_follow_context_and_batch() -> None:
    """Every cell has the same floor."""
    g = geometry("k3-nano")
    floors = [
        floor(cell_traffic(Cell(scope="step", batch=b, context=c), g), CEILINGS).ns
        for b, c in ((1, 256), (64, 256), (64, 2048))
    ]
    assert floors == sorted(floors)
    assert floors[2] > 1.5 * floors[1]
    kda = floor(cell_traffic(Cell(scope="kda_decode", batch=64), g), CEILINGS)
    assert kda.resource == "memory"


@pytest.mark.slow
def test_measured_ceilings_are_plausible_and_fall_with_the_working_set(tmp_path: Path) -> None:
    """The ceilings program measures an empty loop, or one thread."""
    one, two = measure_ceilings(1, tmp_path), measure_ceilings(2, tmp_path)
    assert len(list((tmp_path / "ceilings").iterdir())) == 1, "the program is built once"
    for found in (one, two):
        assert [size for size, _ in found.read] == sorted(size for size, _ in found.read)
        rates = [rate for table in (found.read, found.write, found.copy) for _, rate in table]
        assert all(0.5 < rate < 20_000 for rate in rates)
        assert found.read[0][1] > found.read[-1][1], "a cache is faster than memory"
        assert 5 < found.fma_gflops <= found.bf16_gflops < 100_000
    assert (one.threads, two.threads) == (1, 2)
