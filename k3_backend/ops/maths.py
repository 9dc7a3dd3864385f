"""Formulas that several references share, in any floating type, and the one way in which they round to bf16.

References compute in fp64 or fp32 and round only where the op's interface says so; `Rounding` makes both kinds of
reference (with the op's roundings, or exact maths) the same code. Nothing here is meant to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["Attributes", "Rounding", "Tensors", "need", "rms_norm", "round_bf16", "rounding_to_bf16", "situ"]

Tensors = Mapping[str, Tensor | None]
"""Arguments of an op by `TensorSpec` name."""
Attributes = Mapping[str, int | float]
"""Attributes of an op by `AttrSpec` name."""
Rounding = Callable[[Tensor], Tensor]
"""Rounds to bf16 values and keeps the type, or leaves its argument alone."""

_SIGNIFICANT_BITS = 8
_LEAST_EXPONENT = -126


def need(t: Tensors, name: str) -> Tensor:
    """A tensor that this call cannot do without.

    Raises:
        ValueError: it is absent.
    """
    tensor = t.get(name)
    if tensor is None:
        raise ValueError(f"op argument {name!r}: absent; expected a tensor for these attributes; next: bind it")
    return tensor


def round_bf16(x: Tensor) -> Tensor:
    """X rounded once to the nearest bf16 value (ties to even), in the type of x.

    A plain cast of fp64 goes through fp32 and so rounds twice; this does not.
    """
    if x.dtype != torch.float64:
        return x.to(torch.bfloat16).to(x.dtype)
    # frexp gives |mantissa| in [0.5, 1): the last of 8 significant bits weighs 2^(exponent - 8), and no less than the
    # smallest subnormal, 2^-133.
    _, exponent = torch.frexp(x)
    last_bit = exponent.clamp(min=_LEAST_EXPONENT + 1) - _SIGNIFICANT_BITS
    rounded = torch.ldexp(torch.round(torch.ldexp(x, -last_bit)), last_bit)
    overflow = rounded.abs() > torch.finfo(torch.bfloat16).max
    rounded = torch.where(overflow, torch.copysign(torch.full_like(x, torch.inf), x), rounded)
    return torch.where(torch.isfinite(x), rounded, x)


def rounding_to_bf16(enabled: bool) -> Rounding:
    """`round_bf16`, or the identity."""
    return round_bf16 if enabled else lambda x: x


def rms_norm(v: Tensor, weight: Tensor, eps: float) -> Tensor:
    """V * rsqrt(mean(v^2) + eps) * weight over the last dimension, unrounded."""
    return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU: beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta), unrounded.

    A linear_beta <= 0 leaves u unbounded.
    """
    bounded_up = linear_beta * torch.tanh(up / linear_beta) if linear_beta > 0 else up
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded_up
