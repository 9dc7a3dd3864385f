"""The memory that evaluator and worker share: one sealed mapping, reserved from the start in the evaluator's order."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from verify.workers.shared import ALIGNMENT, ITEM_BYTES, View

__all__ = ["SharedBuffer"]


class SharedBuffer:
    """One anonymous shared mapping with a bump allocator; owned by the evaluator.

    The file is sealed against growing and shrinking: truncation by a worker could kill the evaluator by SIGBUS.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("fasttrack-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        """The whole buffer, u8 [nbytes]."""
        self._used = 0

    def alloc(self, nbytes: int, *, alignment: int = ALIGNMENT) -> int:
        """Reserve bytes and return their offset.

        Raises:
            MemoryError: the buffer is full; says how much was asked and left.
        """
        offset = -(-self._used // alignment) * alignment
        if offset + nbytes > self.bytes.nbytes:
            raise MemoryError(
                f"shared buffer: {nbytes} bytes asked, {self.bytes.nbytes - offset} of {self.bytes.nbytes} left"
            )
        self._used = offset + nbytes
        return offset

    def view(self, dtype: str, shape: Sequence[int]) -> View:
        """Reserve a tensor; its content is whatever was there."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
        return View(self.alloc(nbytes), dtype, tuple(shape))

    def array(self, view: View) -> npt.NDArray[Any]:
        """The view's elements, sharing memory."""
        return view.array(self.bytes)

    @property
    def used(self) -> int:
        """Bytes from the start that are reserved."""
        return self._used

    def reset(self, mark: int = 0) -> None:
        """Forget every reservation above `mark`; the memory is kept."""
        self._used = mark

    def close(self) -> None:
        """Release the descriptor; the mapping goes when the last array over it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
