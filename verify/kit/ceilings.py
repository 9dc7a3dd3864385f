"""What this GPU can move and compute at most, in the same run: read, write and copy by working set, and product rates.

A figure is the best of several methods and repetitions, because a ceiling that is too low would fail honest kernels:
reductions, matrix-vector products by cuBLAS and a plain Triton kernel for reading; fills for writing; copies and
updates in place for both. Trusted code, in the evaluator's own process, while no worker runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from verify.protocol.floors import Ceilings

__all__ = ["measure"]

SETS = (24 << 20, 1 << 30)
"""Working sets in bytes: one that the last-level cache holds, one that it does not."""
REPLAYS = 12
CALLS = 8
CHUNK = 1 << 13
"""Elements (f32) that a program of the reading kernel sums."""
SIDE = 8192
"""Rows and columns of the products that give the arithmetic rates."""


def measure() -> Ceilings:
    """Measure on the current device; about two seconds."""
    tables: dict[str, list[tuple[int, float]]] = {"read": [], "write": [], "copy": []}
    for size in SETS:
        first = torch.ones(size // 4, dtype=torch.float32, device="cuda")
        second = torch.empty_like(first)
        for name, methods in _methods(first, second).items():
            factor = 2 if name == "copy" else 1
            tables[name].append((size, max(factor * size / _ns(method) for method in methods)))
    bf16 = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    single = torch.ones(SIDE // 2, SIDE // 2, dtype=torch.float32, device="cuda")
    return Ceilings(
        threads=torch.cuda.get_device_properties(0).multi_processor_count,
        read=tuple(tables["read"]),
        write=tuple(tables["write"]),
        copy=tuple(tables["copy"]),
        fma_gflops=2.0 * (SIDE // 2) ** 3 / _ns(lambda: torch.mm(single, single), calls=2),
        bf16_gflops=2.0 * SIDE**3 / _ns(lambda: torch.mm(bf16, bf16), calls=2),
        bf16_unit="tensor cores",
    )


def _methods(first: torch.Tensor, second: torch.Tensor) -> dict[str, list[Callable[[], Any]]]:
    """Ways of reading, writing and copying all of `first`."""
    sums = torch.empty(triton.cdiv(first.numel(), CHUNK), dtype=torch.float32, device="cuda")
    matrix = first.view(torch.bfloat16).view(-1, 4096)
    vector = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    return {
        "read": [
            first.sum,
            first.max,
            lambda: torch.mv(matrix, vector),
            lambda: _read[(sums.numel(),)](first, sums, CHUNK=CHUNK, num_warps=8),
        ],
        "write": [lambda: first.fill_(1.0), first.zero_],
        "copy": [lambda: second.copy_(first), lambda: first.mul_(1.0), lambda: torch.neg(first, out=second)],
    }


def _ns(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Nanoseconds of one call: the quickest replay of a graph of several."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    best = float("inf")
    with torch.cuda.stream(stream):
        for _ in range(REPLAYS):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record(stream)
            graph.replay()
            last.record(stream)
            last.synchronize()
            best = min(best, first.elapsed_time(last) * 1e6 / calls)
    return best


@triton.jit  # type: ignore[untyped-decorator]
def _read(values, sums, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(sums + program, tl.sum(tl.load(values + at), 0))
