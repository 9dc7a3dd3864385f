"""What an op is: a destination-passing signature over named, role-tagged tensors.

Every op folder has one `interface.py` with one `OpSpec`. From that single description are derived the packing of
kernel arguments, the buffers and red zones of the kernels gate, which inputs count as constant for the audit gate,
and the shapes that tests use. The caller owns every buffer; an op allocates nothing and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from k3_backend.geometry import Geometry

__all__ = ["AttrSpec", "DType", "OpSpec", "Role", "Shape", "TensorSpec"]

DType = Literal["bf16", "f32", "i32", "i64", "u8", "e4m3"]
Role = Literal["activation", "constant", "metadata", "state", "output"]
Shape = tuple[int, ...]
Dims = Mapping[str, int]


@dataclass(frozen=True)
class TensorSpec:
    """One contiguous (row-major) tensor argument.

    Roles: `constant` = weight, never changes after loading; `activation` = produced by an earlier kernel of the
    step, read-only here; `metadata` = integers describing the batch, read-only; `state` = read and written in
    place, persists beyond the call; `output` = fully written by the op, its previous content must not matter.
    """

    name: str
    dims: tuple[str | int, ...]
    """Symbolic sizes: geometry-derived names from `OpSpec.sizes`, or call sizes such as M, B, T."""
    dtype: DType
    role: Role
    optional: bool = False
    """May be absent (passed as null) under a stated attribute value."""


@dataclass(frozen=True)
class AttrSpec:
    """One scalar argument that is fixed when a step is planned."""

    name: str
    kind: Literal["int", "float"]
    meaning: str


@dataclass(frozen=True)
class OpSpec:
    """The interface of one op.

    A specialised kernel receives, in this order: the launch context, the tensors, the attributes, and then the
    schedule's tunables (see `aot/cpu/k3_cpu.h` for the CPU calling convention).
    """

    name: str
    summary: str
    tensors: tuple[TensorSpec, ...]
    sizes: Callable[[Geometry], Dims]
    """Geometry-derived symbols used in `dims`."""
    attrs: tuple[AttrSpec, ...] = ()

    def tensor(self, name: str) -> TensorSpec:
        """The tensor of that name; KeyError if the op has none."""
        for spec in self.tensors:
            if spec.name == name:
                return spec
        raise KeyError(f"op {self.name} has no tensor {name!r}")

    def shapes(self, geometry: Geometry, call: Dims) -> dict[str, Shape]:
        """Concrete shapes for a geometry and the call sizes (M, B, T, pages, ...); KeyError names a missing size."""
        sizes = {**self.sizes(geometry), **call}
        return {t.name: tuple(d if isinstance(d, int) else sizes[d] for d in t.dims) for t in self.tensors}
