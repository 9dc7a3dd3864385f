"""Router, top-k selection and latent down projection in plain maths."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need, rounding_to_bf16

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """Chosen experts with their weights, and the latent input of the experts.

    Args:
        t: x [M, D], w_gate [E, D], bias [E], w_down [L, D].
        a: scale, top_k.
        dtype: type of the computation and of the floating results.
        rounding: round `latent` to bf16; scores and weights are never rounded.

    Returns:
        topk_ids [M, k] i32 in descending order of s + bias, topk_weights [M, k], latent [M, L].
    """
    bf16 = rounding_to_bf16(rounding)
    x, bias = need(t, "x").to(dtype), need(t, "bias").to(dtype)
    score = torch.sigmoid(x @ need(t, "w_gate").to(dtype).T)
    chosen = _ranked(score + bias)[:, : int(a["top_k"])]
    chosen_score = score.gather(1, chosen)
    return {
        "topk_ids": chosen.int(),
        "topk_weights": a["scale"] * chosen_score / (chosen_score.sum(1, keepdim=True) + 1e-20),
        "latent": bf16(x @ need(t, "w_down").to(dtype).T),
    }


def _ranked(key: Tensor) -> Tensor:
    """Ids by descending key; ties keep the lower id first, NaN comes last (even behind -inf)."""
    missing = torch.isnan(key)
    by_key = torch.sort(key.masked_fill(missing, -torch.inf), dim=-1, descending=True, stable=True).indices
    nan_last = torch.sort(missing.gather(1, by_key).int(), dim=-1, stable=True).indices
    return by_key.gather(1, nan_last)
