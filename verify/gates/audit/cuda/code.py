"""Facts about one kernel's code: accesses with origin and order, polls, cache policies, calls. Judges nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from verify.gates.audit.cuda import flow, ordering, policies, values
from verify.gates.audit.cuda.ops import Effect, Flow, Memory
from verify.gates.audit.cuda.program import Program
from verify.gates.audit.cuda.records import Facts
from verify.gates.audit.cuda.values import Value

__all__ = ["code_facts"]

_PLACES = 4
"""Places listed per group of equal accesses; the count is always complete."""
_MAX_POLLS = 2048
_MAX_INSTRUCTIONS = 400_000
"""The largest kernels of the study have 4,000."""
_TENSOR_MAP_BYTES = 128
_TENSOR_MEMORY_RETRY = "UTCATOMSWS"
"""tcgen05.alloc becomes a loop that asks for tensor memory and sleeps in between."""


class _Kernel:
    """A program with its control flow."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ops = program.ops
        self.origins = program.origins
        self.place = program.place
        self.graph = flow.build(program.ops, program.start)
        self.reachable = [i for b in self.graph.blocks for i in range(b.first, b.last + 1)]
        self.loops: Sequence[flow.Loop] = ()

    def inside(self, loops: Sequence[flow.Loop]) -> set[int]:
        """Instructions of these loops."""
        blocks = {b for loop in loops for b in loop.blocks}
        return {i for b in blocks for i in range(self.graph.blocks[b].first, self.graph.blocks[b].last + 1)}


def code_facts(program: Program) -> Facts:
    """All facts that need the instructions."""
    kernel = _Kernel(program)
    ops = program.ops
    unevaluated = [{"what": "control_flow", "why": why, "at": kernel.place(at)} for at, why in kernel.graph.unresolved]
    facts: Facts = {
        "instructions": len(kernel.reachable),
        "opcodes": _opcodes(kernel),
        "classes": _classes(kernel),
        "switches": sum(ops[i].flow is Flow.SWITCH for i in kernel.reachable),
        "waits": [kernel.place(i) for i in kernel.reachable if ops[i].effect is Effect.WAIT][:_PLACES],
        "notes": _notes(kernel),
        "local_accesses": sum(ops[i].reads_local or ops[i].writes_local for i in kernel.reachable),
        "unevaluated": unevaluated,
    }
    if len(kernel.reachable) > _MAX_INSTRUCTIONS:
        why = f"{len(kernel.reachable)} instructions, at most {_MAX_INSTRUCTIONS}"
        unevaluated.append({"what": "size", "why": why, "at": ""})
        return facts
    loops = flow.find_loops(kernel.graph)
    if loops is None:
        unevaluated.append({"what": "loops", "why": "the kernel has too many nested loops to look at", "at": ""})
        return facts
    kernel.loops = loops
    found = ordering.candidates(ops, kernel.graph, loops)
    if len(found) > _MAX_POLLS:
        unevaluated.append({"what": "polls", "why": f"{len(found)} loads in loops, at most {_MAX_POLLS}", "at": ""})
        found = found[:_MAX_POLLS]
    bits = {index: kernel.origins.poll(n) for n, index in enumerate(found)}
    try:
        traced = values.trace(ops, kernel.graph, kernel.origins, program.constant, bits, program.predicates)
    except values.BudgetError:
        unevaluated.append({"what": "values", "why": "the kernel is too large for the analysis of addresses", "at": ""})
        return facts
    polls = ordering.find_polls(ops, kernel.graph, loops, bits, traced)
    tickets = ordering.find_tickets(ops, polls, bits, traced)
    ordered = ordering.order(ops, kernel.graph, polls, tickets, traced, kernel.origins)
    facts["polls"] = _polls(kernel, polls, ordered)
    facts["accesses"] = _accesses(kernel, traced, ordered, polls, tickets)
    facts["cache_policies"] = _policies(kernel, traced)
    facts["sleeps_outside_polls"] = _sleeps(kernel, polls)
    return facts


def _opcodes(kernel: _Kernel) -> dict[str, int]:
    counts = Counter(kernel.ops[i].opcode.partition(".")[0] for i in kernel.reachable)
    return dict(sorted(counts.items()))


def _classes(kernel: _Kernel) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for index in kernel.reachable:
        counts.update(kernel.program.classes(index))
    return dict(sorted(counts.items()))


def _notes(kernel: _Kernel) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for index in kernel.reachable:
        for note in kernel.ops[index].notes:
            places = found.setdefault(note, [])
            if len(places) < _PLACES and not kernel.program.compilers_own(index):
                places.append(kernel.place(index))
    return {note: places for note, places in found.items() if places}


def _sleeps(kernel: _Kernel, polls: Sequence[ordering.Poll]) -> list[str]:
    sleeps = [i for i in kernel.reachable if "sleep" in kernel.ops[i].notes]
    if not sleeps:
        return []
    retries = [
        loop
        for loop in kernel.loops
        if any(kernel.ops[i].opcode.startswith(_TENSOR_MEMORY_RETRY) for i in kernel.inside([loop]))
    ]
    inside = kernel.inside([*(p.loop for p in polls), *retries[:1]])
    return [kernel.place(i) for i in sleeps if i not in inside][:_PLACES]


