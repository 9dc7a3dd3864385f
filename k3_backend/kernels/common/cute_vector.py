"""16 bytes per lane, in registers as tuples; asynchronous copies into shared memory; values for other blocks.

Loads and stores of global memory keep their place behind the dependency wait that precedes them in the source. Weights
have loads of their own (`cute_mma.load_weight_16b`).
"""

from cutlass import Float32, Int32, cute

__all__ = [
    "copy_16b_async", "copy_box", "load_4xb32", "load_shared_4xb32", "load_shared_4xf32", "send_f32", "store_4xb32",
    "store_4xf32", "store_4xf32_once", "store_8b", "store_shared_4xf32",
]  # fmt: skip


@cute.jit
def load_4xb32(pointer: cute.Pointer) -> tuple:
    """16 bytes of an activation or state as four Int32."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer],
    )


@cute.jit
def store_4xf32(pointer: cute.Pointer, values: tuple) -> None:
    """Four consecutive Float32."""
    cute.arch.inline_ptx("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *values])


@cute.jit
def store_4xf32_once(pointer: cute.Pointer, values: tuple) -> None:
    """As `store_4xf32`, of values that nobody reads soon: their lines leave L2 first (evict_first, all of them)."""
    cute.arch.inline_ptx(
        "{ .reg .b64 policy; mov.b64 policy, 0x12F0000000000000; "
        "st.global.L2::cache_hint.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, policy; }",
        read_only_args=[pointer, *values],
    )


@cute.jit
def store_4xb32(pointer: cute.Pointer, values: tuple) -> None:
    """16 bytes from four Int32."""
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *values])


@cute.jit
def store_8b(pointer: cute.Pointer, low: Int32, high: Int32) -> None:
    """Two registers, four bf16."""
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[pointer, low, high])


@cute.jit
def store_shared_4xf32(address: Int32, values: tuple) -> None:
    """Four consecutive Float32 to shared memory, by its 32-bit address."""
    cute.arch.inline_ptx("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


@cute.jit
def send_f32(target: Int32, value: Float32, barrier: Int32) -> None:
    """A Float32 to another block's shared memory, by mapped address; completes four bytes on that block's barrier."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[target, value, barrier],
    )


@cute.jit
def copy_16b_async(target: Int32, source: cute.Pointer) -> None:
    """16 bytes from global memory to a shared address (cp.async, past L1); part of the group that is committed next."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source])


@cute.jit
def load_shared_4xf32(address: Int32) -> tuple:
    """Four consecutive Float32 of shared memory, by its 32-bit address."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_shared_4xb32(address: Int32) -> tuple:
    """16 bytes of shared memory, by its 32-bit address, as four Int32."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


@cute.jit
def copy_box(target: Int32, tensor_map: cute.Pointer, column: Int32, row: Int32, barrier: Int32) -> None:
    """A TMA box, from (row, column) on, to shared memory; completes its bytes on the barrier."""
    cute.arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}}], [{$r4}];",
        read_only_args=[target, tensor_map, column, row, barrier],
    )
