"""The attention-side CPU kernels against the fp64 references, at every level this machine runs.

Fast tests cover both geometries, each at another level; slow ones complete the matrix and take the long shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
from attn_cases import (
    Case,
    attn_res_case,
    bits,
    call,
    compare,
    expected,
    kda_case,
    mla_decode_case,
    mla_query_case,
    mla_value_case,
)
from torch import Tensor

from k3_backend.aot.build import SCHEDULES_DIR, build, build_runtime
from k3_backend.aot.cpu.host import runnable_archs
from k3_backend.aot.cpu.launch import LaunchError, LoadedOp, Pool, Runtime
from k3_backend.geometry import Geometry, geometry

NANO, PICO = geometry("k3-nano"), geometry("k3-pico")
OPS = ("kda_decode", "attn_res", "mla_query", "mla_decode", "mla_value")
BATCHES = (1, 2, 3, 5, 8, 17, 64)
TOKENS = (1, 2, 4, 8)
CONTEXTS = (1, 2, 15, 16, 17, 255, 2048)
ARCHS = runnable_archs()
FAST = [("k3-pico", "x86-64-v3"), ("k3-nano", ARCHS[0])]
MATRIX = [
    pytest.param(g, a, marks=[] if (g, a) in FAST else [pytest.mark.slow])
    for g, a in itertools.product(("k3-nano", "k3-pico"), ARCHS)
]
LEVELS = pytest.mark.parametrize(("geometry_name", "arch"), MATRIX)


@lru_cache
def kernel(op: str, geometry_name: str, arch: str) -> LoadedOp:
    g = geometry(geometry_name)
    return LoadedOp(build(op, arch, g), g, SCHEDULES_DIR / "cpu" / g.name / f"{op}.toml")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Runtime(build_runtime()).pool(2)
    yield pool
    pool.close()


def points(op: LoadedOp) -> list[dict[str, int]]:
    """Every combination of declared tunable values."""
    names = [t.name for t in op.tunables]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(t.values for t in op.tunables))]


# What decides a result's bits besides the inputs; every other tunable must not. `threads` is nowhere among them.
DECIDES_BITS = {
    "kda_decode": ("gates",),
    "mla_decode": ("split", "tile"),
    "mla_query": ("form",),
    "mla_value": ("form",),
}


def small_cases(op: str, g: Geometry) -> list[Case]:
    return {
        "kda_decode": lambda: [kda_case(g, 5, 1, null=(1, 4)), kda_case(g, 3, 3, extra_taps=2)],
        "attn_res": lambda: [attn_res_case(g, 5, sources=2, final=True)],
        "mla_query": lambda: [mla_query_case(g, 1), mla_query_case(g, 19)],
        "mla_decode": lambda: [mla_decode_case(g, [0, 130, 17, 2, 64], 2)],
        "mla_value": lambda: [mla_value_case(g, 1), mla_value_case(g, 19, shards=3)],
    }[op]()


@LEVELS
@pytest.mark.parametrize("op", OPS)
def test_every_declared_tunable_value_is_right(op: str, geometry_name: str, arch: str, pool: Pool) -> None:
    """A tuner may pick any declared point: each must be right, and only tunables said to may change bits."""
    loaded = kernel(op, geometry_name, arch)
    for case in small_cases(op, geometry(geometry_name)):
        want = expected(case)
        seen: dict[tuple[int, ...], Mapping[str, Tensor]] = {}
        for point in points(loaded):
            got = call(loaded, pool, case, point)
            key = tuple(point[name] for name in DECIDES_BITS.get(op, ()))
            if key not in seen:
                compare(got, want)
            first = seen.setdefault(key, got)
            assert all(torch.equal(bits(got[name]), bits(first[name])) for name in got), f"bits differ at {point}"


def shape_cases(op: str, g: Geometry, batches: tuple[int, ...], tokens: tuple[int, ...]) -> Iterator[Case]:
    """Calls over batches and tokens per request, with the contexts and page sizes spread over them."""
    for seed, (batch, count) in enumerate(itertools.product(batches, tokens)):
        rows = batch * count
        if op == "kda_decode":
            yield kda_case(g, batch, count, seed, null=(batch // 2,) if batch > 2 else (), extra_taps=seed % 3)
        elif op == "attn_res":
            yield attn_res_case(g, rows, seed, delta=bool(seed % 2), write=seed % 3 - 1, sources=seed % 3)
        elif op == "mla_query":
            yield mla_query_case(g, rows, seed, page=(16, 64)[seed % 2])
        elif op == "mla_value":
            yield mla_value_case(g, rows, 1 + seed % 4, seed)
        else:
            contexts = [c for c in CONTEXTS[: 6 if batch > 8 else 7] if c >= count]
            lengths = [contexts[(b + seed) % len(contexts)] for b in range(batch)]
            yield mla_decode_case(g, lengths, count, (16, 64)[seed % 2], seed)


@LEVELS
@pytest.mark.parametrize("op", OPS)
def test_shapes_agree_with_the_reference(op: str, geometry_name: str, arch: str, pool: Pool) -> None:
    """Batches, tokens, contexts and pages that fill no tile: tails, empty shares and block borders."""
    for case in shape_cases(op, geometry(geometry_name), BATCHES[:6], (1, 4)):
        compare(call(kernel(op, geometry_name, arch), pool, case), expected(case))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_the_whole_shape_matrix_agrees_with_the_reference(op: str, pool: Pool) -> None:
    """Shapes that only the largest batches or most tokens reach, 512 rows included."""
    for g in (NANO, PICO):
        for case in shape_cases(op, g, BATCHES, TOKENS):
            compare(call(kernel(op, g.name, ARCHS[0]), pool, case), expected(case))


@LEVELS
@pytest.mark.parametrize("context", CONTEXTS)
def test_one_request_at_every_context(context: int, geometry_name: str, arch: str, pool: Pool) -> None:
    """Split contexts: parts of one request, the last of them short, merge to the undivided result."""
    loaded = kernel("mla_decode", geometry_name, arch)
    case = mla_decode_case(geometry(geometry_name), [context], page=64)
    want = expected(case)
    for split in (0, 64, 256):
        compare(call(loaded, pool, case, {"threads": 2, "split": split, "tile": 16, "prefetch": 1}), want)


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (4, 1), (4, 4)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_shards_merge_to_the_undivided_attention(size: int, interleave: int, tokens: int, pool: Pool) -> None:
    """DCP: each shard is right by itself, empty ones included, and merge and gate undo the division."""
    lengths = [0, tokens, 4, 5, 33, 100]
    shards = []
    for rank in range(size):
        case = mla_decode_case(PICO, lengths, tokens, seed=rank, shard=(rank, size, interleave))
        got = call(kernel("mla_decode", PICO.name, ARCHS[0]), pool, case)
        compare(got, expected(case))
        shards.append(got)
    assert any(bool(torch.isneginf(shard["lse"]).any()) for shard in shards[1:]), "no empty shard was tried"
    merged = mla_value_case(PICO, len(lengths) * tokens, size)
    merged.tensors["partial"] = torch.stack([shard["out"] for shard in shards])
    merged.tensors["lse"] = torch.stack([shard["lse"] for shard in shards])
    compare(call(kernel("mla_value", PICO.name, ARCHS[0]), pool, merged), expected(merged))


@pytest.mark.parametrize("op", OPS)
def test_repeated_calls_give_the_same_bits(op: str, pool: Pool) -> None:
    """A race between workers, or a read of leftover scratch, shows as bits that change from run to run."""
    case = next(shape_cases(op, PICO, (17,), (2,)))
    loaded = kernel(op, PICO.name, ARCHS[0])
    first = call(loaded, pool, case)
    for _ in range(20):
        again = call(loaded, pool, case)
        assert all(torch.equal(bits(again[name]), bits(first[name])) for name in first)


def test_a_request_does_not_depend_on_its_neighbours(pool: Pool) -> None:
    """A request's bits in a batch equal its bits alone: nothing leaks between requests or follows from the batch."""
    for g, arch in ((geometry(name), arch) for name, arch in FAST):
        batch = kda_case(g, 5, 2)
        together = call(kernel("kda_decode", g.name, arch), pool, batch)
        alone = kda_case(g, 5, 2, null=(0, 1, 2, 4))
        alone.tensors["slots"][3], alone.tensors["accepted"][3] = (batch.tensors[n][3] for n in ("slots", "accepted"))  # type: ignore[index]
        for name in ("proj", "conv_state", "state", "conv_w", "f_b", "a_log", "dt_bias", "o_norm"):
            alone.tensors[name] = batch.tensors[name]
        single = call(kernel("kda_decode", g.name, arch), pool, alone)
        assert torch.equal(bits(single["out"][6:8]), bits(together["out"][6:8]))

        lengths = [40, 300, 7]
        point = {"threads": 2, "split": 64, "tile": 16, "prefetch": 1}
        many = mla_decode_case(g, lengths)
        together = call(kernel("mla_decode", g.name, arch), pool, many, point)
        many.tensors["seq_lens"] = torch.tensor([0, 300, 0], dtype=torch.int32)
        single = call(kernel("mla_decode", g.name, arch), pool, many, point)
        assert torch.equal(bits(single["out"][1]), bits(together["out"][1]))
        assert not bool(single["out"][0].any())


