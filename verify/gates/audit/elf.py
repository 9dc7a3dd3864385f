"""Facts about a compiled host object, as the loader and the processor would see it. Judges nothing.

Symbols, libraries and load-time entries come from the dynamic segment, memory from the program headers: section names
are only reported. The file is parsed by pyelftools in this process (no code of it runs); the disassembler, a larger
parser written in C, runs in the sandbox.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from elftools.common.exceptions import ELFError
from elftools.elf.descriptions import describe_reloc_type
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from harness import sandbox

__all__ = ["inspect"]

_PAGE = 4096
_LOAD_TIME = {
    "DT_INIT_ARRAYSZ": "DT_INIT_ARRAY",
    "DT_FINI_ARRAYSZ": "DT_FINI_ARRAY",
    "DT_PREINIT_ARRAYSZ": "DT_PREINIT_ARRAY",
}
_PREFIXES = frozenset({
    "lock", "rep", "repz", "repe", "repnz", "repne", "data16", "addr32", "cs", "ds", "es", "ss", "bnd", "notrack",
    "xacquire", "xrelease", "{evex}", "{vex}", "{vex3}",
})  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t(?P<text>.+)$", re.MULTILINE)


def inspect(path: Path) -> dict[str, Any]:
    """Read the facts that `verify.protocol.audit` judges. A file that cannot be read has its reason in `malformed`."""
    try:
        with path.open("rb") as file:
            facts = _facts(file)
    except (
        ELFError,
        ValueError,
        KeyError,
        IndexError,
        UnicodeDecodeError,
        AttributeError,
        TypeError,
        OverflowError,
    ) as error:
        # pyelftools reports nonsense in a file through whichever of these its parser stumbles over.
        return {"malformed": f"cannot be read as ELF ({type(error).__name__}: {error})"}
    if facts["malformed"] is None:
        facts.update(_disassemble(path))
    return facts


def _facts(file: BinaryIO) -> dict[str, Any]:
    elf = ELFFile(file)
    kind = (elf.elfclass, elf.little_endian, elf["e_machine"], elf["e_type"])
    if kind != (64, True, "EM_X86_64", "ET_DYN"):
        return {"malformed": f"ELF of another kind {kind}"}
    segments = list(elf.iter_segments())
    dynamic = [s for s in segments if isinstance(s, DynamicSegment)]
    if len(dynamic) != 1:
        return {"malformed": f"{len(dynamic)} dynamic segments"}
    return {
        "malformed": None,
        **_memory(segments),
        **_dynamic(dynamic[0]),
        **_symbols(dynamic[0]),
        "relocations": dict(_relocations(dynamic[0])),
        "sections": [s.name for s in elf.iter_sections() if s.name],
        "writable_objects": _writable_objects(elf, segments),
    }


def _flags(segment: Any) -> str:
    bits = segment["p_flags"]
    return "".join(letter for letter, bit in (("R", 4), ("W", 2), ("X", 1)) if bits & bit)


def _memory(segments: list[Any]) -> dict[str, Any]:
    stack = [s for s in segments if s["p_type"] == "PT_GNU_STACK"]
    loads = [s for s in segments if s["p_type"] == "PT_LOAD"]
    return {
        "segments": [
            {"type": str(s["p_type"]), "flags": _flags(s), "vaddr": s["p_vaddr"], "bytes": s["p_memsz"]}
            for s in segments
        ],
        "stack_flags": _flags(stack[0]) if stack else None,
        "writable_bytes": sum(end - start for start, end in _writable_ranges(segments)),
        "tls_bytes": sum(s["p_memsz"] for s in segments if s["p_type"] == "PT_TLS"),
        "code_bytes": sum(s["p_memsz"] for s in loads if "X" in _flags(s)),
    }


def _writable_ranges(segments: list[Any]) -> list[tuple[int, int]]:
    """Address ranges that stay writable after relocation: writable segments without the RELRO pages.

    The loader rounds both ends of RELRO down to pages, so a tail that does not fill a page stays writable.
    """
    relro = [
        (s["p_vaddr"] // _PAGE * _PAGE, (s["p_vaddr"] + s["p_memsz"]) // _PAGE * _PAGE)
        for s in segments
        if s["p_type"] == "PT_GNU_RELRO"
    ]
    ranges = []
    for segment in segments:
        if segment["p_type"] != "PT_LOAD" or "W" not in _flags(segment):
            continue
        start, end = segment["p_vaddr"], segment["p_vaddr"] + segment["p_memsz"]
        for low, high in relro:
            if low <= start < high:
                start = min(end, high)
        if start < end:
            ranges.append((start, end))
    return ranges


def _dynamic(dynamic: DynamicSegment) -> dict[str, Any]:
    tags = list(dynamic.iter_tags())
    names = [str(t.entry.d_tag) for t in tags]
    entries: Counter[str] = Counter()
    for tag, name in zip(tags, names, strict=True):
        if name in _LOAD_TIME and tag.entry.d_val:
            entries[_LOAD_TIME[name]] += tag.entry.d_val // 8
        elif name in ("DT_INIT", "DT_FINI"):
            entries[name] += 1
    flags = sum(t.entry.d_val for t in tags if t.entry.d_tag == "DT_FLAGS")
    return {
        "dynamic_tags": sorted(set(names)),
        "needed": [_string(t) for t in tags if t.entry.d_tag == "DT_NEEDED"],
        "load_time_entries": dict(entries),
        "textrel": "DT_TEXTREL" in names or bool(flags & 0x4),
        "search_paths": [_string(t) for t in tags if t.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")],
    }


def _string(tag: Any) -> str:
    """The string that a DT_NEEDED, DT_RPATH or DT_RUNPATH entry names; pyelftools keeps it under the tag's own name."""
    return str(getattr(tag, tag.entry.d_tag.removeprefix("DT_").lower()))


