"""The real engine of timed chains: `k3_backend.step.cuda` on the current GPU; its clock is CUDA events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3_backend.geometry import Geometry
from k3_backend.model.program import Site
from k3_backend.step.cuda import Captured, CudaArm, capture

__all__ = ["CudaEngine"]


class CudaEngine:
    """See `chain_methods.Engine`."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self._arms: dict[str, CudaArm] = {}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def load(self, artifacts: Mapping[str, Path], schedules: Path | None, g: Geometry, arch: str) -> dict[str, Any]:
        """Load the images; their digests."""
        arm = self._arms[g.name] = CudaArm(artifacts, schedules, g, arch)
        if "kda_decode" not in artifacts:
            from k3_backend.ops.kda_decode.standard_cuda import implementation

            implementation()  # importing fla takes seconds, better spent while the other arms start, too
        return {"images": arm.images}

    def capture(
        self,
        g: Geometry,
        program: Sequence[Site],
        buffers: Mapping[str, Tensor],
        constants: Callable[[Site], Mapping[str, Tensor]],
        before: Callable[[], None],
    ) -> _Graph:
        """One graph."""
        made = capture(self._arms[g.name], program, buffers, constants, before=before, stream=self._stream)
        return _Graph(made)


class _Graph:
    def __init__(self, made: Captured) -> None:
        self._made = made
        self.choices = [choice.record() for choice in made.choices]
        self.tensors = made.tensors
        self._first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def replay(self, count: int) -> int:
        """See `chain_methods.Graph`."""
        torch.cuda.synchronize()
        self._first.record(self._made.stream)
        self._made.replay(count)
        self._last.record(self._made.stream)
        self._last.synchronize()
        milliseconds = float(self._first.elapsed_time(self._last))
        return max(1, round(milliseconds * 1e6))

    def counts(self) -> Mapping[str, Sequence[int]]:
        """See `chain_methods.Graph`."""
        return self._made.ledger.snapshot()

    def reset(self) -> None:
        """See `chain_methods.Graph`."""
        self._made.ledger.reset()
        torch.cuda.synchronize()


def standard_identity() -> dict[str, str]:
    """Versions of what the standard path runs on."""
    import triton

    from k3_backend.ops.kda_decode.standard_cuda import implementation

    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "triton": str(triton.__version__),
        "kda_decode": implementation(),
    }
