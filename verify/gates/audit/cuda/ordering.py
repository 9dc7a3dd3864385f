"""Which accesses are ordered, by which wait, on every path (a must-analysis); and which loops poll memory.

Three levels of order at a point of a thread's path: nothing; synchronised with other threads, of which one may have
waited; waited itself. `griddepcontrol.wait` makes the earlier grids' writes visible to the whole grid (PTX ISA,
griddepcontrol), so one thread's wait followed by a barrier of the whole CTA orders all its threads: that is recognised
where the waiting threads are chosen by thread index alone. A named barrier or an mbarrier proves less: the audit does
not know who arrives there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from verify.gates.audit.cuda.flow import Block, Graph, Loop, dominators
from verify.gates.audit.cuda.ops import Effect, Flow, Op, Touch
from verify.gates.audit.cuda.values import Origins, Values

__all__ = ["Level", "Order", "Poll", "Ticket", "candidates", "find_polls", "find_tickets", "order"]


class Level(IntEnum):
    """How well a point is ordered behind earlier grids."""

    NONE = 0
    BARRIER = 1
    WAITED = 2


@dataclass(frozen=True)
class Poll:
    """A loop that ends when a value arrives in memory."""

    load: int
    """Instruction that reads the flag."""
    loop: Loop
    bit: int


@dataclass(frozen=True)
class Ticket:
    """An atomic whose result decides a branch outside a poll: the last CTA to arrive goes on with everybody's data."""

    atomic: int
    bit: int


_MANY_WAITS = 64
"""More are not looked at, which errs on the side of a finding."""


class State(NamedTuple):
    """What holds at a point of a thread's path."""

    each: Level
    """This thread's level on the path that orders least."""
    best: Level
    """This thread's level on the path that orders most."""
    some: Level
    """The level of some thread of the CTA."""
    unacquired: int
    """Flags that were read on some path and not acquired since."""
    read: int
    """Flags that were read on every path."""
    acquired: int
    """Flags that were read and then acquired on every path."""


@dataclass
class Order:
    """The state before each instruction."""

    levels: dict[int, Level] = field(default_factory=dict)
    unacquired: dict[int, int] = field(default_factory=dict)
    """Polls (bit set) that have been read on some path without an acquire after."""
    acquired: dict[int, int] = field(default_factory=dict)
    """Polls that have been passed and acquired on every path."""
    wait_follows: dict[int, bool] = field(default_factory=dict)
    """Whether a wait can still be reached."""
    poll_follows: dict[int, bool] = field(default_factory=dict)
    """Whether a poll can still be reached."""


def candidates(ops: Sequence[Op], graph: Graph, loops: Sequence[Loop]) -> list[int]:
    """What may be waited for: in loops, strong loads and weak ones with a fixed address; atomics with a result."""
    found: dict[int, None] = {}
    for loop in loops:
        body = [ops[i] for b in loop.blocks for i in range(graph.blocks[b].first, graph.blocks[b].last + 1)]
        written = {r for op in body for r in op.defs if not any(m.touch is Touch.LOAD for m in op.memory)}
        for op in body:
            if any(_may_poll(op, written) for _ in op.memory[:1]):
                found[op.index] = None
    for index in _instructions(graph):
        if ops[index].defs and any(m.touch is Touch.ATOMIC for m in ops[index].memory):
            found[index] = None
    return list(found)


def _may_poll(op: Op, written: set[int]) -> bool:
    access = op.memory[0]
    if not op.defs:
        return False
    return access.touch is Touch.LOAD and (access.strong or not written.intersection(access.address))


def find_polls(
    ops: Sequence[Op], graph: Graph, loops: Sequence[Loop], polls: Mapping[int, int], values: Values
) -> list[Poll]:
    """For each candidate the smallest loop around it that it can end.

    An atomic that hands out work ends loops as well. A flag is exchanged or compared, or is all that the loop touches.
    """
    found: list[Poll] = []
    holder = {
        i: n for n, block in enumerate(graph.blocks) for i in range(block.first, block.last + 1)
    }  # fmt: skip
    for load, bit in polls.items():
        for loop in loops:
            if (
                holder[load] in loop.blocks
                and _waits(ops, graph, load, loop, polls, values)
                and _ends(ops, graph, loop, bit, values)
            ):
                found.append(Poll(load, loop, bit))
                break
    return found


