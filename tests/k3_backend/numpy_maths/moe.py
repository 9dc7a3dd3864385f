"""Latent mixture of experts in fp64 numpy: router, experts in both weight formats, shared expert."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpy_maths.common import Array, Attributes, Inputs, Outputs, given, rms_norm, sigmoid, situ_mlp

MX_BLOCK = 32
UE8M0_NAN = 255


def e2m1(code: int) -> float:
    """Value of a 4-bit float: sign, two exponent bits with bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1.0 + mantissa * 0.5) * 2.0 ** (exponent - 1))


def ue8m0(code: int) -> float:
    """Value of a scale byte: a bare exponent with bias 127; all ones is NaN."""
    return float("nan") if code == UE8M0_NAN else 2.0 ** (code - 127)


_E2M1 = np.array([e2m1(code) for code in range(16)])
_UE8M0 = np.array([ue8m0(code) for code in range(256)])


def mxfp4_decode(packed: NDArray[Any], scale: NDArray[Any]) -> Array:
    """[rows, K / 2] element pairs and [rows, K / 32] scale bytes -> [rows, K]; the even element is the low nibble."""
    values = np.empty((packed.shape[0], 2 * packed.shape[1]))
    values[:, 0::2] = _E2M1[packed & 15]
    values[:, 1::2] = _E2M1[packed >> 4]
    assert values.shape[1] == MX_BLOCK * scale.shape[1]
    for block in range(scale.shape[1]):
        values[:, block * MX_BLOCK : (block + 1) * MX_BLOCK] *= _UE8M0[scale[:, block]][:, np.newaxis]
    return values


def moe_front(t: Inputs, a: Attributes) -> Outputs:
    """Sigmoid router with a selection-only bias, and the latent input of the experts."""
    x, bias = given(t, "x"), given(t, "bias")
    ids = np.zeros((x.shape[0], int(a["top_k"])), dtype=np.int64)
    weights = np.zeros(ids.shape)
    for m, row in enumerate(x):
        score = sigmoid(given(t, "w_gate") @ row)
        ids[m] = _ranked(score + bias)[: ids.shape[1]]
        total = sum(score[e] for e in ids[m]) + 1e-20
        weights[m] = [float(a["scale"]) * score[e] / total for e in ids[m]]
    return {"topk_ids": ids, "topk_weights": weights, "latent": np.stack([given(t, "w_down") @ row for row in x])}


def _ranked(keys: Array) -> list[int]:
    """Expert ids by falling key; equal keys by rising id; NaN after everything else."""
    numbers = sorted((-key, e) for e, key in enumerate(keys.tolist()) if not np.isnan(key))
    return [e for _, e in numbers] + [e for e, key in enumerate(keys.tolist()) if np.isnan(key)]


def moe_experts(t: Inputs, a: Attributes) -> Outputs:
    """Weighted sum of the chosen experts, latent norm, up projection, plus the shared expert."""
    beta, linear_beta = float(a["beta"]), float(a["linear_beta"])
    x, latent = given(t, "x"), given(t, "latent")
    out = np.zeros_like(x)
    for m in range(x.shape[0]):
        routed = np.zeros(latent.shape[1])
        for e, weight in zip(given(t, "topk_ids")[m], given(t, "topk_weights")[m], strict=True):
            w13, w2 = _expert(t, a, int(e))
            routed = routed + weight * situ_mlp(latent[m], w13, w2, beta, linear_beta)
        shared = situ_mlp(x[m], given(t, "shared_gate_up"), given(t, "shared_down"), beta, linear_beta)
        out[m] = given(t, "w_up") @ rms_norm(routed, given(t, "latent_norm"), float(a["eps"])) + shared
    return {"out": out}


def _expert(t: Inputs, a: Attributes, e: int) -> tuple[Array, Array]:
    """w13 [2I, L] and w2 [L, I] of one expert."""
    if a["expert_format"] == 0:
        return given(t, "w13")[e], given(t, "w2")[e]
    return (
        mxfp4_decode(given(t, "w13_packed")[e], given(t, "w13_scale")[e]),
        mxfp4_decode(given(t, "w2_packed")[e], given(t, "w2_scale")[e]),
    )
