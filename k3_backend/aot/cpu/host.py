"""CPU architecture levels: the compiler flags that define each, and which of them this machine can run.

Levels are fixed sets of instructions (never `native`), so that an artifact's digest does not depend on the machine that
built it. The module decides nothing about kernels; it only answers "can this host run that level".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["ARCHS", "Arch", "best_arch", "host_cpu_flags", "runnable_archs"]


@dataclass(frozen=True)
class Arch:
    """One architecture level."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    """Names in /proc/cpuinfo that a host must report."""


_V3 = frozenset({
    "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave",
    "cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2",
})  # fmt: skip
_V4_BF16 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16"}
_V4_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16")

ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch(
            "x86-64-v4-amx",
            (*_V4_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"),
            _V4_BF16 | {"amx_tile", "amx_bf16"},
        ),
        Arch("x86-64-v4-bf16", _V4_BF16_FLAGS, _V4_BF16),
        Arch("x86-64-v3", ("-march=x86-64-v3",), _V3),
    )
}
"""Known levels, best first. CPU flag sets follow the x86-64 psABI's level definitions."""


@lru_cache(maxsize=1)
def host_cpu_flags() -> frozenset[str]:
    """Instruction-set flags of the first processor in /proc/cpuinfo; empty where the file has none (not x86 Linux)."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return frozenset()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def runnable_archs(cpu_flags: frozenset[str] | None = None) -> tuple[str, ...]:
    """Levels that a CPU with these flags (default: this host) can run, best first."""
    flags = host_cpu_flags() if cpu_flags is None else cpu_flags
    return tuple(name for name, arch in ARCHS.items() if arch.cpu_flags <= flags)


def best_arch(available: Iterable[str], cpu_flags: frozenset[str] | None = None) -> str | None:
    """The best level among `available` that the host can run, or None."""
    offered = set(available)
    return next((name for name in runnable_archs(cpu_flags) if name in offered), None)
