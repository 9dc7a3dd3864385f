"""Physical floors: bytes at the fastest cache they could be in, the slowest resource, merged ceilings."""

from __future__ import annotations

import dataclasses
import json

import pytest

from verify.protocol.floors import GUARD, Ceilings, Traffic, floor, merge, transfer_ns

SMALL = Ceilings(
    threads=2,
    read=((1000, 100.0), (10_000, 10.0)),
    write=((1000, 50.0), (10_000, 5.0)),
    copy=((1000, 80.0), (10_000, 20.0)),
    fma_gflops=100.0,
    bf16_gflops=1000.0,
    bf16_unit="amx",
)


def test_floors_count_each_byte_at_the_fastest_cache_it_could_be_in() -> None:
    """A working set larger than a cache is judged as if it all came from memory, or all from the cache."""
    assert transfer_ns(500, SMALL.read) == pytest.approx(5.0)
    assert transfer_ns(2000, SMALL.read) == pytest.approx(10.0 + 100.0)
    assert transfer_ns(20_000, SMALL.read) == pytest.approx(10.0 + 1900.0)
    slower_small = ((1000, 1.0), (10_000, 10.0))
    assert transfer_ns(500, slower_small) == pytest.approx(50.0), "a ceiling is the best of what was seen"


def test_the_floor_is_its_slowest_resource() -> None:
    """Arithmetic or writing is left out of the floor."""
    assert floor(Traffic(500, 0, 0), SMALL).ns == pytest.approx(5.0)
    assert floor(Traffic(0, 500, 0), SMALL).ns == pytest.approx(10.0)
    compute = floor(Traffic(500, 0, 1e6), SMALL)
    assert compute.ns == compute.arithmetic_ns == pytest.approx(1000.0)
    assert 0 < GUARD < 0.1
    assert Ceilings.from_json(json.loads(json.dumps(SMALL.record()))) == SMALL


def test_merged_ceilings_are_the_higher_ones() -> None:
    """A disturbed second measurement lowers the ceiling, so that honest kernels exceed it."""
    slower = dataclasses.replace(SMALL, read=((1000, 200.0), (10_000, 1.0)), bf16_gflops=10.0, bf16_unit="fma")
    found = merge(SMALL, slower)
    assert found.read == ((1000, 200.0), (10_000, 10.0))
    assert (found.bf16_gflops, found.bf16_unit) == (1000.0, "amx")
    with pytest.raises(ValueError, match="cannot be merged"):
        merge(SMALL, dataclasses.replace(SMALL, threads=1))
