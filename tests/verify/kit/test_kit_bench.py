"""The peer table through a kit on a machine without a GPU: whole, resumable, bound to its packages."""

from __future__ import annotations

import json
from pathlib import Path

import fake_peers
import pytest
from kit_fixtures import ROOT, PeerMachine, fake_arm, lines_of, write_fake_kit

from fasttrack.cli import main
from fasttrack.console import EXIT_USAGE
from harness import settings
from harness.errors import FasttrackError
from tests.verify.peer_fixtures import half
from verify.bench.gpu.cells import BATCHES, GEOMETRIES
from verify.kit import bench, bench_halves, run
from verify.kit.manifest import Unit
from verify.kit.planning_bench import bench_plan
from verify.kit.receive import read_results
from verify.protocol.peer_figures import HALF_CELLS, HALF_GEOMETRIES, HALF_LAYERS
from verify.protocol.peers import decide, read_table

SETTINGS = settings.load(ROOT)
OPS = ("attn_res", "input_projection", "kda_decode", "mla_query", "mla_decode", "mla_value")
UNITS = {"mla_query": GEOMETRIES[0]}


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is no GPU."""
    monkeypatch.setattr(bench_halves, "ROUNDS", 6)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    arm = fake_arm(tmp_path / "arm", UNITS)
    write_fake_kit(tmp_path / "K", arm, SETTINGS, gates=("bench",), plans={"bench": bench_plan(arm.artifacts)})
    return tmp_path / "K"


def half_kit(folder: Path, image: bytes, ops: tuple[str, ...] = OPS) -> Path:
    """A kit whose table has two small half-layers only; its kernels do what their image says."""
    arm = fake_arm(folder / "arm", dict.fromkeys(ops, "k3-pico"), images=dict.fromkeys(ops, image))
    planned = [half("kda_half_layer", "k3-pico", 2, None, copies=2), half("mla_half_layer", "k3-pico", 2, 64, copies=2)]
    write_fake_kit(folder / "K", arm, SETTINGS, gates=("bench",), plans={"bench": {"planned": planned}})
    return folder / "K"


def session(kit: Path, out: Path, *, resume: bool = False, peers: Path | None = None) -> int:
    return run.session(kit, out, machine=PeerMachine(), gates=["bench"], resume=resume, peers=peers)


def test_a_whole_table(kit: Path, tmp_path: Path) -> None:
    """A table with cells that the kit cannot have, without ceilings, or whose lines do not survive the journey."""
    assert session(kit, tmp_path / "R") == run.FINE
    received = read_results(tmp_path / "R")
    lines = received.lines["bench"]
    assert [line["kind"] for line in lines] == ["header", "ceilings", *["cell"] * len(BATCHES), "ceilings"]
    table = read_table(lines)
    assert decide(lines).outcome == "passed"
    assert {row.cell["op"] for row in table.rows} == {"mla_query"}
    assert table.rows[0].ratios["cublas"].value == pytest.approx(1.25)
    assert table.rows[0].missing == {"compile": "cannot be imported here (no triton)"}
    assert b"/tmp/" not in (tmp_path / "R" / "raw" / "bench.jsonl").read_bytes()


@pytest.mark.parametrize("fault", ["exits", "raises", "device"])
def test_a_cell_that_breaks_is_recorded_once(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A crash that ends the table, is repeated on every resume, or is no failure."""
    monkeypatch.setenv(fake_peers.FAULTY, f"3:{fault}")
    assert session(kit, tmp_path / "R") == run.FALLS_SHORT
    lines = lines_of(tmp_path / "R", "bench")
    failed = [line for line in lines if line["kind"] == "cell" and line["failure"]]
    assert [line["key"].split("/")[2] for line in failed] == ["B3"]
    assert len(lines) == 1 + 1 + len(BATCHES) + 1
    assert session(kit, tmp_path / "R", resume=True) == run.FALLS_SHORT
    assert lines_of(tmp_path / "R", "bench") == lines