def _waits(ops: Sequence[Op], graph: Graph, load: int, loop: Loop, polls: Mapping[int, int], values: Values) -> bool:
    op = ops[load]
    inside = [i for b in loop.blocks for i in range(graph.blocks[b].first, graph.blocks[b].last + 1)]
    # Where what is swapped in was computed from what was read, the loop is an atomic operation made of
    # compare-and-swap: it waits for nobody.
    swaps = [i for i in inside if i in polls and ".CAS" in ops[i].opcode.upper()]
    if op.memory[0].touch is not Touch.ATOMIC:
        return not any(values.inputs.get(i, 0) & polls[load] for i in swaps)
    if load in swaps:
        return not values.inputs.get(load, 0) & sum({polls[i] for i in inside if i in polls})
    return ".EXCH" in op.opcode or ".exch" in op.opcode or sum(bool(ops[i].memory) for i in inside) == 1


def find_tickets(
    ops: Sequence[Op], polls: Sequence[Poll], candidates: Mapping[int, int], values: Values
) -> list[Ticket]:
    """Atomics that are no polls and decide a branch."""
    flags = {p.load for p in polls}
    decided = 0
    for bits in values.conditions.values():
        decided |= bits
    return [
        Ticket(index, bit)
        for index, bit in candidates.items()
        if index not in flags and decided & bit and ops[index].memory[0].touch is Touch.ATOMIC
    ]


def _ends(ops: Sequence[Op], graph: Graph, loop: Loop, bit: int, values: Values) -> bool:
    for number in loop.blocks:
        block = graph.blocks[number]
        leaves = any(s not in loop.blocks for s in block.successors) or not block.successors
        inside = range(block.first, block.last + 1)
        if leaves and any(ops[i].flow is not Flow.NEXT and values.conditions.get(i, 0) & bit for i in inside):
            return True
    return False


def order(
    ops: Sequence[Op],
    graph: Graph,
    polls: Sequence[Poll],
    tickets: Sequence[Ticket],
    values: Values,
    origins: Origins,
) -> Order:
    """Run to the fixed point; the state has few values, so this is linear in practice."""
    bits = {**{p.load: p.bit for p in polls}, **{t.atomic: t.bit for t in tickets}}
    above = dominators(graph)
    idle = _before_all_waits(ops, graph, above) | _barriers_without_waiters(ops, graph)
    by_thread = {
        n for n in graph.order if values.conditions.get(graph.blocks[n].last, 0) == origins.thread
    }  # fmt: skip
    rank = {block: n for n, block in enumerate(graph.order)}
    heads = {n for n in graph.order if any(rank.get(p, -1) >= rank[n] for p in graph.blocks[n].predecessors)}
    walk = _Walk(ops, bits, values, origins, idle)
    outs: dict[int, State] = {}
    changed = True
    while changed:
        changed = False
        for number in graph.order:
            state = walk.through(graph.blocks[number], _join(number, graph, outs, above, by_thread, heads))[-1]
            if outs.get(number) != state:
                outs[number] = state
                changed = True
    result = Order()
    flags = {p.load for p in polls}
    waits = _follows(graph, {i for i in _instructions(graph) if ops[i].effect is Effect.WAIT})
    later_polls = _follows(graph, flags)
    for number in graph.order:
        block = graph.blocks[number]
        states = walk.through(block, _join(number, graph, outs, above, by_thread, heads))
        wait, poll = waits[number], later_polls[number]
        for at, state in zip(range(block.first, block.last + 1), states, strict=False):
            # Loops over tiles may be empty as far as the code says. A path around their barriers is no proof of a
            # fault, so such a place counts as ordered by a barrier: not proven, not refuted.
            skipped = state.each is Level.NONE and state.best is Level.BARRIER
            result.levels[at] = Level.BARRIER if skipped else state.each
            result.unacquired[at], result.acquired[at] = state.unacquired, state.acquired
        for at in range(block.last, block.first - 1, -1):
            wait, poll = wait or ops[at].effect is Effect.WAIT, poll or at in flags
            result.wait_follows[at], result.poll_follows[at] = wait, poll
    return result


def _join(
    number: int,
    graph: Graph,
    outs: Mapping[int, State],
    above: Mapping[int, int],
    by_thread: set[int],
    heads: set[int],
) -> State:
    """The state at a block's start."""
    incoming = [outs[p] for p in graph.blocks[number].predecessors if p in outs]
    if number == graph.order[0]:
        incoming.append(State(Level.NONE, Level.NONE, Level.NONE, 0, 0, 0))
    if not incoming:
        return State(Level.WAITED, Level.NONE, Level.WAITED, 0, -1, -1)
    unacquired, read, acquired = 0, -1, -1
    for state in incoming:
        unacquired |= state.unacquired
        read &= state.read
        acquired &= state.acquired
    # Behind a branch on the thread index, some threads took each side. A loop's head also joins with its own end.
    divides = above.get(number) in by_thread and number not in heads
    pick = max if divides else min
    each, some = min(s.each for s in incoming), pick(s.some for s in incoming)
    return State(each, max(s.best for s in incoming), some, unacquired, read, acquired)


