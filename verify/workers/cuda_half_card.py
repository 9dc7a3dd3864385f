"""The real card of `half_methods`: half-layers captured into CUDA graphs over one arena of device memory.

Every run starts from the whole image, so nothing that capturing or an earlier run left behind survives. No host code of
a candidate runs here: `k3_backend.step.cuda` loads images, launches them and counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3_backend.aot.arguments import TORCH_DTYPES
from k3_backend.geometry import Geometry
from k3_backend.model.program import Site
from k3_backend.ops import OPS
from k3_backend.step.cuda import Captured, CudaArm, DeviceLedger, capture
from verify.workers.half_layer import constant_name
from verify.workers.kernel_trace import obstacle, traced
from verify.workers.shared import View
from verify.workers.spoil import disturb

__all__ = ["CudaHalfCard"]


class CudaHalfCard:
    """One arm on the current device."""

    def load(self, folders: Mapping[str, Path], schedules: Path, g: Geometry, arch: str, nbytes: int) -> dict[str, Any]:
        """Load the images, reserve the arena, and see whether the profiler sees."""
        self.arm = CudaArm(folders, schedules, g, arch)
        self.off = CudaArm({}, None, g, arch)
        self.arena = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self.places: dict[str, Tensor] = {}
        self.captured: Captured | None = None
        why_not, symbol = _ledger_symbol()
        return {
            "images": self.arm.images,
            "device": {
                "name": torch.cuda.get_device_name(),
                "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
            },
            "profiler": {"obstacle": why_not, "ledger": symbol},
        }

    def bind(
        self,
        program: tuple[Site, ...],
        views: Mapping[str, View],
        image: npt.NDArray[np.uint8],
        mode: str,
        spoil: Sequence[str],
    ) -> list[dict[str, Any]]:
        """Capture; an earlier capture is forgotten."""
        self.captured = None
        self.arena[: image.size].copy_(torch.from_numpy(image))
        self.places = {name: self._tensor(view) for name, view in views.items()}
        arguments = {spec.name for site in program for spec in OPS[site.op].tensors if spec.role == "constant"}

        def constants(site: Site) -> dict[str, Tensor]:
            names = {name: constant_name(site, name) for name in arguments}
            return {name: self.places[key] for name, key in names.items() if key in self.places}

        def after(site: Site, tensors: Mapping[str, Tensor | None]) -> None:
            if site.op in spoil:
                disturb(OPS[site.op], tensors)

        arm = self.arm if mode == "auto" else self.off
        self.captured = capture(arm, program, self.places, constants, after=after if spoil else None)
        return [choice.record() for choice in self.captured.choices]

    def run(self, image: npt.NDArray[np.uint8], replays: int, *, profile: bool) -> dict[str, Any]:
        """Replay, count and copy back."""
        captured, host = self.captured, torch.from_numpy(image)
        if captured is None:
            raise LookupError("half.bind comes first")
        used = host.numel()
        self.arena[:used].copy_(host)
        torch.cuda.synchronize()
        before = captured.ledger.snapshot()
        kernels = None
        if profile:
            kernels = traced(lambda: captured.replay(replays))
        else:
            captured.replay(replays)
            torch.cuda.synchronize()
        after = captured.ledger.snapshot()
        for name, tensor in captured.tensors.items():
            place = self.places[name]
            if tensor.data_ptr() != place.data_ptr():  # the standard path leaves a result where it made it
                place.copy_(tensor.reshape(place.shape))
        torch.cuda.synchronize()
        host.copy_(self.arena[:used])
        return {"ledger": {"before": before, "after": after}, "kernels": kernels}

    def _tensor(self, view: View) -> Tensor:
        dtype = TORCH_DTYPES[view.dtype]  # type: ignore[index]
        return self.arena[view.offset : view.offset + view.nbytes].view(dtype).view(view.shape)


def _ledger_symbol() -> tuple[str | None, str | None]:
    """(why kernels cannot be counted, symbol of the ledger's kernel): one is null.

    The kernel is found by tracing a ledger's own addition, which is all that the trace may hold.
    """
    ledger = DeviceLedger([f"site {number}" for number in range(5)])
    step = ledger.vector(())

    def once() -> None:
        ledger.counts.add_(step)

    once()  # compiled or loaded on first use
    return obstacle(once)
