"""Rows asked for in L2 before the dependency wait, while the kernel before is still running.

A prefetch into L2 reads nothing into the multiprocessor. L2 is where the GPU's memory is coherent: what the kernel
before still writes to such a row is in the line that the load behind the wait finds. An early prefetch can therefore
cost a transfer, never a stale value.
"""

import cutlass
from cutlass import Boolean, Int32, Int64, cute

__all__ = ["ask_for_rows"]

LINE = 64
"""Columns of a 128-byte line."""


@cute.jit
def prefetch_line(address: Int64, wanted: Boolean) -> None:
    """The line of a global address into L2; nothing where not wanted."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; @p prefetch.global.L2 [{$r0}]; }",
        read_only_args=[address, Int32(wanted)],
    )


def ask_for_rows(
    saved: cute.Pointer,
    prefix: cute.Pointer,
    delta: cute.Pointer,
    add_delta: Int32,
    *,
    lane: Int32,
    width: int,
    columns: int,
    sources: int,
    with_delta: bool,
) -> None:
    """A warp's columns of the saved rows that are mixed, of the prefix and, where there is one, of the delta.

    Args:
        saved: the warp's first column of the token's saved row 0.
        prefix: the same of the prefix.
        delta: the same of the delta.
        add_delta: 0: the delta is null and not touched.
        lane: each lane asks for every 32nd line.
        width: columns of a row.
        columns: of one row that the warp has, consecutive.
        sources: saved rows that are mixed.
        with_delta: whether the delta is asked for at all.
    """
    lines = columns // LINE
    for first in range(0, (sources + 1 + with_delta) * lines, 32):
        item = first + lane
        row, place = item // lines, item % lines * LINE
        address = (saved + (row * width + place)).toint()
        address = cutlass.select_(row == sources, (prefix + place).toint(), address)
        wanted = row <= sources
        if with_delta:
            address = cutlass.select_(row == sources + 1, (delta + place).toint(), address)
            wanted = wanted | ((row == sources + 1) & (add_delta != 0))
        prefetch_line(address, wanted)
