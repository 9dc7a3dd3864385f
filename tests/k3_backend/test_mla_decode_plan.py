"""Sizes of the MLA core's CUDA kernel: how query rows are cut, and what lies where in shared memory."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import ModuleType

import pytest

from k3_backend.aot.build import KERNELS_DIR


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    """`plan.py` alone: it needs no compiler."""
    name = "mla_decode_plan"
    spec = importlib.util.spec_from_file_location(name, KERNELS_DIR / "mla_decode" / "plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    del sys.modules[name]
    return module


@pytest.mark.parametrize("heads", [6, 12, 96])
@pytest.mark.parametrize("most", [8, 16, 24, 32])
def test_every_group_has_query_rows(sizes: ModuleType, heads: int, most: int) -> None:
    """A last group with fewer rows than a ring slot, to which a copy of a negative length went (T = 3: 24 and 12)."""
    for tokens in range(1, 9):
        groups, rows = sizes.cut(heads * tokens, most)
        assert rows % 8 == 0
        assert 0 < rows <= most
        assert (groups - 1) * rows < heads * tokens <= groups * rows


@pytest.mark.parametrize("e4m3", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [8, 16, 24, 32])
def test_shared_memory_holds_a_tile_and_more(sizes: ModuleType, rows: int, cluster: int, e4m3: bool) -> None:
    """Regions that overlap, or a ring too small for the tile that consumers hold while the next one is on its way."""
    plan = sizes.Plan(12, 1, rows, 1, cluster, 0, 2, 0, 12, e4m3)
    inbox_bytes = 512 * plan.slice_fragments * cluster if cluster > 1 else 0
    regions = [
        (plan.barriers, plan.free_barrier + 8),
        (plan.starts, plan.starts + 4 * (sizes.STOPS + sizes.MAX_BATCH)),
        (plan.lengths, plan.lengths + 4 * sizes.MAX_BATCH),
        (plan.stats, plan.stats + 8 * rows * cluster),
        (plan.factors, plan.factors + 4 * rows),
        (plan.verdict, plan.verdict + 4),
        (plan.p, plan.p + sizes.P_PITCH * rows),
        (plan.scores, plan.scores + 4 * sizes.SLICES * sizes.S_PITCH * rows),
        (plan.inbox, plan.inbox + inbox_bytes),
        (plan.tile, plan.tile + (sizes.TILE * sizes.CHUNK * sizes.PITCH if e4m3 else 0)),
        (plan.ring, plan.ring + plan.slots * plan.slot),
    ]
    for (_, end), (begin, _) in itertools.pairwise(regions):
        assert end <= begin
    assert regions[-1][1] == plan.shared <= sizes.SHARED_LIMIT
    assert plan.slots > sizes.TILE


def test_a_ring_smaller_than_a_tile_is_refused(sizes: ModuleType) -> None:
    """A tile that waits for ever for slots that it holds itself."""
    with pytest.raises(ValueError, match="fewer than a tile"):
        sizes.Plan(12, 1, 16, 1, 1, 0, 2, 0, 3, False)
