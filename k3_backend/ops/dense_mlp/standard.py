"""Dense SiTU MLP as stock serving runs it: merged gate/up product, activation, down product."""

from __future__ import annotations

from torch import Tensor

from k3_backend.ops.eager import linear, situ
from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """From x [M, D], w_gate_up [2 I, D], w_down [D, I] to out [M, D], all bf16."""
    hidden = situ(linear(need(t, "x"), need(t, "w_gate_up")), a["beta"], a["linear_beta"])
    return {"out": linear(hidden, need(t, "w_down"))}
