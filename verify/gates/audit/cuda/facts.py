"""Assembles the facts about kernels that `verify.protocol.audit_cuda` judges. Judges nothing itself.

Facts are plain JSON values, one mapping per kernel, enough to decide again without the cubin: resources, instruction
counts, every kind of global access with its origin and its order, polls, cache hints, calls, and what was not
understood.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from verify.gates.audit.cuda import flow, isa, lower, ordering, policies, values
from verify.gates.audit.cuda.cubin import Cubin, CubinError, Kernel, Slot, read
from verify.gates.audit.cuda.nvdisasm import disassemble
from verify.gates.audit.cuda.ops import Constant, Effect, Flow, Memory, Op
from verify.gates.audit.cuda.sass import Listing, parse
from verify.gates.audit.cuda.values import Origins, Value

__all__ = ["Claims", "Facts", "Param", "Role", "inspect_cubin"]

Role = Literal["constant", "activation", "metadata", "state", "output", "workspace", "scalar"]
Facts = dict[str, Any]

_PLACES = 4
"""Places listed per group of equal accesses; the count is always complete."""
_MAX_POLLS = 2048
_MODULE_BANK = 4
"""Constant bank that holds the addresses of module variables and functions."""
_COMPILERS_OWN = "$__internal_"
"""Functions that ptxas adds, such as the traps that guard tensor memory against misuse."""
_POINTER_BYTES = 8
_TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Param:
    """One kernel parameter as the launch descriptor declares it."""

    name: str
    offset: int
    """Bytes from the first parameter."""
    size: int
    role: Role
    """What the pointer points to; `scalar` for values."""


@dataclass(frozen=True)
class Claims:
    """What the author says about a kernel's launch."""

    block: int
    """Threads per CTA."""
    dynamic_smem: int
    """Bytes."""
    min_ctas_per_sm: int
    expects: tuple[str, ...] = ()
    """Instruction classes that must be there; see `isa.CLASSES`."""
    pdl: bool = False
    """Launched as a programmatic dependent of its predecessor."""
    polling: str | None = None
    """A memory-model argument, if the kernel polls with relaxed loads."""


def inspect_cubin(
    cubin: bytes,
    *,
    entry: str | None = None,
    params: Sequence[Param] | None = None,
    claims: Claims | None = None,
    ptx: str | None = None,
) -> list[Facts]:
    """Facts of every kernel in a cubin, or of `entry` alone.

    Never raises for the content of the file: what cannot be read is stated in `malformed`, what could not be analysed
    in `unevaluated`.

    Args:
        cubin: the file's bytes.
        entry: the kernel's symbol; None for all.
        params: roles of the parameters; None: every pointer, struct and tensor map is an activation.
        claims: what the launch descriptor promises; None: rules on claims find nothing to compare with.
        ptx: the source, to compare what the assembler dropped or moved.
    """
    try:
        image = read(cubin)
    except CubinError as error:
        return [_malformed(str(error), claims)]
    wanted = [k for k in image.kernels.values() if entry is None or k.name == entry]
    if not wanted:
        have = ", ".join(image.kernels) or "none"
        return [_malformed(f"no kernel {entry or ''} in the file (kernels: {have[:200]})", claims)]
    done = disassemble(cubin)
    if done.failed is not None:
        return [_malformed(done.failed, claims)]
    listing = parse(done.text)
    ops = lower.lower(listing)
    return [
        inspect_kernel(listing, ops, kernel, image, params, claims, ptx=ptx, missing=done.missing) for kernel in wanted
    ]


def _malformed(why: str, claims: Claims | None) -> Facts:
    return {"malformed": why, "kernel": None, "claims": _claims(claims)}


def _claims(claims: Claims | None) -> Facts | None:
    return None if claims is None else {**asdict(claims), "expects": list(claims.expects)}


