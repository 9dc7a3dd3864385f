"""Physical floors: how fast a call can be at most, from bytes, operations and ceilings measured on this machine.

Pure arithmetic. Bytes and operations come from `verify.bench.traffic`, ceilings from `verify.bench.ceilings`. A floor
is a lower bound: every byte is counted once, at the bandwidth of the fastest cache that it could be in, reading,
writing and arithmetic overlap completely, and launches cost nothing. A result below the floor (less `GUARD`) did not do
the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["GUARD", "Ceilings", "Floor", "Traffic", "floor", "merge", "transfer_ns"]

GUARD = 0.03
"""Share by which a time may lie below its floor: how well a ceiling is known."""


Table = tuple[tuple[int, float], ...]
"""(working set in bytes, GB/s), ascending by working set, not empty."""


@dataclass(frozen=True)
class Traffic:
    """The least that one call must move and compute."""

    read_bytes: float
    write_bytes: float
    flops: float
    """Multiplications and additions, each counted as one."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Traffic:
        """Read a raw line's; numbers must not be negative."""
        found = cls(float(data["read_bytes"]), float(data["write_bytes"]), float(data["flops"]))
        if not min(found.read_bytes, found.write_bytes, found.flops) >= 0:
            raise ValueError(f"negative traffic: {dict(data)}")
        return found


@dataclass(frozen=True)
class Ceilings:
    """The fastest that trusted code moved and computed on this machine, with the threads that arms may use.

    Bandwidths are (working set in bytes, GB/s), ascending by working set: caches are faster than memory.
    """

    threads: int
    read: Table
    write: Table
    copy: Table
    """Bytes read plus bytes written, by copying or by updating in place, whichever is faster."""
    fma_gflops: float
    """f32 multiply-add, vector units."""
    bf16_gflops: float
    """bf16 products summed in f32, the fastest unit that this machine has."""
    bf16_unit: str
    """Which unit that is: `amx`, `avx512_bf16` or `fma`."""

    def record(self) -> dict[str, Any]:
        """JSON for a raw line."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ceilings:
        """Inverse of `record` after a round trip through JSON."""

        def table(name: str) -> Table:
            return tuple((int(size), float(gbps)) for size, gbps in data[name])

        return cls(
            threads=int(data["threads"]),
            read=table("read"),
            write=table("write"),
            copy=table("copy"),
            fma_gflops=float(data["fma_gflops"]),
            bf16_gflops=float(data["bf16_gflops"]),
            bf16_unit=str(data["bf16_unit"]),
        )


@dataclass(frozen=True)
class Floor:
    """The least time of one call, in nanoseconds, by resource."""

    read_ns: float
    write_ns: float
    move_ns: float
    """Reading and writing together, at the fastest of the measured mixes."""
    arithmetic_ns: float

    @property
    def ns(self) -> float:
        """The floor: the slowest resource, all of them overlapping."""
        return max(self.memory_ns, self.arithmetic_ns)

    @property
    def resource(self) -> str:
        """What bounds the call: `memory` or `arithmetic`."""
        return "arithmetic" if self.arithmetic_ns >= self.memory_ns else "memory"

    @property
    def memory_ns(self) -> float:
        """The memory part of it."""
        return max(self.read_ns, self.write_ns, self.move_ns)


def floor(traffic: Traffic, ceilings: Ceilings) -> Floor:
    """The floor of a call that is repeated, so that caches may still hold what the previous call touched.

    Args:
        traffic: what one call must move and compute.
        ceilings: of this machine, measured in the same run.
    """
    moved = traffic.read_bytes + traffic.write_bytes
    return Floor(
        read_ns=transfer_ns(traffic.read_bytes, ceilings.read),
        write_ns=transfer_ns(traffic.write_bytes, ceilings.write),
        move_ns=min(transfer_ns(moved, table) for table in (ceilings.read, ceilings.write, ceilings.copy)),
        arithmetic_ns=traffic.flops / max(ceilings.fma_gflops, ceilings.bf16_gflops),
    )


def merge(first: Ceilings, second: Ceilings) -> Ceilings:
    """The higher of two measurements with the same threads, figure by figure.

    Raises:
        ValueError: they were made with different threads or working sets.
    """
    if first.threads != second.threads or [s for s, _ in first.read] != [s for s, _ in second.read]:
        raise ValueError("ceilings of different programs or threads cannot be merged")

    def higher(one: Table, other: Table) -> Table:
        return tuple((size, max(rate, more)) for (size, rate), (_, more) in zip(one, other, strict=True))

    faster = first if first.bf16_gflops >= second.bf16_gflops else second
    return Ceilings(
        threads=first.threads,
        read=higher(first.read, second.read),
        write=higher(first.write, second.write),
        copy=higher(first.copy, second.copy),
        fma_gflops=max(first.fma_gflops, second.fma_gflops),
        bf16_gflops=faster.bf16_gflops,
        bf16_unit=faster.bf16_unit,
    )


def transfer_ns(nbytes: float, table: Table) -> float:
    """Least time to touch `nbytes` distinct bytes, in nanoseconds.

    The best that any order of accesses can do is to find as much as fits into the fastest cache there, as much as fits
    into the next one there, and so on. So the part of the bytes between two measured working sets goes at the fastest
    bandwidth seen for the larger one or anything above it.

    Args:
        nbytes: bytes.
        table: (working set in bytes, GB/s), ascending, not empty.
    """
    total, below = 0.0, 0
    for at, (size, gbps) in enumerate(table):
        fastest = max(gbps, *(rate for _, rate in table[at:]))
        last = at == len(table) - 1
        part = (nbytes if last else min(nbytes, size)) - below
        if part <= 0:
            break
        total += part / fastest
        below = size
    return total
