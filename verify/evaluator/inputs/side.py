"""Inputs of ops that run beside a step."""

from __future__ import annotations

import torch

from k3_backend.ops.l2_prefetch.interface import PIECE_BYTES
from verify.evaluator.inputs.draw import Draw
from verify.evaluator.inputs.masks import Inputs

__all__ = ["L2_PREFETCH_KINDS", "l2_prefetch"]

L2_PREFETCH_KINDS = ("gaussian",)
"""One class, under the name that every op has: no value can matter to an op without results."""


def l2_prefetch(d: Draw) -> Inputs:
    """Random bytes, as many pieces as the case has rows."""
    return {"weights": d.integers(0, 255, (d.case.rows, PIECE_BYTES)).to(torch.uint8)}, {}
