"""Names the L2 cache policy of an access.

ptxas turns `createpolicy` and `.L2::cache_hint` into a descriptor in a pair of uniform registers; without a hint the
descriptor is the driver's, read from constant bank 0. The upper word's top bits name the primary priority; the values
are those that `createpolicy` yields in SASS for sm_90a and sm_103a and that CUTLASS uses for TMA (`TMA::CacheHintSm90`:
EVICT_NORMAL 0x1000000000000000, EVICT_FIRST 0x12F0000000000000, EVICT_LAST 0x14F0000000000000).
"""

from __future__ import annotations

from verify.gates.audit.cuda.values import Origins, Value

__all__ = ["of_descriptor", "of_opcode"]

_FULL = 0xF
_NAMES = {0x10: "evict_normal", 0x12: "evict_first", 0x14: "evict_last", 0x16: "evict_unchanged"}
_SUFFIXES = {
    "EL": "l1_evict_last", "EF": "l1_evict_first", "EU": "l1_evict_unchanged", "NA": "l1_no_allocate",
    "LU": "l1_last_use",
}  # fmt: skip


def of_descriptor(pair: tuple[Value, Value], origins: Origins) -> str | None:
    """None for the driver's own descriptor; `unknown` where the value is not a constant."""
    low, high = pair
    if low is high and low[1] is not None:
        high = (high[0], low[1] >> 32)  # PTX keeps the policy in one 64-bit register.
    bits = low[0] | high[0]
    if bits == origins.driver:
        return None
    if bits or high[1] is None:
        return "unknown"
    word = high[1]
    name = _NAMES.get(word >> 24)
    if name is None:
        return f"fractional_or_range_{word >> 24:#x}"
    if name != "evict_normal" and word >> 20 & 0xF != _FULL:
        return f"{name}_fractional"
    return name


def of_opcode(opcode: str) -> list[str]:
    """Hints that stand in the opcode itself."""
    modifiers = opcode.split(".")[1:]
    found = [name for suffix, name in _SUFFIXES.items() if suffix in modifiers]
    if opcode.startswith("CCTL") and "PML2" in modifiers:
        found.append("prefetch_evict_last")
    if opcode.startswith("CCTL") and "DML2" in modifiers:
        found.append("applypriority")
    if "L2::evict_last" in modifiers and not opcode.startswith("createpolicy"):
        found.append("prefetch_evict_last")
    return found + [f"l1_{m.removeprefix('L1::')}" for m in modifiers if m.startswith("L1::")]
