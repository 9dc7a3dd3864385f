"""Warp-level pieces of small matrix products: bf16 m16n8k16 on packed registers, 16-byte loads, bf16 pairs, sums.

Fragments are packed 32-bit registers (two bf16, the lower index in the lower half), named as PTX does for
`mma.m16n8k16`, with g = lane / 4 and t = lane % 4:

    A [16, 16]   a0 (row g, k 2t)   a1 (row g + 8, k 2t)   a2 (row g, k 2t + 8)   a3 (row g + 8, k 2t + 8)
    B [16, 8]    b0 (k 2t, column g)   b1 (k 2t + 8, column g)
    C [16, 8]    c0, c1 (row g, columns 2t, 2t + 1)   c2, c3 (row g + 8, the same columns)

A sum over k may run in any order as long as both operands agree. Let lane t own k = 8t .. 8t + 7 of a chunk of 32: one
16-byte load of a row then yields, in order, the registers (a0, a2) of one MMA and (a0, a2) of the next, and the same
load of the other operand's row yields (b0, b1) twice. Neither operand passes through ldmatrix or a transposition.
The machine wants the registers of a fragment side by side: weights as B need no moves, weights as A do (two rows mix).
"""

import cutlass
from cutlass import Float32, Int32, cute

__all__ = [
    "load_shared_8b", "load_weight_16b", "matrix_transposed_x4", "matrix_x4", "mma_m16n8k16",
    "pack_bf16x2", "store_shared_8b", "unpack_bf16x2", "warp_sum",
]  # fmt: skip


@cute.jit
def mma_m16n8k16(acc: tuple, a: tuple, b: tuple) -> tuple:
    """D = acc + A B: four Float32 from four Float32, four Int32 (A) and two Int32 (B) per lane."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *acc],
    )


@cute.jit
def load_weight_16b(pointer: cute.Pointer) -> tuple:
    """16 bytes of a constant tensor as four Int32, not kept in L1. May precede the PDL wait.

    Not `ld.global.nc`: ptxas holds such loads to be independent of `griddepcontrol.wait` and sinks them below it.
    """
    return cute.arch.inline_ptx(
        "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer],
    )


@cute.jit
def load_shared_8b(address: Int32) -> tuple:
    """8 bytes at an address of shared memory as two Float32."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


@cute.jit
def store_shared_8b(address: Int32, low: Float32, high: Float32) -> None:
    """Two Float32 to an address of shared memory."""
    cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, low, high])


@cute.jit
def matrix_x4(address: Int32) -> tuple:
    """Four 8 x 8 bf16 matrices: lane L gives the address of row L % 8 of matrix L / 8 (16 bytes of shared memory);
    register j of lane (g, t) holds columns 2t, 2t + 1 of row g of matrix j.
    """
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


@cute.jit
def matrix_transposed_x4(address: Int32) -> tuple:
    """Four 8 x 8 bf16 matrices, transposed: lane L gives the address of row L % 8 of matrix L / 8 (16 bytes of shared
    memory); register j of lane (g, t) holds rows 2t, 2t + 1 of column g of matrix j.
    """
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


@cute.jit
def unpack_bf16x2(pair: Int32) -> tuple:
    """(lower, upper) bf16 of a register as Float32; exact."""
    low = cute.arch.inline_ptx("shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Float32], read_only_args=[pair])
    high = cute.arch.inline_ptx("and.b32 {$w0}, {$r0}, 0xffff0000;", write_only_types=[Float32], read_only_args=[pair])
    return low, high


@cute.jit
def pack_bf16x2(low: Float32, high: Float32) -> Int32:
    """Two Float32 rounded to nearest-even bf16 in one register, `low` in the lower half."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


@cute.jit
def warp_sum(value: Float32, width: cutlass.Constexpr = 32) -> Float32:
    """Sum over aligned groups of `width` lanes, in a fixed order; every lane gets it."""
    for step in cutlass.range_constexpr(width.bit_length() - 1):
        value += cute.arch.shuffle_sync_bfly(value, offset=1 << step)
    return value
