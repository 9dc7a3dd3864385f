"""From an op's name to its reference maths and its standard implementation. Specialised kernels are not found here."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from k3_backend.ops import ALL_OPS
from k3_backend.ops.maths import Attributes, Tensors

__all__ = ["Reference", "Standard", "reference", "standard"]


class Reference(Protocol):
    """Pure: returns every output and the new value of every state tensor, in `dtype` (integers as integers)."""

    def __call__(
        self, t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
    ) -> dict[str, Tensor]: ...


class Standard(Protocol):
    """Returns the outputs in the interface's dtypes and updates state tensors in place."""

    def __call__(self, t: Tensors, a: Attributes) -> dict[str, Tensor]: ...


@cache
def reference(op: str) -> Reference:
    """The reference of an op.

    Raises:
        KeyError: unknown op; the message lists the known ones.
    """
    return cast(Reference, _attribute(op, "reference"))


@cache
def standard(op: str, device: str = "cpu") -> Standard:
    """The standard implementation of an op: what stock serving does.

    Args:
        op: name.
        device: `cpu` or `cuda`. An op whose eager torch form does not suit a GPU, or cannot be captured in a graph,
            has a form of its own there (`standard_cuda.py`).

    Raises:
        KeyError: unknown op; the message lists the known ones.
    """
    if device == "cuda" and op in ALL_OPS and find_spec(f"k3_backend.ops.{op}.standard_cuda") is not None:
        return cast(Standard, import_module(f"k3_backend.ops.{op}.standard_cuda").standard)
    return cast(Standard, _attribute(op, "standard"))


def _attribute(op: str, name: str) -> object:
    if op not in ALL_OPS:
        raise KeyError(f"unknown op {op!r}; known: {', '.join(ALL_OPS)}")
    return getattr(import_module(f"k3_backend.ops.{op}.{name}"), name)
