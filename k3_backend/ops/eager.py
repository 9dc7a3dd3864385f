"""Building blocks of the standard path: bf16 torch on the CPU, the fastest honest eager form of each.

What is fastest was measured on 2 cores (`docs/model.md` names the command); nothing here knows about ops or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["holds_for_all", "linear", "rms_norm", "situ"]


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Product x [M, K] bf16 @ w [N, K]^T -> [M, N] bf16, fp32 accumulation.

    A single row goes through the matrix-vector product, which skips the packing that functional.linear pays for.
    """
    if x.shape[0] == 1:
        return torch.mv(w, x[0]).unsqueeze(0)
    return functional.linear(x, w)


def rms_norm(v: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16(v * rsqrt(mean(v^2) + eps) * weight) over the last dimension, computed in fp32.

    Args:
        v: [..., D] f32 or bf16.
        weight: [D] bf16.
        eps: epsilon.
    """
    return functional.rms_norm(v.float(), (v.shape[-1],), weight.float(), eps).to(torch.bfloat16)


def situ(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """bf16(f(gate, up)), computed in fp32; the first half of the columns is the gate.

    Args:
        gate_up: [..., 2 I] bf16.
        beta: SiTU beta.
        linear_beta: SiTU linear beta; <= 0 leaves u unbounded.
    """
    gate, up = (half.float() for half in gate_up.chunk(2, -1))
    f = torch.tanh(gate / beta).mul_(torch.sigmoid(gate))
    if linear_beta > 0:
        return f.mul_(up.div_(linear_beta).tanh_()).mul_(beta * linear_beta).to(torch.bfloat16)
    return f.mul_(up).mul_(beta).to(torch.bfloat16)


def holds_for_all(condition: Tensor) -> bool:
    """Whether a condition on the batch is known to hold everywhere, so that masking can be skipped.

    Reads the tensor in eager mode. Under torch.compile the answer is False: a host read would break the graph.
    """
    return not torch.compiler.is_compiling() and bool(condition.all())
