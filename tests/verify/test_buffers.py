"""Red zones, poison and ownership of an op call's buffers."""

from __future__ import annotations

import numpy as np
import pytest

from verify.evaluator.buffers import GUARD_BYTES, Arena, poison
from verify.evaluator.worker import SharedBuffer

LAYOUT = [("x", "bf16", (3, 5)), ("pool", "f32", (4, 2, 3)), ("out", "bf16", (3, 7))]


@pytest.fixture
def arena() -> Arena:
    arena = Arena(SharedBuffer(1 << 20), LAYOUT, np.random.default_rng(3))
    arena.paint("nan")
    arena.put_input("x", np.arange(15, dtype=np.uint16).reshape(3, 5), free=None, kind="nan")
    written = np.array([False, True, False, False])
    arena.put_state(
        "pool", np.ones((4, 2, 3), np.float32), free=np.array([False, False, False, True]), fixed=~written, kind="nan"
    )
    arena.put_output("out", "nan")
    return arena


def test_an_honest_call_leaves_no_trace(arena: Arena) -> None:
    """Red zones or ownership checks that refuse what the call may write."""
    arena.array("out")[...] = 7
    arena.array("pool")[1] = 2.0
    assert arena.touched() == []


@pytest.mark.parametrize("name", ["x", "pool", "out"])
@pytest.mark.parametrize("after", [False, True])
def test_one_byte_outside_a_tensor_is_seen(arena: Arena, name: str, after: bool) -> None:
    """A write of one element past (or before) a tensor that lands in padding."""
    view = arena.views()[name]
    at = view.offset + (view.nbytes if after else -1)
    arena.buffer.bytes[at] ^= 1
    (hit,) = arena.touched()
    assert (hit.kind, hit.tensor, hit.offset) == ("out_of_bounds_write", name, view.nbytes if after else -1)


def test_red_zones_are_pages_and_reach_from_tensor_to_tensor(arena: Arena) -> None:
    """Bytes between tensors that nobody watches."""
    views = sorted(arena.views().values(), key=lambda v: v.offset)
    ends = [0, *(v.offset + v.nbytes for v in views)]
    for end, start in zip(ends, [*(v.offset for v in views), arena.buffer.used], strict=True):
        assert start - end >= GUARD_BYTES
        arena.buffer.bytes[(start + end) // 2] ^= 0x80
    assert len(arena.touched()) == 4


def test_changed_inputs_and_neighbours_are_seen(arena: Arena) -> None:
    """An input that is edited so that a later check agrees; a state slot of another request."""
    arena.array("x")[1, 2] ^= 1
    arena.array("pool")[2, 1, 0] = 5.0
    kinds = {(hit.kind, hit.tensor, hit.offset) for hit in arena.touched()}
    assert kinds == {("input_changed", "x", 14), ("unowned_state_changed", "pool", 2 * 24 + 12 + 2)}


def test_unowned_rows_hold_poison_that_must_stay(arena: Arena) -> None:
    """Free rows that are left at harmless values, or a change of a NaN into another NaN that compares as equal."""
    assert np.isnan(arena.array("pool")[3]).all()
    arena.array("pool")[3, 0, 0] = np.float32(np.nan)
    assert [hit.kind for hit in arena.touched()] == ["unowned_state_changed"]


@pytest.mark.parametrize("nbytes", [2, 4, 18, 4096])
def test_poison_kinds(nbytes: int) -> None:
    """Poison that is finite where it should be NaN, or the reverse, in either format."""
    rng = np.random.default_rng(1)
    nan, finite = poison("nan", nbytes, rng), poison("finite", nbytes, rng)
    assert len(nan) == len(finite) == nbytes

    def as_bf16(data: np.ndarray) -> np.ndarray:
        return (data[: nbytes // 2 * 2].view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    assert np.isnan(as_bf16(nan)).all()
    assert (np.abs(as_bf16(finite)) < 2).all()
    assert np.isnan(nan[: nbytes // 4 * 4].view(np.float32)).all()
    assert np.isfinite(finite[: nbytes // 4 * 4].view(np.float32)).all()


def test_poison_is_secret() -> None:
    """A pattern that a kernel could restore after an overrun."""
    rng = np.random.default_rng(2)
    assert not np.array_equal(poison("nan", 64, rng), poison("nan", 64, rng))
    assert len(np.unique(poison("finite", 4096, rng))) > 100


def test_a_wrong_shape_is_a_mistake_here(arena: Arena) -> None:
    """Contents that are silently broadcast over a tensor of another shape."""
    with pytest.raises(ValueError, match="placed as"):
        arena.put_input("x", np.zeros((1, 5), np.uint16), free=None, kind="nan")
