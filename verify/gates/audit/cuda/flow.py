"""Control flow of one kernel: reachable code, basic blocks, calls, loops. Works on `ops` alone.

Calls are followed: a return leads to the continuation of every caller. A function that touches no memory (the slow path
of a division) is stepped over instead, so that a wait before one call is not forgotten because of another call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verify.gates.audit.cuda.ops import Effect, Flow, Op

__all__ = ["Block", "Graph", "Loop", "build", "dominators", "find_loops"]


@dataclass(slots=True)
class Block:
    """Instructions that run one after another: indices `first` to `last`, both included."""

    first: int
    last: int
    successors: list[int] = field(default_factory=list)
    """Block numbers. A call leads into the callee, a return to every continuation of the function's callers."""
    predecessors: list[int] = field(default_factory=list)
    call: tuple[int, int] | None = None
    """(callee's first block, continuation) if the block ends in a call."""
    summary: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """(registers written, registers read) by a called function that touches no memory: such a call is stepped over."""


@dataclass(frozen=True)
class Loop:
    """A natural loop: blocks from which the back edge is reached without leaving through the head."""

    head: int
    blocks: frozenset[int]


@dataclass
class Graph:
    """The reachable part of a kernel."""

    blocks: list[Block]
    order: list[int]
    """Block numbers in reverse postorder; the entry is first."""
    unresolved: list[tuple[int, str]]
    """(instruction, why): places where control may go anywhere."""


def build(ops: Sequence[Op], entry: int) -> Graph:
    """Follow control from `entry`. Linear in the number of reachable instructions."""
    unresolved: list[tuple[int, str]] = []
    reachable, leaders = _explore(ops, entry, unresolved)
    starts = sorted(leaders & reachable)
    number = {start: n for n, start in enumerate(starts)}
    blocks = [_block(ops, start, reachable, leaders) for start in starts]
    for block in blocks:
        _link(ops, block, number)
    callees = _callees(ops, blocks)
    _summarise(ops, blocks, callees)
    _returns(ops, blocks, callees, unresolved)
    for n, block in enumerate(blocks):
        block.successors = list(dict.fromkeys(block.successors))
        for successor in block.successors:
            blocks[successor].predecessors.append(n)
    return Graph(blocks, _reverse_postorder(blocks, number[entry]), unresolved)


def _explore(ops: Sequence[Op], entry: int, unresolved: list[tuple[int, str]]) -> tuple[set[int], set[int]]:
    reachable: set[int] = set()
    leaders = {entry}
    work = [entry]
    while work:
        at = work.pop()
        while at not in reachable:
            if at >= len(ops):
                unresolved.append((len(ops) - 1, "control runs past the last instruction"))
                break
            reachable.add(at)
            op = ops[at]
            if op.flow is Flow.UNKNOWN:
                unresolved.append((at, f"{op.opcode}: the target is not known"))
            elif op.flow is not Flow.NEXT:
                leaders.update(op.targets)
                work.extend(op.targets)
                leaders.add(at + 1)
            if not _falls_through(op):
                break
            at += 1
    return reachable, leaders


def _falls_through(op: Op) -> bool:
    """Whether the next instruction in the text can follow; a call's continuation counts as following."""
    if op.flow in (Flow.NEXT, Flow.BRANCH, Flow.CALL):
        return True
    return op.guarded


def _block(ops: Sequence[Op], start: int, reachable: set[int], leaders: set[int]) -> Block:
    last = start
    while ops[last].flow is Flow.NEXT and last + 1 in reachable and last + 1 not in leaders:
        last += 1
    return Block(start, last)


def _link(ops: Sequence[Op], block: Block, number: dict[int, int]) -> None:
    op = ops[block.last]
    following = number.get(block.last + 1)
    if op.flow is Flow.CALL:
        block.call = (number[op.targets[0]], following) if following is not None else None
        block.successors.append(number[op.targets[0]])
        if op.guarded and following is not None:
            block.successors.append(following)
        return
    block.successors += [number[t] for t in op.targets if t in number]
    if _falls_through(op) and following is not None:
        block.successors.append(following)