def inspect_kernel(
    listing: Listing,
    ops: list[Op],
    kernel: Kernel,
    image: Cubin | None,
    params: Sequence[Param] | None,
    claims: Claims | None,
    *,
    ptx: str | None = None,
    missing: str | None = None,
) -> Facts:
    """Facts of one kernel whose code is in `listing`."""
    slots = parameters(kernel, params)
    facts: Facts = {
        "malformed": None,
        "kernel": kernel.name,
        "arch": listing.target or (image.arch if image else None),
        "level": "sass",
        "claims": _claims(claims),
        "parameters": [asdict(p) for p in slots],
        "parameter_table": _table(kernel, params),
        "roles_declared": params is not None,
        "resources": _resources(kernel),
        "undefined_functions": list(image.undefined_functions) if image else [],
        "device_bytes": image.device_bytes if image else None,
        "ptx": None if ptx is None else {"waits": _body(ptx, kernel.name).count("griddepcontrol.wait")},
        "unevaluated": [],
    }
    start = listing.functions.get(kernel.name, listing.sections.get(f".text.{kernel.name}"))
    if missing is not None or start is None or start >= len(listing.instructions):
        why = missing or "no code of this kernel in the listing"
        facts["unevaluated"].append({"what": "code", "why": why, "at": ""})
        return facts
    if listing.unread_lines:
        facts["unevaluated"].append(
            {"what": "listing", "why": f"{listing.unread_lines} lines not understood: {listing.unread[0]}", "at": ""}
        )
    return {**facts, **_code(ops, listing, start, kernel, slots)}


def _body(ptx: str, name: str) -> str:
    """The text of one entry function, without comments; empty if the file does not hold it."""
    found = re.search(rf"\.entry\s+{re.escape(name)}\s*\(", ptx)
    if found is None:
        return ""
    end = ptx.find(".entry", found.end())
    return re.sub(r"//[^\n]*", "", ptx[found.end() : end if end > 0 else len(ptx)])


def parameters(kernel: Kernel, params: Sequence[Param] | None) -> list[Param]:
    """The declared parameters, or the kernel's own table with every possible pointer taken for an activation."""
    if params is not None:
        return list(params)
    return [Param(f"param{s.index}", s.offset, s.size, _default_role(s)) for s in kernel.parameters]


def _default_role(slot: Slot) -> Role:
    return "activation" if slot.pointer or slot.size >= _POINTER_BYTES else "scalar"


def _table(kernel: Kernel, params: Sequence[Param] | None) -> Facts:
    actual = [[s.offset, s.size] for s in kernel.parameters]
    declared = None if params is None else [[p.offset, p.size] for p in params]
    return {"cubin": actual, "declared": declared, "base": kernel.parameter_base}


def _resources(kernel: Kernel) -> Facts:
    return {
        "registers": kernel.registers,
        "frame_bytes": kernel.frame_bytes,
        "stack_bytes": kernel.stack_bytes,
        "static_smem": kernel.shared_bytes,
        "required_threads": list(kernel.required_threads) if kernel.required_threads else None,
        "max_threads": list(kernel.max_threads) if kernel.max_threads else None,
    }


class _Code:
    """One kernel under analysis."""

    def __init__(self, ops: list[Op], listing: Listing, start: int, base: int | None, slots: list[Param]) -> None:
        self.ops = ops
        self.listing = listing
        self.slots = slots
        self.base = base
        self.origins = Origins(len(slots))
        self.graph = flow.build(ops, start)
        named = sorted((at, name) for name, at in listing.functions.items())
        self.function_starts = [at for at, _ in named]
        self.function_names = [name for _, name in named]
        self.reachable = [i for b in self.graph.blocks for i in range(b.first, b.last + 1)]

    def constant(self, constant: Constant) -> Value:
        """Origin of a read of constant memory."""
        if constant.bank == -1:
            return self.origins.unknown, None
        if constant.bank == _MODULE_BANK:
            return self.origins.module, None
        if constant.bank != 0:
            return 0, None
        if self.base is None or (constant.indexed and constant.offset + constant.size >= self.base):
            return self.origins.parameters, None
        if constant.offset < self.base:
            return self.origins.driver, 0
        bits = 0
        low = constant.offset - self.base
        for number, slot in enumerate(self.slots):
            if slot.offset < low + constant.size and low < slot.offset + slot.size:
                bits |= self.origins.parameter(number)
        return bits or self.origins.unknown, None

    def function(self, index: int) -> str:
        """Name of the function that holds an instruction."""
        at = bisect.bisect_right(self.function_starts, index) - 1
        return self.function_names[at] if at >= 0 else ""

    def place(self, index: int) -> str:
        """Where an instruction stands, for people: byte offset and source line."""
        ins = self.listing.instructions[index]
        source = f" {ins.file}:{ins.line}" if ins.file else ""
        return f"{ins.offset:#06x}{source}"


