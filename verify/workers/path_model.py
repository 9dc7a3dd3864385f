"""The model that the path gate steps: seeded weights whose routing does not depend on rounding.

With random weights two of sixteen experts are so often nearly tied that correct implementations choose differently in
every other row, and whole rows then differ. Here selection biases decide the choice by a wide margin (another
permutation per layer), so that two correct steps agree to rounding and a broken one does not. Routing itself is
judged by the kernels gate, on near and exact ties.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from k3_backend.geometry import geometry
from k3_backend.model.weights import ModelWeights

__all__ = ["path_model"]

_MARGIN = 2.0
"""Difference between neighbouring biases; scores lie in (0, 1)."""


def path_model(geometry_name: str, seed: int) -> ModelWeights:
    """The same weights on both sides of the worker's border, from a seed."""
    weights = ModelWeights.seeded(geometry(geometry_name), seed)
    generator = torch.Generator().manual_seed(seed)
    sites = dict(weights.sites)
    for layer, constants in weights.sites.items():
        if "moe_front" in constants:
            order = torch.randperm(weights.geometry.experts, generator=generator)
            front = {**constants["moe_front"], "bias": order.float() * _MARGIN}
            sites[layer] = {**constants, "moe_front": front}
    return replace(weights, sites=sites)
