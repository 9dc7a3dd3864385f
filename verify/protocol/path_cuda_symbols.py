"""What the profiler saw in a cell of the path gate, against what its captured sites launch.

A kernel is its symbol with threads, registers and shared memory: variants of one op share a symbol, and descriptor and
driver both state the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from verify.protocol.decision import Line

__all__ = ["Problem", "symbol_problems"]

Problem = tuple[str, str, str]
"""(code without the gate, what was seen, the rule)."""

Kernel = tuple[str, int | None, int | None, int | None]
"""Symbol, threads, registers, bytes of shared memory."""


def symbol_problems(header: Line, entry: Line, cell: Line, ledger_symbols: frozenset[str]) -> Iterator[Problem]:
    """Kernels that the profiler saw too often, too rarely, or that nobody names.

    Args:
        header: of the record; `symbols` has every kernel of the arm.
        entry: the cell's plan.
        cell: its line; `kernels` is null where there was no profiler, which is judged elsewhere.
        ledger_symbols: kernels of the ledger.
    """
    if cell["kernels"] is None:
        return
    replays = int(cell["replays"])
    seen = Counter({_kernel(row): int(row["count"]) for row in cell["kernels"]})
    expected = Counter({_kernel(row): 0 for site in entry["sites"] for row in site["launches"]})
    for site in entry["sites"]:
        expected.update({_kernel(row): replays for row in site["launches"]})
    for kernel, count in expected.items():
        if seen[kernel] != count:
            yield "symbols", f"{_named(kernel)} ran {seen[kernel]} times in {replays} replays", f"{count} times"
    others = {kernel: count for kernel, count in seen.items() if kernel not in expected}
    own = {name for names in header["symbols"][entry["geometry"]].values() for name in names}
    for kernel in sorted((kernel for kernel in others if kernel[0] in own), key=str):
        yield (
            "symbols",
            f"{_named(kernel)} ran {others.pop(kernel)} times and no captured site launches it",
            "not at all",
        )
    standard = sum(site["path"] == "standard" for site in entry["sites"])
    counted = sum(count for kernel, count in others.items() if kernel[0] in ledger_symbols)
    if counted < replays or (counted != replays and not standard):
        yield "symbols", f"the ledger's kernel ran {counted} times in {replays} replays", f"{replays} times"
    foreign = {kernel: count for kernel, count in others.items() if kernel[0] not in ledger_symbols}
    if not standard:
        for kernel, count in sorted(foreign.items(), key=str):
            yield "symbols", f"unknown {_named(kernel)} ran {count} times", "only kernels that descriptors name"
        return
    for kernel, count in sorted(foreign.items(), key=str):
        if count % replays:
            yield "symbols", f"{_named(kernel)} ran {count} times in {replays} replays", "as often in every replay"
    if sum(foreign.values()) < replays * standard:
        text = f"{sum(foreign.values())} kernels beside the descriptors' for {standard} standard sites"
        yield "symbols", text, "at least one kernel of each standard site in each replay"


def _kernel(row: Line) -> Kernel:
    return str(row["name"]), row["block"], row["registers"], row["shared"]


def _named(kernel: Kernel) -> str:
    name, block, registers, shared = kernel
    return f"kernel {name} ({block} threads, {registers} registers, {shared} B shared)"