class _Walk:
    """What instructions do to the state."""

    def __init__(
        self, ops: Sequence[Op], flags: Mapping[int, int], values: Values, origins: Origins, idle: set[int]
    ) -> None:
        self.ops = ops
        self.flags = flags
        self.values = values
        self.thread = origins.thread
        self.idle = idle

    def through(self, block: Block, state: State) -> list[State]:
        """The state before each instruction of a block, and after the last."""
        states = [state]
        guarded: dict[str, int] = {}
        for at in range(block.first, block.last + 1):
            op = self.ops[at]
            each, best, some, unacquired, read, acquired = state
            if op.effect is Effect.ACQUIRE:
                # A guarded acquire serves what was read under the same guard.
                unacquired &= ~guarded.pop(op.guard, 0) if op.guarded else 0
                acquired |= 0 if op.guarded else read
            elif op.effect is not Effect.NONE and (at not in self.idle or op.effect is Effect.WAIT):
                best = max(best, self._ordered(op, best, some)[0])
                each, some = self._ordered(op, each, some)
            flag = self.flags.get(at, 0)
            if flag and (op.effect is not Effect.ACQUIRE or op.guarded):
                if op.guarded and not unacquired & flag:
                    guarded[op.guard] = guarded.get(op.guard, 0) | flag
                unacquired |= flag
            if op.predicate_defs and guarded:
                guarded = {}
            if flag and not op.guarded:
                read |= flag
                acquired |= flag if op.effect is Effect.ACQUIRE else 0
            state = State(each, best, some, unacquired, read, acquired)
            states.append(state)
        return states

    def _ordered(self, op: Op, each: Level, some: Level) -> tuple[Level, Level]:
        if op.effect is Effect.WAIT:
            if not op.guarded:
                return Level.WAITED, Level.WAITED
            return each, Level.WAITED if self.values.conditions.get(op.index, 0) == self.thread else some
        if op.guarded:
            return each, some
        if op.effect is Effect.CTA_BARRIER:
            return max(each, some, Level.BARRIER), max(some, Level.BARRIER)
        return max(each, Level.BARRIER), max(some, Level.BARRIER)


def _before_all_waits(ops: Sequence[Op], graph: Graph, above: Mapping[int, int]) -> set[int]:
    """Barriers that every thread passes before its first wait: whoever arrives there has not waited."""
    common: set[int] | None = None
    found = 0
    for number in graph.order:
        block = graph.blocks[number]
        first = next((i for i in range(block.first, block.last + 1) if ops[i].effect is Effect.WAIT), None)
        if first is None or found == _MANY_WAITS:
            continue
        found += 1
        passed = set(range(block.first, first))
        at = number
        while above[at] != at:
            at = above[at]
            passed.update(range(graph.blocks[at].first, graph.blocks[at].last + 1))
        common = passed if common is None else common & passed
    return common or set()


def _barriers_without_waiters(ops: Sequence[Op], graph: Graph) -> set[int]:
    """CTA and cluster barriers at which no thread arrives after a wait: passing one says nothing about waiters."""
    blocks = graph.blocks
    behind: set[int] = set()
    work: list[int] = []
    for number in graph.order:
        inside = range(blocks[number].first, blocks[number].last + 1)
        first = next((i for i in inside if ops[i].effect is Effect.WAIT), None)
        if first is not None:
            behind.update(range(first, blocks[number].last + 1))
            work.extend(blocks[number].successors)
    seen: set[int] = set()
    while work:
        number = work.pop()
        if number not in seen:
            seen.add(number)
            behind.update(range(blocks[number].first, blocks[number].last + 1))
            work.extend(blocks[number].successors)
    named = [i for i in _instructions(graph) if ops[i].barrier]
    reached = {ops[i].barrier for i in named if i in behind}
    if "*" in reached:
        return set()
    return {i for i in named if ops[i].barrier not in reached and ops[i].barrier != "*"}


def _instructions(graph: Graph) -> Iterator[int]:
    for number in graph.order:
        yield from range(graph.blocks[number].first, graph.blocks[number].last + 1)


def _follows(graph: Graph, wanted: set[int]) -> dict[int, bool]:
    """For each block, whether one of these instructions is reachable after its end."""
    blocks = graph.blocks
    before: set[int] = set()
    work = [n for n in graph.order if any(i in wanted for i in range(blocks[n].first, blocks[n].last + 1))]
    while work:
        for predecessor in blocks[work.pop()].predecessors:
            if predecessor not in before:
                before.add(predecessor)
                work.append(predecessor)
    return {n: n in before for n in graph.order}
