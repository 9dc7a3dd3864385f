"""Dense SiTU MLP in plain maths."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need, rounding_to_bf16, situ

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """Out = bf16(W_down bf16(f(bf16(W_g x), bf16(W_u x)))).

    Args:
        t: x [M, D], w_gate_up [2 I, D] (gate rows first), w_down [D, I].
        a: beta, linear_beta.
        dtype: type of the computation and of the result.
        rounding: apply the bf16 roundings of the definition.
    """
    bf16 = rounding_to_bf16(rounding)
    gate_up = bf16(need(t, "x").to(dtype) @ need(t, "w_gate_up").to(dtype).T)
    gate, up = gate_up.chunk(2, -1)
    hidden = bf16(situ(gate, up, a["beta"], a["linear_beta"]))
    return {"out": bf16(hidden @ need(t, "w_down").to(dtype).T)}
