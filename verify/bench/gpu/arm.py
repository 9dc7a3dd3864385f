"""What an arm of the peer table is: our kernel or a peer, as one launch per set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from k3_backend.geometry import Geometry
from verify.bench.gpu.cells import PeerCell

__all__ = ["Arm", "Inputs", "Missing", "Tensors"]

Tensors = Mapping[str, Any]
"""Tensors of a call by their names in the op's interface; optional ones may be None."""


class Missing(Exception):  # noqa: N818 - an outcome of its own, not an error: the row says why the arm is absent
    """An arm that cannot be had for a cell; the message is the reason that the row shows."""


@dataclass(frozen=True)
class Inputs:
    """Distinct inputs of one cell's calls."""

    cell: PeerCell
    geometry: Geometry
    sets: Sequence[Tensors]
    attrs: Mapping[str, int | float]


@dataclass(frozen=True)
class Arm:
    """Something that is timed."""

    launches: Sequence[Callable[[], object]]
    """One per set of inputs; enqueues on torch's current stream and can be captured."""
    results: Callable[[], Mapping[str, Tensor]]
    """What the first launch left, comparable with `expected`."""
    pdl: bool
    """Whether its kernels are launched with programmatic dependent launch."""
    note: str = ""
    """What it leaves out or gets for free, for the table's legend."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Choices made for it, for the raw line."""
    expected: Mapping[str, Tensor] | None = None
    """What the first launch has to leave, where that is not the op's own result."""
