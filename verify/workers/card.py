"""What the methods for single ops ask of a GPU: one call as data, and the operations behind which every driver call is.

The real ones are `cuda_card.CudaCard` and `separate_card.SeparateCard`; tests have one without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from k3_backend.geometry import Geometry
from k3_backend.ops.interface import OpSpec
from verify.workers.shared import View

__all__ = ["MODES", "Card", "Plan"]

MODES = ("eager", "graph", "late", "contended")
"""How a run launches: by itself; from a captured graph; from a graph in which everything but the weights is written by
a kernel that starts its successor early and then takes its time; from a graph, beside another stream's work."""


@dataclass(frozen=True)
class Plan:
    """One call as the card needs it."""

    spec: OpSpec
    geometry: Geometry
    attrs: Mapping[str, int | float]
    tunables: Mapping[str, int]


class Card(Protocol):
    """A GPU with one op's kernels loaded. Any exception of `run` and `repeat` may leave it unusable."""

    def load(self, folder: Path, spec: OpSpec, geometry: Geometry, nbytes: int) -> dict[str, Any]:
        """Load an artifact's images and reserve device memory; facts for the raw line."""
        ...

    def scratch(self, plan: Plan, layout: Mapping[str, View]) -> Sequence[tuple[str, str, int, bool]]:
        """(name, dtype, elements, zeroed) of the workspaces of a call; BindError if no variant takes it."""
        ...

    def bind(self, plan: Plan, views: Mapping[str, View], scratch: Mapping[str, View]) -> int:
        """Pack a call over device memory; a handle."""
        ...

    def spoil(self) -> None:
        """Make the results of every call that is bound from now on deliberately wrong, until the next `load`."""
        ...

    def run(self, handle: int, mode: str, image: npt.NDArray[np.uint8], delay_ns: int) -> None:
        """Run once: contents from `image`, results into it."""
        ...

    def repeat(
        self, handle: int, image: npt.NDArray[np.uint8], views: Sequence[View], out: npt.NDArray[np.uint8], count: int
    ) -> None:
        """Run `count` times on the image's contents; the viewed bytes of each run go to `out`, run by run."""
        ...