Break = Callable[[dict[str, Any]], None]


def _set(name: str, index: tuple[int, ...], value: int) -> Break:
    def apply(tensors: dict[str, Any]) -> None:
        tensors[name][index] = value

    return apply


@pytest.mark.parametrize(
    ("op", "broken", "message"),
    [
        ("kda_decode", _set("slots", (2, 0), 10_000), "beyond the state pool"),
        ("kda_decode", _set("accepted", (2,), 0), "accepted"),
        ("kda_decode", _set("accepted", (2,), 3), "accepted"),
        ("mla_query", _set("slot_mapping", (2,), 1_000_000), "beyond the cache"),
        ("mla_decode", _set("block_table", (2, 0), 10_000), "beyond the cache"),
        ("mla_decode", _set("block_table", (2, 0), -1), "beyond the cache"),
        ("mla_decode", _set("seq_lens", (2,), 1_000), "too narrow"),
        ("mla_decode", _set("seq_lens", (2,), -5), "negative"),
    ],
)
def test_broken_metadata_is_an_error_before_anything_is_touched(
    op: str, broken: Break, message: str, pool: Pool
) -> None:
    """An id from a broken plan must not become an address: the call fails and writes nothing."""
    case = {
        "kda_decode": lambda: kda_case(PICO, 3, 2),
        "mla_query": lambda: mla_query_case(PICO, 4),
        "mla_decode": lambda: mla_decode_case(PICO, [5, 40, 33]),
    }[op]()
    kept: list[Any] = []

    def breaks(guarded: Any) -> None:
        broken(guarded.tensors)
        kept.append(({name: t.clone() for name, t in guarded.tensors.items()}, guarded))

    with pytest.raises(LaunchError, match=message):
        call(kernel(op, PICO.name, ARCHS[0]), pool, case, before=breaks)
    before, guarded = kept[0]
    guarded.check()
    assert all(torch.equal(bits(guarded.tensors[name]), bits(before[name])) for name in before)


