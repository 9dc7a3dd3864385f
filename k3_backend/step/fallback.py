"""How a step returns to the standard path: run it, count why. Nothing else happens here.

A refusal is decided before anything ran, so the standard path starts from untouched state. An error inside the
specialised path is not a refusal: it propagates, because state may already have changed.
"""

from __future__ import annotations

from torch import Tensor

from k3_backend.model import standard
from k3_backend.model.batch import Batch
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.step.ledger import Ledger
from k3_backend.step.plan import Refusal

__all__ = ["run_standard"]


def run_standard(weights: ModelWeights, state: DecodeState, batch: Batch, refusal: Refusal, ledger: Ledger) -> Tensor:
    """Run one step on the standard path: hidden [N, D] bf16, model.norm applied. State is updated in place."""
    hidden = standard.forward(weights, state, batch)
    ledger.count_standard_step(refusal.codes)
    return hidden
