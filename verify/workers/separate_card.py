"""A card for memory checkers: every tensor is an allocation of its own, and what a call must not read is never written.

Inside one arena an access beyond a tensor still hits valid memory; here a checker such as compute-sanitizer sees it.
Outputs and workspaces stay uninitialised, so that a read of either shows. There are no graphs and no staging.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from k3_backend.aot.arguments import TORCH_DTYPES
from k3_backend.aot.cuda.launch import BoundCall, CudaOp
from k3_backend.geometry import Geometry
from k3_backend.ops.interface import OpSpec
from verify.workers.card import Plan
from verify.workers.cuda_card import CudaCard
from verify.workers.shared import View

__all__ = ["SeparateCard"]


class SeparateCard(CudaCard):
    """One op on the current device, eagerly and slowly."""

    def load(self, folder: Path, spec: OpSpec, geometry: Geometry, nbytes: int) -> dict[str, Any]:  # noqa: ARG002 - no arena
        """Load the images."""
        self.op = CudaOp(folder, spec, geometry)
        self.bound: BoundCall | None = None
        return {"name": torch.cuda.get_device_name(), "multiprocessors": self.op.multiprocessors}

    def bind(self, plan: Plan, views: Mapping[str, View], scratch: Mapping[str, View]) -> int:
        """Allocate and pack."""
        roles = {tensor.name: tensor.role for tensor in plan.spec.tensors}
        self.tensors = {name: self._empty(view) for name, view in views.items()}
        work = {name: self._empty(view) for name, view in scratch.items()}
        self.placed = [(view, self.tensors[name], roles[name] != "output") for name, view in views.items()]
        self.bound = self.op.bind(self.tensors, plan.attrs, plan.tunables, work)
        zeroed = {workspace.name for workspace in self.bound.variant.workspaces if workspace.zeroed}
        for name, tensor in work.items():
            if name in zeroed:
                tensor.zero_()
        self.placed += [(view, work[name], False) for name, view in scratch.items() if name in zeroed]
        torch.cuda.synchronize()
        return 0

    def spoil(self) -> None:
        """Refused: a checker looks at the kernels' accesses, not at results."""
        raise ValueError("card.spoil under a memory checker; expected the card with one arena; next: load it plainly")

    def run(self, handle: int, mode: str, image: npt.NDArray[np.uint8], delay_ns: int) -> None:  # noqa: ARG002
        """Copy what the call may read, launch, and copy everything back."""
        assert self.bound is not None
        for view, tensor, readable in self.placed:
            if readable:
                tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(self._part(image, view)))
        torch.cuda.synchronize()
        self.bound.launch()
        torch.cuda.synchronize()
        for view, tensor, _ in self.placed:
            self._part(image, view)[:] = tensor.view(-1).view(torch.uint8).cpu().numpy()

    @staticmethod
    def _part(image: npt.NDArray[np.uint8], view: View) -> npt.NDArray[np.uint8]:
        return image[view.offset : view.offset + view.nbytes]

    @staticmethod
    def _empty(view: View) -> torch.Tensor:
        return torch.empty(view.shape, dtype=TORCH_DTYPES[view.dtype], device="cuda")  # type: ignore[index]
