"""Output projection, sum over ranks and prefix update in plain maths."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need, rounding_to_bf16

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """Prefix = y, or bf16(prefix + y), with y = bf16(sum over ranks of bf16(x_r W_r^T)).

    Args:
        t: x [ranks, M, KL], w [ranks, D, KL], prefix [M, D].
        a: restart.
        dtype: type of the computation and of the result.
        rounding: apply the bf16 roundings of the definition.

    Returns:
        prefix [M, D], the new value.
    """
    bf16 = rounding_to_bf16(rounding)
    partial = bf16(need(t, "x").to(dtype) @ need(t, "w").to(dtype).transpose(1, 2))
    y = bf16(partial.sum(0))
    return {"prefix": y if a["restart"] else bf16(need(t, "prefix").to(dtype) + y)}
