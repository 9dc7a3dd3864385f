"""Which tunables a call takes: what an artifact declares and a schedule chooses, or why nobody would launch it.

One place for every caller: the dispatcher of a step and the workers of the gates ask here, so that what is judged is
what is dispatched. Nothing is loaded and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from k3_backend.aot.cuda.arch import ARCHS
from k3_backend.aot.cuda.descriptor import Descriptor
from k3_backend.aot.schedule import Declarations, Schedule, load_declarations
from k3_backend.geometry import Geometry
from k3_backend.ops.interface import OpSpec

__all__ = ["Choices", "Declined"]


@dataclass(frozen=True)
class Declined:
    """Why a call takes the standard path; codes are those of `k3_backend.step.plan`."""

    code: str
    message: str


@dataclass(frozen=True)
class Choices:
    """One artifact's descriptor and declarations, and the arm's schedule for it."""

    descriptor: Descriptor
    declared: Declarations
    schedule: Schedule

    @classmethod
    def read(cls, folder: Path, schedules: Path, spec: OpSpec, g: Geometry, arch: str) -> Choices:
        """Read what decides a call's tunables.

        Args:
            folder: of the artifact.
            schedules: the arm's folder of schedules: the one that holds the families.
            spec: interface of the op, from the trusted side.
            g: geometry that the artifact was built for.
            arch: names the schedules' family.

        Raises:
            ArtifactError, ScheduleError: one of them cannot be read, or they do not fit.
        """
        descriptor, declared = Descriptor.read(folder, spec), load_declarations(folder / "cute.toml")
        built = {name: sorted({v.choices[name] for v in descriptor.variants}) for name in descriptor.specialised}
        path = schedules / ARCHS[arch].schedules / g.name / f"{spec.name}.toml"
        schedule = Schedule.load(path, op=spec.name, geometry=g.name, tunables=declared.tunables, specialised=built)
        return cls(descriptor, declared, schedule)

    def tunables(
        self, rows: int, sizes: Mapping[str, int], attrs: Mapping[str, int | float]
    ) -> dict[str, int] | Declined:
        """Values for one call, in declaration order.

        Args:
            rows: M.
            sizes: the call's symbolic sizes (`aot.arguments.call_sizes`).
            attrs: the call's attributes.
        """
        for attr, values in self.declared.supports.items():
            if attrs.get(attr) not in values:
                message = f"attribute {attr} = {attrs.get(attr)}; the kernel supports {list(values)}"
                return Declined("op.unsupported", message)
        known = {**sizes, **{name: value for name, value in attrs.items() if isinstance(value, int)}}
        chosen = self.schedule.lookup(rows, known)
        return Declined("op.no_schedule", f"no schedule bucket for {rows} rows") if chosen is None else chosen
