"""Guarded placement of one op call's tensors in the shared buffer, and what must be unchanged afterwards.

Every tensor gets a red zone on each side, filled with a secret pattern; outputs and
everything the call does not own are filled with poison. Two kinds of poison exist and each case is run with both: `nan`
(any read that matters turns results into NaN) and `finite` (a write of NaN or of a remembered value shows). The module
sees writes inside the shared buffer only; a wild write elsewhere shows as a crash, if at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from verify.evaluator.memory import SharedBuffer
from verify.workers.shared import ALIGNMENT, View

__all__ = ["GUARD_BYTES", "Arena", "Poison", "Touched", "poison"]

GUARD_BYTES = 4096
"""Red zone on each side of a tensor where the device names no other."""

Poison = Literal["nan", "finite"]

_NAN_BITS = np.uint32(0x7FC0_7FC0)  # a quiet NaN both as one f32 and as two bf16
_FINITE_CLEAR = np.uint32(0x4000_4000)  # top exponent bit of an f32 and of both bf16: finite, magnitude below 2


def poison(kind: Poison, nbytes: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Secret filler bytes, u8 [nbytes].

    `nan`: every aligned f32 and every aligned bf16 is a NaN with random sign and payload; as integers the values are
    huge. `finite`: every f32 and bf16 is finite with magnitude below 2; as integers the values are arbitrary.
    """
    words = rng.integers(0, 1 << 32, size=-(-nbytes // 4), dtype=np.uint32)
    words = words | _NAN_BITS if kind == "nan" else words & ~_FINITE_CLEAR
    return words.view(np.uint8)[:nbytes]


@dataclass(frozen=True)
class Touched:
    """Bytes that changed although the call does not own them."""

    kind: Literal["out_of_bounds_write", "input_changed", "unowned_state_changed", "workspace_not_zeroed"]
    tensor: str
    """The tensor changed, or the nearest tensor of a red zone."""
    offset: int
    """First changed byte, relative to the tensor's start (negative: in the red zone before it)."""
    nbytes: int
    """How many bytes differ."""

    def record(self) -> dict[str, Any]:
        """JSON for a raw line."""
        return {"code": self.kind, "tensor": self.tensor, "offset": self.offset, "nbytes": self.nbytes}


@dataclass
class _Slot:
    view: View
    fixed: npt.NDArray[np.bool_] | None = None
    """Which rows must keep `content` through the call, over flattened leading dimensions; None: all of it."""
    content: npt.NDArray[np.uint8] | None = None
    """Bytes before the call; None for tensors without a must-not-change part."""
    kind: Literal["input_changed", "unowned_state_changed", "workspace_not_zeroed"] = "input_changed"


@dataclass
class Arena:
    """The tensors of one op call at fixed addresses. Refill it as often as needed: addresses stay.

    Args:
        buffer: where to place them; reset by the owner between cases.
        layout: (name, dtype, shape) in placement order.
        rng: source of secret patterns; seeded from the operating system by the caller.
        guard_bytes: red zone on each side of a tensor.
    """

    buffer: SharedBuffer
    layout: Sequence[tuple[str, str, tuple[int, ...]]]
    rng: np.random.Generator
    guard_bytes: int = GUARD_BYTES
    _slots: dict[str, _Slot] = field(default_factory=dict, init=False)
    _zones: list[tuple[int, int, str, str]] = field(default_factory=list, init=False)
    """(start, end, tensor before, tensor after) of each red zone."""
    _zone_bytes: list[npt.NDArray[np.uint8]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        before, start = "", self.buffer.alloc(self.guard_bytes)
        for name, dtype, shape in self.layout:
            view = self.buffer.view(dtype, shape)
            self._zones.append((start, view.offset, before, name))
            self._slots[name] = _Slot(view)
            before, start = name, view.offset + view.nbytes
            # From the last byte of the tensor on, so that one element too many is seen whatever the alignment.
            self.buffer.alloc(self.guard_bytes + start % ALIGNMENT, alignment=1)
        self._zones.append((start, self.buffer.used, before, ""))

    def views(self) -> dict[str, View]:
        """Name -> where the tensor lies."""
        return {name: slot.view for name, slot in self._slots.items()}

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor's current elements, sharing memory."""
        return self.buffer.array(self._slots[name].view)

    def paint(self, kind: Poison) -> None:
        """Fill all red zones with a fresh secret pattern."""
        self._zone_bytes = []
        for start, end, _, _ in self._zones:
            pattern = poison(kind, end - start, self.rng)
            self.buffer.bytes[start:end] = pattern
            self._zone_bytes.append(pattern)

    def put_input(
        self, name: str, values: npt.NDArray[Any], *, free: npt.NDArray[np.bool_] | None, kind: Poison
    ) -> None:
        """Write a read-only tensor; rows marked `free` (their content must not matter) get poison instead."""
        self._fill(name, values, free, kind)
        slot = self._slots[name]
        slot.content, slot.fixed, slot.kind = self._bytes(name).copy(), None, "input_changed"

    def put_state(
        self,
        name: str,
        values: npt.NDArray[Any],
        *,
        free: npt.NDArray[np.bool_] | None,
        fixed: npt.NDArray[np.bool_],
        kind: Poison,
    ) -> None:
        """Write a state tensor; rows marked `free` get poison, rows marked `fixed` must keep their bits."""
        self._fill(name, values, free, kind)
        slot = self._slots[name]
        slot.content, slot.kind = self._bytes(name).copy(), "unowned_state_changed"
        slot.fixed = fixed.reshape(-1)

    def put_output(self, name: str, kind: Poison) -> npt.NDArray[np.uint8]:
        """Fill an output with poison and return a copy of it, u8 [nbytes]: what is still there was not written."""
        view = self._slots[name].view
        pattern = poison(kind, view.nbytes, self.rng)
        self._bytes(name)[:] = pattern
        self._slots[name].content = None
        return pattern

    def put_scratch(self, name: str, kind: Poison | None) -> None:
        """Fill a workspace with poison, or with zeros that must be back after the call if `kind` is null."""
        slot = self._slots[name]
        self._bytes(name)[:] = 0 if kind is None else poison(kind, slot.view.nbytes, self.rng)
        slot.content, slot.fixed, slot.kind = None, None, "workspace_not_zeroed"
        if kind is None:
            slot.content = self._bytes(name).copy()

    def touched(self) -> list[Touched]:
        """Everything that changed since the fill although the call does not own it."""
        found = [
            hit
            for zone, pattern in zip(self._zones, self._zone_bytes, strict=True)
            if (hit := self._zone(zone, pattern))
        ]
        for name, slot in self._slots.items():
            if slot.content is None:
                continue
            if np.array_equal(now := self._bytes(name), slot.content):
                continue
            changed = now != slot.content
            if slot.fixed is not None:
                changed.reshape(slot.fixed.size, -1)[~slot.fixed] = False
            if changed.any():
                found.append(Touched(slot.kind, name, int(changed.argmax()), int(changed.sum())))
        return found

    def _zone(self, zone: tuple[int, int, str, str], pattern: npt.NDArray[np.uint8]) -> Touched | None:
        start, end, before, after = zone
        changed = np.flatnonzero(self.buffer.bytes[start:end] != pattern)
        if not changed.size:
            return None
        first, last = int(changed[0]) + start, int(changed[-1]) + start
        if before and (not after or first - start <= end - 1 - last):
            return Touched("out_of_bounds_write", before, first - self._slots[before].view.offset, changed.size)
        return Touched("out_of_bounds_write", after, first - self._slots[after].view.offset, changed.size)

    def _bytes(self, name: str) -> npt.NDArray[np.uint8]:
        view = self._slots[name].view
        return self.buffer.bytes[view.offset : view.offset + view.nbytes]

    def _fill(self, name: str, values: npt.NDArray[Any], free: npt.NDArray[np.bool_] | None, kind: Poison) -> None:
        target = self.array(name)
        if values.shape != target.shape or values.dtype != target.dtype:
            raise ValueError(
                f"tensor {name}: {values.dtype}{values.shape} given; placed as {target.dtype}{target.shape}"
            )
        target[...] = values
        if free is not None and free.any():
            rows = target.reshape(free.shape + target.shape[free.ndim :])
            filler = poison(kind, int(free.sum()) * (target.nbytes // free.size), self.rng)
            rows[free] = filler.view(target.dtype).reshape(-1, *rows.shape[free.ndim :])
