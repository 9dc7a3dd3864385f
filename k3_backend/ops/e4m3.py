"""FP8 E4M3 cache rows: one byte per element and one scale per cache, in exact maths and as torch does it.

Source: OCP FP8 formats (1 sign, 4 exponent, 3 mantissa bits, bias 7, largest finite value 448, no infinity). A cached
element is E4M3(row / scale), to nearest even and saturated; its value is byte * scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["E4M3_MAX", "round_e4m3", "to_e4m3"]

E4M3_MAX = 448.0
_SIGNIFICANT_BITS = 4
_LEAST_EXPONENT = -6
"""Of normal numbers; subnormal ones are multiples of 2^-9."""


def round_e4m3(x: Tensor) -> Tensor:
    """X rounded once to the nearest E4M3 value (ties to even, saturated at 448), in the type of x; NaN stays NaN."""
    # frexp gives |mantissa| in [0.5, 1): the last of 4 significant bits weighs 2^(exponent - 4).
    _, exponent = torch.frexp(x)
    last_bit = exponent.clamp(min=_LEAST_EXPONENT + 1) - _SIGNIFICANT_BITS
    return torch.ldexp(torch.round(torch.ldexp(x, -last_bit)), last_bit).clamp(-E4M3_MAX, E4M3_MAX)


def to_e4m3(x: Tensor) -> Tensor:
    """X as `torch.float8_e4m3fn`, saturated; torch's own cast turns what is too large into NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
