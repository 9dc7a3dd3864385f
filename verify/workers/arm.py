"""The arm's kernels inside a worker: loaded once, shared by all areas, and optionally spoiled on purpose.

`kernels(session)` is the only place where candidate objects are loaded. `spoil` wraps an op's entry so that its results
come out deliberately wrong: if a judged number survives that, the number did not come from this kernel (the *watermark*
proof of the path gate). The wrapper is trusted code and knows nothing of expected values.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from k3_backend.aot.cpu.launch import KernelSet, LoadedOp
from k3_backend.aot.manifest import Artifact
from k3_backend.geometry import geometry
from k3_backend.ops.interface import Role
from verify.workers.main import Session

__all__ = ["kernels", "spoil", "unspoil"]

_AREA = "arm"
_DLTENSOR = 7  # TVMFFITypeIndex


class _Any(ctypes.Structure):
    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("pointer", ctypes.c_void_p))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Entry = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Any), ctypes.c_int32, ctypes.c_void_p)


class _Loaded:
    def __init__(self, kernel_set: KernelSet) -> None:
        self.kernels = kernel_set
        self.honest = {op: loaded.entry for op, loaded in kernel_set.items()}
        self.wrappers: dict[str, Any] = {}


def _loaded(session: Session) -> _Loaded:
    if _AREA not in session.areas:
        artifacts = {op: Artifact.read(path) for op, path in session.artifacts.items()}
        if session.schedules is None or "runtime" not in artifacts:
            raise ValueError("this arm has no specialised kernels: artifacts, the runtime and schedules are needed")
        runtime = artifacts.pop("runtime")
        names = {artifact.geometry for artifact in artifacts.values()}
        if len(names) != 1:
            raise ValueError(f"artifacts of geometries {sorted(names)}; expected one geometry")
        loaded = KernelSet.load(artifacts, session.schedules, geometry(names.pop()), runtime)
        session.areas[_AREA] = _Loaded(loaded)
    area = session.areas[_AREA]
    assert isinstance(area, _Loaded)
    return area


def kernels(session: Session) -> KernelSet:
    """The arm's specialised ops, loaded on first use.

    Raises:
        ValueError: the arm has none.
        BackendError: an artifact or schedule cannot be loaded.
    """
    return _loaded(session).kernels


def spoil(session: Session, op: str) -> None:
    """Make an op's results deliberately wrong in every launch list that is replayed for the first time from now on.

    A list packs its entries at its first replay and keeps them.
    """
    area = _loaded(session)
    loaded = area.kernels[op]
    honest = _Entry(area.honest[op])
    roles = [tensor.role for tensor in loaded.spec.tensors]
    spoiled: Role = "output" if "output" in roles else "state"
    written = [at for at, role in enumerate(roles, 1) if role == spoiled]

    def entry(handle: int, args: ctypes._Pointer[_Any], count: int, result: int) -> int:
        status: int = honest(handle, args, count, result)
        if status == 0:
            for at in written:
                if args[at].type_index == _DLTENSOR:
                    _disturb(_DLTensor.from_address(args[at].pointer))
        return status

    area.wrappers[op] = _Entry(entry)
    _set_entry(loaded, ctypes.cast(area.wrappers[op], ctypes.c_void_p).value or 0)


def unspoil(session: Session, op: str) -> None:
    """Use the honest entry again for lists not replayed yet. The wrapper lives on for those that hold it."""
    area = _loaded(session)
    _set_entry(area.kernels[op], area.honest[op])


def _set_entry(loaded: LoadedOp, entry: int) -> None:
    loaded.entry = entry


def _disturb(tensor: _DLTensor) -> None:
    """Flip the sign of every second element (ids: their lowest bit): large, and nothing that a norm can scale away."""
    count = math.prod(tensor.shape[dim] for dim in range(tensor.ndim))
    dtype, bit = {
        (4, 16): (np.uint16, 1 << 15),  # bf16
        (2, 32): (np.uint32, 1 << 31),  # f32
        (0, 32): (np.uint32, 1),  # i32
    }[(tensor.code, tensor.bits)]
    memory = (ctypes.c_uint8 * (count * tensor.bits // 8)).from_address(tensor.data + tensor.byte_offset)
    np.frombuffer(memory, dtype=dtype)[::2] ^= dtype(bit)
