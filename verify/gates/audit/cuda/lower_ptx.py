"""Turns PTX statements into the form of `ops`. Meanings are those of the PTX ISA, which documents every instruction."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from verify.gates.audit.cuda.ops import Constant, Effect, Flow, Memory, Op, Term, Touch
from verify.gates.audit.cuda.ptx import Entry, Statement

__all__ = ["PREDICATES", "lower"]

PREDICATES = 1 << 30
"""First register number that is a predicate."""

_NAME = re.compile(r"%?[A-Za-z_$][\w$.#]*")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_SPECIAL = re.compile(
    r"^%(?:n?tid|n?ctaid|n?clusterid|cluster_|is_explicit|laneid|lanemask|n?warpid|n?smid|gridid|clock|globaltimer|pm\d|"
    r"envreg|dynamic_smem|total_smem|aggr_smem|current_graph|reserved_smem)"
)
_NO_RESULT = frozenset({
    "st", "red", "bar", "barrier", "fence", "membar", "griddepcontrol", "bra", "brx", "ret", "exit", "trap", "brkpt",
    "prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "pmevent", "mbarrier_store", "cp", "stmatrix",
    "wgmma", "setmaxnreg", "tcgen05", "stackrestore", "call", "bmsk", "clusterlaunchcontrol", "tensormap", "cvta_none",
})  # fmt: skip
_RESULT_OF = frozenset({"tcgen05.ld", "wgmma.mma_async"})
_PRIORITIES = {
    "evict_normal": 0x10F << 52, "evict_first": 0x12F << 52, "evict_last": 0x14F << 52, "evict_unchanged": 0x16F << 52,
}  # fmt: skip
_FRACTIONAL = 0x15F << 52
_CLASSES: dict[str, tuple[str, ...]] = {
    "tensor_core": ("mma.", "wgmma.mma_async", "tcgen05.mma", "wmma.mma"),
    "warpgroup_mma": ("wgmma.mma_async",),
    "tcgen05": ("tcgen05.mma",),
    "bulk_copy": ("cp.async.bulk.shared", "cp.async.bulk.global", "cp.async.bulk.tensor", "cp.reduce.async.bulk"),
    "tma": ("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor"),
    "async_copy": ("cp.async.ca", "cp.async.cg", "cp.async.bulk.shared", "cp.async.bulk.tensor"),
    "cluster": ("barrier.cluster", "mapa", "st.async"),
    "mbarrier": ("mbarrier.",),
    "prefetch": ("prefetch.global", "cp.async.bulk.prefetch"),
    "pdl_wait": ("griddepcontrol.wait",),
    "pdl_launch": ("griddepcontrol.launch_dependents",),
    "multimem": ("multimem.",),
    "strong_load": ("ld.relaxed", "ld.acquire", "ld.volatile", "ld.global.relaxed"),
}


def classes(opcode: str) -> list[str]:
    """Instruction classes that an opcode proves; the names are those of `isa.CLASSES`."""
    return [name for name, starts in _CLASSES.items() if opcode.startswith(starts)]


@dataclass
class _Names:
    """Numbers registers in the order in which they appear; predicates from PREDICATES on."""

    known: dict[str, int] = field(default_factory=dict)

    def number(self, name: str, *, predicate: bool = False) -> int:
        found = self.known.get(name)
        if found is None:
            found = len(self.known) + (PREDICATES if predicate or re.match(r"%p\d", name) else 0)
            self.known[name] = found
        return found


def lower(entry: Entry) -> list[Op]:
    """One `Op` per statement, in order."""
    names = _Names()
    return [_lower(index, statement, entry, names) for index, statement in enumerate(entry.statements)]


def _lower(index: int, statement: Statement, entry: Entry, names: _Names) -> Op:
    opcode = statement.opcode
    op = Op(index, opcode, guard=statement.guard)
    parts = opcode.split(".")
    guard = (names.number(statement.guard.lstrip("!"), predicate=True),) if statement.guard else ()
    op.condition = guard
    result, sources = _operands(statement, parts)
    registers = [names.number(n, predicate=parts[0] == "setp") for o in result for n in _registers(o, entry)]
    op.defs = tuple(r for r in registers if r < PREDICATES)
    op.predicate_defs = tuple(r for r in registers if r >= PREDICATES)
    used = [names.number(n) for o in sources for n in _registers(o, entry)]
    op.uses = tuple(dict.fromkeys([*guard, *used]))
    op.constants = tuple(c for o in sources for c in _parameter(o, entry, parts))
    _special(op, sources)
    _memory(op, statement, entry, names, parts)
    _effect(op, statement, parts)
    _flow(op, statement, entry, parts)
    if parts[0] == "createpolicy":
        op.compute, op.terms = "mov64", (_policy_value(parts, sources),)
    elif parts[0] in ("mov", "cvta") and len(sources) == 1:
        term = _term(sources[0], entry, names)
        if term is not None:
            op.compute, op.terms = "mov64", (term,)
    return op


def _operands(statement: Statement, parts: list[str]) -> tuple[list[str], list[str]]:
    operands = list(statement.operands)
    whole = ".".join(parts[:2])
    if parts[0] == "mbarrier":
        plain = bool(operands) and not operands[0].startswith("[")
        return (operands[:1], operands[1:]) if plain else ([], operands)
    if parts[0] == "call":
        returns = [o for o in operands[:1] if o.startswith("(")]
        return returns, operands[len(returns) :]
    no_result = (parts[0] in _NO_RESULT and whole not in _RESULT_OF) or whole in ("multimem.st", "multimem.red")
    if no_result or not operands:
        return [], operands
    return operands[:1], operands[1:]


def _registers(operand: str, entry: Entry) -> list[str]:
    found = []
    for name in _NAME.findall(operand):
        base = name.rstrip(".")
        if _SPECIAL.match(base):
            continue
        if base in entry.parameter_names or base in entry.labels or base in entry.targets:
            continue
        if re.match(r"^0[xfFdD]", base) or base in ("_",):
            continue
        found.append(base)
    return found


def _parameter(operand: str, entry: Entry, parts: list[str]) -> list[Constant]:
    found = []
    for name in _NAME.findall(operand):
        slot = entry.parameter_names.get(name)
        if slot is not None:
            offset = re.search(re.escape(name) + r"\s*\+\s*(\d+)", operand)
            width = max((int(m[1]) // 8 for p in parts if (m := re.match(r"^[busf](\d+)$", p))), default=8)
            count = {"v2": 2, "v4": 4, "v8": 8}.get(next((p for p in parts if re.match(r"^v[248]$", p)), ""), 1)
            if parts[0] == "ld":
                found.append(Constant(0, slot.offset + int(offset[1] if offset else 0), width * count))
            else:
                # The parameter's address, not its value.
                found.append(Constant(Constant.ADDRESS_OF, slot.offset, 0))
    return found


def _term(operand: str, entry: Entry, names: _Names) -> Term | None:
    if re.match(r"^-?(0[xX][0-9a-fA-F]+|\d+)U?$", operand):
        return int(operand.rstrip("U"), 0)
    found = _registers(operand, entry)
    if len(found) == 1 and found[0] == operand:
        return ("r", names.number(operand))
    return None


def _policy_value(parts: list[str], sources: list[str]) -> int:
    """The value that ptxas makes of createpolicy; anything but one priority for all accesses counts as fractional."""
    priorities = [p.removeprefix("L2::") for p in parts if p.startswith("L2::")]
    whole = not sources or sources[-1] in ("1.0", "0f3F800000")
    if "fractional" not in parts or not whole or len(priorities) != 1:
        return _FRACTIONAL
    return _PRIORITIES.get(priorities[0], _FRACTIONAL)


def _special(op: Op, sources: list[str]) -> None:
    text = " ".join(sources)
    notes = []
    if re.search(r"%(tid|laneid|warpid|lanemask)", text) or op.opcode.startswith("elect"):
        op.source = "thread"
    elif re.search(r"%(n?ctaid|smid|nsmid|cluster|gridid|clock|globaltimer|pm)", text):
        op.source = "launch"
    if re.search(r"%(clock|globaltimer|pm\d)", text):
        notes.append("clock")
    if op.opcode.startswith("nanosleep"):
        notes.append("sleep")
    if op.opcode in ("trap", "brkpt"):
        notes.append("trap")
    if op.opcode.startswith("pmevent"):
        notes.append("performance_trigger")
    op.notes = tuple(notes)


def _memory(op: Op, statement: Statement, entry: Entry, names: _Names, parts: list[str]) -> None:
    brackets = [m[1] for o in statement.operands for m in _BRACKET.finditer(o)]
    base = parts[0]
    space = next((p.partition("::")[0] for p in parts if p.partition("::")[0] in _SPACES), "")
    op.reads_shared = base in ("ld", "ldmatrix", "atom") and (space == "shared" or base == "ldmatrix")
    op.writes_shared = base in ("st", "stmatrix", "atom", "red") and (space == "shared" or base == "stmatrix")
    op.reads_local, op.writes_local = base == "ld" and space == "local", base == "st" and space == "local"
    place = _place(statement.opcode, parts, space, bool(brackets))
    if place is None:
        return
    touch, number = place
    if number >= len(brackets):
        op.memory = (Memory(Touch.UNKNOWN, ()),)
        return
    text = brackets[number]
    descriptor = ".tensor" in statement.opcode
    address = text.partition(",")[0] if descriptor else text
    policy, policy_value = None, None
    if "cache_hint" in statement.opcode and statement.operands:
        found = _registers(statement.operands[-1], entry)
        policy = (names.number(found[0]), names.number(found[0])) if found else None
        if re.match(r"^\d+$|^0x[0-9a-fA-F]+$", statement.operands[-1]):
            policy_value = int(statement.operands[-1], 0)
    op.memory = (
        Memory(
            touch,
            tuple(names.number(n) for n in _registers(address, entry)),
            tuple(_parameter(address, entry, ["mov"])),
            descriptor=descriptor,
            strong=bool({"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"} & set(parts))
            or touch is Touch.ATOMIC,
            generic=space == "" and base in ("ld", "st", "atom", "red"),
            policy=policy,
            policy_value=policy_value,
        ),
    )
    if touch is Touch.COPY_IN:
        op.writes_shared = True


_SPACES = frozenset({"global", "shared", "local", "param", "const"})


def _place(opcode: str, parts: list[str], space: str, has_bracket: bool) -> tuple[Touch, int] | None:
    """How global memory is touched, and by which address operand; None if it is not."""
    base = parts[0]
    if opcode.startswith(("cp.async.bulk.prefetch", "prefetch", "applypriority")):
        level = Touch.PREFETCH_L1 if "L1" in parts or base == "prefetchu" else Touch.PREFETCH_L2
        return None if "tensormap" in parts else (level, 0)
    if opcode.startswith(("cp.async.bulk", "cp.reduce.async.bulk")):
        if parts[-1].startswith(("commit", "wait")) or "commit_group" in parts or "wait_group" in parts:
            return None
        order = [p.partition("::")[0] for p in parts if p.partition("::")[0] in ("global", "shared")]
        if order[:2] == ["global", "shared"]:
            return Touch.COPY_OUT, 0
        return (Touch.COPY_IN, 1) if order[:2] == ["shared", "global"] else None
    if opcode.startswith("cp.async"):
        return (Touch.COPY_IN, 1) if has_bracket and "global" in parts else None
    if base == "discard":
        return Touch.DISCARD, 0
    if base == "multimem":
        kind = {"ld_reduce": Touch.LOAD, "st": Touch.STORE}.get(parts[1], Touch.ATOMIC)
        return kind, 0
    if base in ("ld", "ldu", "st", "atom", "red") and space in ("", "global"):
        if parts[1:2] == ["async"]:
            return None
        kinds = {"ld": Touch.LOAD, "ldu": Touch.LOAD, "st": Touch.STORE, "atom": Touch.ATOMIC, "red": Touch.ATOMIC}
        return kinds[base], 0
    if base in ("tex", "tld4", "suld", "sust", "sured"):
        return Touch.UNKNOWN, 0
    return None


def _effect(op: Op, statement: Statement, parts: list[str]) -> None:
    opcode, wide = statement.opcode, bool({"gpu", "sys"} & set(parts))
    if opcode == "griddepcontrol.wait":
        op.effect = Effect.WAIT
    elif (
        (parts[0] == "fence" and wide and bool({"acq_rel", "sc", "acquire"} & set(parts)) and "proxy" not in parts)
        or opcode in ("membar.gl", "membar.sys")
        or (parts[0] in ("ld", "atom") and bool({"acquire", "acq_rel"} & set(parts)) and wide)
    ):
        op.effect = Effect.ACQUIRE
    if parts[0] in ("bar", "barrier"):
        first = statement.operands[0] if statement.operands else "0"
        op.barrier = "cluster" if "cluster" in parts else first if first.isdecimal() else "*"
    if parts[0] in ("bar", "barrier") and "cluster" not in parts and ("sync" in parts or "red" in parts):
        op.effect = Effect.CTA_BARRIER if statement.operands in (("0",), ("%0",)) else Effect.SYNC
    elif opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait", "barrier.cluster.wait")):
        op.effect = Effect.SYNC


def _flow(op: Op, statement: Statement, entry: Entry, parts: list[str]) -> None:
    base = parts[0]
    if base in ("ret", "exit"):
        op.flow = Flow.EXIT
    elif base == "bra":
        target = entry.labels.get(statement.operands[0]) if statement.operands else None
        op.targets = () if target is None else (target,)
        known = Flow.BRANCH if op.guarded else Flow.JUMP
        op.flow = known if target is not None else Flow.UNKNOWN
    elif base == "brx":
        names = entry.targets.get(statement.operands[-1], ()) if statement.operands else ()
        found = [t for n in names if (t := entry.labels.get(n)) is not None]
        op.targets = tuple(found)
        op.flow = Flow.SWITCH if found and len(found) == len(names) else Flow.UNKNOWN
    elif base == "call":
        op.flow = Flow.UNKNOWN
