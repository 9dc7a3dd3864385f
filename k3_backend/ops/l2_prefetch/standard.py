"""L2 prefetch as stock serving runs it: not at all. Weights are read when they are needed."""

from __future__ import annotations

from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """No outputs and no states.

    Args:
        t: weights [M, 16384] uint8.
        a: none.
    """
    del a
    need(t, "weights")
    return {}
