"""Whether a kernel's machine code has mbarrier instructions, by the image's own table.

ptxas lists their places in `.nv.info.<kernel>` (attribute 0x39, EIATTR_MBARRIER_INSTR_OFFSETS). Read with the standard
library alone: a kit has no ELF reader, and the images were read by `k3_backend.aot.cuda.cubin` where it was built. A
forged table can turn racecheck's errors into a check that was not evaluated, never into a clean one.
"""

from __future__ import annotations

import struct

__all__ = ["kernels_with_mbarriers"]

_TABLE = ".nv.info."
_MBARRIERS = 0x39
_SIZED = 4
"""Format of an attribute whose 16-bit number is the length of its value; other formats hold the value in it."""


def kernels_with_mbarriers(image: bytes) -> frozenset[str]:
    """Names of the image's kernels that have mbarrier instructions.

    Args:
        image: a 64-bit little-endian ELF file.

    Raises:
        ValueError: it is not one.
    """
    try:
        if image[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no 64-bit little-endian ELF file")
        (sections_at,) = struct.unpack_from("<Q", image, 0x28)
        size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
        # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size
        headers = [struct.unpack_from("<IIQQQQ", image, sections_at + size * index) for index in range(count)]
        names_at = headers[names_index][4]
        found = set()
        for name_at, _, _, _, offset, length in headers:
            start = names_at + name_at
            name = image[start : image.index(b"\0", start)].decode("ascii")
            if name.startswith(_TABLE) and _has(image[offset : offset + length]):
                found.add(name[len(_TABLE) :])
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"image cannot be read ({error}); expected a cubin; next: build the kit again") from error
    return frozenset(found)


def _has(table: bytes) -> bool:
    at = 0
    while at + 4 <= len(table):
        kind, code, number = struct.unpack_from("<BBH", table, at)
        if code == _MBARRIERS:
            return True
        at += 4 + (number if kind == _SIZED else 0)
    return False
