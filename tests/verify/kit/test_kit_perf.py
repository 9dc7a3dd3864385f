"""The perf gate in a kit, without a GPU: real campaign and processes, an engine whose arms are as fast as they say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kit_fixtures import ARCH, ROOT, FakeMachine, fake_arm, lines_of, write_fake_kit

from harness import canonical, settings
from harness.errors import FasttrackError
from harness.records import Cell
from k3_backend.geometry import geometry
from verify.kit import run
from verify.kit.build import Arm, kit_files
from verify.kit.manifest import KitManifest, Unit, read_kit
from verify.kit.packages import use_wheels
from verify.kit.perf_arms import KitBlock
from verify.kit.planning import changed_units, perf_plan
from verify.kit.receive import read_results
from verify.kit.store import Results
from verify.protocol.floors import Traffic
from verify.protocol.perf import decide, summarise
from verify.protocol.perf_plan import CUDA_PROTOCOL_ID, CellPlan, Claim, Plan, PlanError, plan_stages
from verify.timing.sampler import Slice

SETTINGS = settings.load(ROOT)
CELLS = (
    Cell(scope="kda_half_layer", batch=2, layout="x"),
    Cell(scope="mla_half_layer", batch=2, context=64, layout="x"),
)
OPS = ("attn_res", "input_projection", "kda_decode", "mla_query", "mla_decode", "mla_value")
PICO = dict.fromkeys(OPS, "k3-pico")


@pytest.fixture(scope="module", autouse=True)
def told_clock() -> Iterator[None]:
    """The engine's clock for both: this host's says how busy its cores are."""
    real = KitBlock.slice

    def told(self: KitBlock, arm: str, cell: CellPlan) -> Slice:
        taken = real(self, arm, cell)
        assert taken.evaluator_ns > 0
        return Slice(taken.worker_ns, taken.worker_ns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KitBlock, "slice", told)
        yield


def plan_of(blocks: int, band: float = 0.05) -> Plan:
    """A plan of two small cells."""
    claims = (Claim("standard", "faster"), Claim("best", "not_slower"))
    return Plan(
        target="h200", tier="smoke", arms={"standard": {}, "best": {"a": "1"}, "candidate": {"a": "2"}}, band=band,
        alpha_per_run=0.1, candidates=1, stages=plan_stages(blocks, 0.1, 1),
        cells=tuple(CellPlan(c.key, c.model_dump(mode="json"), claims, Traffic(1.0, 1.0, 1.0)) for c in CELLS),
        gain_cells=tuple(c.key for c in CELLS), command="fasttrack verify", protocol=CUDA_PROTOCOL_ID,
        chains={c.key: {"geometry": "k3-pico", "copies": 2} for c in CELLS},
    )  # fmt: skip


def write_kit(folder: Path, blocks: int, candidate: bytes, best: bytes = b"replay_ms 20\n") -> Path:
    """A kit whose arms do what their images say."""
    arms = [
        fake_arm(folder / name, PICO, images=dict.fromkeys(OPS, text)) for name, text in (("c", candidate), ("b", best))
    ]
    plans = {"perf": json.loads(canonical.line(plan_of(blocks).header()))}
    write_fake_kit(folder / "K", arms[0], SETTINGS, gates=("perf",), best=arms[1], plans=plans)
    return folder / "K"


def evaluated(folder: Path, blocks: int, candidate: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and raw lines of a session."""
    code = run.session(write_kit(folder, blocks, candidate), folder / "R", machine=FakeMachine())
    return code, lines_of(folder / "R", "perf")


def codes(lines: list[dict[str, Any]]) -> set[str]:
    return {finding.code for finding in decide(lines).findings}