def _code(ops: list[Op], listing: Listing, start: int, kernel: Kernel, slots: list[Param]) -> Facts:
    code = _Code(ops, listing, start, kernel.parameter_base, slots)
    unevaluated = [{"what": "control_flow", "why": why, "at": code.place(at)} for at, why in code.graph.unresolved]
    facts: Facts = {
        "instructions": len(code.reachable),
        "opcodes": _opcodes(code),
        "classes": _classes(code),
        "switches": sum(ops[i].flow is Flow.SWITCH for i in code.reachable),
        "waits": [code.place(i) for i in code.reachable if ops[i].effect is Effect.WAIT][:_PLACES],
        "notes": _notes(code),
        "local_accesses": sum(ops[i].reads_local or ops[i].writes_local for i in code.reachable),
        "unevaluated": unevaluated,
    }
    loops = flow.find_loops(code.graph)
    if loops is None:
        unevaluated.append({"what": "loops", "why": "the kernel has too many nested loops to look at", "at": ""})
        return facts
    found = ordering.candidates(ops, code.graph, loops)
    if len(found) > _MAX_POLLS:
        unevaluated.append({"what": "polls", "why": f"{len(found)} loads in loops, at most {_MAX_POLLS}", "at": ""})
        found = found[:_MAX_POLLS]
    bits = {index: code.origins.poll(n) for n, index in enumerate(found)}
    try:
        traced = values.trace(ops, code.graph, code.origins, code.constant, bits, lower.PREDICATES)
    except values.BudgetError:
        unevaluated.append({"what": "values", "why": "the kernel is too large for the analysis of addresses", "at": ""})
        return facts
    polls = ordering.find_polls(code.graph, loops, bits, traced)
    ordered = ordering.order(ops, code.graph, polls, traced, code.origins)
    facts["polls"] = _polls(code, polls, ordered)
    facts["accesses"] = _accesses(code, traced, ordered, polls)
    facts["cache_policies"] = _policies(code, traced)
    facts["sleeps_outside_polls"] = _sleeps(code, polls)
    return facts


def _opcodes(code: _Code) -> dict[str, int]:
    counts: Counter[str] = Counter(code.listing.instructions[i].base for i in code.reachable)
    return dict(sorted(counts.items()))


def _classes(code: _Code) -> dict[str, int]:
    """How many instructions prove each class of `isa.CLASSES`."""
    kinds = Counter[tuple[str, ...]]()
    for index in code.reachable:
        parts = code.listing.instructions[index].opcode.split(".")
        kinds[tuple(parts)] += 1
    found: Counter[str] = Counter()
    for kind, count in kinds.items():
        for name, opcodes in isa.CLASSES.items():
            if any(kind[0] == o.partition(".")[0] and set(o.split(".")[1:]) <= set(kind[1:]) for o in opcodes):
                found[name] += count
    return dict(sorted(found.items()))


def _notes(code: _Code) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for index in code.reachable:
        if code.function(index).startswith(_COMPILERS_OWN):
            continue
        for note in code.ops[index].notes:
            places = found.setdefault(note, [])
            if len(places) < _PLACES:
                places.append(code.place(index))
    return found


def _sleeps(code: _Code, polls: Sequence[ordering.Poll]) -> list[str]:
    inside = _inside(code, polls)
    return [code.place(i) for i in code.reachable if "sleep" in code.ops[i].notes and i not in inside][:_PLACES]


def _inside(code: _Code, polls: Sequence[ordering.Poll]) -> set[int]:
    blocks = {b for p in polls for b in p.loop.blocks}
    return {i for b in blocks for i in range(code.graph.blocks[b].first, code.graph.blocks[b].last + 1)}


