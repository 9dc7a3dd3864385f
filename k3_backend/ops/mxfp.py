"""Block-scaled number formats of the routed experts: MXFP4 weights and MXFP8 activations.

Both share one power-of-two scale per 32 consecutive elements along K, stored as a UE8M0 byte (value 2^(s - 127),
255 is NaN). The element layouts here are the plain ones of a checkpoint; kernels may permute their own copies.
Source of the formats: OCP Microscaling Formats (MX) Specification 1.0. The scale rules R and F are explained in
`docs/model.md`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "E2M1",
    "dequantise_mxfp4",
    "dequantise_mxfp8",
    "mxfp8_scale",
    "quantise_mxfp4",
    "quantise_mxfp8",
    "ue8m0_value",
]

BLOCK = 32
"""Elements that share one scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0..7; code 8 + c is the negative of code c."""
E4M3_MAX = 448.0
ScaleRule = Literal["R", "F"]


def ue8m0_value(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(s - 127) of UE8M0 bytes, NaN for 255.

    Args:
        scale: any shape, u8.
        dtype: result type; float32 and float64 represent every scale exactly, bfloat16 too (2^-127 as a subnormal).
    """
    exponent = scale.to(torch.int32) - 127
    value = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    return torch.where(scale == 255, torch.nan, value).to(dtype)


def _blocks(x: Tensor) -> Tensor:
    if x.shape[-1] % BLOCK:
        raise ValueError(
            f"MX quantisation: last dimension {x.shape[-1]}; expected a multiple of {BLOCK}; next: pad the K dimension"
        )
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def _float32_fields(x: Tensor) -> tuple[Tensor, Tensor]:
    """Biased exponent (i32, 0..255) and mantissa fraction in [0, 1) (f32) of float32 magnitudes."""
    bits = x.float().contiguous().view(torch.int32)
    return (bits >> 23) & 0xFF, (bits & 0x7FFFFF).float() / float(1 << 23)


def quantise_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights to E2M1 with one UE8M0 scale per 32 along the last dimension.

    The scale is the smallest power of two at which the block's largest magnitude loses at most half a step of the
    format's top interval (scaled maximum <= 7, which rounds to 6). Elements round to nearest, ties to the even code.

    Args:
        w: [..., K], finite, K a multiple of 32.

    Returns:
        packed [..., K // 2] u8, element 2i in the low nibble of byte i; scales [..., K // 32] u8.

    Raises:
        ValueError: K is not a multiple of 32, or an element is not finite.
    """
    if not bool(torch.isfinite(w).all()):
        raise ValueError(
            "MXFP4 quantisation: a weight is not finite; expected finite weights; next: check the checkpoint"
        )
    blocks = _blocks(w.float())
    exponent, fraction = _float32_fields(blocks.abs().amax(-1))
    scale = (exponent - 2 + (fraction > 0.75).int()).clamp(0, 254)
    scale = torch.where(exponent == 0, 0, scale)
    scaled = torch.ldexp(blocks.double(), (127 - scale).unsqueeze(-1)).flatten(-2)
    magnitude = scaled.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for lower in range(7):
        middle = (E2M1[lower] + E2M1[lower + 1]) / 2
        code += (magnitude > middle) if lower % 2 == 0 else (magnitude >= middle)
    code |= torch.signbit(scaled).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4), scale.to(torch.uint8)


@lru_cache(maxsize=8)
def _pair_table(dtype: torch.dtype) -> Tensor:
    """[256, 2]: the two elements of every packed byte, low nibble first."""
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=dtype)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], -1)


def dequantise_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of MXFP4 weights; exact in bfloat16 and wider types.

    Args:
        packed: [..., K // 2] u8, element 2i in the low nibble.
        scale: [..., K // 32] u8.
        dtype: result type.

    Returns:
        [..., K] in dtype; a block whose scale is 255 is NaN.
    """
    elements = _pair_table(dtype)[packed.int()].flatten(-2)
    return (_blocks(elements) * ue8m0_value(scale, dtype).unsqueeze(-1)).flatten(-2)


def mxfp8_scale(block_max: Tensor, rule: ScaleRule) -> Tensor:
    """UE8M0 scale byte of an MXFP8 block from its largest magnitude.

    With e the biased float32 exponent of the maximum and frac its mantissa fraction:
    rule R: s = clamp(e - 8 + [frac > 0.75], 0, 254), and 0 when e = 0; the scaled maximum never exceeds 448.
    rule F: s = e - 8 if e > 8 else 0, and 254 when e = 255; scaled values in (448, 512) saturate.

    Args:
        block_max: any shape, f32, >= 0.
        rule: which rule; activations entering the experts use R, hidden values F or R depending on the layout.

    Returns:
        u8 of the same shape.
    """
    exponent, fraction = _float32_fields(block_max)
    if rule == "R":
        scale = (exponent - 8 + (fraction > 0.75).int()).clamp(0, 254)
        return torch.where(exponent == 0, 0, scale).to(torch.uint8)
    scale = torch.where(exponent > 8, exponent - 8, 0)
    return torch.where(exponent == 255, 254, scale).to(torch.uint8)


def quantise_mxfp8(x: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Quantise activations to E4M3 (nearest even, saturating at 448) with one scale per 32 along the last dimension.

    Args:
        x: [..., K], K a multiple of 32.
        rule: scale rule, see `mxfp8_scale`.

    Returns:
        elements [..., K] float8_e4m3fn and scales [..., K // 32] u8.
    """
    blocks = _blocks(x.float())
    scale = mxfp8_scale(blocks.abs().amax(-1), rule)
    scaled = torch.ldexp(blocks.double(), (127 - scale.int()).unsqueeze(-1))
    elements = scaled.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
    return elements.flatten(-2), scale


def dequantise_mxfp8(elements: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of an MXFP8 tensor: [..., K] elements with [..., K // 32] scales."""
    return (_blocks(elements.to(dtype)) * ue8m0_value(scale, dtype).unsqueeze(-1)).flatten(-2)
