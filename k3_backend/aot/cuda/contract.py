"""What `kernels/<op>/cute.py` hands to the builder: kernels, their arguments and how they are launched.

A kernel file defines `variant(choices) -> Variant`. It is called at build time, in the sandbox, once per combination
of schedule and specialised sizes; what it returns is written down as data (`descriptor.py`), and from then on only
the machine code and that data exist. Arguments are named, never positional by accident: a tensor of the op's interface
(passed as a pointer), a size or attribute (passed by value), a workspace, or an integer expression over sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from k3_backend.geometry import Geometry

__all__ = ["EXPECTABLE", "Choices", "Launch", "TensorMap", "Value", "Variant", "Workspace"]

EXPECTABLE = ("tensor_core", "bulk_copy", "cluster", "async_copy", "prefetch")
"""Instruction classes that a launch may promise; the audit looks for them in the machine code."""

Extent = int | str
"""An integer, or an expression over sizes, attributes, tunables and `sms` (see `expression.py`); in a grid also
`clusters`, how many clusters of the launch the device holds at once."""


@dataclass(frozen=True)
class Choices:
    """Everything that is fixed when a variant is compiled."""

    arch: str
    geometry: Geometry
    tunables: Mapping[str, int]
    specialised: Mapping[str, int]

    def __getitem__(self, name: str) -> int:
        """A tunable or specialised value; KeyError if the kernel declares no such name."""
        return self.tunables[name] if name in self.tunables else self.specialised[name]

    @property
    def blackwell(self) -> bool:
        """Whether the target has fifth-generation tensor cores."""
        return self.arch.startswith("sm_10")


@dataclass(frozen=True)
class Value:
    """An int32 argument that the host computes from sizes when a call is bound."""

    name: str
    expression: str


@dataclass(frozen=True)
class TensorMap:
    """A pointer to a TMA descriptor in device memory, which the launcher encodes when a call is bound.

    The tensor is seen as a row-major matrix [product of the leading dimensions, last dimension]; a copy brings a box of
    rows and columns with 128-byte swizzle (16-byte pieces of row r lie at piece ^ (r % 8)); what lies outside reads as
    zero. Counts as an access to the tensor, with its role.
    """

    tensor: str
    rows: int
    columns: int
    """Elements; at most 128 bytes."""

    @property
    def name(self) -> str:
        """Of the parameter."""
        return f"{self.tensor}_map"


@dataclass(frozen=True)
class Workspace:
    """Scratch in device memory that the caller owns and passes to every call.

    `zeroed` workspaces are zero before the first call and must be zero again when a call has ended; others hold
    nothing that a call may rely on.
    """

    name: str
    dtype: Literal["f32", "bf16", "i32", "u8"]
    elements: Extent
    zeroed: bool = False


@dataclass(frozen=True)
class Launch:
    """One kernel launch. Launches of a variant run in order on one stream."""

    name: str
    kernel: Callable[..., Any]
    """A `@cute.kernel` function taking the arguments in order, then `constants` by keyword (Constexpr)."""
    arguments: tuple[str | Value | TensorMap, ...]
    grid: tuple[Extent, Extent, Extent]
    block: int
    """Threads."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    cluster: int = 1
    """Blocks along x that form a cluster."""
    shared: int = 0
    """Bytes of dynamic shared memory."""
    min_ctas_per_sm: int = 1
    """Occupancy that the schedule claims; the audit checks it against registers and shared memory."""
    pdl: bool = True
    """Programmatic dependent launch: starts before its predecessor has ended, and waits inside the kernel."""
    urgent: bool = False
    """Launched with the highest priority that the device has."""
    carveout: int | None = None
    """Preferred share of shared memory in the memory that it has in common with L1, in per cent; null: the driver's."""
    expects: tuple[str, ...] = ()
    """Instruction classes of `EXPECTABLE` that the machine code must contain."""
    polling: str | None = None
    """Memory-model argument of a kernel that polls with relaxed loads; null if it does not."""


@dataclass(frozen=True)
class Variant:
    """An op's implementation for one set of choices."""

    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()
    requires: tuple[str, ...] = ()
    """Conditions on sizes; a call for which one is false is refused."""
