"""The peer table from raw lines: right numbers, no number for what is missing, no belief in hostile lines."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from reports.peer_table import as_json, markdown, short
from tests.verify.peer_fixtures import arm, ceilings, cell_line, half, half_cells, half_line, header
from verify.bench.gpu.cells import PeerCell, moved_bytes
from verify.protocol.peers import _rank, decide, read_table

GEMV = PeerCell("input_projection", "k3-slice-tp8", 8, site="kda")
BIG = PeerCell("input_projection", "k3-slice-tp8", 64, site="kda")
KDA = PeerCell("kda_decode", "k3-slice-tp8", 32)
RES = PeerCell("attn_res", "k3", 1, sources=8)
MLA = PeerCell("mla_decode", "k3-slice-tp8", 16, context=8192)


def record() -> list[dict[str, Any]]:
    return [
        header(GEMV, BIG, KDA, RES, MLA),
        ceilings(),
        cell_line(GEMV, ours=arm(22.0), cublas=arm(26.4), compile=arm(None, "for time"), triton=arm(24.2)),
        cell_line(BIG, ours=arm(None, "no schedule bucket for 64 rows"), cublas=arm(26.0), triton=arm(30.0)),
        cell_line(KDA, ours=arm(15.0), fla_chain=arm(30.0), fla_recurrence=arm(15.0), in_place=arm(14.0)),
        cell_line(RES, ours=arm(2.2), compile=arm(4.0)),
        cell_line(MLA, ours=arm(50.0), flashinfer=arm(None, "no library"), triton=arm(60.0)),
    ]


def states(lines: list[dict[str, Any]], cell: PeerCell) -> dict[str, str]:
    row = next(row for row in read_table(lines).rows if row.key == cell.key)
    return {judged.demand: judged.state for judged in row.judged}


def test_numbers_of_a_row() -> None:
    """A floor over the wrong ceiling, a ratio upside down, a share of the wrong time."""
    row = read_table(record()).rows[0]
    total = sum(moved_bytes(GEMV))
    assert (row.bytes, row.ceiling and row.ceiling.kind) == (total, "read")
    assert row.floor_us == pytest.approx(total / 4500e3)
    assert row.share == pytest.approx(total / 4500e3 / 22.0)
    ratio = row.ratios["cublas"]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.2, 1.2, 1.2))
    assert (row.arms["ours"].median, row.arms["ours"].device_us) == (22.0, 11.0)


def test_a_call_that_writes_as_much_as_it_reads_is_held_to_moving() -> None:
    """A recurrence measured against a ceiling that only reading reaches."""
    row = read_table(record()).rows[2]
    assert row.ceiling is not None
    assert (row.ceiling.kind, row.ceiling.gbps) == ("update", 4300.0)


def test_ceilings_are_the_best_of_all_times() -> None:
    """A share that looks better because the ceiling was measured in a slow moment."""
    table = read_table([*record(), ceilings(read=4800.0, empty=1.5)])
    assert (table.ceilings["read"].gbps, table.empty_us) == (4800.0, 1.0)


def test_figures_are_judged_per_demand() -> None:
    """A limit applied to other cells, in the wrong direction, or without its peer."""
    assert states(record(), GEMV) == {
        "at least 88% of the ceiling": "met", "cublas's time / ours above 1": "met",
        "triton's time / ours above 1": "met",
    }  # fmt: skip
    assert states(record(), KDA) == {
        "fla_chain's time / ours above 1": "met", "fla_recurrence's time / ours at least 1": "met",
        "in_place's time / ours at least 0.909": "met",
    }  # fmt: skip
    assert set(states(record(), RES).values()) == {"met"}
    assert states(record(), MLA) == {
        "at least 60% of the ceiling": "met", "flashinfer or triton's time / ours above 1": "met",
    }  # fmt: skip
    assert set(states(record(), BIG).values()) == {"unknown"}


def test_a_missed_demand_is_missed_and_a_close_one_open() -> None:
    """A rounding, a tie or an interval around the limit that passes."""
    lines = record()
    lines[2]["arms"]["ours"] = arm(26.4)
    assert states(lines, GEMV)["cublas's time / ours above 1"] == "open"  # a tie is not faster
    lines[2]["arms"]["cublas"] = arm(26.0, spread=0.04)
    assert states(lines, GEMV)["cublas's time / ours above 1"] == "open"
    lines[2]["arms"]["cublas"] = arm(25.0)
    assert states(lines, GEMV)["cublas's time / ours above 1"] == "missed"
    assert states(lines, GEMV)["at least 88% of the ceiling"] == "missed"
    lines[5]["arms"]["ours"] = arm(2.7)
    assert "missed" in states(lines, RES).values()


@pytest.mark.parametrize(("count", "rank"), [(5, 0), (6, 1), (10, 2), (30, 10), (100, 40)])
def test_ranks_are_those_of_the_usual_tables(count: int, rank: int) -> None:
    """Bounds of a median that claim more confidence than they have."""
    assert _rank(count) == rank


def test_the_named_peer_comes_first_and_a_stand_in_says_so() -> None:
    """A row that compares with the slower peer although the named one was there."""
    lines = record()
    lines[6]["arms"]["flashinfer"] = arm(45.0)
    assert states(lines, MLA)["flashinfer or triton's time / ours above 1"] == "missed"
    text = markdown(read_table(record()))
    assert "flashinfer has no number (every call): no library" in text


def test_what_is_missing_has_no_number_anywhere() -> None:
    """A missing peer shown as zero, as infinity, or not at all."""
    table = read_table(record())
    found = json.loads(json.dumps(as_json(table)))
    rows = {row["key"]: row for row in found["rows"]}
    assert rows[MLA.key]["arms"]["flashinfer"] is None
    assert rows[MLA.key]["missing"] == {"flashinfer": "no library"}
    assert rows[BIG.key]["share"] is None
    assert rows[BIG.key]["ratios"] == {}
    text = markdown(table)
    assert "None" not in text
    assert "nan" not in text
    assert "ours has no number (6288 x 7168, M 64): no schedule bucket for 64 rows" in text
    assert "1x H200, driver 580.1, CUDA 13.0, torch 2.11, 2026-11-30T00:00:00Z, commit cccccccccccc" in text


def test_the_short_table_names_the_fastest_peer_that_does_the_whole_op() -> None:
    """A README that compares with the slowest peer, or with half an op."""
    lines = record()
    lines[0] = header(PeerCell("kda_decode", "k3-slice-tp8", 64), MLA)
    lines[2:] = [
        cell_line(PeerCell("kda_decode", "k3-slice-tp8", 64), ours=arm(20.0), fla_chain=arm(30.0), in_place=arm(10.0)),
        cell_line(MLA, ours=arm(50.0), flashinfer=arm(55.0), triton=arm(60.0)),
    ]
    text = short(read_table(lines))
    assert "| KDA decode, 12 heads, B 64 | 20.0 |" in text
    assert "| fla_chain 30.0 | 1.50 (1.50–1.50) |" in text
    assert "| flashinfer 55.0 | 1.10 (1.10–1.10) |" in text


HALF = half("mla_half_layer", "k3-slice-tp8", 8, 32_768)


def halves(ours: float = 20.0, standard: float = 31.0, spread: float = 0.0) -> list[dict[str, Any]]:
    """A record of every half-layer."""
    cells = half_cells()
    return [header(*cells), ceilings(), *(half_line(cell, ours, standard, spread=spread) for cell in cells)]


def test_a_planned_cell_without_a_line_is_unknown_in_its_figure() -> None:
    """A figure that is met in every cell because the others were not measured."""
    lines = record()
    kept = {figure.name: states for figure, states in read_table([*lines[:2], *lines[3:]]).figures()}
    whole = {figure.name: states for figure, states in read_table(lines).figures()}
    name = "input projection 6288x7168, 3648x7168"
    assert (whole[name]["met"], whole[name]["unknown"]) == (3, 3)
    assert (kept[name]["met"], kept[name]["unknown"]) == (0, 6)


def test_half_layers_are_a_figure_of_their_own() -> None:
    """A half-layer that is slower than the standard path, or as fast, and counts as met."""
    lines = [header(HALF), ceilings(), half_line(HALF, 20.0, 31.0)]
    judged = read_table(lines).rows[0].judged
    assert [(j.figure, j.demand, j.state) for j in judged] == [(6, "standard's time / ours above 1", "met")]
    for standard, state in ((20.0, "open"), (19.0, "missed")):
        lines[2] = half_line(HALF, 20.0, standard)
        assert read_table(lines).rows[0].judged[0].state == state


def test_the_mean_of_half_layers_is_over_all_of_them() -> None:
    """A geometric mean over the cells that went well, an arithmetic one, or one that is met within its noise."""
    assert len(halves()) == 2 + 84
    assert read_table(halves()).mean()[1].state == "met"
    assert read_table(halves(standard=29.0)).mean()[1].state == "missed"
    assert read_table(halves(standard=29.8, spread=0.02)).mean()[1].state == "open"
    table = read_table(halves()[:-1])
    assert (table.mean()[1].state, table.mean()[1].found) == ("unknown", "1.550 (1.550-1.550) in 83 of 84 cells")
    counts = {figure.name: states for figure, states in table.figures()}
    assert [counts[name]["unknown"] for name in ("KDA half-layer", "MLA half-layer, 1k and 32k", "AttnRes")] == [
        0,
        1,
        0,
    ]
    lines = halves()
    lines[2]["arms"]["ours"] = arm(10.0)
    assert f"{1.55 * 2 ** (1 / 84):.3f}" in read_table(lines).mean()[1].found
    assert read_table(record()).mean()[1].found == "0 of 84 cells"


def test_a_half_layer_says_where_it_takes_the_standard_path() -> None:
    """A row that looks specialised throughout and is not."""
    lines = [header(HALF), ceilings(), half_line(HALF, 20.0, 31.0, "mla_decode: no schedule bucket for 8 rows")]
    text = markdown(read_table(lines))
    assert "ours takes the standard path (12 heads, B 8, 32k) at mla_decode: no schedule bucket for 8 rows" in text
    row = short(read_table(lines))
    assert "| MLA half-layer, 12 heads, B 8, 32k (standard path in mla_decode) | 20.0 |" in row
    assert "| standard 31.0 | 1.55 (1.55–1.55) |" in row
    lines[2]["arms"]["ours"]["fallbacks"] = [1]
    with pytest.raises(ValueError, match="line 3: fallbacks are no texts"):
        read_table(lines)


def test_a_table_without_ceilings_has_no_shares() -> None:
    """A share of a ceiling that nobody measured."""
    lines = [line for line in record() if line["kind"] != "ceilings"]
    row = read_table(lines).rows[0]
    assert (row.floor_us, row.share) == (None, None)
    assert states(lines, GEMV)["at least 88% of the ceiling"] == "unknown"
    assert decide(lines).outcome == "not_evaluated"


def test_outcomes() -> None:
    """A record that counts as whole without a cell, or in spite of wrong results of ours."""
    assert decide(record()).outcome == "passed"
    short = decide(record()[:-1])
    assert (short.outcome, short.findings[0].code) == ("not_evaluated", "bench.incomplete")
    for reason in ("wrong results: out", "failed: CudaError: x"):
        lines = record()
        lines[2]["arms"]["ours"] = arm(None, reason)
        assert (decide(lines).outcome, decide(lines).findings[0].where) == ("failed", GEMV.key)
    lines = record()
    lines[2] = {"kind": "cell", "key": GEMV.key, "failure": "crash: the worker ended"}
    assert decide(lines).findings[0].code == "bench.wrong"
    assert read_table(lines).rows[0].failure == "crash: the worker ended"


def _first(lines: list[dict[str, Any]], **changes: Any) -> None:
    lines[2]["arms"]["ours"] |= changes


HOSTILE: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "no header": lambda lines: lines.pop(0),
    "unknown kind": lambda lines: lines.append({"kind": "poem"}),
    "repeated cell": lambda lines: lines.append(copy.deepcopy(lines[2])),
    "unplanned cell": lambda lines: lines[2].update(key="input_projection/other"),
    "cell planned twice": lambda lines: lines[0]["planned"].append(lines[0]["planned"][0]),
    "no samples": lambda lines: _first(lines, samples_us=[]),
    "text as a sample": lambda lines: _first(lines, samples_us=["1"] * 30),
    "boolean as a sample": lambda lines: _first(lines, samples_us=[True] * 30),
    "zero": lambda lines: _first(lines, samples_us=[0.0] * 30),
    "negative": lambda lines: _first(lines, samples_us=[-1.0] * 30),
    "not a number": lambda lines: _first(lines, samples_us=[float("nan")] * 30),
    "fewer rounds": lambda lines: _first(lines, samples_us=[22.0] * 29),
    "too many samples": lambda lines: _first(lines, samples_us=[22.0] * 1001),
    "negative device time": lambda lines: _first(lines, device_us=-1.0),
    "pdl as text": lambda lines: _first(lines, pdl="yes"),
    "arms as a list": lambda lines: lines[2].update(arms=[]),
    "an arm as a number": lambda lines: lines[2]["arms"].update(ours=3),
    "unknown ceiling": lambda lines: lines[1]["gbps"].update(dream={"a": 1e6}),
    "infinite ceiling": lambda lines: lines[1]["gbps"]["read"].update(a=float("inf")),
    "context as a list": lambda lines: lines[0]["planned"][0].update(context=[]),
    "no operation": lambda lines: lines[0]["planned"][0].pop("op"),
    "negative bytes": lambda lines: lines[0]["planned"][0].update(read_bytes=-1),
    "calls as text": lambda lines: lines[2].update(calls="many"),
    "failure as a number": lambda lines: lines[2].update(failure=7),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_are_refused_as_such(name: str) -> None:
    """A malformed line that ends the reader with a traceback, or that becomes a number."""
    lines = record()
    HOSTILE[name](lines)
    with pytest.raises(ValueError, match="line"):
        read_table(lines)
    decision = decide(lines)
    assert (decision.outcome, decision.findings[0].code) == ("not_evaluated", "bench.malformed")