def test_padding_is_left_alone(pool: Pool) -> None:
    """A captured batch is padded with null requests: duplicates of slot 0, `accepted` garbage, zero outputs."""
    case = kda_case(NANO, 4, 2, null=(0, 2, 3))
    got = call(kernel("kda_decode", NANO.name, ARCHS[0]), pool, case)
    compare(got, expected(case))
    assert not bool(got["out"][[0, 1, 4, 5, 6, 7]].any())


def test_a_later_draft_row_cannot_reach_an_earlier_token(pool: Pool) -> None:
    """Zero times NaN is NaN: the row of a later token of the same request is left out, not weighted by zero."""
    case = mla_decode_case(NANO, [50], 4)
    table, cache = case.tensors["block_table"], case.tensors["kv_cache"]
    assert table is not None
    assert cache is not None
    cache[int(table[0, 3]), 1] = torch.nan  # position 49, that of the last token
    got = call(kernel("mla_decode", NANO.name, ARCHS[0]), pool, case)
    assert bool(torch.isfinite(got["out"][:3].float()).all())
    assert bool(torch.isnan(got["out"][3].float()).all())


def test_scratch_too_small_for_all_parts_lengthens_the_chunks(pool: Pool) -> None:
    """Many long requests cut finely would need more scratch than there is; the kernel must cut less, not overflow."""
    loaded = kernel("mla_decode", PICO.name, ARCHS[0])
    case = mla_decode_case(PICO, [3000] * 24, 8)
    cut, whole = (
        call(loaded, pool, case, {"threads": 2, "split": split, "tile": 64, "prefetch": 0}) for split in (64, 0)
    )
    compare(cut, {name: tensor.double() for name, tensor in whole.items()})