def _symbols(dynamic: DynamicSegment) -> dict[str, Any]:
    named = [s for s in dynamic.iter_symbols() if s.name]
    undefined = [s for s in named if s["st_shndx"] == "SHN_UNDEF"]
    defined = [s for s in named if s["st_shndx"] != "SHN_UNDEF"]
    return {
        "undefined": sorted(s.name for s in undefined),
        "exported": sorted(s.name for s in defined if s["st_info"]["bind"] != "STB_LOCAL"),
        "ifuncs": sorted(s.name for s in named if s["st_info"]["type"] in ("STT_GNU_IFUNC", "STT_LOOS")),
        "unique": sorted(s.name for s in named if s["st_info"]["bind"] in ("STB_GNU_UNIQUE", "STB_LOOS")),
    }


def _relocations(dynamic: DynamicSegment) -> Counter[str]:
    counts: Counter[str] = Counter()
    tables: Any = dynamic.get_relocation_tables()
    for table in tables.values():
        for relocation in table.iter_relocations():
            # RELR tables hold relative relocations only and carry no type.
            kind = relocation["r_info_type"] if "r_info_type" in relocation.entry else 8
            counts[describe_reloc_type(kind, dynamic.elffile)] += 1
    return counts


def _writable_objects(elf: ELFFile, segments: list[Any]) -> list[str]:
    """Names of symbols inside writable ranges, for the message; the linker's own markers are left out."""
    ranges = _writable_ranges(segments)
    names = set()
    for section in elf.iter_sections():
        if isinstance(section, SymbolTableSection):
            for symbol in section.iter_symbols():
                inside = any(start <= symbol["st_value"] < end for start, end in ranges)
                if inside and symbol["st_info"]["type"] == "STT_OBJECT" and symbol["st_size"]:
                    names.add(symbol.name)
    return sorted(names)


def _disassemble(path: Path) -> dict[str, Any]:
    """Counts of instruction mnemonics, and of memory accesses through fs or gs."""
    missing: dict[str, Any] = {"instructions": None, "segment_accesses": None}
    path = path.resolve()
    tool = shutil.which("objdump", path="/usr/bin:/bin")
    reason = sandbox.unavailable()
    if tool is None or reason is not None:
        return {**missing, "instructions_missing": "objdump not found" if reason is None else reason.message}
    done = sandbox.run(
        [tool, "-d", "-z", "--no-show-raw-insn", str(path)], ro=[path], timeout_s=60, output_bytes=64 << 20
    )
    if done.returncode or done.timed_out:
        why = done.stderr.decode("utf-8", "replace").strip()[-200:]
        return {**missing, "instructions_missing": f"objdump ended with status {done.returncode}: {why}"}
    counts: Counter[str] = Counter()
    accesses = 0
    for text in _instructions(done.stdout.decode("utf-8", "replace")):
        words = text.split()
        counts[next((w for w in words if w not in _PREFIXES and not w.startswith("rex")), words[0])] += 1
        accesses += bool(re.search(r"%[fg]s\b", text))
    if not counts:
        return {**missing, "instructions_missing": "objdump printed no instruction"}
    return {"instructions": dict(sorted(counts.items())), "segment_accesses": accesses, "instructions_missing": None}


def _instructions(listing: str) -> Iterator[str]:
    for match in _INSTRUCTION.finditer(listing):
        yield match["text"].partition("#")[0].partition("<")[0].strip() or match["text"]
