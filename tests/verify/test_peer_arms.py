"""The parts of the peer table's measuring that need no GPU: sets, graphs' lengths, alignment, what counts as right."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from k3_backend.aot.arguments import TENSOR_ALIGNMENT
from k3_backend.ops import OPS
from verify.bench.gpu import checks
from verify.bench.gpu.arm import Arm
from verify.bench.gpu.cells import GEOMETRIES, PeerCell, moved_bytes, plan
from verify.bench.gpu.checks import compared
from verify.bench.gpu.graphs import GRAPH_US, calls_for
from verify.bench.gpu.inputs import MIN_SETS, ROTATED_BYTES, _aligned, sets_for
from verify.bench.gpu.measure import PEERS
from verify.protocol.peer_figures import FIGURES, STANDARD

ROOT = Path(__file__).resolve().parents[2]


def test_every_cell_rotates_through_more_than_the_caches_hold() -> None:
    """Calls that find their weights in the L2 of the call before."""
    for cell in plan([(op, name) for op in OPS for name in (*GEOMETRIES, "k3")]):
        sets, touched = sets_for(cell), sum(moved_bytes(cell))
        assert sets >= MIN_SETS or touched > ROTATED_BYTES, cell.key
        if (cell.op, cell.batch) != ("attn_res", 1):
            assert sets * touched >= 400_000_000, cell.key


@pytest.mark.parametrize(("sets", "us"), [(8, 20.0), (2, 2000.0), (2048, 1.5), (8, 0.001)])
def test_a_graph_goes_through_all_sets_equally_often_and_lasts(sets: int, us: float) -> None:
    """A graph whose last sets are timed less often, or that is shorter than the events around it."""
    calls = calls_for(sets, us)
    assert calls % sets == 0
    assert calls >= sets
    assert calls * us >= GRAPH_US / 2


@pytest.mark.parametrize("shape", [(3, 1), (3, 12), (4, 2, 16), (2, 33)])
def test_every_set_begins_where_a_launch_accepts_it(shape: tuple[int, ...]) -> None:
    """The second request's slots at an address that the launcher refuses."""
    stacked = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    parts = _aligned(stacked)
    assert all(torch.equal(part, whole) for part, whole in zip(parts, stacked, strict=True))
    offsets = [part.data_ptr() - parts[0].data_ptr() for part in parts]
    assert all(offset % TENSOR_ALIGNMENT == 0 for offset in offsets)


@pytest.mark.parametrize(
    ("got", "fine"),
    [
        (lambda want: want.bfloat16(), True),
        (lambda want: want * 1.01, True),
        (lambda want: want * 1.1, False),
        (torch.zeros_like, False),
        (lambda want: torch.cat([want[:-1], want[-1:] * 1.2]), False),
        (lambda want: torch.cat([want[:-1], want[-1:] * float("nan")]), False),
        (lambda want: torch.cat([want[:-1], want[-1:] * float("inf")]), False),
    ],
)
def test_what_counts_as_right(monkeypatch: pytest.MonkeyPatch, got: object, fine: bool) -> None:
    """A peer that is timed although one of its rows is wrong, or that is refused for rounding."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    want = torch.randn(64, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    arm = Arm([lambda: None], lambda: {"out": got(want)}, pdl=False)  # type: ignore[operator]
    found = compared(arm, {"out": want})["out"]
    assert found["fine"] is fine
    assert 0 <= found["error"] <= checks._HUGE


def test_every_peer_that_a_row_or_figure_names_exists() -> None:
    """A peer that is missing everywhere because its module or function has another name."""
    for op, peers in PEERS.items():
        assert op in OPS
        for name, (module, function) in peers.items():
            tree = ast.parse((ROOT / "verify" / "bench" / "gpu" / "peers" / f"{module}.py").read_text())
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (op, name)
    for figure in FIGURES:
        known = set(PEERS[figure.op]) if figure.op in OPS else {STANDARD}  # a half-layer has one peer, no op's module
        assert all(set(need.peers) <= known for need in figure.needs), figure.name
    assert {cell.op for cell in plan([(op, GEOMETRIES[0]) for op in OPS])} <= set(PEERS)
    assert PeerCell("attn_res", "k3", 1, sources=8).key == "attn_res/k3/B1/T1/n8"
