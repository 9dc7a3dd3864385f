"""Latent mixture of experts with shared expert in plain maths, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Rounding, Tensors, need, rms_norm, rounding_to_bf16, situ
from k3_backend.ops.mxfp import dequantise_mxfp4

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """Weighted sum of the chosen experts in the latent space, norm, up projection, plus the shared expert.

    Args:
        t: x [M, D], latent [M, L], topk_ids [M, k], topk_weights [M, k]; w13 [E, 2I, L] (gate rows first) and
            w2 [E, L, I], or their packed and scale tensors; latent_norm [L], w_up [D, L], shared_gate_up [2S, D],
            shared_down [D, S].
        a: expert_format, eps, beta, linear_beta.
        dtype: type of the computation and of the result.
        rounding: apply the bf16 roundings of the definition.

    Returns:
        out [M, D].
    """
    bf16 = rounding_to_bf16(rounding)
    x, latent, weights = (need(t, name).to(dtype) for name in ("x", "latent", "topk_weights"))

    routed = torch.zeros_like(latent)
    for m, ids in enumerate(need(t, "topk_ids").tolist()):
        for weight, e in zip(weights[m], ids, strict=True):
            w13, w2 = _expert(t, a, e, dtype)
            routed[m] += weight * (w2 @ _situ_rows(w13 @ latent[m], a, bf16))
    normed = bf16(rms_norm(bf16(routed), need(t, "latent_norm").to(dtype), a["eps"]))
    up = bf16(normed @ need(t, "w_up").to(dtype).T)

    hidden = _situ_rows(x @ need(t, "shared_gate_up").to(dtype).T, a, bf16)
    shared = bf16(hidden @ need(t, "shared_down").to(dtype).T)
    return {"out": bf16(up + shared)}


def _situ_rows(gate_up: Tensor, a: Attributes, bf16: Rounding) -> Tensor:
    """F of a product whose first half of columns is the gate: inputs and result are rounded."""
    gate, up = bf16(gate_up).chunk(2, -1)
    return bf16(situ(gate, up, a["beta"], a["linear_beta"]))


def _expert(t: Tensors, a: Attributes, e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """w13 [2I, L] and w2 [L, I] of one expert."""
    if not a["expert_format"]:
        return need(t, "w13")[e].to(dtype), need(t, "w2")[e].to(dtype)
    return (
        dequantise_mxfp4(need(t, "w13_packed")[e], need(t, "w13_scale")[e], dtype),
        dequantise_mxfp4(need(t, "w2_packed")[e], need(t, "w2_scale")[e], dtype),
    )
