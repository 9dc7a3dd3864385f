"""Calls of the matrix ops for kernel tests: seeded arguments, outputs poisoned. Run them with `attn_cases.call`."""

from __future__ import annotations

import torch
from attn_cases import BF16, NAN, Case
from torch import Tensor

from k3_backend.geometry import Geometry
from k3_backend.ops.mxfp import quantise_mxfp4

__all__ = ["dense_mlp_case", "input_projection_case", "moe_experts_case", "moe_front_case", "oproj_case"]


class _Draw:
    """Seeded random tensors; weights are scaled so that products keep the size of their inputs."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype)

    def weight(self, *shape: int, gain: float = 1.0) -> Tensor:
        return self.normal(*shape, scale=gain * shape[-1] ** -0.5)

    def ids(self, rows: int, experts: int, k: int) -> Tensor:
        return torch.rand(rows, experts, generator=self._generator).argsort(-1)[:, :k].int()


def _poisoned(*shape: int) -> Tensor:
    return torch.full(shape, NAN, dtype=BF16)


def input_projection_case(g: Geometry, rows: int, seed: int = 0) -> Case:
    """Input projection; even seeds take the KDA packing, odd ones that of MLA."""
    draw = _Draw(seed)
    packed = (g.kda_proj_rows, g.mla_proj_rows)[seed % 2]
    tensors: dict[str, Tensor | None] = {
        "x": draw.normal(rows, g.hidden),
        "w": draw.weight(packed, g.hidden),
        "out": _poisoned(rows, packed),
    }
    return Case("input_projection", tensors, {}, rows)


def oproj_case(g: Geometry, rows: int, seed: int = 0, ranks: int = 1, *, restart: bool = False) -> Case:
    """Output projection; with `restart` the old prefix is NaN, because it must not be read."""
    draw = _Draw(seed)
    width = g.kda_width if ranks == 1 else 32 * ranks
    tensors: dict[str, Tensor | None] = {
        "x": draw.normal(ranks, rows, width),
        "w": draw.weight(ranks, g.hidden, width),
        "prefix": _poisoned(rows, g.hidden) if restart else draw.normal(rows, g.hidden),
    }
    return Case("oproj_allreduce", tensors, {"restart": int(restart)}, rows)


def dense_mlp_case(g: Geometry, rows: int, seed: int = 0, linear_beta: float = 25.0) -> Case:
    """Dense MLP; gate and up are wide enough that SiTU's bounds bend them."""
    draw = _Draw(seed)
    tensors: dict[str, Tensor | None] = {
        "x": draw.normal(rows, g.hidden),
        "w_gate_up": draw.weight(2 * g.dense_width, g.hidden, gain=4.0),
        "w_down": draw.weight(g.hidden, g.dense_width),
        "out": _poisoned(rows, g.hidden),
    }
    return Case("dense_mlp", tensors, {"beta": g.situ_beta, "linear_beta": linear_beta}, rows)


def moe_front_case(g: Geometry, rows: int, seed: int = 0, scale: float = 2.5) -> Case:
    """Router, selection and latent projection."""
    draw = _Draw(seed)
    tensors: dict[str, Tensor | None] = {
        "x": draw.normal(rows, g.hidden),
        "w_gate": draw.weight(g.experts, g.hidden),
        "bias": draw.normal(g.experts, scale=0.1, dtype=torch.float32),
        "w_down": draw.weight(g.latent, g.hidden),
        "topk_ids": torch.full((rows, g.top_k), -7, dtype=torch.int32),
        "topk_weights": torch.full((rows, g.top_k), NAN),
        "latent": _poisoned(rows, g.latent),
    }
    return Case("moe_front", tensors, {"scale": scale, "top_k": g.top_k}, rows)


def moe_experts_case(g: Geometry, rows: int, seed: int = 0, *, mxfp4: bool = False) -> Case:
    """Routed and shared experts; every token chooses different experts with weights of either sign."""
    draw = _Draw(seed)
    w13 = draw.weight(g.experts, 2 * g.expert_width, g.latent, gain=2.0)
    w2 = draw.weight(g.experts, g.latent, g.expert_width)
    experts: dict[str, Tensor | None] = dict.fromkeys(("w13_packed", "w13_scale", "w2_packed", "w2_scale"))
    if mxfp4:
        experts["w13_packed"], experts["w13_scale"] = quantise_mxfp4(w13.float())
        experts["w2_packed"], experts["w2_scale"] = quantise_mxfp4(w2.float())
    tensors: dict[str, Tensor | None] = {
        "x": draw.normal(rows, g.hidden),
        "latent": draw.normal(rows, g.latent),
        "topk_ids": draw.ids(rows, g.experts, g.top_k),
        "topk_weights": draw.normal(rows, g.top_k, dtype=torch.float32),
        "w13": None if mxfp4 else w13,
        "w2": None if mxfp4 else w2,
        **experts,
        "latent_norm": 1 + draw.normal(g.latent, scale=0.1),
        "w_up": draw.weight(g.hidden, g.latent),
        "shared_gate_up": draw.weight(2 * g.shared_width, g.hidden, gain=2.0),
        "shared_down": draw.weight(g.hidden, g.shared_width),
        "out": _poisoned(rows, g.hidden),
    }
    attrs: dict[str, int | float] = {
        "expert_format": int(mxfp4), "eps": g.eps, "beta": g.situ_beta, "linear_beta": g.situ_linear_beta,
    }  # fmt: skip
    return Case("moe_experts", tensors, attrs, rows)
