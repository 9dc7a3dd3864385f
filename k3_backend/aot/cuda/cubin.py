"""What a cubin says about its kernels: parameter table, registers, stack, static shared memory.

Reads the ELF sections that the assembler writes for the driver (`.nv.info.<kernel>`); formats follow what `readelf` and
`cuobjdump` show of them. Nothing is executed. The builder compares the parameter table with the descriptor, so that a
launch never packs an argument where the machine code does not read it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from k3_backend.errors import BackendError

__all__ = ["CubinError", "KernelInfo", "Parameter", "read_kernels"]

_PARAMETER_INFO, _FRAME_SIZE, _REGISTER_COUNT, _CB_PARAM = 0x17, 0x11, 0x2F, 0x0A
_SIZED = 4
"""Attribute format with a 16-bit byte count and a value of that length; the others carry 16 bits in place."""


class CubinError(BackendError):
    """A cubin that cannot be read."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what, where="cubin", expected="an ELF object for CUDA with .nv.info sections", next="build it again"
        )


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter as the driver sees it."""

    offset: int
    size: int


@dataclass(frozen=True)
class KernelInfo:
    """One entry point."""

    entry: str
    parameters: tuple[Parameter, ...]
    """In declaration order."""
    registers: int
    frame_bytes: int
    """Stack per thread; spills and local arrays."""
    static_shared: int


def read_kernels(cubin: bytes) -> tuple[KernelInfo, ...]:
    """All entry points of a cubin, in section order.

    Raises:
        CubinError: not a readable cubin, or one without kernels.
    """
    try:
        elf = ELFFile(io.BytesIO(cubin))
        if elf["e_machine"] not in ("EM_CUDA", 190):
            raise CubinError(f"machine {elf['e_machine']}")
        kernels = tuple(_kernels(elf))
    except (ELFError, struct.error, IndexError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise CubinError(f"cannot be read ({type(error).__name__}: {error})") from error
    if not kernels:
        raise CubinError("no kernels")
    return kernels


def _kernels(elf: ELFFile) -> Iterator[KernelInfo]:
    sections = {section.name: section for section in elf.iter_sections()}
    symbols: list[str] = []
    for section in sections.values():
        if isinstance(section, SymbolTableSection):
            symbols = [symbol.name for symbol in section.iter_symbols()]
    shared_attributes = list(_attributes(sections[".nv.info"].data())) if ".nv.info" in sections else []
    for name, section in sections.items():
        if not name.startswith(".nv.info."):
            continue
        entry = name.removeprefix(".nv.info.")
        parameters: dict[int, Parameter] = {}
        for kind, value in _attributes(section.data()):
            if kind == _PARAMETER_INFO:
                _, ordinal, offset, packed = struct.unpack("<IHHI", value)
                parameters[ordinal] = Parameter(offset, packed >> 18)
        if sorted(parameters) != list(range(len(parameters))):
            raise CubinError(f"parameter table of {entry} has gaps")
        own = {kind: count for kind, symbol, count in _per_symbol(shared_attributes, symbols) if symbol == entry}
        static = sections.get(f".nv.shared.{entry}")
        yield KernelInfo(
            entry=entry, parameters=tuple(parameters[i] for i in range(len(parameters))),
            registers=own.get(_REGISTER_COUNT, 0), frame_bytes=own.get(_FRAME_SIZE, 0),
            static_shared=0 if static is None else static["sh_size"],
        )  # fmt: skip


def _per_symbol(attributes: list[tuple[int, bytes]], symbols: list[str]) -> Iterator[tuple[int, str, int]]:
    for kind, value in attributes:
        if kind in (_REGISTER_COUNT, _FRAME_SIZE):
            index, count = struct.unpack("<II", value)
            yield kind, symbols[index], count


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of an .nv.info section: bytes format, attribute, then 16 bits that are value or length."""
    at = 0
    while at + 4 <= len(data):
        form, kind, short = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            if at + short > len(data):
                raise CubinError("an attribute reaches beyond its section")
            yield kind, data[at : at + short]
            at += short
        else:
            yield kind, struct.pack("<H", short)
