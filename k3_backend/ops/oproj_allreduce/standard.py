"""Output projection as stock serving runs it: a product per rank, the all-reduce, then the residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.eager import linear
from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Updates prefix [M, D] in place; returns nothing else.

    Args:
        t: x [ranks, M, KL], w [ranks, D, KL], prefix [M, D], all bf16.
        a: restart.
    """
    x, w, prefix = need(t, "x"), need(t, "w"), need(t, "prefix")
    if x.shape[0] == 1:
        y = linear(x[0], w[0])
    else:
        y = torch.bmm(x, w.transpose(1, 2)).sum(0, dtype=torch.float32).to(torch.bfloat16)
    if a["restart"]:
        prefix.copy_(y)
    else:
        prefix.add_(y)
    return {}
