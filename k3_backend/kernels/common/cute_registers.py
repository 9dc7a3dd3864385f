"""Packed registers: four Int32 with eight bf16 values, between memory, shared memory and fp32 arithmetic.

Loads of activations and states carry a predicate on the load itself, instead of a branch around it, so that many are in
flight together; they are volatile and stay behind the dependency wait that precedes them in the source.
"""

import cutlass
from cutlass import Boolean, Int32, cute
from kernels.common.cute_mma import pack_bf16x2, unpack_bf16x2

__all__ = ["load_4b_if", "load_16b_if", "pack", "park_16b", "unpack"]


@cute.jit
def load_4b_if(pointer: cute.Pointer, wanted: Boolean) -> Int32:
    """Four bytes of an activation or state; 0, and no access, where not wanted."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Int32],
        read_only_args=[pointer, Int32(wanted)],
    )


@cute.jit
def load_16b_if(pointer: cute.Pointer, wanted: Boolean, absent: cutlass.Constexpr = 0) -> tuple:
    """16 bytes of an activation or state; four times the word `absent`, and no access, where not wanted."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; "
        f"mov.b32 {{$w0}}, {absent}; mov.b32 {{$w1}}, {absent}; mov.b32 {{$w2}}, {absent}; mov.b32 {{$w3}}, {absent}; "
        "@p ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer, Int32(wanted)],
    )


@cute.jit
def park_16b(pointer: cute.Pointer, words) -> None:
    """Four registers to shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer.toint(), *words]
    )


def unpack(words) -> list:
    """The values of packed registers as Float32, in memory order; exact."""
    return [value for word in words for value in unpack_bf16x2(word)]


def pack(values) -> list:
    """Float32 values rounded to nearest-even bf16, two per register."""
    return [pack_bf16x2(low, high) for low, high in zip(values[::2], values[1::2], strict=True)]
