"""Our kernel as an arm: one artifact, with the tunables of its own schedule, as a planned step launches it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from k3_backend.aot.arguments import TORCH_DTYPES, BindError, call_sizes
from k3_backend.aot.cuda.choices import Choices, Declined
from k3_backend.aot.cuda.launch import BoundCall, CudaOp
from k3_backend.geometry import geometry
from k3_backend.ops import OPS
from verify.bench.gpu.arm import Arm, Inputs, Missing, Tensors

__all__ = ["Ours"]


class Ours:
    """One op's kernels, loaded on the current device.

    Args:
        folder: artifact.
        schedules: folder of the arm's schedules.
        op: op name.
        arch: names the schedules' family.
        geometry_name: what the artifact was built for.
    """

    def __init__(self, folder: Path, schedules: Path, op: str, arch: str, geometry_name: str) -> None:
        self.spec, self.geometry = OPS[op], geometry(geometry_name)
        self.choices = Choices.read(folder, schedules, self.spec, self.geometry, arch)
        self.kernels = CudaOp(folder, self.spec, self.geometry)

    def arm(self, inputs: Inputs) -> Arm:
        """Bind every set.

        Raises:
            Missing: the schedule or the artifact has nothing for the call, so the standard path would run.
        """
        outputs = [self._outputs(tensors) for tensors in inputs.sets]
        first = {**inputs.sets[0], **outputs[0]}
        sizes = call_sizes(self.spec, self.geometry, first)
        tunables = self.choices.tunables(inputs.cell.rows, sizes, inputs.attrs)
        if isinstance(tunables, Declined):
            raise Missing(f"{tunables.message}: the standard path runs")
        calls: list[BoundCall] = []
        try:
            for tensors, out in zip(inputs.sets, outputs, strict=True):
                calls.append(self.kernels.bind({**tensors, **out}, inputs.attrs, tunables))
        except BindError as error:
            raise Missing(str(error)) from error
        written = [t.name for t in self.spec.tensors if t.role == "state"]

        def results() -> Mapping[str, Tensor]:
            return {**outputs[0], **{name: inputs.sets[0][name] for name in written}}

        pdl = all(launch.pdl for launch in calls[0].variant.launches)
        return Arm([call.launch for call in calls], results, pdl, facts={"tunables": dict(tunables)})

    def _outputs(self, tensors: Tensors) -> dict[str, Tensor]:
        """NaN in every output's place."""
        sizes = {**self.spec.sizes(self.geometry), **call_sizes(self.spec, self.geometry, tensors)}
        made = {}
        for tensor in self.spec.tensors:
            if tensor.role == "output":
                shape = [d if isinstance(d, int) else sizes[d] for d in tensor.dims]
                dtype = TORCH_DTYPES[tensor.dtype]
                made[tensor.name] = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        return made