def test_a_session_goes_on_where_it_was_cut(kit: Path, tmp_path: Path) -> None:
    """A resumed table that measures cells again, or forgets the rest."""
    assert session(kit, tmp_path / "R") == run.FINE
    path = tmp_path / "R" / "raw" / "bench.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:6]) + whole[6][:20])  # killed while a line was being written
    (tmp_path / "R" / "result.json").unlink()
    assert session(kit, tmp_path / "R", resume=True) == run.FINE
    lines = lines_of(tmp_path / "R", "bench")
    keys = [line["key"] for line in lines if line["kind"] == "cell"]
    assert len(keys) == len(set(keys)) == len(BATCHES)
    assert path.read_bytes().splitlines(keepends=True)[:6] == whole[:6]
    assert decide(lines).outcome == "passed"


def test_time_that_is_over_leaves_a_table_that_says_so(kit: Path, tmp_path: Path) -> None:
    """A cut table that passes."""
    code = run.session(kit, tmp_path / "R", machine=PeerMachine(), gates=["bench"], minutes=1e-9)
    assert code == run.INCOMPLETE
    decision = decide(lines_of(tmp_path / "R", "bench"))
    assert (decision.outcome, decision.findings[0].code) == ("not_evaluated", "bench.incomplete")


def test_packages_are_named_and_stay_the_same(kit: Path, tmp_path: Path) -> None:
    """A table whose peers nobody can name, or that mixes two versions of one."""
    peers = tmp_path / "P"
    (peers / "site" / "fla_core-0.6.0.dist-info").mkdir(parents=True)
    (peers / "x.so").write_bytes(b"machine code")
    assert session(kit, tmp_path / "R", peers=peers) == run.FINE
    packages = lines_of(tmp_path / "R", "bench")[0]["packages"]
    assert packages["distributions"] == ["fla_core-0.6.0"]
    assert list(packages["objects"]) == ["x.so"]
    (peers / "x.so").write_bytes(b"other code")
    with pytest.raises(FasttrackError, match="packages are others"):
        session(kit, tmp_path / "R", resume=True, peers=peers)
    with pytest.raises(FasttrackError, match="no such folder"):
        session(kit, tmp_path / "R2", peers=tmp_path / "nowhere")


