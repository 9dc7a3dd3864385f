"""Facts of every kernel of a CUDA artifact: its cubins, held against what its launch descriptor declares.

One cubin is read once, however many variants launch it. Roles come from the trusted interface of the op, since the
builder refuses a descriptor that names others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from k3_backend.aot.cuda.descriptor import Descriptor, LaunchSpec, ParameterSpec
from k3_backend.aot.manifest import Artifact
from k3_backend.ops import ALL_OPS
from verify.gates.audit.cuda import Claims, Facts, Param, Role, inspect_cubin

__all__ = ["DeviceKernel", "inspect_artifact"]


@dataclass(frozen=True)
class DeviceKernel:
    """One kernel as it would be launched."""

    where: str
    """op/arch/geometry/launch and the choices of the first variant that uses it."""
    image: str
    facts: Facts


def inspect_artifact(artifact: Artifact) -> list[DeviceKernel]:
    """Every distinct (image, claims) of an artifact, in descriptor order.

    Raises:
        ArtifactError: the descriptor cannot be read.
    """
    descriptor = Descriptor.read(artifact.path, ALL_OPS[artifact.op])
    kernels: dict[tuple[object, ...], DeviceKernel] = {}
    for variant in descriptor.variants:
        choices = ",".join(f"{name}={value}" for name, value in sorted(variant.choices.items()))
        for launch in variant.launches:
            key = (launch.image, launch.parameters, launch.block, launch.shared, launch.min_ctas_per_sm, launch.expects)
            if key not in kernels:
                where = f"{artifact.name}/{launch.name} ({choices})"
                kernels[key] = DeviceKernel(where, launch.image, _facts(artifact, launch))
    return list(kernels.values())


def _facts(artifact: Artifact, launch: LaunchSpec) -> Facts:
    image = artifact.path / launch.image
    ptx = image.with_suffix(".ptx")
    found = inspect_cubin(
        image.read_bytes(),
        entry=launch.entry,
        params=[_parameter(p) for p in launch.parameters],
        claims=Claims(
            block=launch.block, dynamic_smem=launch.shared, min_ctas_per_sm=launch.min_ctas_per_sm,
            expects=launch.expects, pdl=launch.pdl, polling=launch.polling,
        ),
        ptx=ptx.read_text(encoding="utf-8") if ptx.is_file() else None,
    )  # fmt: skip
    if len(found) != 1:
        raise ValueError(f"{len(found)} kernels are called {launch.entry} in {launch.image}")
    return found[0]


def _parameter(parameter: ParameterSpec) -> Param:
    return Param(parameter.name, parameter.offset, parameter.size, cast(Role, parameter.role))
