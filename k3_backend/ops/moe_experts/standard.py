"""Latent mixture of experts as stock serving runs it, in eager torch; the form depends on rows and weight size.

Routing weights are applied in fp32. MXFP4 experts are weight-only: values are exact in bf16, activations stay bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from k3_backend.ops.eager import linear, rms_norm, situ
from k3_backend.ops.maths import Attributes, Tensors, need
from k3_backend.ops.mxfp import dequantise_mxfp4

__all__ = ["standard"]

SMALL_EXPERTS = 1 << 20
"""Elements of w13 up to which the weights stay in a core's cache, so that computing all experts is cheap."""
GATHER_ROWS = 4
"""Rows up to which, with small experts, gathering the chosen experts beats computing all of them."""


@dataclass(frozen=True)
class _Experts:
    """bf16 weights of `count` experts, gate rows first; `ids` index them."""

    w13: Tensor
    w2: Tensor
    ids: Tensor

    @property
    def count(self) -> int:
        return self.w13.shape[0]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Returns out [M, D] bf16.

    Args:
        t: tensors of the op's interface.
        a: expert_format, eps, beta, linear_beta.
    """
    x, latent, weights = need(t, "x"), need(t, "latent"), need(t, "topk_weights")
    experts = _weights(t, a)
    small = experts.w13.numel() <= SMALL_EXPERTS
    if small and latent.shape[0] <= GATHER_ROWS:
        routed = _gathered(latent, experts, weights, a)
    elif small:
        routed = _all_experts(latent, experts, weights, a)
    else:
        routed = _grouped(latent, experts, weights, a)
    up = linear(rms_norm(routed, need(t, "latent_norm"), a["eps"]), need(t, "w_up"))
    hidden = situ(linear(x, need(t, "shared_gate_up")), a["beta"], a["linear_beta"])
    return {"out": up.add_(linear(hidden, need(t, "shared_down")))}


def _weights(t: Tensors, a: Attributes) -> _Experts:
    ids = need(t, "topk_ids")
    if not a["expert_format"]:
        return _Experts(need(t, "w13"), need(t, "w2"), ids)
    packed = [need(t, name) for name in ("w13_packed", "w13_scale", "w2_packed", "w2_scale")]
    if ids.numel() < packed[0].shape[0]:
        chosen = ids.flatten()
        packed = [tensor.index_select(0, chosen) for tensor in packed]
        ids = torch.arange(chosen.numel(), dtype=ids.dtype, device=ids.device).view_as(ids)
    w13, w2 = (dequantise_mxfp4(packed[i], packed[i + 1], torch.bfloat16) for i in (0, 2))
    return _Experts(w13, w2, ids)


def _gathered(z: Tensor, experts: _Experts, weights: Tensor, a: Attributes) -> Tensor:
    """A copy of the chosen experts' weights per row, then batched matrix-vector products."""
    rows, k = experts.ids.shape
    chosen = experts.ids.flatten()
    w13 = experts.w13.index_select(0, chosen).view(rows, -1, z.shape[1])
    gate_up = torch.bmm(w13, z.unsqueeze(2)).view(rows * k, -1)
    hidden = situ(gate_up, a["beta"], a["linear_beta"])
    y = torch.bmm(experts.w2.index_select(0, chosen), hidden.unsqueeze(2)).view(rows, k, -1)
    return _combine(y, weights)


def _all_experts(z: Tensor, experts: _Experts, weights: Tensor, a: Attributes) -> Tensor:
    """Every expert on every row; the routing weight, 0 for the others, scales the hidden values of each expert."""
    rows, latent = z.shape
    gate_up = linear(z, experts.w13.view(-1, latent)).view(rows, experts.count, -1)
    hidden = situ(gate_up, a["beta"], a["linear_beta"])
    dense = torch.zeros(rows, experts.count, device=z.device).scatter_(1, experts.ids.long(), weights)
    scaled = (hidden * dense.unsqueeze(2)).to(torch.bfloat16)
    return functional.linear(scaled.view(rows, -1), experts.w2.transpose(0, 1).reshape(latent, -1))


def _grouped(z: Tensor, experts: _Experts, weights: Tensor, a: Attributes) -> Tensor:
    """Rows sorted by expert, one grouped product per layer of the experts: each weight is read at most once."""
    rows, k = experts.ids.shape
    chosen = experts.ids.flatten()
    order = torch.argsort(chosen, stable=True)
    expert = torch.arange(experts.count, dtype=chosen.dtype, device=chosen.device)
    ends = torch.searchsorted(chosen.index_select(0, order), expert, right=True).int()
    by_expert = z.index_select(0, torch.div(order, k, rounding_mode="floor"))
    hidden = situ(functional.grouped_mm(by_expert, experts.w13.transpose(1, 2), offs=ends), a["beta"], a["linear_beta"])
    y = functional.grouped_mm(hidden, experts.w2.transpose(1, 2), offs=ends)
    return _combine(torch.empty_like(y).index_copy_(0, order, y).view(rows, k, -1), weights)


def _combine(y: Tensor, weights: Tensor) -> Tensor:
    """bf16(sum over slots of weight * row): [M, k, L] bf16 and [M, k] f32 -> [M, L]."""
    return torch.bmm(weights.unsqueeze(1), y.float()).squeeze(1).to(torch.bfloat16)
