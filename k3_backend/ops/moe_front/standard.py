"""Router, top-k and latent down projection as stock serving runs them, in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from k3_backend.ops.eager import linear
from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Returns topk_ids [M, k] i32, topk_weights [M, k] f32, latent [M, L] bf16.

    The router's logits stay fp32, so its product runs in fp32; products of bf16 values are exact there.

    Args:
        t: x [M, D] bf16, w_gate [E, D] bf16, bias [E] f32, w_down [L, D] bf16.
        a: scale, top_k.
    """
    x = need(t, "x")
    score = functional.linear(x.float(), need(t, "w_gate").float()).sigmoid_()
    ids = _top_k(score + need(t, "bias"), int(a["top_k"]))
    chosen = score.gather(1, ids)
    weights = chosen / chosen.sum(1, keepdim=True).add_(1e-20)
    if a["scale"] != 1.0:
        weights.mul_(a["scale"])
    return {"topk_ids": ids.int(), "topk_weights": weights, "latent": linear(x, need(t, "w_down"))}


def _top_k(key: Tensor, k: int) -> Tensor:
    """Ids of the k largest keys in descending order, ties to the lower id, NaN last."""
    key = torch.where(torch.isnan(key), -torch.inf, key)
    return torch.sort(key, dim=1, descending=True, stable=True).indices[:, :k]
