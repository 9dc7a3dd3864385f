"""Reads nvdisasm's text (`nvdisasm -c -g`) into instructions. Knows the grammar of a line, not what opcodes mean.

Text is the one form that a cubin, a `.sass` file and a reviewer's terminal have in common. Lines that are neither
instruction, label, directive nor comment are collected, because a listing that was not understood in full must not
count as read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from k3_backend.aot.cuda.cubin import Kernel, Slot

__all__ = ["Instruction", "Listing", "listed_kernels", "parse"]

_INSTRUCTION = re.compile(
    r"^/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P(?:\d+|T))?\s*(?P<opcode>[A-Z][A-Za-z0-9_.:]*)\s*(?P<rest>.*)$"
)
_LABEL = re.compile(r"^(?P<name>[.$A-Za-z_@?][^\s:]*):$")
_LINE = re.compile(r'^//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
_SECTION = re.compile(r'^\.section\s+"?(?P<name>[^\s",]+)')
_ENCODING = re.compile(r"^/\* 0x[0-9a-f]+ \*/$")
_TARGETS = re.compile(r'\(\*"(?P<what>[A-Z_]+) ?(?P<labels>[^"]*)"\*\)')
_CODE_LABEL = re.compile(r"`\((?P<name>[^)]*(?:\([^)]*\))?[^)]*)\)")
_MAX_UNREAD = 8


@dataclass(slots=True)
class Instruction:
    """One machine instruction."""

    index: int
    """Position in the listing, over all functions."""
    offset: int
    """Byte offset in its section."""
    section: str
    guard: str
    """Predicate register with its sign, or empty: `P0`, `!UP1`."""
    opcode: str
    operands: tuple[str, ...]
    labels: tuple[str, ...]
    """Code labels among the operands."""
    declared: tuple[str, ...]
    """Targets that the compiler declared for an indirect branch."""
    file: str = ""
    line: int = 0

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass
class Listing:
    """A disassembled file."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Index of the instruction that follows each label; labels are unique in nvdisasm's output."""
    sections: dict[str, int] = field(default_factory=dict)
    """Index of the first instruction of each code section."""
    functions: dict[str, int] = field(default_factory=dict)
    """Labels that are functions: not of the form `.L_…`."""
    target: str | None = None
    unread: list[str] = field(default_factory=list)
    """The first lines that match no rule of the grammar."""
    unread_lines: int = 0


def parse(text: str) -> Listing:
    """Parse a listing; time grows linearly with its length. Never raises: what is not understood is counted."""
    listing = Listing()
    section = file = ""
    line = 0
    data_section = False
    for raw in text.splitlines():
        stripped = raw.strip()
        if not stripped or _ENCODING.match(stripped):
            continue
        if stripped.startswith("//"):
            found = _LINE.match(stripped)
            if found:
                file, line = found["file"], int(found["line"])
            continue
        if stripped.startswith("."):
            named = _SECTION.match(stripped)
            if named:
                section = named["name"]
                data_section = not section.startswith(".text.")
                file, line = "", 0
                if not data_section:
                    listing.sections.setdefault(section, len(listing.instructions))
                continue
            if stripped.startswith(".target"):
                listing.target = stripped.split()[-1]
                continue
        if data_section:
            continue
        label = _LABEL.match(stripped)
        if label:
            _label(listing, label["name"])
        elif stripped[0] != ".":
            _instruction(listing, stripped, section, file, line)
    return listing


def _label(listing: Listing, name: str) -> None:
    at = len(listing.instructions)
    if listing.labels.setdefault(name, at) != at:
        _unread(listing, f"label {name} stands at two places")
    if name.startswith(".text."):
        listing.sections.setdefault(name, at)
    elif not name.startswith("."):
        listing.functions.setdefault(name, at)


