"""Warp-group matrix products (sm_90a): both operands in shared memory, sums in registers.

`wgmma.m64nNk16` of a warp group (four consecutive warps): warp w holds rows 16w .. 16w + 15 of the sums, in the
fragment layout of `mma.m16n8k16` (see `cute_mma`); operands are read through 64-bit descriptors of shared memory.
"""

from cutlass import Float32, Int32, cute

__all__ = ["accumulate_box"]

_SWIZZLE_128B = 1 << 30
"""Bits 62-63 of a descriptor, in its upper half."""
_EIGHT_ROWS = 1024 >> 4
"""Bits 32-45: distance of groups of eight rows, in units of 16 bytes."""


def accumulate_box(sums: list, a: Int32, b: Int32, *, columns: int) -> tuple:
    """Sums + A B of a box of 64 k; returns when they are complete. All threads of a warp group.

    Args:
        sums: columns / 2 Float32: for each 8 columns the registers (c0, c1, c2, c3) of `mma.m16n8k16`.
        a: shared address, aligned to 1024: 64 rows of 64 k, with 128-byte swizzle.
        b: likewise, `columns` rows.
        columns: N, a multiple of 8 up to 256.

    Returns:
        The new sums.
    """
    registers = ", ".join(f"{{$w{i}}}" for i in range(columns // 2))
    code = ["{ .reg .b64 a, b; .reg .b32 low;"]
    code += [f"mov.f32 {{$w{i}}}, {{$r{2 + i}}};" for i in range(columns // 2)]
    code.append("wgmma.fence.sync.aligned;")
    for name, register in (("a", "{$r0}"), ("b", "{$r1}")):
        code += [
            f"bfe.u32 low, {register}, 4, 14;",
            f"or.b32 low, low, {1 << 16};",
            f"mov.b64 {name}, {{low, {_SWIZZLE_128B | _EIGHT_ROWS}}};",
        ]
    product = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{registers}}}, a, b, 1, 1, 1, 0, 0;"
    code.append(" add.s64 a, a, 2; add.s64 b, b, 2; ".join([product] * 4))
    code.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }")
    return cute.arch.inline_ptx(
        " ".join(code), write_only_types=[Float32] * (columns // 2), read_only_args=[a, b, *sums]
    )
