"""Turns SASS instructions into the form of `ops`: which registers, which memory, which effect, where control goes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from verify.gates.audit.cuda import isa
from verify.gates.audit.cuda.ops import Constant, Effect, Flow, Memory, Op, Term, Touch
from verify.gates.audit.cuda.sass import Instruction, Listing

__all__ = ["PREDICATES", "lower"]

UNIFORM = 256
PREDICATES = 512
"""First register number that is a predicate."""

_REGISTER = re.compile(r"(?<![A-Za-z0-9_])(UR|UP|R|P)(\d+)(?![A-Za-z0-9_])")
_PLAIN = re.compile(r"^[-~|!]*(UR|R)(\d+|Z)\b[.A-Za-z0-9_|]*$")
_PREDICATE = re.compile(r"^!?U?P(\d|T)(\.\w+)?$")
_CONSTANT = re.compile(r"c\[0x([0-9a-f]+)\]\[((?:U?R(?:\d+|Z)(?:\.\w+)?\+?)?)(-?0x[0-9a-f]+)?\]")
_POLICY = re.compile(r"(?<!g)(?<!i)\bdesc\[UR(\d+)\]")
_BRACKET = re.compile(r"\[([^\[\]]*)\]$")
_NUMBER = re.compile(r"^-?0x[0-9a-f]+$|^-?\d+$")
_WIDTHS = {"64": 2, "128": 4, "96": 3, "256": 8, "WIDE": 2, "U64": 2, "S64": 2, "F64": 2}
_COMPUTED = {
    "MOV": "mov", "UMOV": "mov", "R2UR": "mov", "UIADD3": "add", "IADD3": "add", "VIADD": "add", "UVIADD": "add",
    "ULOP3": "lop3", "LOP3": "lop3", "USHF": "shf", "SHF": "shf", "ULEA": "lea", "LEA": "lea",
}  # fmt: skip
_PREDICATES = tuple(range(PREDICATES, PREDICATES + 8)) + tuple(range(PREDICATES + 16, PREDICATES + 24))
_CARRIES = frozenset({"IADD3", "UIADD3", "LEA", "ULEA", "IMAD", "UIMAD", "VIADD", "UVIADD", "IADD", "LOP3", "ULOP3"})
_SWITCHES = frozenset({"BRX", "BRXU", "JMX", "JMXU"})
_LABELS_IN_PASSING = frozenset({"BSSY", "LEPC", "ULEPC", "MOV", "UMOV", "IMAD", "RET", "BSYNC", "BMOV"})
_TENSOR_MAPS = frozenset({"UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF"})


def lower(listing: Listing) -> list[Op]:
    """One `Op` per instruction, same indices."""
    starts = _offsets(listing)
    return [_lower(instruction, listing, starts) for instruction in listing.instructions]


def _offsets(listing: Listing) -> Mapping[tuple[str, int], int]:
    return {(i.section, i.offset): i.index for i in listing.instructions}


def _lower(ins: Instruction, listing: Listing, starts: Mapping[tuple[str, int], int]) -> Op:
    op = Op(ins.index, ins.opcode, guard="" if ins.guard in ("PT", "UPT") else ins.guard)
    base, modifiers = ins.base, ins.opcode.split(".")[1:]
    if ins.guard in ("!PT", "!UPT"):
        # Never executed; ptxas places such loads as hints to its scheduler.
        return op
    _registers(op, ins, base, modifiers)
    _memory(op, ins, base, modifiers)
    _effect(op, ins, base, modifiers)
    _flow(op, ins, base, listing, starts)
    return op


def _number(kind: str, digits: str) -> int:
    return int(digits) + {"R": 0, "UR": UNIFORM, "P": PREDICATES, "UP": PREDICATES + 16}[kind]


def _all_registers(text: str) -> list[int]:
    return [_number(m[1], m[2]) for m in _REGISTER.finditer(text)]


def _registers(op: Op, ins: Instruction, base: str, modifiers: list[str]) -> None:
    operands = list(ins.operands)
    guards = _all_registers(ins.guard)
    predicate_defs: list[int] = []
    defs: list[int] = []
    at = 0
    if base not in isa.NO_RESULT or base.endswith(("SETP", "SETP2", "PLOP3")) or base in ("SYNCS", "FCHK", "R2P"):
        # Comparisons have two results; the predicates behind them are inputs.
        most = 2 if base.endswith(("SETP", "SETP2", "PLOP3")) else 1
        while at < min(most, len(operands)) and _PREDICATE.match(operands[at]):
            predicate_defs += _all_registers(operands[at])
            at += 1
    if base not in isa.NO_RESULT and at < len(operands):
        results = 2 if "ENL2" in modifiers else 1
        for _ in range(results):
            found = _PLAIN.match(operands[at]) if at < len(operands) else None
            if found:
                if found[2] != "Z":
                    first = _number(found[1], found[2])
                    defs += range(first, first + _width(base, modifiers) // results)
                at += 1
        # Carry-outs follow the result.
        while at < len(operands) and re.match(r"^U?P(\d|T)$", operands[at]) and base in _CARRIES:
            predicate_defs += _all_registers(operands[at])
            at += 1
    sources = operands[at:]
    text = " , ".join(sources)
    if base in ("R2P", "UR2UP"):
        predicate_defs += _PREDICATES
    op.defs = tuple(defs)
    op.predicate_defs = tuple(predicate_defs)
    packed = _PREDICATES if base in ("P2R", "UP2UR") else ()
    op.uses = tuple(dict.fromkeys([*guards, *_all_registers(text), *packed]))
    op.constants = tuple(_constants(text, modifiers))
    op.condition = tuple(guards)
    if base in _COMPUTED and len(defs) >= 1:
        values = [s for s in sources if not _PREDICATE.match(s)]
        terms = [_term(s) for s in values]
        if all(t is not None for t in terms) and not any(c.bank == 0 for c in op.constants):
            op.compute = _COMPUTED[base] + _direction(base, modifiers)
            op.terms = tuple(t for t in terms if t is not None)
    elif base == "CS2R" and "SRZ" in text:
        op.compute, op.terms = "mov", (0,)
    elif base == "IMAD" and "MOV" in modifiers and len(sources) == 3:
        term = _term(sources[2])
        if term is not None:
            op.compute, op.terms = "mov", (term,)


def _direction(base: str, modifiers: list[str]) -> str:
    if base not in ("SHF", "USHF"):
        return ".x" if "X" in modifiers or "HI" in modifiers else ""
    side = "l" if "L" in modifiers else "r"
    return f".{side}{'.hi' if 'HI' in modifiers else ''}{'.64' if any('64' in m for m in modifiers) else ''}"


def _term(text: str) -> Term | None:
    text = text.removesuffix(".reuse")
    if text in ("RZ", "URZ"):
        return 0
    if _NUMBER.match(text):
        return int(text, 16) if "0x" in text else int(text)
    found = re.match(r"^(-?)(UR|R)(\d+)$", text)
    return (f"{found[1]}r", _number(found[2], found[3])) if found else None


def _width(base: str, modifiers: list[str]) -> int:
    if base in ("LDTM", "HGMMA", "IGMMA", "QGMMA", "BGMMA"):
        return _wide_result(base, modifiers)
    if base in ("LDSM", "LDSU"):
        return int(modifiers[-1]) if modifiers and modifiers[-1] in ("2", "4") else 1
    if base == "CS2R":
        return 1 if "32" in modifiers else 2
    if base in ("F2I", "I2F", "F2F") or base.startswith(("SHF", "USHF", "I2")):
        return 2 if base != "SHF" and modifiers[:1] in (["F64"], ["S64"], ["U64"]) else 1
    if base in ("HMMA", "IMMA"):
        return 2 if "F16" in modifiers else 4
    if base in ("ATOMG", "ATOM", "ATOMS") and "CAS" in modifiers and "64" in modifiers:
        return 2
    widths = [_WIDTHS[m] for m in modifiers if m in _WIDTHS]
    if widths:
        return max(widths)
    return next((n for name, n in isa.RESULT_REGISTERS if base == name), 1)


def _wide_result(base: str, modifiers: list[str]) -> int:
    """Registers of a tensor-memory load (repeat count) or of a warpgroup product (64 x N values over 128 threads)."""
    for modifier in modifiers:
        found = re.match(r"^x(\d+)$", modifier) if base == "LDTM" else re.match(r"^64x(\d+)x", modifier)
        if found and base == "LDTM":
            return min(255, int(found[1]) * (4 if any("256" in m for m in modifiers) else 1))
        if found:
            return int(found[1]) // (2 if "F32" in modifiers or "S32" in modifiers else 4)
    return 1


def _constants(text: str, modifiers: list[str]) -> list[Constant]:
    size = 4 * max((_WIDTHS[m] for m in modifiers if m in ("64", "128", "96", "256")), default=1)
    found = [
        Constant(int(m[1], 16), int(m[3] or "0", 16), size, indexed=bool(m[2]) and "Z" not in m[2])
        for m in _CONSTANT.finditer(text)
    ]
    if "cx[" in text:
        found.append(Constant(Constant.UNKNOWN, 0, size, indexed=True))
    return found


def _memory(op: Op, ins: Instruction, base: str, modifiers: list[str]) -> None:
    brackets = [o for o in ins.operands if _BRACKET.search(o) and not o.startswith(("c[", "cx[", "-c[", "|c["))]
    addresses = [o for o in brackets if not re.match(r"^(?:desc|gdesc|idesc|tmem)\[UR(?:\d+|Z)\]$", o)]
    policy = next((m for o in ins.operands if (m := _POLICY.search(o))), None)
    pair = (_number("UR", policy[1]), _number("UR", policy[1]) + 1) if policy else None
    op.reads_shared, op.writes_shared = base in isa.SHARED_READS, base in isa.SHARED_WRITES
    op.reads_local, op.writes_local = base in isa.LOCAL_READS, base in isa.LOCAL_WRITES
    places: list[tuple[Touch, int]] = []
    if base in isa.GLOBAL:
        places = [isa.GLOBAL[base]]
    elif base == "UBLKCP":
        places = [(Touch.COPY_IN, 1)] if modifiers[:2] == ["S", "G"] else [(Touch.COPY_OUT, 0)]
        places = [] if modifiers[:2] == ["S", "S"] else places
    elif base == "CCTL" and addresses:
        places = [(_cache_control(modifiers), 0)]
    elif addresses and base not in isa.SILENT_BRACKETS:
        places = [(Touch.UNKNOWN, 0)]
    op.memory = tuple(
        _access(touch, addresses[at], base, modifiers, pair) for touch, at in places if at < len(addresses)
    )
    if places and not op.memory:
        op.memory = (Memory(Touch.UNKNOWN, ()),)
    if any(m.touch is Touch.COPY_IN for m in op.memory):
        op.writes_shared = True


def _cache_control(modifiers: list[str]) -> Touch:
    if "PF1" in modifiers:
        return Touch.PREFETCH_L1
    if any(m in ("PF2", "PML2", "DML2") for m in modifiers):
        return Touch.PREFETCH_L2
    return Touch.DISCARD


def _access(touch: Touch, address: str, base: str, modifiers: list[str], policy: tuple[int, int] | None) -> Memory:
    inner = _BRACKET.search(address)
    text = inner[1] if inner else address
    registers: list[int] = []
    for found in _REGISTER.finditer(text):
        first = _number(found[1], found[2])
        registers.append(first)
        if not text[found.end() :].startswith(".U32") and found[1] in ("R", "UR"):
            registers.append(first + 1)
    return Memory(
        touch,
        tuple(registers),
        tuple(_constants(text, ["64"])),
        descriptor=base in _TENSOR_MAPS,
        strong="STRONG" in modifiers or "MMIO" in modifiers or touch is Touch.ATOMIC,
        generic=base in ("LD", "ST", "ATOM", "RED"),
        policy=policy,
    )


def _effect(op: Op, ins: Instruction, base: str, modifiers: list[str]) -> None:
    notes = []
    if base == "ACQBULK":
        op.effect = Effect.WAIT
    elif (base, True) in (
        ("CCTL", any(m.startswith("IVALL") for m in modifiers)),
        ("MEMBAR", any(m in ("GPU", "SYS", "VC") for m in modifiers)),
    ):
        op.effect = Effect.ACQUIRE
    elif base == "BAR" and ("SYNC" in modifiers or "RED" in modifiers or "SYNCALL" in modifiers):
        whole = len(ins.operands) == 1 and ins.operands[0] == "0x0"
        op.effect = Effect.CTA_BARRIER if whole else Effect.SYNC
    elif base == "UCGABAR_WAIT" or (base == "SYNCS" and "PHASECHK" in modifiers):
        op.effect = Effect.SYNC
    if base == "BAR":
        first = ins.operands[0] if ins.operands else "0x0"
        op.barrier = first if _NUMBER.match(first) else "*"
    elif base.startswith("UCGABAR"):
        op.barrier = "cluster"
    special = next((o for o in ins.operands if o.startswith("SR_")), "")
    if special.startswith(isa.CLOCKS):
        notes.append("clock")
    if special.startswith(isa.THREAD_IDS) or base == "ELECT":
        op.source = "thread"
    elif special.startswith(isa.WINDOWS):
        op.source = "window"
    elif special and special != "SRZ":
        op.source = "launch"
    if base == "NANOSLEEP" and "SYNCS" not in modifiers:
        notes.append("sleep")
    if base == "BPT":
        notes.append("trap")
    if base == "PMTRIG":
        notes.append("performance_trigger")
    op.notes = tuple(notes)


def _flow(op: Op, ins: Instruction, base: str, listing: Listing, starts: Mapping[tuple[str, int], int]) -> None:
    if base in ("EXIT", "KILL"):
        op.flow = Flow.EXIT
    elif base == "RET":
        op.flow = Flow.RETURN
    elif base in ("BRA", "JMP", "CALL"):
        _direct(op, ins, base, listing, starts)
    elif base in _SWITCHES:
        targets = [listing.labels.get(name) for name in ins.declared]
        known = [t for t in targets if t is not None]
        op.flow = Flow.SWITCH if known and len(known) == len(targets) else Flow.UNKNOWN
        op.targets = tuple(dict.fromkeys(known))
    elif ins.labels and base not in _LABELS_IN_PASSING:
        # WARPSYNC.COLLECTIVE and whatever else names a label: control may go there or on.
        known = [t for name in ins.labels if (t := listing.labels.get(name)) is not None]
        op.flow, op.targets = (Flow.BRANCH, tuple(known)) if known else (Flow.UNKNOWN, ())


def _direct(op: Op, ins: Instruction, base: str, listing: Listing, starts: Mapping[tuple[str, int], int]) -> None:
    target = next((t for name in ins.labels if (t := listing.labels.get(name)) is not None), None)
    if target is None and ins.operands and _NUMBER.match(ins.operands[-1]):
        target = starts.get((ins.section, int(ins.operands[-1], 0)))
    if target is None:
        op.flow = Flow.UNKNOWN
        return
    op.targets = (target,)
    if base == "CALL":
        op.flow = Flow.CALL
        return
    predicates = [o for o in ins.operands if _PREDICATE.match(o)]
    op.condition = tuple(dict.fromkeys([*op.condition, *op.uses]))
    always = not op.guarded and not predicates and ins.opcode in ("BRA", "JMP", "BRA.RECONVERGENT")
    op.flow = Flow.JUMP if always else Flow.BRANCH
