"""What a caller says about kernels, and the form of the facts that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from k3_backend.aot.cuda.cubin import Kernel, Slot

__all__ = ["Claims", "Facts", "Param", "Role", "claims_facts", "parameters", "resources"]

Role = Literal["constant", "activation", "metadata", "state", "output", "workspace", "scalar"]
Facts = dict[str, Any]
"""Plain JSON values, one mapping per kernel, enough to decide again without the file."""

_POINTER_BYTES = 8


@dataclass(frozen=True)
class Param:
    """One kernel parameter as the launch descriptor declares it."""

    name: str
    offset: int
    """Bytes from the first parameter."""
    size: int
    role: Role
    """What the pointer points to; `scalar` for values."""


@dataclass(frozen=True)
class Claims:
    """What the author says about a kernel's launch."""

    block: int
    """Threads per CTA."""
    dynamic_smem: int
    """Bytes."""
    min_ctas_per_sm: int
    expects: tuple[str, ...] = ()
    """Instruction classes that must be there; see `isa.CLASSES`."""
    pdl: bool = False
    """Launched as a programmatic dependent of its predecessor."""
    polling: str | None = None
    """A memory-model argument, if the kernel polls with relaxed loads."""


def claims_facts(claims: Claims | None) -> Facts | None:
    """The claims as JSON."""
    return None if claims is None else {**asdict(claims), "expects": list(claims.expects)}


def parameters(kernel: Kernel, params: Sequence[Param] | None) -> list[Param]:
    """The declared parameters, or the kernel's own table with everything that can hold a pointer as an activation."""
    if params is not None:
        return list(params)
    return [Param(f"param{s.index}", s.offset, s.size, _default_role(s)) for s in kernel.parameters]


def _default_role(slot: Slot) -> Role:
    return "activation" if slot.pointer or slot.size >= _POINTER_BYTES else "scalar"


def resources(kernel: Kernel) -> Facts:
    """What the kernel takes, as far as its file states it."""
    return {
        "registers": kernel.registers,
        "frame_bytes": kernel.frame_bytes,
        "stack_bytes": kernel.stack_bytes,
        "static_smem": kernel.shared_bytes,
        "required_threads": list(kernel.required_threads) if kernel.required_threads else None,
        "max_threads": list(kernel.max_threads) if kernel.max_threads else None,
    }