def _polls(kernel: _Kernel, polls: Sequence[ordering.Poll], ordered: ordering.Order) -> list[Facts]:
    """Each polling loop, and the first place where something is touched or the kernel ends without an acquire."""
    rows = []
    loads = {p.load for p in polls}
    for poll in polls:
        escape = next(
            (
                i
                for i in kernel.reachable
                if ordered.unacquired.get(i, 0) & poll.bit
                and i not in loads
                and (kernel.ops[i].memory or kernel.ops[i].flow is Flow.EXIT)
            ),
            None,
        )
        op = kernel.ops[poll.load]
        rows.append(
            {
                "op": op.opcode,
                "at": kernel.place(poll.load),
                "strong": op.memory[0].strong,
                "unacquired_at": None if escape is None else f"{kernel.ops[escape].opcode} {kernel.place(escape)}",
            }
        )
    return rows


def _accesses(
    kernel: _Kernel,
    traced: values.Values,
    ordered: ordering.Order,
    polls: Sequence[ordering.Poll],
    tickets: Sequence[ordering.Ticket],
) -> list[Facts]:
    """Accesses to global memory; equal ones form one row."""
    by_ticket = sum({t.bit for t in tickets})
    inside = kernel.inside([p.loop for p in polls])
    loads = {p.load for p in polls}
    groups: dict[tuple[Any, ...], Facts] = {}
    for index in kernel.reachable:
        for number, access in enumerate(kernel.ops[index].memory):
            via, names, roles = _origin(kernel, access, traced.addresses.get((index, number), (0, None)))
            if via == "window":
                continue
            row: Facts = {
                "op": kernel.ops[index].opcode,
                "touch": access.touch.value,
                "via": via,
                "params": names,
                "roles": roles,
                "strong": access.strong,
                "order": _level(index, ordered, by_ticket),
                "wait_follows": ordered.wait_follows.get(index, False),
                "poll": _place_of(index, loads, inside, ordered, by_ticket),
            }
            group = groups.setdefault(tuple(map(str, row.values())), {**row, "count": 0, "at": []})
            group["count"] += 1
            if len(group["at"]) < _PLACES:
                group["at"].append(kernel.place(index))
    return list(groups.values())


def _level(index: int, ordered: ordering.Order, by_ticket: int) -> str:
    """`waited`, `barrier`, `none`; or `poll`: no wait, but every path has passed a poll and an acquire."""
    level = ordered.levels.get(index, ordering.Level.NONE)
    if level is not ordering.Level.WAITED and ordered.acquired.get(index, 0) & ~by_ticket:
        return "poll"
    return level.name.lower()


def _place_of(index: int, loads: set[int], inside: set[int], ordered: ordering.Order, by_ticket: int) -> str | None:
    """How an access stands to the polls and tickets of the kernel."""
    if index in loads:
        return "flag"
    if index in inside:
        return "inside"
    unacquired = ordered.unacquired.get(index, 0)
    if unacquired & ~by_ticket:
        return "after"
    if unacquired:
        return "ticket"
    return "before" if ordered.poll_follows.get(index) else None


def _origin(kernel: _Kernel, access: Memory, address: Value) -> tuple[str, list[str], list[str]]:
    """How the address was formed, and the parameters and roles it stands for."""
    origins, bits, slots = kernel.origins, address[0], kernel.program.slots
    if access.descriptor:
        return _tensor_map(kernel, address)
    pointers = [slots[s] for s in origins.slots_in(bits) if slots[s].role != "scalar"]
    if pointers:
        return "parameter", [p.name for p in pointers], sorted({p.role for p in pointers})
    loaded = [slots[s].name for s in origins.slots_in(bits >> origins.slots)]
    if loaded:
        return "loaded", loaded, ["activation"]
    if bits & origins.module:
        return "module", [], ["state"]
    if access.generic and bits & (origins.window | origins.driver):
        return "window", [], []
    if bits & origins.driver and not bits & ~(origins.driver | origins.window | origins.thread | origins.launch):
        return "window", [], []
    return "unknown", [slots[s].name for s in origins.slots_in(bits)], []


def _tensor_map(kernel: _Kernel, address: Value) -> tuple[str, list[str], list[str]]:
    """A tensor map is a parameter itself: its address is an offset in the window of the constant bank."""
    origins, (bits, number), slots = kernel.origins, address, kernel.program.slots
    found = [slots[s] for s in origins.slots_in(bits)]
    if not found and number is not None and bits & origins.driver:
        found = [p for p in slots if p.offset <= number < p.offset + p.size]
    if not found:
        found = [p for p in slots if p.size >= _TENSOR_MAP_BYTES and p.role != "scalar"]
    if not found:
        return "unknown", [], []
    return "tensor_map", [p.name for p in found], sorted({p.role for p in found})


def _policies(kernel: _Kernel, traced: values.Values) -> list[Facts]:
    found: dict[tuple[str, str], Facts] = {}
    for index in kernel.reachable:
        names = policies.of_opcode(kernel.ops[index].opcode)
        for number in range(len(kernel.ops[index].memory)):
            pair = traced.policies.get((index, number))
            value = kernel.ops[index].memory[number].policy_value
            pair = ((0, value & 0xFFFFFFFF), (0, value >> 32)) if value is not None else pair
            name = None if pair is None else policies.of_descriptor(pair, kernel.origins)
            names += [name] if name is not None else []
        for name in names:
            key = (name, kernel.ops[index].opcode)
            row = found.setdefault(key, {"policy": name, "op": key[1], "count": 0, "at": []})
            row["count"] += 1
            if len(row["at"]) < _PLACES:
                row["at"].append(kernel.place(index))
    return list(found.values())
