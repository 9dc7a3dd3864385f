"""Pack checked arguments (`aot/arguments.py`) of a launch for the C calling convention.

The packed form is apache-tvm-ffi's `TVMFFIAny` array over DLPack `DLTensor` structures.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

__all__ = ["CallArguments"]

_NONE, _INT, _FLOAT, _OPAQUE, _DLTENSOR = 0, 1, 3, 4, 7  # TVMFFITypeIndex
_DL_CODES: dict[torch.dtype, tuple[int, int]] = {  # DLDataTypeCode, bits
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
}


class _DLTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Payload(ctypes.Union):
    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_void_p))


class _Any(ctypes.Structure):
    """`TVMFFIAny` of apache-tvm-ffi's c_api.h."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Payload))


class CallArguments:
    """One launch's packed arguments; owns the memory they point into and keeps the tensors alive."""

    def __init__(
        self,
        context: int,
        tensors: Sequence[torch.Tensor | None],
        attrs: Sequence[int | float],
        tunables: Sequence[int],
    ) -> None:
        self.count = 1 + len(tensors) + len(attrs) + len(tunables)
        self._tensors = list(tensors)
        self._keep: list[object] = []
        self._args = (_Any * self.count)()
        self._args[0] = _Any(_OPAQUE, 0, _Payload(pointer=context))
        for at, tensor in enumerate(tensors, 1):
            if tensor is None:
                self._args[at] = _Any(_NONE, 0, _Payload(integer=0))
            else:
                view = self._describe(tensor)
                self._args[at] = _Any(_DLTENSOR, 0, _Payload(pointer=ctypes.addressof(view)))
        for at, number in enumerate((*attrs, *tunables), 1 + len(tensors)):
            if isinstance(number, int):
                self._args[at] = _Any(_INT, 0, _Payload(integer=number))
            else:
                self._args[at] = _Any(_FLOAT, 0, _Payload(real=number))

    @property
    def address(self) -> int:
        """Address of the first `TVMFFIAny`."""
        return ctypes.addressof(self._args)

    def _describe(self, tensor: torch.Tensor) -> _DLTensor:
        shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        strides = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
        code, bits = _DL_CODES[tensor.dtype]
        view = _DLTensor(
            tensor.data_ptr(), 1, 0, tensor.dim(), code, bits, 1, ctypes.addressof(shape), ctypes.addressof(strides), 0
        )  # fmt: skip
        self._keep += [shape, strides, view]
        return view
