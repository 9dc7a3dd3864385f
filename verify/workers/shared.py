"""The shared buffer as both sides see it: a flat byte array and typed views described by offsets.

A `View` is what control messages carry in place of data. Resolving one checks its bounds and alignment, so that no
message can name memory outside the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGNMENT", "ITEM_BYTES", "STORAGE", "View"]

ALIGNMENT = 64
"""Bytes; every tensor of a call starts on such a boundary."""

STORAGE: dict[str, type[np.generic]] = {
    "bf16": np.uint16,  # numpy has no bfloat16; the bits are what is compared
    "f32": np.float32,
    "f64": np.float64,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "e4m3": np.uint8,  # likewise
}
"""dtype name -> how numpy holds it."""

ITEM_BYTES: dict[str, int] = {name: np.dtype(kind).itemsize for name, kind in STORAGE.items()}
"""Element size of each dtype name of the op interfaces, plus f64 and u8."""


@dataclass(frozen=True)
class View:
    """A contiguous row-major tensor inside the shared buffer."""

    offset: int
    """Bytes from the start of the buffer."""
    dtype: str
    """Key of `ITEM_BYTES`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """As a control message carries it."""
        return {"offset": self.offset, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> View:
        """Inverse of `to_json`.

        Raises:
            ValueError: unknown dtype, negative size or unaligned offset.
        """
        view = cls(int(data["offset"]), str(data["dtype"]), tuple(int(n) for n in data["shape"]))
        if (
            view.dtype not in ITEM_BYTES
            or min((*view.shape, view.offset, 0)) < 0
            or view.offset % ITEM_BYTES[view.dtype]
        ):
            raise ValueError(f"not a tensor view: {dict(data)}")
        return view

    def array(self, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """The view's elements, sharing memory with `buffer` (u8 [bytes]). bf16 and e4m3 come as their bits.

        Raises:
            ValueError: the view reaches beyond the buffer.
        """
        if self.offset + self.nbytes > buffer.nbytes:
            raise ValueError(f"view {self} ends {self.offset + self.nbytes - buffer.nbytes} bytes beyond the buffer")
        flat = buffer[self.offset : self.offset + self.nbytes]
        return flat.view(STORAGE[self.dtype]).reshape(self.shape)
