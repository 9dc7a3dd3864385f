"""The launch descriptor: everything a trusted launcher needs to run an op's machine code, as data.

One `cuda.json` per artifact lists the variants of an op (one per set of choices), their launches and workspaces.
Images are named by the sha256 of their bytes. The file is written by the builder and read by launcher, audit and kit;
all of its rules are integer expressions (`expression.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3_backend.aot.cuda.contract import EXPECTABLE
from k3_backend.aot.cuda.expression import names
from k3_backend.aot.manifest import ArtifactError
from k3_backend.ops.interface import OpSpec

__all__ = ["DESCRIPTOR_NAME", "Descriptor", "LaunchSpec", "ParameterSpec", "VariantSpec", "WorkspaceSpec"]

DESCRIPTOR_NAME = "cuda.json"
DESCRIPTOR_VERSION = 1

ParameterKind = Literal["pointer", "map", "i32", "f32"]
PARAMETER_BYTES: dict[str, int] = {"pointer": 8, "map": 8, "i32": 4, "f32": 4}
POINTERS = ("pointer", "map")


@dataclass(frozen=True)
class ParameterSpec:
    """One kernel parameter."""

    name: str
    """A tensor, size, attribute or workspace of the call, or the name of a derived value."""
    kind: ParameterKind
    role: str
    """A tensor role of the op's interface, `workspace`, or `scalar`."""
    offset: int
    """Bytes from the start of the parameter block, as the cubin's own table says."""
    expression: str | None = None
    """Of a derived value."""
    tensor: str | None = None
    """Of a tensor map."""
    box: tuple[int, int] | None = None
    """Rows and columns of a tensor map's copies."""

    @property
    def size(self) -> int:
        """Bytes."""
        return PARAMETER_BYTES[self.kind]


@dataclass(frozen=True)
class LaunchSpec:
    """One kernel launch of a variant."""

    name: str
    image: str
    """File name of the cubin: its sha256 and `.cubin`."""
    entry: str
    parameters: tuple[ParameterSpec, ...]
    grid: tuple[str, str, str]
    block: int
    cluster: int
    shared: int
    min_ctas_per_sm: int
    pdl: bool
    expects: tuple[str, ...]
    polling: str | None
    registers: int
    static_shared: int
    """Bytes of shared memory beside `shared`; the part that the system reserves is not in it."""
    urgent: bool = False
    carveout: int | None = None


@dataclass(frozen=True)
class WorkspaceSpec:
    """Scratch memory that the caller provides."""

    name: str
    dtype: str
    elements: str
    zeroed: bool


@dataclass(frozen=True)
class VariantSpec:
    """One set of choices."""

    choices: Mapping[str, int]
    """Tunables and specialised values together."""
    launches: tuple[LaunchSpec, ...]
    workspaces: tuple[WorkspaceSpec, ...]
    requires: tuple[str, ...]


@dataclass(frozen=True)
class Descriptor:
    """All variants of one op for one architecture and geometry."""

    op: str
    arch: str
    geometry: str
    tunables: tuple[str, ...]
    specialised: tuple[str, ...]
    variants: tuple[VariantSpec, ...]

    def variant(self, choices: Mapping[str, int]) -> VariantSpec | None:
        """The variant built for exactly these choices, or None."""
        wanted = {name: choices[name] for name in (*self.tunables, *self.specialised)}
        return next((v for v in self.variants if v.choices == wanted), None)

    def images(self) -> tuple[str, ...]:
        """File names of all cubins, sorted."""
        return tuple(sorted({launch.image for variant in self.variants for launch in variant.launches}))

    def to_text(self) -> str:
        """Canonical JSON."""
        return json.dumps({"version": DESCRIPTOR_VERSION, **dataclasses.asdict(self)}, sort_keys=True, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path, spec: OpSpec) -> Descriptor:
        """Read `cuda.json` of an artifact folder and check its form against the op's interface.

        Raises:
            ArtifactError: unreadable, of another version or op, or a rule outside the language.
        """
        path = folder / DESCRIPTOR_NAME
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            version = raw.pop("version")
            variants = tuple(_variant(entry) for entry in raw.pop("variants"))
            descriptor = cls(
                variants=variants, tunables=tuple(raw.pop("tunables")), specialised=tuple(raw.pop("specialised")), **raw
            )
            if version != DESCRIPTOR_VERSION or descriptor.op != spec.name:
                raise ValueError(f"version {version}, op {descriptor.op}")
            check_form(descriptor, spec)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"unreadable launch descriptor ({error})", where=str(path),
                expected=f"version {DESCRIPTOR_VERSION} for op {spec.name}", next="build the artifact again",
            ) from error  # fmt: skip
        return descriptor


def check_form(descriptor: Descriptor, spec: OpSpec) -> None:
    """Every role is the interface's own and every rule parses; ValueError or ExpressionError says what does not."""
    roles = {t.name: t.role for t in spec.tensors}
    for variant in descriptor.variants:
        scratch = {w.name for w in variant.workspaces}
        for workspace in variant.workspaces:
            names(workspace.elements)
        for condition in variant.requires:
            names(condition)
        for launch in variant.launches:
            for extent in launch.grid:
                names(extent)
            if unknown := set(launch.expects) - set(EXPECTABLE):
                raise ValueError(f"launch {launch.name} expects unknown instruction classes {sorted(unknown)}")
            if launch.carveout is not None and not 0 <= launch.carveout <= 100:
                raise ValueError(f"launch {launch.name} prefers a carve-out of {launch.carveout} per cent")
            for parameter in launch.parameters:
                if parameter.expression is not None:
                    names(parameter.expression)
                name = parameter.tensor if parameter.kind == "map" else parameter.name
                role = "workspace" if name in scratch else roles.get(name or "", "scalar")
                if parameter.role != role or (parameter.kind in POINTERS) != (role != "scalar"):
                    raise ValueError(f"parameter {parameter.name} of {launch.name} is {parameter.role}, not {role}")


def _variant(raw: dict[str, Any]) -> VariantSpec:
    return VariantSpec(
        choices=dict(raw["choices"]),
        launches=tuple(_launch(entry) for entry in raw["launches"]),
        workspaces=tuple(WorkspaceSpec(**entry) for entry in raw["workspaces"]),
        requires=tuple(raw["requires"]),
    )


def _launch(raw: dict[str, Any]) -> LaunchSpec:
    parameters: Sequence[dict[str, Any]] = raw["parameters"]
    return LaunchSpec(**{
        **raw,
        "parameters": tuple(_parameter(entry) for entry in parameters),
        "grid": tuple(raw["grid"]),
        "expects": tuple(raw["expects"]),
    })  # fmt: skip


def _parameter(raw: dict[str, Any]) -> ParameterSpec:
    box = raw["box"]
    return ParameterSpec(**{**raw, "box": None if box is None else (int(box[0]), int(box[1]))})
