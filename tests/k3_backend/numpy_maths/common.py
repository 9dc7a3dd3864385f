"""Pieces that several ops share: types, logistic sigmoid, RMSNorm, SiTU. fp64 numpy, nothing is rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Inputs = Mapping[str, NDArray[Any] | None]
"""Argument name -> array: bf16 and f32 arguments as fp64, integer arguments as integers, absent ones None."""
Attributes = Mapping[str, int | float]
Outputs = dict[str, NDArray[Any]]


def given(inputs: Inputs, name: str) -> NDArray[Any]:
    """The argument of that name, which must be present."""
    value = inputs[name]
    assert value is not None, f"argument {name} is absent"
    return value


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x) without overflow at either end."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small))


def rms_norm(v: Array, weight: Array, eps: float) -> Array:
    """v / sqrt(mean(v^2) + eps) * weight for one vector."""
    return v / np.sqrt(np.sum(v * v) / v.size + eps) * weight


def situ(gate: Array, up: Array, beta: float, linear_beta: float) -> Array:
    """beta tanh(gate / beta) sg(gate) * linear_beta tanh(up / linear_beta); `up` itself when linear_beta <= 0."""
    bounded_up = linear_beta * np.tanh(up / linear_beta) if linear_beta > 0 else up
    return beta * np.tanh(gate / beta) * sigmoid(gate) * bounded_up


def situ_mlp(x: Array, w_gate_up: Array, w_down: Array, beta: float, linear_beta: float) -> Array:
    """W_down f(W_gate x, W_up x) for one token; the gate rows come first in `w_gate_up`."""
    width = w_down.shape[1]
    assert w_gate_up.shape[0] == 2 * width
    return w_down @ situ(w_gate_up[:width] @ x, w_gate_up[width:] @ x, beta, linear_beta)
