"""What a cubin says about itself: kernels, parameter tables, resources, symbols. Runs and judges nothing.

Everything is read from the ELF file: symbols, and the attributes that ptxas writes to `.nv.info` and
`.nv.info.<kernel>` (format and numbers as `nvdisasm` shows them; the CUDA driver reads the same tables to launch a
kernel). The builder compares the parameter table with the descriptor, so that a launch never packs an argument where
the machine code does not read it; the audit judges the rest.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Section, SymbolTableSection

from k3_backend.errors import BackendError

__all__ = ["RESERVED_SHARED_BYTES", "Cubin", "CubinError", "Kernel", "Slot", "read"]

_EM_CUDA = 190
_REGCOUNT, _FRAME_SIZE, _MIN_STACK = 0x2F, 0x11, 0x12
_KPARAM_INFO, _PARAM_CBANK, _REQNTID, _MAX_THREADS, _CLUSTER = 0x17, 0x0A, 0x10, 0x05, 0x3D
_HVAL = 3
_SVAL = 4
_GLOBAL_SPACE = 0x4
RESERVED_SHARED_BYTES = 1024
"""Of each CTA's shared memory from sm_90 on, taken by the system; `.nv.shared.<kernel>` starts with them. They count
against a multiprocessor's shared memory, not against the limit of one CTA."""
_ENTRY = 0x10
"""STO_CUDA_ENTRY in a symbol's `st_other`."""


class CubinError(BackendError):
    """The bytes are not a cubin that can be read."""

    def __init__(self, what: str) -> None:
        super().__init__(what, where="cubin", expected="a 64-bit ELF object for CUDA", next="build it again")


@dataclass(frozen=True)
class Slot:
    """One row of a kernel's parameter table."""

    index: int
    offset: int
    size: int
    pointer: bool | None
    """True where the PTX declared `.ptr .global`; None where the table does not say."""


@dataclass
class Kernel:
    """One entry function."""

    name: str
    parameters: list[Slot] = field(default_factory=list)
    parameter_base: int | None = None
    """Offset of the first parameter in constant bank 0."""
    parameter_bytes: int | None = None
    registers: int | None = None
    frame_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int = 0
    """Static shared memory, the system's reserved part excluded."""
    required_threads: tuple[int, ...] | None = None
    max_threads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Cubin:
    """The file's statements that the rules use."""

    arch: str
    kernels: Mapping[str, Kernel]
    undefined_functions: tuple[str, ...]
    device_bytes: int
    """Module variables in global memory, which outlive a launch."""


def read(data: bytes) -> Cubin:
    """Read a cubin.

    Raises:
        CubinError: not a 64-bit CUDA ELF file, or its tables contradict each other.
    """
    try:
        return _read(ELFFile(io.BytesIO(data)))
    except CubinError:
        raise
    except (
        ELFError, ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError, MemoryError,
        AssertionError, RecursionError, struct.error,
    ) as error:  # fmt: skip
        # pyelftools reports nonsense in a file through whichever of these its parser stumbles over.
        raise CubinError(f"cannot be read as a cubin ({type(error).__name__}: {error})") from error


def _read(elf: Any) -> Cubin:
    machine = elf["e_machine"]
    if elf.elfclass != 64 or not elf.little_endian or machine not in ("EM_CUDA", _EM_CUDA):
        raise CubinError(f"ELF of another kind ({elf.elfclass} bit, machine {machine})")
    sections = list(elf.iter_sections())
    tables = [s for s in sections if isinstance(s, SymbolTableSection) and s.name == ".symtab"]
    if len(tables) != 1:
        raise CubinError(f"{len(tables)} symbol tables, expected one")
    symbols = list(tables[0].iter_symbols())
    # pyelftools drops the bits of st_other that mark entry functions.
    other = tables[0].data()[5 :: tables[0]["sh_entsize"]]
    kernels = {s.name: Kernel(s.name) for s, bits in zip(symbols, other, strict=True) if _is_entry(s, bits)}
    by_name = {s.name: s for s in sections}
    _resources(by_name.get(".nv.info"), symbols, kernels)
    for kernel in kernels.values():
        _attributes(by_name.get(f".nv.info.{kernel.name}"), kernel)
        shared = by_name.get(f".nv.shared.{kernel.name}")
        kernel.shared_bytes = max(0, int(shared["sh_size"]) - RESERVED_SHARED_BYTES) if shared is not None else 0
    return Cubin(
        arch=_arch(elf),
        kernels=kernels,
        undefined_functions=tuple(
            sorted(
                s.name
                for s in symbols
                if s["st_shndx"] == "SHN_UNDEF" and s["st_info"]["type"] == "STT_FUNC" and s.name
            )
        ),
        device_bytes=sum(
            int(s["sh_size"]) for s in sections if s.name == ".nv.global" or s.name.startswith(".nv.global.")
        ),
    )


def _is_entry(symbol: Any, other: int) -> bool:
    defined = symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["type"] == "STT_FUNC"
    return bool(symbol.name) and defined and bool(other & _ENTRY)


def _arch(elf: Any) -> str:
    """The architecture as the file's flags state it; the layout of the flags changed with ELF ABI 8 (CUDA 13)."""
    flags = int(elf["e_flags"])
    number = flags >> 8 & 0xFF if elf["e_ident"]["EI_ABIVERSION"] >= 8 else flags & 0xFF
    return f"sm_{number}"


def _resources(section: Section | None, symbols: list[Any], kernels: Mapping[str, Kernel]) -> None:
    fields = {_REGCOUNT: "registers", _FRAME_SIZE: "frame_bytes", _MIN_STACK: "stack_bytes"}
    for code, value in _entries(section):
        if code not in fields or len(value) < 8:
            continue
        index, number = struct.unpack_from("<II", value)
        if index >= len(symbols):
            raise CubinError(f".nv.info names symbol {index} of {len(symbols)}")
        kernel = kernels.get(symbols[index].name)
        if kernel is not None:
            setattr(kernel, fields[code], number)


def _attributes(section: Section | None, kernel: Kernel) -> None:
    for code, value in _entries(section):
        if code == _KPARAM_INFO and len(value) >= 12:
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", value)
            pointer = True if flags >> 12 & 0xF == 0xF and flags >> 8 & 0xF == _GLOBAL_SPACE else None
            kernel.parameters.append(Slot(ordinal, offset, flags >> 18, pointer))
        elif code == _PARAM_CBANK and len(value) >= 8:
            _, kernel.parameter_base, kernel.parameter_bytes = struct.unpack_from("<IHH", value)
        elif code == _REQNTID and len(value) >= 12:
            kernel.required_threads = struct.unpack_from("<III", value)
        elif code == _MAX_THREADS and len(value) >= 12:
            kernel.max_threads = struct.unpack_from("<III", value)
    kernel.parameters.sort(key=lambda slot: slot.index)


def _entries(section: Section | None) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) pairs: format byte, attribute byte, 16-bit value or length, and as many bytes as that says."""
    if section is None:
        return
    data = section.data()
    at = 0
    while at + 4 <= len(data):
        kind, code, number = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _SVAL:
            if at + number > len(data):
                raise CubinError(f"{section.name}: attribute {code:#x} is longer than the section")
            yield code, data[at : at + number]
            at += number
        elif kind <= _HVAL:
            yield code, struct.pack("<H", number)
        else:
            raise CubinError(f"{section.name}: attribute of unknown format {kind}")
