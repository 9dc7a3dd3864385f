"""Cells of the peer table and their bytes, against values worked out by hand."""

from __future__ import annotations

import pytest

from k3_backend.geometry import geometry
from k3_backend.ops import OPS
from verify.bench.gpu.cells import BATCHES, GEOMETRIES, PeerCell, moved_bytes, plan, width
from verify.bench.traffic import op_traffic
from verify.protocol.peer_figures import FIGURES, HALF_LAYERS

TP8, TP16 = GEOMETRIES
EVERY = [(op, name) for op in OPS for name in (*GEOMETRIES, "k3")]


@pytest.mark.parametrize(
    ("cell", "read", "write"),
    [
        # weights 6288 x 7168 and 16 rows of x, bf16; 16 rows of 6288
        (PeerCell("input_projection", TP8, 16, site="kda"), (6288 + 16) * 7168 * 2, 16 * 6288 * 2),
        # 12 heads: q, k, v, g (4 x 1536), f_a (128), beta (12); conv weights 4608 x 4 f32; F_b 1536 x 128; a_log,
        # dt_bias, norm; slot and accepted; 3 taps of 4608; one 128 x 128 f32 state per head. Written: taps, state, out.
        (
            PeerCell("kda_decode", TP8, 1),
            (4 * 1536 + 128 + 12) * 2 + 4608 * 16 + 1536 * 256 + 12 * 4 + 1536 * 4 + 256 + 8 + 27_648 + 786_432,
            27_648 + 786_432 + 3072,
        ),
        # T = 8: one state read, eight written; 10 taps written
        (
            PeerCell("kda_decode", TP16, 1, tokens=8),
            8 * (4 * 768 + 128 + 6) * 2 + 2304 * 16 + 768 * 256 + 6 * 4 + 768 * 4 + 256 + 36 + 13_824 + 393_216,
            10 * 4608 + 8 * 393_216 + 8 * 1536,
        ),
        # prefix, delta and 8 saved rows, three vectors; prefix and out
        (PeerCell("attn_res", TP8, 4, sources=8), 4 * 10 * 14_336 + 3 * 14_336, 4 * 2 * 14_336),
        # 12 x 192 x 1536, 12 x 128 x 512, two norms; q_a | kv_a of the row; slot. Written: 12 queries and a cache row
        (PeerCell("mla_query", TP8, 1), (3_538_944 + 786_432 + 2048 + 2112) * 2 + 8, 13 * 576 * 2),
        # 6 x 128 x 512; 6 latents, gate of 768, lse
        (PeerCell("mla_value", TP16, 2), (393_216 + 2 * (3072 + 768)) * 2 + 48, 2 * 768 * 2),
        # 16 x 8192 rows of 1152 bytes, 16 x 12 queries, 128 pages and a length per request; outputs and lse
        (
            PeerCell("mla_decode", TP8, 16, context=8192),
            16 * 8192 * 1152 + 192 * 1152 + 16 * 129 * 4,
            192 * (1024 + 4),
        ),
    ],
    ids=lambda value: value.key if isinstance(value, PeerCell) else None,
)
def test_bytes_are_those_worked_out_by_hand(cell: PeerCell, read: int, write: int) -> None:
    """A floor with a forgotten or doubled tensor, which moves every share in the table."""
    assert moved_bytes(cell) == (read, write)


def test_bytes_agree_with_the_floors_of_the_perf_gate_where_both_count_the_same() -> None:
    """Two definitions of one op's traffic that drift apart."""
    for site in ("kda", "mla"):
        cell = PeerCell("input_projection", TP16, 8, site=site)
        other = op_traffic("input_projection", geometry(TP16), batch=8, tokens=1, context=None, site=site)
        assert moved_bytes(cell) == (other.read_bytes, other.write_bytes)


def test_the_plan_has_every_cell_that_a_figure_is_about() -> None:
    """A figure that is met because its cells are missing."""
    cells = plan(EVERY)
    assert len({cell.key for cell in cells}) == len(cells) == 190
    widths = {(width(cell), cell.batch) for cell in cells if cell.op == "input_projection"}
    assert widths == {(n, batch) for n in (6288, 3648, 3216, 2880) for batch in BATCHES}
    for figure in (figure for figure in FIGURES if figure.op not in HALF_LAYERS):
        meant = [c for c in cells if c.op == figure.op and (not figure.widths or width(c) in figure.widths)]
        for need in figure.needs:
            assert any(need.applies(c.batch, c.to_json()["cache_bytes"]) for c in meant), (figure.name, need.text)
    core = {(c.geometry, c.batch, c.context) for c in cells if c.op == "mla_decode"}
    assert len(core) == 32
    assert all(PeerCell.from_json(cell.to_json()) == cell for cell in cells)


def test_the_plan_holds_only_what_the_kit_has() -> None:
    """Cells planned for an artifact that the kit does not carry."""
    cells = plan([("kda_decode", TP16)])
    assert {(cell.op, cell.geometry) for cell in cells} == {("kda_decode", TP16)}
    assert plan([("moe_front", TP8)]) == []