@pytest.fixture(scope="module")
def faster(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A whole session of a candidate that takes half the time, in two parts."""
    folder = tmp_path_factory.mktemp("faster")
    kit = write_kit(folder, 2, b"replay_ms 10\n")
    assert run.session(kit, folder / "R", machine=FakeMachine(), minutes=1e-4) == run.INCOMPLETE
    return run.session(kit, folder / "R", machine=FakeMachine(), resume=True), folder / "R"


def test_a_faster_candidate_passes_and_what_ran_is_in_the_record(faster: tuple[int, Path]) -> None:
    """A gain is not seen, or the record does not say what the arms were."""
    code, results = faster
    lines = lines_of(results, "perf")
    assert decide(lines).outcome == "passed", decide(lines).findings
    assert code == run.FINE
    header = lines[0]
    assert header["protocol"] == CUDA_PROTOCOL_ID
    assert header["standard"]["kda_decode"] == "torch"
    cell = next(line for line in lines if line["kind"] == "block")["cells"][0]
    assert {site["path"] for site in cell["facts"]["candidate"]["sites"]} == {"specialized"}
    assert {site["code"] for site in cell["facts"]["standard"]["sites"]} == {"op.missing"}
    assert cell["calls"] == cell["standard_calls"]
    assert cell["paths"]["candidate"]["standard"] == 0


def test_a_session_out_of_time_measures_nothing_twice(faster: tuple[int, Path]) -> None:
    """A resumed session loses blocks or repeats the header."""
    kinds = [line["kind"] for line in lines_of(faster[1], "perf")]
    assert kinds == ["header", "ceilings", "begin", "block", "begin", "block", "end"]


def test_imported_lines_are_decided_again(faster: tuple[int, Path]) -> None:
    """Reading the results believes an outcome instead of the lines."""
    received = read_results(faster[1])
    assert received.ended
    assert decide(received.lines["perf"]).outcome == "passed"
    table = summarise(received.lines["perf"])
    assert all(cell["against"]["standard"]["ratio"] > 2 for cell in table["cells"])


def test_a_header_of_another_plan_is_refused(tmp_path: Path) -> None:
    """The GPU machine widens the band, or leaves cells out, and the results are taken in."""
    kit = write_kit(tmp_path, 2, b"replay_ms 10\n")
    manifest = read_kit(kit)
    results = Results.open(tmp_path / "R", manifest.digest, manifest.document(), resume=False)
    wanted = header_of(manifest, results.nonce)
    results.append("perf", {**wanted, "band": 0.1})
    results.close()
    with pytest.raises(FasttrackError, match="its header names another band"):
        read_results(tmp_path / "R")


def header_of(manifest: KitManifest, nonce: str) -> dict[str, Any]:
    return {
        **manifest.plans["perf"], "base": manifest.base, "head": manifest.head, "kit": manifest.digest, "nonce": nonce,
        "artifacts": dict(manifest.arms["candidate"]), "mutants": {}, "batches": list(manifest.batches),
        "tokens": list(manifest.tokens), "draws": manifest.draws,
    }  # fmt: skip


def test_a_slower_candidate_fails(tmp_path: Path) -> None:
    """A loss passes as "not slower"."""
    code, lines = evaluated(tmp_path, 2, b"replay_ms 30\n")
    assert code == run.FALLS_SHORT
    assert codes(lines) <= {"perf.cell_slower", "perf.no_gain"}


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        pytest.param(b"replay_ms 10\nskips\n", "perf.output_mismatch", id="leaves-out-every-second-replay"),
        pytest.param(b"replay_ms 10\ndies\n", "perf.crash", id="process-dies"),
        pytest.param(b"replay_ms 10\nforgets\n", "perf.fallback", id="ledger-lacks-a-replay"),
    ],
)
def test_a_fast_candidate_that_does_not_do_the_work_fails(tmp_path: Path, image: bytes, expected: str) -> None:
    """Time is believed although outputs, process or ledger say that work was left out. One block is enough for that."""
    code, lines = evaluated(tmp_path, 1, image)
    assert code == run.FALLS_SHORT
    assert codes(lines) == {expected}


def arms(folder: Path, candidate: Mapping[str, bytes], best: Mapping[str, bytes], rows: int = 64) -> tuple[Arm, Arm]:
    def arm(name: str, images: Mapping[str, bytes], max_rows: int) -> Arm:
        return fake_arm(folder / name, dict.fromkeys(images, "k3-slice-tp8"), max_rows, images)

    return arm("c", candidate, 64), arm("b", best, rows)


def test_the_plan_covers_half_layers_of_both_kinds_and_layouts(tmp_path: Path) -> None:
    """A batch, context, layout or claim of the tier is missing, or a replay would fit into the caches."""
    candidate, best = arms(tmp_path, dict.fromkeys(OPS, b"new"), {})
    target, tier = SETTINGS.target("h200"), SETTINGS.tier("pr")
    plan = perf_plan(target, tier, base="b", candidate=candidate, best=best, command="again")
    assert Plan.from_header(json.loads(json.dumps(plan.header()))) == plan
    assert len(plan.cells) == 2 * (7 + 7 * 2) == len(target.cells(tier))
    for cell in plan.cells:
        assert set(cell.claims) == {Claim("standard", "faster"), Claim("best", "not_slower")}
        assert cell.traffic.read_bytes > 350e6
        chain = plan.chains[cell.key]
        assert chain["copies"] >= 8
        assert geometry(chain["geometry"]).heads == (12 if "tp8" in cell.key else 6)
    assert plan.gain_cells == plan.keys


def test_a_changed_schedule_brings_cells_of_its_op(tmp_path: Path) -> None:
    """A change of one op's schedule is diluted in whole half-layers."""
    images = {"kda_decode": b"same"}
    candidate, best = arms(tmp_path, images, images, rows=32)
    assert changed_units(candidate, best) == (Unit("k3-slice-tp8", "kda_decode", ARCH),)
    target, tier = SETTINGS.target("h200"), SETTINGS.tier("pr")
    plan = perf_plan(target, tier, base="b", candidate=candidate, best=best, command="again")
    own = [cell for cell in plan.cells if cell.cell["scope"] == "kda_decode"]
    assert [cell.cell["batch"] for cell in own] == [1, 2, 4, 16, 32, 64]
    assert all(cell.claims == (Claim("best", "not_slower"),) for cell in own)


def test_identical_arms_are_not_measured(tmp_path: Path) -> None:
    """A candidate that changes nothing costs GPU time, or passes."""
    images = {"kda_decode": b"same"}
    candidate, best = arms(tmp_path, images, images)
    target, tier = SETTINGS.target("h200"), SETTINGS.tier("smoke")
    plan = perf_plan(target, tier, base="b", candidate=candidate, best=best, command="again")
    assert plan.arms["candidate"] == plan.arms["best"]
    decision = decide([plan.header()])
    assert (decision.outcome, [finding.code for finding in decision.findings]) == ("failed", ["perf.identical"])


def test_a_plan_without_a_chain_is_refused(tmp_path: Path) -> None:
    """A cell's copies are missing from the record, and its numbers mean nothing."""
    header = plan_of(2).header()
    header["chains"].popitem()
    with pytest.raises(PlanError, match="every cell on a GPU has a chain"):
        Plan.from_header(header)


def test_an_artifact_of_both_arms_lies_in_the_kit_once(tmp_path: Path) -> None:
    """Two arms double the kit."""
    candidate, best = arms(
        tmp_path, {"kda_decode": b"same", "attn_res": b"new"}, {"kda_decode": b"same", "attn_res": b"old"}
    )
    names = kit_files(ROOT, {"candidate": candidate, "best": best})
    held = {name.split("/")[1] + "/" + name.split("/")[4] for name in names if "/artifacts/" in name}
    assert held == {"candidate/kda_decode", "candidate/attn_res", "best/attn_res"}
    manifest = write_fake_kit(tmp_path / "K", candidate, SETTINGS, best=best)
    assert manifest.holder("best", Unit("k3-slice-tp8", "kda_decode", ARCH)) == "candidate"
    assert manifest.holder("best", Unit("k3-slice-tp8", "attn_res", ARCH)) == "best"


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    """A mistyped --packages quietly measures another standard path."""
    with pytest.raises(FasttrackError, match="holds no wheels"):
        use_wheels(tmp_path)
