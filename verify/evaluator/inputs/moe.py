"""Inputs of the MoE ops: router front and routed experts."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.geometry import Geometry
from verify.evaluator.inputs.draw import ACTIVATION_KINDS, Draw
from verify.evaluator.inputs.masks import Attrs, Inputs, Tensors

__all__ = ["MOE_EXPERTS_KINDS", "MOE_FRONT_KINDS", "moe_experts", "moe_front"]

MOE_FRONT_KINDS = (*ACTIVATION_KINDS, "near_ties", "exact_ties", "nan_score", "saturated", "bias_decides")
MOE_EXPERTS_KINDS = (*ACTIVATION_KINDS, "one_expert", "saturated", "zero_weights", "mxfp4", "mxfp4_wide")


def moe_front(d: Draw) -> Inputs:
    """Router inputs by class.

    `near_ties`: experts whose scores differ by about one f32 rounding; `exact_ties`: equal expert rows whose products
    are exact in any order of summation, so that the lower id must win; `nan_score`: some biases are NaN; `saturated`:
    logits of +-20 and beyond; `bias_decides`: biases that overrule the scores.
    """
    g, rows = d.geometry, d.case.rows
    x, gate, bias = (
        d.activation((rows, g.hidden)),
        d.normal((g.experts, g.hidden), g.hidden**-0.5),
        d.normal((g.experts,), 0.1),
    )
    groups = d.integers(0, max(1, g.experts // 3), (g.experts,))
    if d.kind == "exact_ties":
        x = d.integers(-2, 2, (rows, g.hidden)).to(torch.bfloat16)
        gate = (d.integers(-2, 2, (g.experts, g.hidden)).float() / 64.0)[groups]
        bias = torch.zeros(g.experts)
    elif d.kind == "near_ties":
        gate = gate[groups]
        bias = bias[groups] + d.integers(-1, 1, (g.experts,)).float() * 2.0**-24
    elif d.kind == "nan_score":
        bias[d.permutation(g.experts)[: g.experts // 4]] = torch.nan
    elif d.kind == "saturated":
        gate *= 24.0
    elif d.kind == "bias_decides":
        bias = d.normal((g.experts,), 2.0)
    tensors: Tensors = {
        "x": x,
        "w_gate": gate.to(torch.bfloat16),
        "bias": bias,
        "w_down": d.weight(g.latent, g.hidden),
    }
    return tensors, {"scale": float(d.fixed.choose(2, 5)) / 2.0, "top_k": g.top_k}


def moe_experts(d: Draw) -> Inputs:
    """`one_expert`: all rows choose the same experts; `zero_weights`: some routing weights are exactly 0; `saturated`:
    activations far outside the linear range; `mxfp4`, `mxfp4_wide`: packed experts, scales near 1 or over 2^+-20.
    """
    g, rows = d.geometry, d.case.rows
    scale = 12.0 if d.kind == "saturated" else 1.0
    scores = torch.rand((rows, g.experts), generator=d.generator)
    ids = scores.topk(g.top_k, dim=1).indices
    weights = d.uniform(0.05, 1.0, (rows, g.top_k))
    if d.kind == "one_expert":
        ids = ids[:1].expand(rows, -1).contiguous()
    weights = weights / weights.sum(1, keepdim=True)
    if d.kind == "zero_weights":
        weights = torch.where(d.chance(0.4, weights.shape), 0.0, weights)
    packed = d.kind.startswith("mxfp4")
    tensors: Tensors = {
        "x": d.activation((rows, g.hidden), scale),
        "latent": d.activation((rows, g.latent), scale),
        "topk_ids": ids.to(torch.int32),
        "topk_weights": weights,
        **(_packed_experts(d, g) if packed else _plain_experts(d, g)),
        "latent_norm": d.norm_weight(g.latent),
        "w_up": d.weight(g.hidden, g.latent),
        "shared_gate_up": d.weight(2 * g.shared_width, g.hidden),
        "shared_down": d.weight(g.hidden, g.shared_width),
    }
    attrs: Attrs = {
        "expert_format": int(packed),
        "eps": g.eps,
        "beta": g.situ_beta,
        "linear_beta": g.situ_linear_beta,
    }
    return tensors, attrs


def _plain_experts(d: Draw, g: Geometry) -> Tensors:
    return {
        "w13": d.weight(2 * g.expert_width, g.latent, g.experts),
        "w2": d.weight(g.latent, g.expert_width, g.experts),
        "w13_packed": None,
        "w13_scale": None,
        "w2_packed": None,
        "w2_scale": None,
    }


def _packed_experts(d: Draw, g: Geometry) -> Tensors:
    """Random E2M1 pairs, so that all sixteen codes of both nibbles occur, with UE8M0 scales (127 = 1)."""

    def scales(rows: int, columns: int) -> Tensor:
        centre = 127 - round(torch.log2(torch.tensor(float(columns))).item() / 2) - 1
        reach = 20 if d.kind == "mxfp4_wide" else 1
        return d.integers(centre - reach, centre + (0 if reach == 20 else reach), (g.experts, rows, columns // 32)).to(
            torch.uint8
        )

    return {
        "w13": None,
        "w2": None,
        "w13_packed": d.integers(0, 255, (g.experts, 2 * g.expert_width, g.latent // 2)).to(torch.uint8),
        "w13_scale": scales(2 * g.expert_width, g.latent),
        "w2_packed": d.integers(0, 255, (g.experts, g.latent, g.expert_width // 2)).to(torch.uint8),
        "w2_scale": scales(g.latent, g.expert_width),
    }
