"""Steps that take whole rows of `proj`: the latent's norm and cache insert, and q_a's norm as a launch of its own."""

import cutlass
from cutlass import Float32, Int32, cute
from kernels.common.cute_mma import load_weight_16b, pack_bf16x2, unpack_bf16x2, warp_sum
from kernels.mla_query.steps import load_16b, store_4b, store_16b, sum_of_squares

__all__ = ["insert_rows", "norm_rows"]


@cute.jit
def _scaled(packed: tuple, weights: tuple, scale: Float32) -> list:
    """Eight values times scale times weight, each rounded once."""
    out = []
    for i in cutlass.range_constexpr(4):
        x, y = unpack_bf16x2(packed[i])
        v, w = unpack_bf16x2(weights[i])
        out.append(pack_bf16x2(x * scale * v, y * scale * w))
    return out


@cute.jit
def insert_rows(
    proj: cute.Pointer,
    kv_norm: cute.Pointer,
    slot_mapping: cute.Pointer,
    kv_cache: cute.Pointer,
    rows: Int32,
    eps: Float32,
    first: Int32,
    step: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """A warp per token first, first + step, ...: latent normalised, pe as it is, to the token's slot if it has one."""
    lane = cute.arch.lane_idx()
    parts = plan.kv_lora // 256
    norm = [load_weight_16b(kv_norm + (256 * part + 8 * lane)) for part in range(parts)]
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    slots = cute.make_tensor(slot_mapping, cute.make_layout(rows))
    for token in cutlass.range(first, rows, step, unroll=1):
        slot = slots[token]
        source = proj + (token * plan.proj_row + plan.q_lora + 8 * lane)
        latent = [load_16b(source + 256 * part) for part in range(parts)]
        total = Float32(0.0)
        for part in cutlass.range_constexpr(parts):
            total = sum_of_squares(total, latent[part])
        scale = cute.math.rsqrt(warp_sum(total) * (1.0 / plan.kv_lora) + eps)
        if slot >= 0:
            target = kv_cache + (slot * plan.row + 8 * lane)
            for part in cutlass.range_constexpr(parts):
                store_16b(target + 256 * part, _scaled(latent[part], norm[part], scale))
            if lane < plan.pe // 8:
                store_16b(target + plan.kv_lora, load_16b(source + plan.kv_lora))


@cute.jit
def norm_rows(
    proj: cute.Pointer,
    q_norm: cute.Pointer,
    c: cute.Pointer,
    rows: Int32,
    eps: Float32,
    first: Int32,
    step: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """A warp per token first, first + step, ...: c [rows, q_lora] = bf16(q_a w / rms).

    Within a chunk of 32 k, pair 8t + 2j of c lies at 8j + 2t: ldmatrix then hands lane t the k that its weights have.
    """
    lane = cute.arch.lane_idx()
    parts = plan.q_lora // 256
    norm = [load_weight_16b(q_norm + (256 * part + 8 * lane)) for part in range(parts)]
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    for token in cutlass.range(first, rows, step, unroll=1):
        source = proj + (token * plan.proj_row + 8 * lane)
        q_a = [load_16b(source + 256 * part) for part in range(parts)]
        sums = [Float32(0.0), Float32(0.0)]
        for part in cutlass.range_constexpr(parts):
            sums[part % 2] = sum_of_squares(sums[part % 2], q_a[part])
        scale = cute.math.rsqrt(warp_sum(sums[0] + sums[1]) * (1.0 / plan.q_lora) + eps)
        target = c + (token * plan.q_lora + 32 * (lane // 4) + 2 * (lane % 4))
        for part in cutlass.range_constexpr(parts):
            values = _scaled(q_a[part], norm[part], scale)
            for j in cutlass.range_constexpr(4):
                store_4b(target + 256 * part + 8 * j, values[j])
