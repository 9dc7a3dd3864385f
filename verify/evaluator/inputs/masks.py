"""Which parts of a call's tensors are whose: what may be written, and what must not matter."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Attrs", "Inputs", "Masks", "Tensors", "whole"]

Tensors = dict[str, Tensor | None]
"""Inputs and initial states by name; outputs are not in it."""
Attrs = dict[str, int | float]
Inputs = tuple[Tensors, Attrs]


@dataclass(frozen=True)
class Masks:
    """Ownership of a call's tensors. Masks are boolean over the tensor's leading dimensions (all of them at most)."""

    written: dict[str, Tensor] = field(default_factory=dict)
    """State tensor -> what the call writes. Everything else of the tensor must keep its bits."""
    free: dict[str, Tensor] = field(default_factory=dict)
    """Tensor -> what must not influence any result: it is filled with poison before the call."""


def whole(tensor: Tensor) -> Tensor:
    """A mask of all elements."""
    return torch.ones(tensor.shape, dtype=torch.bool)