def _instruction(listing: Listing, stripped: str, section: str, file: str, line: int) -> None:
    # An encoding may follow on the same line (nvdisasm -hex).
    body = stripped.partition(";")
    found = _INSTRUCTION.match(body[0])
    if found is None or not body[1]:
        _unread(listing, stripped)
        return
    rest = found["rest"]
    declared: tuple[str, ...] = ()
    note = _TARGETS.search(rest)
    if note:
        rest = rest[: note.start()] + rest[note.end() :]
        if note["what"] == "BRANCH_TARGETS":
            declared = tuple(name.strip() for name in note["labels"].split(",") if name.strip())
    operands = tuple(_split(rest))
    listing.instructions.append(
        Instruction(
            index=len(listing.instructions),
            offset=int(found["offset"], 16),
            section=section,
            guard=(found["guard"] or "").removeprefix("@"),
            opcode=found["opcode"],
            operands=operands,
            labels=tuple(m["name"] for m in _CODE_LABEL.finditer(rest)),
            declared=declared,
            file=file,
            line=line,
        )
    )


def _split(text: str) -> Iterable[str]:
    """Operands, split at commas outside brackets."""
    depth = start = 0
    for at, char in enumerate(text):
        if char in "[(":
            depth += 1
        elif char in "])":
            depth -= 1
        elif char == "," and depth <= 0:
            yield text[start:at].strip()
            start = at + 1
    tail = text[start:].strip()
    if tail:
        yield tail


def _unread(listing: Listing, line: str) -> None:
    listing.unread_lines += 1
    if len(listing.unread) < _MAX_UNREAD:
        listing.unread.append(line[:160])


_CBANK = re.compile(r"EIATTR_PARAM_CBANK.*?\.short\s+0x([0-9a-f]+)", re.DOTALL)
_BASES = {"sm_90": 0x210, "sm_100": 0x380, "sm_103": 0x380}
"""Start of the parameters in constant bank 0, where a listing does not state it (as seen from ptxas 13)."""


def listed_kernels(listing: Listing, text: str) -> list[Kernel]:
    """Kernels of a listing without its cubin. Parameters come from the printed `.nv.info` sections, else from use.

    Without the table, each 8 bytes of constant bank 0 from the first parameter on count as one pointer.
    """
    entries = set(re.findall(r'^\s*\.other\s+(\S+),@"STO_CUDA_ENTRY', text, re.MULTILINE))
    names = [s.removeprefix(".text.") for s in listing.sections if s.startswith(".text.")]
    return [_listed(name, listing, text) for name in names if name in entries or not entries]


def _listed(name: str, listing: Listing, text: str) -> Kernel:
    kernel = Kernel(name)
    head = re.search(rf"^\s*\.section\s+\.nv\.info\.{re.escape(name)}\b", text, re.MULTILINE)
    if head:
        at = head.start()
        end = text.find("//---------------------", at)
        table = text[at : end if end > 0 else len(text)]
        kernel.parameters = sorted(_printed_slots(table), key=lambda slot: slot.index)
        base = _CBANK.search(table)
        kernel.parameter_base = int(base[1], 16) if base else None
    if kernel.parameter_base is None:
        kernel.parameter_base = _BASES.get((listing.target or "").rstrip("af"))
    if not kernel.parameters and kernel.parameter_base is not None:
        used = [int(n, 16) for n in re.findall(r"c\[0x0\]\[0x([0-9a-f]+)\]", text)]
        count = max((n - kernel.parameter_base) // 8 for n in [*used, kernel.parameter_base]) + 1
        kernel.parameters = [Slot(i, 8 * i, 8, None) for i in range(min(count, 512))]
    return kernel


def _printed_slots(table: str) -> Iterable[Slot]:
    """EIATTR_KPARAM_INFO as nvdisasm prints it: index and offset as shorts, then four bytes of flags."""
    for part in table.split("EIATTR_KPARAM_INFO")[1:]:
        shorts = re.findall(r"\.short\s+0x([0-9a-f]{4})", part)
        flags = re.search(
            r"\.byte\s+0x(\w\w), 0x(\w\w), 0x(\w\w), 0x(\w\w)\s*(?:\n\s*\n|\Z|\n\s*//|\n\s*\.align)", part
        )
        if len(shorts) >= 2 and flags:
            word = int("".join(reversed(flags.groups())), 16)
            pointer = True if word >> 8 & 0xFF == 0xF4 else None
            yield Slot(int(shorts[0], 16), int(shorts[1], 16), word >> 18, pointer)
