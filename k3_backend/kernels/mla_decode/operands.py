"""Operands of the matrix products: bf16 for a bf16 cache, f16 for an E4M3 cache.

Every E4M3 value is an f16 value, and the machine converts in one step; bf16 would take three more. The query then is
f16 as well: its elements keep all digits from 2^-14 to 65504 and saturate beyond (values of E4M3 end at 448). P is
multiplied by 2^15, so that weights down to 2^-29 of the largest keep all digits and a long tail of small ones is not
lost; what `gain` multiplies the sums by takes it back.
"""

from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import mma_m16n8k16, pack_bf16x2, unpack_bf16x2

__all__ = ["P_SCALE", "f16_of_bf16", "f16_of_e4m3", "multiply", "pack_p"]

P_SCALE = 2.0**15
"""Of P in f16."""


def multiply(acc: tuple, a: tuple, b: tuple, plan: object) -> tuple:
    """D = acc + A B of fragments m16n8k16, in the operands' format."""
    return _mma_f16(acc, a, b) if plan.e4m3 else mma_m16n8k16(acc, a, b)


@cute.jit
def _mma_f16(acc: tuple, a: tuple, b: tuple) -> tuple:
    """As `mma_m16n8k16`, with f16 operands."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *acc],
    )


def pack_p(low: Float32, high: Float32, plan: object) -> Int32:
    """Two weights of the softmax."""
    return _pack_f16x2(low * P_SCALE, high * P_SCALE) if plan.e4m3 else pack_bf16x2(low, high)


@cute.jit
def _pack_f16x2(low: Float32, high: Float32) -> Int32:
    """Two Float32 rounded to nearest-even f16 in one register, saturated; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "cvt.rn.satfinite.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


@cute.jit
def f16_of_bf16(pair: Int32) -> Int32:
    """A register of bf16 as f16."""
    low, high = unpack_bf16x2(pair)
    return _pack_f16x2(low, high)


@cute.jit
def f16_of_e4m3(word: Int32) -> tuple:
    """Four E4M3 values as two registers of f16: exact; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 x, y; mov.b32 {x, y}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, x; cvt.rn.f16x2.e4m3x2 {$w1}, y; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )
