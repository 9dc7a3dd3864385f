"""Block-scaled formats: values at the boundaries of each rule, and round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_backend.ops.mxfp import (
    E2M1,
    dequantise_mxfp4,
    dequantise_mxfp8,
    mxfp8_scale,
    quantise_mxfp4,
    quantise_mxfp8,
    ue8m0_value,
)


def _block(first: float, *rest: float) -> torch.Tensor:
    values = [first, *rest]
    return torch.tensor([values + [0.0] * (32 - len(values))])


def test_ue8m0_is_a_power_of_two_and_255_is_nan() -> None:
    """A scale read with a wrong bias is off by a factor of two everywhere."""
    scale = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)
    value = ue8m0_value(scale, torch.float64)
    assert value[:6].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert torch.isnan(value[6])
    assert ue8m0_value(scale[:1], torch.bfloat16).item() == 2.0**-127


def test_mxfp4_stores_even_elements_in_the_low_nibble() -> None:
    """Swapped nibbles exchange neighbouring weights."""
    packed, scale = quantise_mxfp4(_block(6.0, -1.5, 0.5, 0.0))
    assert scale.tolist() == [[127]]
    assert packed[0, :2].tolist() == [0x7 | 0xB << 4, 0x1]
    assert dequantise_mxfp4(packed, scale, torch.float32)[0, :4].tolist() == [6.0, -1.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.26, 0.5), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (5.01, 6.0)],
)
def test_mxfp4_rounds_to_nearest_with_ties_to_even(value: float, rounded: float) -> None:
    """Truncation or ties away from zero biases every weight."""
    packed, scale = quantise_mxfp4(_block(6.0, value, -value))
    assert dequantise_mxfp4(packed, scale, torch.float32)[0, 1:3].tolist() == [rounded, -rounded]


@pytest.mark.parametrize(
    ("largest", "scale"), [(6.0, 127), (7.0, 127), (7.1, 128), (4.0, 127), (3.9, 127), (3.6, 127), (3.5, 126)]
)
def test_mxfp4_scale_loses_at_most_half_a_step_at_the_top(largest: float, scale: int) -> None:
    """A scale one too small clips the largest weights of a block."""
    assert quantise_mxfp4(_block(largest))[1].item() == scale


def test_mxfp4_scale_255_dequantises_to_nan_and_zero_blocks_stay_zero() -> None:
    """A NaN scale must not turn into a large finite weight."""
    packed, scale = quantise_mxfp4(torch.zeros(1, 32))
    assert torch.equal(dequantise_mxfp4(packed, scale, torch.bfloat16), torch.zeros(1, 32, dtype=torch.bfloat16))
    assert torch.isnan(dequantise_mxfp4(packed, torch.full_like(scale, 255), torch.float32)).all()


def test_mxfp4_refuses_ragged_blocks_and_non_finite_weights() -> None:
    """Silent padding would shift every later scale."""
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise_mxfp4(torch.zeros(1, 40))
    with pytest.raises(ValueError, match="not finite"):
        quantise_mxfp4(_block(float("inf")))


@settings(max_examples=50, deadline=None, print_blob=True)
@given(st.integers(0, 2**32 - 1), st.integers(-100, 100))
def test_mxfp4_values_survive_a_second_quantisation(seed: int, exponent: int) -> None:
    """Quantised values are fixed points; bf16 holds them exactly."""
    w = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    packed, scale = quantise_mxfp4(w)
    values = dequantise_mxfp4(packed, scale, torch.float64)
    assert torch.equal(dequantise_mxfp4(packed, scale, torch.bfloat16).double(), values)
    again = dequantise_mxfp4(*quantise_mxfp4(values.float()), torch.float64)
    assert torch.equal(again, values)
    step = torch.repeat_interleave(ue8m0_value(scale, torch.float64), 32, -1)
    assert ((values - w.double()).abs() <= step).all()


def test_every_byte_decodes_to_two_codes() -> None:
    """The decoding table holds every code once per nibble position."""
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = dequantise_mxfp4(packed, torch.full((16, 1), 127, dtype=torch.uint8), torch.float32).view(256, 2)
    codes = torch.tensor([*E2M1, *(-v for v in E2M1)])
    assert torch.equal(values[:, 0], codes.repeat(16))
    assert torch.equal(values[:, 1], codes.repeat_interleave(16))


def _bits(exponent: int, fraction: float) -> torch.Tensor:
    """The float32 with that biased exponent and mantissa fraction."""
    pattern = exponent << 23 | int(fraction * (1 << 23))
    return torch.tensor([pattern], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("exponent", "fraction", "rule_r", "rule_f"),
    [
        (0, 0.0, 0, 0),
        (0, 0.9, 0, 0),
        (7, 0.5, 0, 0),
        (7, 0.9, 0, 0),
        (8, 0.75, 0, 0),
        (8, 0.875, 1, 0),
        (9, 0.0, 1, 1),
        (135, 0.75, 127, 127),
        (135, 0.7500002, 128, 127),
        (254, 0.9, 247, 246),
        (255, 0.0, 247, 254),
    ],
)
def test_mxfp8_scale_rules_at_their_boundaries(exponent: int, fraction: float, rule_r: int, rule_f: int) -> None:
    """The two rules differ by one exactly where the scaled maximum passes 448."""
    largest = _bits(exponent, fraction)
    assert mxfp8_scale(largest, "R").item() == rule_r
    assert mxfp8_scale(largest, "F").item() == rule_f


def test_mxfp8_rule_f_saturates_where_rule_r_does_not() -> None:
    """Scaled values in (448, 512) clip under F; R takes the next scale."""
    x = _block(500.0, 1.0)
    by_f = dequantise_mxfp8(*quantise_mxfp8(x, "F"))
    by_r = dequantise_mxfp8(*quantise_mxfp8(x, "R"))
    assert by_f[0, 0].item() == 448.0
    assert by_r[0, 0].item() == 512.0  # 250 at scale 2 rounds to 256


@settings(max_examples=50, deadline=None, print_blob=True)
@given(st.integers(0, 2**32 - 1), st.integers(-110, 110))
def test_mxfp8_rule_r_never_saturates_and_loses_at_most_a_sixteenth(seed: int, exponent: int) -> None:
    """E4M3 has three mantissa bits: the error of a normal element is at most 2^-4 of it."""
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    elements, scale = quantise_mxfp8(x, "R")
    back = dequantise_mxfp8(elements, scale, torch.float64)
    smallest_normal = torch.repeat_interleave(ue8m0_value(scale, torch.float64), 32, -1) * 2.0**-6
    assert ((back - x.double()).abs() <= torch.maximum(x.double().abs(), smallest_normal) / 16).all()
