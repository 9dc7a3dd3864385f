"""GPU architectures that artifacts are built for: what the assembler is told, and whose schedules apply.

Limits are those of the CUDA programming guide's table of compute capabilities; the builder refuses a launch beyond
them, and the audit compares registers and shared memory with the occupancy that a launch claims.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARCHS", "Arch"]


@dataclass(frozen=True)
class Arch:
    """One compute capability with its architecture-specific instructions."""

    name: str
    """As the assembler spells it."""
    schedules: str
    """Folder below `k3_backend/schedules` that holds the tuned tables."""
    compute_capability: tuple[int, int]
    max_shared_per_block: int = 227 * 1024
    """Bytes of dynamic shared memory that one block may ask for."""


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_90a", "h200", (9, 0)),
        Arch("sm_100a", "gb300", (10, 0)),
        Arch("sm_103a", "gb300", (10, 3)),
    )
}