def _polls(code: _Code, polls: Sequence[ordering.Poll], ordered: ordering.Order) -> list[Facts]:
    """Each polling loop, and the first place where something is touched or the kernel ends without an acquire."""
    rows = []
    loads = {p.load for p in polls}
    for poll in polls:
        escape = next(
            (
                i
                for i in code.reachable
                if ordered.unacquired.get(i, 0) & poll.bit
                and i not in loads
                and (code.ops[i].memory or code.ops[i].flow is Flow.EXIT)
            ),
            None,
        )
        op = code.ops[poll.load]
        rows.append({
            "op": op.opcode,
            "at": code.place(poll.load),
            "strong": op.memory[0].strong,
            "unacquired_at": None if escape is None else f"{code.ops[escape].opcode} {code.place(escape)}",
        })  # fmt: skip
    return rows


def _accesses(
    code: _Code, traced: values.Values, ordered: ordering.Order, polls: Sequence[ordering.Poll]
) -> list[Facts]:
    inside = _inside(code, polls)
    loads = {p.load for p in polls}
    groups: dict[tuple[Any, ...], Facts] = {}
    for index in code.reachable:
        for number, access in enumerate(code.ops[index].memory):
            via, names, roles = _origin(code, access, traced.addresses.get((index, number), (0, None)))
            if via == "window":
                continue
            poll = "inside" if index in inside else "after" if ordered.unacquired.get(index, 0) else None
            level = ordered.levels.get(index, ordering.Level.NONE).name.lower()
            row: Facts = {
                "op": code.ops[index].opcode,
                "touch": access.touch.value,
                "via": via,
                "params": names,
                "roles": roles,
                "strong": access.strong,
                "order": level,
                "wait_follows": ordered.wait_follows.get(index, False),
                "poll": "flag" if index in loads else poll,
            }
            group = groups.setdefault(tuple(map(str, row.values())), {**row, "count": 0, "at": []})
            group["count"] += 1
            if len(group["at"]) < _PLACES:
                group["at"].append(code.place(index))
    return list(groups.values())


def _origin(code: _Code, access: Memory, address: Value) -> tuple[str, list[str], list[str]]:
    """How the address was formed, and the parameters and roles it stands for."""
    origins, bits = code.origins, address[0]
    if access.descriptor:
        return _tensor_map(code, address)
    pointers = [code.slots[s] for s in origins.slots_in(bits) if code.slots[s].role != "scalar"]
    if pointers:
        return "parameter", [p.name for p in pointers], sorted({p.role for p in pointers})
    loaded = [code.slots[s].name for s in origins.slots_in(bits >> origins.slots)]
    if loaded:
        return "loaded", loaded, ["activation"]
    if bits & origins.module:
        return "module", [], ["state"]
    if access.generic and bits & (origins.window | origins.driver):
        return "window", [], []
    if bits & origins.driver and not bits & ~(origins.driver | origins.window | origins.thread | origins.launch):
        return "window", [], []
    scalars = [code.slots[s].name for s in origins.slots_in(bits)]
    return "unknown", scalars, []


def _tensor_map(code: _Code, address: Value) -> tuple[str, list[str], list[str]]:
    """A tensor map is a parameter itself: its address is an offset in the window of the constant bank."""
    origins, (bits, number) = code.origins, address
    maps = [p for p in code.slots if p.size >= _TENSOR_MAP_BYTES and p.role != "scalar"]
    if number is not None and bits & origins.driver:
        maps = [p for p in code.slots if p.offset <= number < p.offset + p.size]
    pointers = [code.slots[s] for s in origins.slots_in(bits)]
    found = pointers or maps
    if not found:
        return "unknown", [], []
    return "tensor_map", [p.name for p in found], sorted({p.role for p in found})


def _policies(code: _Code, traced: values.Values) -> list[Facts]:
    found: dict[tuple[str, str], Facts] = {}
    for index in code.reachable:
        names = policies.of_opcode(code.ops[index].opcode)
        for number in range(len(code.ops[index].memory)):
            pair = traced.policies.get((index, number))
            name = None if pair is None else policies.of_descriptor(pair, code.origins)
            names += [name] if name is not None else []
        for name in names:
            key = (name, code.ops[index].opcode)
            row = found.setdefault(key, {"policy": name, "op": key[1], "count": 0, "at": []})
            row["count"] += 1
            if len(row["at"]) < _PLACES:
                row["at"].append(code.place(index))
    return list(found.values())


def roles_of(params: Sequence[Param]) -> Mapping[str, Role]:
    """Role by parameter name."""
    return {p.name: p.role for p in params}
