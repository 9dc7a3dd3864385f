"""Sums over the values of a thread and over the lanes of a warp, each in a fixed order."""

import cutlass
from cutlass import Float32, Int32, cute

__all__ = ["chained_sum", "scatter_sums", "scattered"]


def chained_sum(values) -> Float32:
    """Sum in four chains: their latencies overlap, few registers are live, and the order is fixed."""
    chains = list(values[:4])
    for i, value in enumerate(values[4:]):
        chains[i % 4] += value
    while len(chains) > 1:
        chains = [a + b for a, b in zip(chains[::2], chains[1::2], strict=False)] + chains[len(chains) // 2 * 2 :]
    return chains[0]


def halvings(count: int) -> list[tuple[int, int]]:
    """(length before, length after) of each of the five steps of `scatter_sums`."""
    steps = []
    for _ in range(5):
        steps.append((count, (count + 1) // 2))
        count = (count + 1) // 2
    return steps


def scatter_sums(values, lane: Int32) -> Float32:
    """Sums of up to 32 values over a warp; a lane gets the one that `scattered` names.

    Each step adds pairs of lanes and halves the list: a lane passes on the half that its partner keeps, which takes
    about one shuffle per value instead of five.
    """
    for step, (_, half) in enumerate(halvings(len(values))):
        upper = (lane & (16 >> step)) != 0
        kept = []
        for i in range(half):
            if i + half < len(values):
                keep = cutlass.select_(upper, values[i + half], values[i])
                give = cutlass.select_(upper, values[i], values[i + half])
            else:
                keep = give = values[i]
            kept.append(Float32(keep) + cute.arch.shuffle_sync_bfly(Float32(give), offset=16 >> step))
        values = kept
    return values[0]


def scattered(count: int, lane: Int32) -> tuple[Int32, Int32]:
    """(index of the value that a lane holds after `scatter_sums`, 1 unless a lower lane holds it too)."""
    index, first = Int32(0), Int32(1)
    for step, (before, half) in reversed(list(enumerate(halvings(count)))):
        upper = (lane >> (4 - step)) & 1
        moved = upper * Int32(index + half < before)
        index += moved * half
        first *= 1 - upper + moved
    return index, first
