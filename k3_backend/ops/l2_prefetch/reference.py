"""L2 prefetch in plain maths: it computes nothing and changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """No outputs and no states.

    Args:
        t: weights [M, 16384] uint8.
        a: none.
        dtype: of results, of which there are none.
        rounding: likewise.
    """
    del a, dtype, rounding
    need(t, "weights")
    return {}
