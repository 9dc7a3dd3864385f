"""Memory ceilings of this GPU, best of several methods and sizes, and the spacing of empty launches.

Read, write, copy and update in place are ceilings of their own: a GEMV reads faster than a copy moves. Every method is
trusted code: torch, cuBLAS, or a plain Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify.bench.gpu.graphs import quick_us
from verify.bench.gpu.peers import empty

__all__ = ["measure"]

PROGRAMS = 1056
"""Eight per multiprocessor of an H200."""
SIZES = (PROGRAMS * 12 * 8192, PROGRAMS * 120 * 8192)
"""Bytes of one call, whole tiles for every program. The smaller is about the largest projection's weights; the calls of
a graph together overflow every cache."""
TOTAL = 4 << 30
COLUMNS = 7168
SPACED_CALLS = 512
_TILE = 2048
"""Words of 4 bytes."""


@triton.jit  # type: ignore[untyped-decorator]
def _read(source, sums, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Programs share int32 words in tiles and keep a sum each."""
    total = tl.zeros((TILE,), dtype=tl.int32)
    for tile in range(tl.program_id(0), count // TILE, tl.num_programs(0)):
        total += tl.load(source + tile * TILE + tl.arange(0, TILE))
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit  # type: ignore[untyped-decorator]
def _write(target, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Programs write one tile each."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(target + at, tl.full((TILE,), 1, dtype=tl.int32), mask=at < count)


@triton.jit  # type: ignore[untyped-decorator]
def _move(source, target, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Programs copy one tile each; source and target may be the same."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(target + at, tl.load(source + at, mask=at < count) + 1, mask=at < count)


def measure() -> dict[str, Any]:
    """GB/s by ceiling, method and size, and us between empty launches by number of blocks."""
    torch.cuda.empty_cache()
    pool = torch.zeros(TOTAL // 4, dtype=torch.int32, device="cuda")
    other = torch.zeros(TOTAL // 4, dtype=torch.int32, device="cuda")
    found: dict[str, dict[str, float]] = {"read": {}, "write": {}, "copy": {}, "update": {}}
    for size in SIZES:
        whole = TOTAL // size * (size // 4)
        methods = _methods(*(list(torch.split(x[:whole], size // 4)) for x in (pool, other)))
        for (kind, method), (moved, launches) in methods.items():
            found[kind][f"{method}, {size // 1_000_000} MB"] = size * moved / quick_us(launches) / 1e3
    spacing = {str(blocks): quick_us([lambda b=blocks: empty.launch(b)], SPACED_CALLS) for blocks in (1, 132)}  # type: ignore[misc]
    del pool, other
    torch.cuda.empty_cache()
    return {"gbps": found, "empty_us": spacing}


def _methods(
    parts: list[Tensor], targets: list[Tensor]
) -> dict[tuple[str, str], tuple[int, list[Callable[[], object]]]]:
    """(ceiling, method) -> how often a byte counts, and the launches of one graph."""
    count = parts[0].numel()
    sums = torch.zeros(2 * PROGRAMS, dtype=torch.int32, device="cuda")
    tiles = (triton.cdiv(count, _TILE),)
    matrices = [part.view(torch.bfloat16)[: count * 2 // COLUMNS * COLUMNS].view(-1, COLUMNS) for part in parts]
    vector = torch.zeros(COLUMNS, dtype=torch.bfloat16, device="cuda")
    results = torch.zeros(matrices[0].shape[0], dtype=torch.bfloat16, device="cuda")
    rows = torch.zeros(16, COLUMNS, dtype=torch.bfloat16, device="cuda")
    wide = torch.zeros(16, matrices[0].shape[0], dtype=torch.bfloat16, device="cuda")
    floats = [part.view(torch.float32) for part in parts]

    def each(launch: Callable[..., object], *lists: list[Tensor]) -> list[Callable[[], object]]:
        return [lambda row=row: launch(*row) for row in zip(*lists, strict=True)]  # type: ignore[misc]

    return {
        ("read", "Triton sum"): (1, each(lambda x: _read[PROGRAMS,](x, sums, count, TILE=_TILE), parts)),
        ("read", "Triton sum, half the programs"): (
            1, each(lambda x: _read[PROGRAMS // 2,](x, sums, count, TILE=_TILE, num_stages=4), parts),
        ),
        ("read", "Triton sum, twice the programs"): (
            1,
            each(lambda x: _read[PROGRAMS * 2,](x, sums, count, TILE=_TILE), parts),
        ),
        ("read", "cuBLAS GEMV"): (1, each(lambda m: torch.mv(m, vector, out=results), matrices)),
        ("read", "cuBLAS product of 16 rows"): (1, each(lambda m: torch.mm(rows, m.T, out=wide), matrices)),
        ("write", "fill_"): (1, each(lambda x: x.fill_(1), parts)),
        ("write", "Triton store"): (1, each(lambda x: _write[tiles](x, count, TILE=_TILE), parts)),
        ("copy", "copy_"): (2, each(lambda x, y: y.copy_(x), parts, targets)),
        ("copy", "Triton copy"): (2, each(lambda x, y: _move[tiles](x, y, count, TILE=_TILE), parts, targets)),
        ("update", "mul_"): (2, each(lambda x: x.mul_(0.5), floats)),
        ("update", "Triton update"): (2, each(lambda x: _move[tiles](x, x, count, TILE=_TILE), parts)),
    }  # fmt: skip
