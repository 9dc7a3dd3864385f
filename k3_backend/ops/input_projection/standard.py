"""Attention input projection as stock serving runs it: one bf16 matrix product."""

from __future__ import annotations

from torch import Tensor

from k3_backend.ops.eager import linear
from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:  # noqa: ARG001 - every standard has the same signature
    """Returns out [M, N] = x [M, D] @ w [N, D]^T, bf16."""
    return {"out": linear(need(t, "x"), need(t, "w"))}
