"""Where values come from: which kernel parameters each register derives from, on every path (a may-analysis).

A value is a set of origins, kept as the bits of an integer, and sometimes a known number. Every instruction's result
derives from all its inputs, unless it is a load: then it derives from the memory that was read. Comparisons pass on
only what loop exits need (which loads they depend on), not addresses. Shared and local memory are one cell each, into
which everything stored flows.

What it cannot see: an address that is rebuilt bit by bit through predicates, or hidden in memory that another kernel
wrote. The rules for loads err on the safe side (see `facts`); the kernels gate's poisoned producers answer for the
rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from verify.gates.audit.cuda.flow import Graph
from verify.gates.audit.cuda.ops import Constant, Op, Touch

__all__ = ["BudgetError", "Origins", "Value", "Values", "trace"]

Value = tuple[int, int | None]
"""(origin bits, number if known)."""
_NOTHING: Value = (0, None)
_MASK32 = 0xFFFFFFFF


class BudgetError(Exception):
    """The analysis would take too long on this input."""


@dataclass(frozen=True)
class Origins:
    """Meaning of the bits: one per parameter slot, one per slot for what was loaded through it, then these."""

    slots: int

    def parameter(self, slot: int) -> int:
        return 1 << slot

    def loaded(self, slot: int) -> int:
        return 1 << (self.slots + slot)

    @property
    def parameters(self) -> int:
        return (1 << self.slots) - 1

    @property
    def driver(self) -> int:
        """Constant bank 0 below the parameters: windows, descriptors, launch geometry."""
        return 1 << (2 * self.slots)

    @property
    def module(self) -> int:
        """Address of a module variable."""
        return self.driver << 1

    @property
    def unknown(self) -> int:
        """Loaded through an address of unknown origin."""
        return self.driver << 2

    @property
    def window(self) -> int:
        return self.driver << 3

    @property
    def launch(self) -> int:
        """Special registers other than the thread index: CTA index, SM number, clocks."""
        return self.driver << 5

    @property
    def thread(self) -> int:
        """Thread index within the CTA."""
        return self.driver << 4

    def poll(self, number: int) -> int:
        return self.driver << (6 + number)

    def of_load(self, address: int) -> int:
        """Origins of a value loaded through an address with these origins."""
        pointers = address & self.parameters
        result = pointers << self.slots | address & (self.parameters << self.slots)
        return result | (0 if result else self.unknown)

    def slots_in(self, bits: int) -> list[int]:
        return [s for s in range(self.slots) if bits >> s & 1]


State = dict[int, Value]


@dataclass
class Values:
    """Result: origins of each access's address, policy and each branch's condition."""

    addresses: dict[tuple[int, int], Value] = field(default_factory=dict)
    """(instruction, number of the access) -> value of its address."""
    policies: dict[tuple[int, int], tuple[Value, Value]] = field(default_factory=dict)
    conditions: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    """Instruction that may be polled -> origins of its operands other than the address."""


def trace(
    ops: Sequence[Op],
    graph: Graph,
    origins: Origins,
    constant: Callable[[Constant, int], Value],
    polls: Mapping[int, int],
    predicates: int,
    budget: int = 24_000_000,
) -> Values:
    """Run to the fixed point.

    Args:
        ops: the whole listing.
        graph: reachable part.
        origins: meaning of bits.
        constant: value of a read of constant memory, given the origins of its index.
        polls: instruction -> bit that marks its result.
        predicates: registers from this number on are predicates.
        budget: bound on executed instruction steps.

    Raises:
        BudgetError: the bound was reached.
    """
    analysis = _Analysis(ops, origins, constant, polls, predicates)
    states: dict[int, State] = {graph.order[0]: {}}
    rank = {block: n for n, block in enumerate(graph.order)}
    while True:
        before = analysis.cells
        queue = list(range(len(graph.order))) if before != (0, 0) else [0]
        queued = set(queue)
        while queue:
            place = heapq.heappop(queue)
            queued.discard(place)
            block = graph.order[place]
            state = dict(states.get(block, {}))
            analysis.enter()
            members = range(graph.blocks[block].first, graph.blocks[block].last + 1)
            budget -= len(members) + len(state)
            if budget < 0:
                raise BudgetError
            for at in members:
                analysis.step(ops[at], state, None)
            _through_call(graph, block, state)
            for successor in graph.blocks[block].successors:
                known = states.get(successor)
                if known is None:
                    states[successor] = dict(state)
                elif not _merge(known, state):
                    continue
                if rank[successor] not in queued:
                    queued.add(rank[successor])
                    heapq.heappush(queue, rank[successor])
        if analysis.cells == before:
            break
    result = Values()
    for block in graph.order:
        state = dict(states.get(block, {}))
        analysis.enter()
        for at in range(graph.blocks[block].first, graph.blocks[block].last + 1):
            analysis.step(ops[at], state, result)
    return result


def _through_call(graph: Graph, block: int, state: State) -> None:
    """Step over a call of a function that touches no memory: what it writes derives from all that it reads."""
    summary = graph.blocks[block].summary
    if summary is not None:
        written, read = summary
        bits = 0
        for register in read:
            bits |= state.get(register, _NOTHING)[0]
        for register in written:
            state[register] = (bits | state.get(register, _NOTHING)[0], None)


def _merge(into: State, other: State) -> bool:
    """Join; a register that only one side knows was undefined on the other, so its number is not certain there."""
    changed = False
    for register, value in other.items():
        old = into.get(register)
        if old == value:
            continue
        new = (value[0] | (old[0] if old else 0), None)
        if old is None or new != old:
            into[register] = new
            changed = True
    for register, value in into.items():
        if value[1] is not None and register not in other:
            into[register] = (value[0], None)
            changed = True
    return changed


class _Analysis:
    def __init__(
        self,
        ops: Sequence[Op],
        origins: Origins,
        constant: Callable[[Constant, int], Value],
        polls: Mapping[int, int],
        predicates: int,
    ) -> None:
        self.ops = ops
        self.origins = origins
        self.constant = constant
        self.polls = polls
        self.predicates = predicates
        self.through_guards = sum(set(polls.values()))
        self.not_stored = origins.thread | origins.launch | origins.driver
        """What says nothing about a value that comes back from memory: another thread may have stored it."""
        self.through_predicates = self.through_guards | origins.thread | origins.launch | origins.driver
        self.cells = (0, 0)
        self.guards = {op.guard: op.condition[0] for op in ops if op.guard and op.condition}
        """Predicate register of each guard, whatever its sign."""
        self.conditional: dict[int, tuple[str, Value]] = {}

    def enter(self) -> None:
        """Start a block."""
        self.conditional = {}

    def read(self, op: Op, register: int, state: State) -> Value:
        """Value of an input. Under the guard under which it was written, it is what was written there."""
        if op.guard:
            written = self.conditional.get(register)
            if written is not None and written[0] == op.guard:
                return written[1]
        return state.get(register, _NOTHING)

    def step(self, op: Op, state: State, result: Values | None) -> None:
        """Apply one instruction to the state; record what the caller asked for."""
        if result is not None:
            self._record(op, state, result)
        bits = 0
        for register in op.uses:
            origin = self.read(op, register, state)[0]
            if register in op.condition:
                origin &= self.through_guards
            elif register >= self.predicates:
                origin &= self.through_predicates
            bits |= origin
        number: int | None = None
        for constant in op.constants:
            value = self.constant(constant, bits)
            bits |= value[0]
            if len(op.constants) == 1 and not op.uses:
                number = value[1]
        if op.source == "thread":
            bits |= self.origins.thread
        elif op.source == "window":
            bits |= self.origins.window
        elif op.source is not None:
            bits |= self.origins.launch
        if op.memory and (op.defs or op.writes_shared):
            # Loaded into registers, or copied into shared memory.
            bits = self._loaded(op, state)
        if op.reads_shared:
            bits |= self.cells[0]
        if op.reads_local:
            bits |= self.cells[1]
        self._stored(op, bits)
        bits |= self.polls.get(op.index, 0)
        if op.compute is not None:
            # A number beside the driver's bit is an offset in one of its windows: sums keep that meaning.
            window = bool(bits & self.origins.driver)
            number = self._compute(op, state) if not window or op.compute in ("mov", "mov64", "add") else None
        self._write(op, state, bits, number)

    def _write(self, op: Op, state: State, bits: int, number: int | None) -> None:
        for place, register in enumerate(op.defs):
            value: Value = (bits, number if place == 0 or op.compute == "mov" else None)
            self.conditional.pop(register, None)
            if op.guarded:
                self.conditional[register] = (op.guard, value)
                old = state.get(register, _NOTHING)
                value = (old[0] | bits, value[1] if value[1] == old[1] else None)
            state[register] = value
        if op.predicate_defs and self.conditional:
            self._forget(op)
        for register in op.predicate_defs:
            old_bits = state.get(register, _NOTHING)[0] if op.guarded else 0
            state[register] = (old_bits | bits, None)

    def _forget(self, op: Op) -> None:
        """A predicate that is written again stands for another condition."""
        names = set(op.predicate_defs)
        self.conditional = {r: w for r, w in self.conditional.items() if self.guards.get(w[0]) not in names}

    def _loaded(self, op: Op, state: State) -> int:
        bits = 0
        for access in op.memory:
            bits |= self.origins.of_load(self._address(op, access.address, access.constants, state)[0])
            if access.generic:
                bits |= self.cells[0] | self.cells[1]
        return bits

    def _stored(self, op: Op, bits: int) -> None:
        shared, local = self.cells
        bits &= ~self.not_stored
        if op.writes_shared:
            shared |= bits
        if op.writes_local:
            local |= bits
        if any(m.generic and m.touch in (Touch.STORE, Touch.ATOMIC) for m in op.memory):
            shared |= bits
            local |= bits
        self.cells = (shared, local)

    def _address(self, op: Op, registers: Sequence[int], constants: Sequence[Constant], state: State) -> Value:
        bits = 0
        number: int | None = None
        for place, register in enumerate(registers):
            value = self.read(op, register, state)
            bits |= value[0]
            number = value[1] if place == 0 else number
        for constant in constants:
            bits |= self.constant(constant, bits)[0]
        return bits, number

    def _record(self, op: Op, state: State, result: Values) -> None:
        for number, access in enumerate(op.memory):
            result.addresses[op.index, number] = self._address(op, access.address, access.constants, state)
            if access.policy is not None:
                low, high = access.policy
                result.policies[op.index, number] = (self.read(op, low, state), self.read(op, high, state))
        if op.index in self.polls:
            address = {register for access in op.memory for register in access.address}
            bits = 0
            for register in op.uses:
                bits |= 0 if register in address else self.read(op, register, state)[0]
            result.inputs[op.index] = bits
        if op.condition:
            bits = 0
            for register in op.condition:
                bits |= state.get(register, _NOTHING)[0]
            result.conditions[op.index] = bits

    def _known(self, op: Op, term: object, state: State) -> int | None:
        if isinstance(term, int):
            return term
        if isinstance(term, tuple):
            value = self.read(op, term[1], state)[1]
            return -value if value is not None and term[0] == "-r" else value
        return None

    def _compute(self, op: Op, state: State) -> int | None:
        values = [self._known(op, term, state) for term in op.terms]
        known = [v for v in values if v is not None]
        if len(known) != len(values) or not known:
            return None
        return _number(op.compute, known)


def _number(kind: str | None, known: list[int]) -> int | None:
    if kind == "mov64":
        return known[0]
    if kind == "mov":
        return known[0] & _MASK32
    if kind == "add":
        return sum(known) & _MASK32
    if kind == "shf.l" and len(known) >= 2:
        return known[0] << (known[1] & 31) & _MASK32
    if kind == "shf.r" and len(known) == 3 and known[2] == 0:
        return (known[0] & _MASK32) >> (known[1] & 31)
    if kind == "shf.r.hi" and len(known) == 3:
        return (known[2] & _MASK32) >> (known[1] & 31)
    if kind == "lea" and len(known) == 3:
        return (known[0] << (known[2] & 31)) + known[1] & _MASK32
    if kind == "lop3" and len(known) == 4:
        return _lop3(*known)
    return None


def _lop3(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for bit in range(32):
        row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        result |= (table >> row & 1) << bit
    return result
