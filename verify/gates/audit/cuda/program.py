"""One kernel ready for analysis, from SASS or from PTX: instructions, entry, parameters, and how to name places."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verify.gates.audit.cuda import isa, lower, lower_ptx
from verify.gates.audit.cuda.ops import Constant, Op
from verify.gates.audit.cuda.ptx import Entry
from verify.gates.audit.cuda.records import Param
from verify.gates.audit.cuda.sass import Listing
from verify.gates.audit.cuda.values import Origins, Value

__all__ = ["Program", "from_ptx", "from_sass"]

_MODULE_BANK = 4
"""Constant bank that holds the addresses of module variables and functions."""
_COMPILERS_OWN = "$__internal_"
"""Functions that ptxas adds, such as the traps that guard tensor memory against misuse."""


@dataclass(frozen=True)
class Program:
    """One kernel under analysis."""

    ops: Sequence[Op]
    start: int
    """Index of the first instruction."""
    base: int | None
    """Offset of the first parameter in constant bank 0."""
    slots: Sequence[Param]
    predicates: int
    """First register number that is a predicate."""
    place: Callable[[int], str]
    """Names an instruction for people: offset (or PTX line) and source line."""
    compilers_own: Callable[[int], bool]
    """Whether an instruction is in a function that the compiler added."""
    classes: Callable[[int], list[str]]
    """Instruction classes that an instruction proves."""

    @property
    def origins(self) -> Origins:
        """Meaning of the bits of a value."""
        return Origins(len(self.slots))

    def constant(self, constant: Constant, index: int) -> Value:
        """Origin of a read of constant memory, given the origins of the registers that take part in its offset."""
        origins = self.origins
        if constant.bank == Constant.UNKNOWN:
            return origins.unknown, None
        if constant.bank == Constant.ADDRESS_OF:
            return origins.driver, constant.offset
        if constant.bank == _MODULE_BANK:
            return origins.module, None
        if constant.bank != 0:
            return 0, None
        if self.base is None:
            return origins.parameters, None
        if constant.indexed:
            # ptxas looks up launch geometry by cluster size below the parameters; any other index may reach them.
            below = constant.offset < self.base and index == origins.launch
            return (origins.driver, None) if below else (origins.parameters, None)
        if constant.offset < self.base:
            return origins.driver, 0
        bits = 0
        low = constant.offset - self.base
        for number, slot in enumerate(self.slots):
            if slot.offset < low + constant.size and low < slot.offset + slot.size:
                bits |= origins.parameter(number)
        return bits or origins.unknown, None


def from_sass(listing: Listing, ops: Sequence[Op], start: int, base: int | None, slots: Sequence[Param]) -> Program:
    """A kernel of a disassembled cubin."""
    named = sorted((at, name) for name, at in listing.functions.items())
    starts = [at for at, _ in named]

    def place(index: int) -> str:
        ins = listing.instructions[index]
        return f"{ins.offset:#06x} {ins.file}:{ins.line}" if ins.file else f"{ins.offset:#06x}"

    def own(index: int) -> bool:
        at = bisect.bisect_right(starts, index) - 1
        return at >= 0 and named[at][1].startswith(_COMPILERS_OWN)

    def classes(index: int) -> list[str]:
        base_name, *modifiers = listing.instructions[index].opcode.split(".")
        return [
            name
            for name, opcodes in isa.CLASSES.items()
            if any(base_name == o.partition(".")[0] and set(o.split(".")[1:]) <= set(modifiers) for o in opcodes)
        ]

    return Program(ops, start, base, slots, lower.PREDICATES, place, own, classes)


def from_ptx(entry: Entry, slots: Sequence[Param]) -> Program:
    """A kernel of a PTX file."""
    statements = entry.statements

    def place(index: int) -> str:
        statement = statements[index]
        source = f" {statement.file}:{statement.line}" if statement.file else ""
        return f"ptx:{statement.row}{source}"

    return Program(
        lower_ptx.lower(entry),
        0,
        0,
        slots,
        lower_ptx.PREDICATES,
        place,
        lambda _: False,
        lambda index: lower_ptx.classes(statements[index].opcode),
    )