def test_bytecode_is_no_package(tmp_path: Path) -> None:
    """A digest that changes because Python ran."""
    (tmp_path / "a.py").write_text("x = 1\n")
    before = bench.tree_digest(sorted(tmp_path.rglob("*")), tmp_path)
    (tmp_path / "a.pyc").write_bytes(b"1")
    assert bench.tree_digest(sorted(tmp_path.rglob("*")), tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert bench.tree_digest(sorted(tmp_path.rglob("*")), tmp_path) != before


def test_half_layers_run_beside_the_standard_path(tmp_path: Path) -> None:
    """Times per replay instead of per half-layer, a ratio upside down, or lines that cannot be read again."""
    assert session(half_kit(tmp_path, b"replay_ms 10\n"), tmp_path / "R") == run.INCOMPLETE  # no ceilings in it
    rows = read_table(read_results(tmp_path / "R").lines["bench"]).rows
    assert [row.cell["op"] for row in rows] == ["kda_half_layer", "mla_half_layer"]
    for row in rows:
        assert (row.arms["ours"].median, row.arms["standard"].median) == pytest.approx((5000.0, 20_000.0), rel=0.01)
        assert row.ratios["standard"].value == pytest.approx(4.0, rel=0.01)
        assert row.arms["ours"].fallbacks == ()
        assert [judged.state for judged in row.judged] == ["met"]


def test_a_site_without_a_kernel_is_named(tmp_path: Path) -> None:
    """A half-layer that is partly the standard path and does not say so."""
    session(half_kit(tmp_path, b"replay_ms 10\n", tuple(op for op in OPS if op != "mla_value")), tmp_path / "R")
    rows = read_table(lines_of(tmp_path / "R", "bench")).rows
    assert [row.arms["ours"].fallbacks for row in rows] == [(), ("mla_value: op.missing",)]


@pytest.mark.parametrize(
    ("image", "reason"),
    [(b"replay_ms 10\nskips\n", "wrong results"), (b"replay_ms 10\nforgets\n", "not on the planned path")],
)
def test_a_half_layer_that_does_not_do_the_work_has_no_number(tmp_path: Path, image: bytes, reason: str) -> None:
    """Work that is left out counts as speed."""
    assert session(half_kit(tmp_path, image), tmp_path / "R") == run.FALLS_SHORT
    for row in read_table(lines_of(tmp_path / "R", "bench")).rows:
        assert reason in row.missing["ours"]
        assert "ours" not in row.arms


def test_a_half_layer_that_ends_its_process_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash that takes the cells after it along, or is repeated on every resume."""
    monkeypatch.setattr(bench_halves, "ROUNDS", 16)
    kit = half_kit(tmp_path, b"replay_ms 10\ndies\n")
    assert session(kit, tmp_path / "R") == run.FALLS_SHORT
    lines = lines_of(tmp_path / "R", "bench")
    assert [line["failure"].partition(":")[0] for line in lines[1:]] == ["ours", "ours"]
    assert session(kit, tmp_path / "R", resume=True) == run.FALLS_SHORT
    assert lines_of(tmp_path / "R", "bench") == lines


def test_the_plan_has_every_half_layer_of_the_figure() -> None:
    """A cell of the figure that no kit measures, or one planned for ops that the kit lacks."""
    units = [Unit(name, op, "sm_90a") for op in OPS for name in HALF_GEOMETRIES]
    planned = bench_plan(units)["planned"]
    halves = [cell for cell in planned if cell["op"] in HALF_LAYERS]
    assert {(c["op"], c["geometry"], c["batch"], c["context"]) for c in halves} == HALF_CELLS
    assert len(halves) == len(HALF_CELLS) == 84
    assert planned[-84:] == halves
    assert len({cell["key"] for cell in planned}) == len(planned)
    assert all(cell["copies"] * cell["read_bytes"] > 350e6 for cell in halves)
    fewer = bench_plan([unit for unit in units if unit.op != "mla_value"])["planned"]
    assert {cell["op"] for cell in fewer if cell["op"] in HALF_LAYERS} == {"kda_half_layer"}


def problem(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """The one message of a command that must exit with 2."""
    assert main([*words, "--json"]) == EXIT_USAGE
    found: dict[str, str] = json.loads(capsys.readouterr().out)["error"]
    return found


def test_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """A machine without a GPU that is told nothing, or a command that does not exist."""
    error = problem(capsys, "bench", "--target", "h200", "--peers")
    assert "through a kit" in error["what"]
    assert "fasttrack kit build --target h200 --gates kernels --bench --out K" in error["next"]
    assert "python3 K/kit.py run --gates bench --peers DIR --out R" in error["next"]


def test_results_without_a_table_are_refused(capsys: pytest.CaptureFixture[str], kit: Path, tmp_path: Path) -> None:
    """A table made of nothing, or of another target's results."""
    assert session(kit, tmp_path / "R") == run.FINE
    (tmp_path / "R" / "raw" / "bench.jsonl").unlink()
    (tmp_path / "R" / "result.json").unlink()
    place = ("bench", "--peers", "--from", str(tmp_path / "R"))
    assert "holds no peer table" in problem(capsys, *place)["what"]
    assert "is about target h200" in problem(capsys, *place, "--target", "gb300")["what"]


def test_a_kit_that_this_checkout_does_not_build_is_refused(
    capsys: pytest.CaptureFixture[str], kit: Path, tmp_path: Path
) -> None:
    """A table about artifacts that nobody can build again."""
    assert session(kit, tmp_path / "R") == run.FINE
    assert problem(capsys, "bench", "--peers", "--from", str(tmp_path / "R"))["what"]
