"""Attention residuals, projections into and out of attention, dense MLP: fp64 numpy, one token at a time."""

from __future__ import annotations

import numpy as np

from numpy_maths.common import Array, Attributes, Inputs, Outputs, given, rms_norm, situ_mlp


def attn_res(t: Inputs, a: Attributes) -> Outputs:
    """Prefix update, block write, softmax mix over depth, norm of the mix."""
    prefix = given(t, "prefix").copy()
    blocks = given(t, "blocks").copy()
    key = given(t, "res_norm") * given(t, "res_proj")
    eps = float(a["eps"])
    out = np.empty_like(prefix)
    for m in range(prefix.shape[0]):
        if a["add_delta"]:
            prefix[m] = prefix[m] + given(t, "delta")[m]
        if a["write_block"] >= 0:
            blocks[m, int(a["write_block"])] = prefix[m]
        rows = [*blocks[m, : int(a["sources"])], prefix[m]]
        out[m] = rms_norm(_mix(rows, key, eps), given(t, "out_norm"), eps)
    return {"prefix": prefix, "blocks": blocks, "out": out}


def _mix(rows: list[Array], key: Array, eps: float) -> Array:
    """The rows averaged with softmax weights of their RMS-normalised products with the key."""
    if len(rows) == 1:
        return rows[0]
    scores = [float(np.sum(row * key)) / float(np.sqrt(np.mean(row * row) + eps)) for row in rows]
    weights = [np.exp(score - max(scores)) for score in scores]
    total = sum(weights)
    mix = np.zeros_like(rows[0])
    for weight, row in zip(weights, rows, strict=True):
        mix = mix + weight / total * row
    return mix


def input_projection(t: Inputs, a: Attributes) -> Outputs:
    """One matrix product."""
    return {"out": np.stack([given(t, "w") @ x for x in given(t, "x")])}


def oproj_allreduce(t: Inputs, a: Attributes) -> Outputs:
    """The ranks' partial products summed, then added to the prefix or put in its place."""
    prefix = given(t, "prefix").copy()
    x, w = given(t, "x"), given(t, "w")
    for m in range(prefix.shape[0]):
        y = sum((w[rank] @ x[rank, m] for rank in range(x.shape[0])), np.zeros(prefix.shape[1]))
        prefix[m] = y if a["restart"] else prefix[m] + y
    return {"prefix": prefix}


def dense_mlp(t: Inputs, a: Attributes) -> Outputs:
    """SiTU MLP of the first layer."""
    beta, linear_beta = float(a["beta"]), float(a["linear_beta"])
    rows = [situ_mlp(x, given(t, "w_gate_up"), given(t, "w_down"), beta, linear_beta) for x in given(t, "x")]
    return {"out": np.stack(rows)}