def _callees(ops: Sequence[Op], blocks: list[Block]) -> dict[int, frozenset[int]]:
    """The blocks of each called function; a call inside it is stepped over."""
    found: dict[int, frozenset[int]] = {}
    for start in {b.call[0] for b in blocks if b.call}:
        seen: set[int] = set()
        work = [start]
        while work:
            at = work.pop()
            if at in seen:
                continue
            seen.add(at)
            call = blocks[at].call
            if call is not None:
                work.append(call[1])
            elif ops[blocks[at].last].flow is not Flow.RETURN:
                work.extend(blocks[at].successors)
        found[start] = frozenset(seen)
    return found


def _summarise(ops: Sequence[Op], blocks: list[Block], callees: dict[int, frozenset[int]]) -> None:
    plain: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for start, members in callees.items():
        inside = [ops[i] for m in members for i in range(blocks[m].first, blocks[m].last + 1)]
        returns = any(op.flow is Flow.RETURN for op in inside)
        if returns and not any(_matters(op) for op in inside) and not any(blocks[m].call for m in members):
            written = {r for op in inside for r in (*op.defs, *op.predicate_defs)}
            plain[start] = tuple(sorted(written)), tuple(sorted({r for op in inside for r in op.uses}))
    for block in blocks:
        if block.call is not None and block.call[0] in plain:
            block.summary = plain[block.call[0]]
            block.successors = [block.call[1]]


def _matters(op: Op) -> bool:
    touches = op.memory or op.reads_shared or op.writes_shared or op.reads_local or op.writes_local
    return bool(touches) or op.effect is not Effect.NONE or op.flow is Flow.UNKNOWN


def _returns(
    ops: Sequence[Op],
    blocks: list[Block],
    callees: dict[int, frozenset[int]],
    unresolved: list[tuple[int, str]],
) -> None:
    owner: dict[int, list[int]] = {}
    for start, members in callees.items():
        for member in members:
            owner.setdefault(member, []).append(start)
    continuations: dict[int, list[int]] = {}
    for block in blocks:
        if block.call is not None and block.summary is None:
            continuations.setdefault(block.call[0], []).append(block.call[1])
    for n, block in enumerate(blocks):
        if ops[block.last].flow is not Flow.RETURN:
            continue
        if n not in owner:
            unresolved.append((block.last, "a return outside every called function"))
        for start in owner.get(n, []):
            block.successors += continuations.get(start, [])


def _reverse_postorder(blocks: list[Block], entry: int) -> list[int]:
    seen = {entry}
    order: list[int] = []
    stack = [(entry, iter(blocks[entry].successors))]
    while stack:
        at, rest = stack[-1]
        for successor in rest:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(blocks[successor].successors)))
                break
        else:
            order.append(at)
            stack.pop()
    return order[::-1]


def find_loops(graph: Graph, budget: int = 2_000_000) -> list[Loop] | None:
    """Loops by their back edges, smallest first; loops with one head are merged. None if the budget is spent.

    In irreducible code (which compilers do not emit from structured source) an edge to an earlier block counts as a
    back edge as well, so the loop is found, possibly with blocks that are not part of it.
    """
    rank = {block: n for n, block in enumerate(graph.order)}
    bodies: dict[int, set[int]] = {}
    for block in graph.order:
        for head in graph.blocks[block].successors:
            if rank[head] > rank[block]:
                continue
            body = bodies.setdefault(head, {head})
            work = [block]
            while work:
                at = work.pop()
                if at in body:
                    continue
                body.add(at)
                work += [p for p in graph.blocks[at].predecessors if p in rank and rank[p] >= rank[head]]
                budget -= 1
                if budget < 0:
                    return None
    return sorted((Loop(head, frozenset(body)) for head, body in bodies.items()), key=lambda loop: len(loop.blocks))


def dominators(graph: Graph) -> dict[int, int]:
    """Immediate dominator of each reachable block (Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm)."""
    rank = {block: n for n, block in enumerate(graph.order)}
    entry = graph.order[0]
    found = {entry: entry}
    changed = True
    while changed:
        changed = False
        for block in graph.order[1:]:
            new = -1
            for predecessor in graph.blocks[block].predecessors:
                if predecessor in found:
                    new = predecessor if new < 0 else _meet(predecessor, new, found, rank)
            if found.get(block) != new:
                found[block] = new
                changed = True
    return found


def _meet(a: int, b: int, found: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] > rank[b]:
            a = found[a]
        while rank[b] > rank[a]:
            b = found[b]
    return a
