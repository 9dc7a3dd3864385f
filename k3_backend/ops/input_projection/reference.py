"""Attention input projection in plain maths."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need, rounding_to_bf16

__all__ = ["reference"]


def reference(
    t: Tensors,
    a: Attributes,  # noqa: ARG001 - every reference has the same signature
    dtype: torch.dtype = torch.float64,
    rounding: bool = True,
) -> dict[str, Tensor]:
    """Out [M, N] = x [M, D] @ w [N, D]^T, rounded once.

    Args:
        t: x [M, D], w [N, D].
        a: none.
        dtype: type of the computation and of the result.
        rounding: apply the bf16 rounding of the definition.
    """
    bf16 = rounding_to_bf16(rounding)
    return {"out": bf16(need(t, "x").to(dtype) @ need(t, "w").to(dtype).T)}
