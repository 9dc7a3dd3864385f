"""What a benchmark run says: per cell and arm a median with its spread, the paired ratio, and shares of the floor."""

from __future__ import annotations

from harness.records import Cell, Record

__all__ = ["ArmTiming", "BenchCell", "BenchReport", "PairedRatio"]


class ArmTiming(Record):
    """One arm in one cell."""

    arm: str
    """`specialized`, `eager`, `compile` or `compile-max-autotune`."""
    median_us: float
    """Per call, over all repeats."""
    quartile_low_us: float
    quartile_high_us: float
    fastest_us: float
    slowest_us: float
    samples_us: tuple[float, ...]
    """Every repeat, in order of measurement, at full precision."""
    calls: int
    """Calls per repeat."""
    floor_share: float
    """Floor divided by median: 1 would be the best that this machine can do."""


class PairedRatio(Record):
    """The specialised arm against the better of the peers, from neighbouring slices."""

    against: str
    """The peer with the lower median."""
    value: float
    """Peer's time divided by the specialised arm's: above 1 is faster."""
    low: float
    high: float
    """95 % interval over the repeats of this run; it does not cover another process or another day."""


class BenchCell(Record):
    """One cell."""

    cell: Cell
    arms: tuple[ArmTiming, ...]
    ratio: PairedRatio | None
    """Null without peers."""
    floor_us: float
    floor_resource: str
    """`memory` or `arithmetic`."""


class BenchReport(Record):
    """A whole run."""

    target: str
    geometry: str
    arch: str
    threads: int
    repeats: int
    ceilings: dict[str, object]
    """As measured in this run."""
    foreign_cpu_share: float
    """CPU time that other processes used during the run, as a share of the machine."""
    cells: tuple[BenchCell, ...]

    def rows(self) -> list[dict[str, str]]:
        """Rows of the table that people read, one per cell, with units in the keys."""
        return [_row(cell) for cell in self.cells]

    def worst(self) -> PairedRatio | None:
        """The lowest ratio of all cells; None without peers."""
        ratios = [cell.ratio for cell in self.cells if cell.ratio is not None]
        return min(ratios, key=lambda ratio: ratio.value, default=None)


def _row(cell: BenchCell) -> dict[str, str]:
    row = {"cell": cell.cell.key}
    for arm in cell.arms:
        spread = f"{arm.quartile_low_us:.1f}–{arm.quartile_high_us:.1f}"
        row[f"{arm.arm} µs (quartiles)"] = f"{arm.median_us:.1f} ({spread})"
        row[f"{arm.arm} share of floor"] = f"{arm.floor_share:.0%}"
    if cell.ratio is not None:
        ratio = cell.ratio
        row["ratio to the better peer (95 %)"] = f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f}) {ratio.against}"
    row["floor µs"] = f"{cell.floor_us:.1f} {cell.floor_resource}"
    return row
