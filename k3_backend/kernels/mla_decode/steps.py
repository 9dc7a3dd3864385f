"""What several roles of the kernel need: base-2 exponentials, maxima, the consumers' barrier."""

import cutlass
from cutlass import Float32, cute
from kernels.mla_decode.plan import CONSUMERS, NEG_INF

__all__ = ["consumer_barrier", "exp2", "finite_base", "log2", "warp_max"]


@cute.jit
def exp2(x: Float32) -> Float32:
    """2^x by ex2.approx; 0 for -inf."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def log2(x: Float32) -> Float32:
    """lg2.approx; -inf for 0."""
    return cute.arch.inline_ptx("lg2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def finite_base(maximum: Float32) -> Float32:
    """What to subtract in the exponent: the maximum, or 0 where nothing has been seen (-inf - -inf is NaN)."""
    base = maximum
    if maximum == NEG_INF:
        base = Float32(0.0)
    return base


@cute.jit
def warp_max(value: Float32) -> Float32:
    """Maximum over a warp; every lane gets it."""
    for step in cutlass.range_constexpr(5):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1 << step))
    return value


@cute.jit
def consumer_barrier() -> None:
    """All consumer warps."""
    cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
