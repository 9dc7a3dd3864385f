"""The form of an instruction that the analyses work on, whether it was read from SASS or from PTX.

Only what ordering needs is kept: which registers are read and written, which memory is touched and how, where control
goes. Registers are small integers; a front end decides the numbering and says which of them are predicates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

__all__ = ["Constant", "Effect", "Flow", "Memory", "Op", "Term", "Touch"]


class Flow(StrEnum):
    """Where control goes after an instruction."""

    NEXT = "next"
    BRANCH = "branch"
    """To a label, or on (a branch with a condition)."""
    JUMP = "jump"
    """To a label, always."""
    EXIT = "exit"
    CALL = "call"
    RETURN = "return"
    SWITCH = "switch"
    """To one of several labels that the compiler declared."""
    UNKNOWN = "unknown"


class Effect(StrEnum):
    """What an instruction does to the order of memory accesses, beside touching memory."""

    NONE = "none"
    WAIT = "wait"
    """All earlier grids of a dependent launch have finished and their writes are visible."""
    ACQUIRE = "acquire"
    """Later loads of this thread see what was visible to the releasing thread (fence, or invalidation of L1)."""
    CTA_BARRIER = "cta_barrier"
    """All threads of the CTA have arrived."""
    SYNC = "sync"
    """Synchronised with some other threads: named barrier, mbarrier phase, cluster barrier."""


class Touch(StrEnum):
    """How global memory is touched."""

    LOAD = "load"
    STORE = "store"
    ATOMIC = "atomic"
    COPY_IN = "copy_in"
    """Asynchronous copy from global memory (LDGSTS, bulk copy, TMA)."""
    COPY_OUT = "copy_out"
    """Asynchronous copy or reduction to global memory."""
    PREFETCH_L1 = "prefetch_l1"
    PREFETCH_L2 = "prefetch_l2"
    DISCARD = "discard"
    """Destroys the content of a cache line without writing it back."""
    UNKNOWN = "unknown"
    """An opcode with an address operand that the tables do not know."""


@dataclass(frozen=True, slots=True)
class Memory:
    """An access to global (or generic) memory."""

    touch: Touch
    address: tuple[int, ...]
    """Registers that form the address."""
    constants: tuple[Constant, ...] = ()
    """Constants that take part in the address."""
    descriptor: bool = False
    """The address names a tensor map, whose own address lies in the kernel's parameters."""
    strong: bool = False
    """Relaxed, acquire or volatile: defined under concurrent writes."""
    generic: bool = False
    """May also be shared or local memory."""
    policy: tuple[int, int] | None = None
    """Register pair that holds a cache policy or the driver's memory descriptor."""
    policy_value: int | None = None
    """A cache policy that stands in the instruction itself (PTX)."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A read of constant memory: `bank`, byte range, and whether a register is added to the offset."""

    bank: int
    offset: int
    size: int
    indexed: bool = False

    UNKNOWN: ClassVar[int] = -1
    """Bank of a bindless read."""
    ADDRESS_OF: ClassVar[int] = -2
    """Not the parameter's value but its address (PTX)."""


Term = int | tuple[str, int]
"""An operand of an instruction whose value can be computed: an immediate, or ("r" or "-r", register)."""


@dataclass(slots=True)
class Op:
    """One instruction."""

    index: int
    opcode: str
    guard: str = ""
    """Predicate with its sign under which the instruction is executed; empty: always."""
    defs: tuple[int, ...] = ()
    predicate_defs: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    constants: tuple[Constant, ...] = ()
    compute: str | None = None
    """How the value of the first definition follows from `terms`, for the few operations that build cache policies."""
    terms: tuple[Term, ...] = ()
    flow: Flow = Flow.NEXT
    targets: tuple[int, ...] = ()
    """Indices of the instructions that control may go to, besides the next one."""
    condition: tuple[int, ...] = ()
    """Predicates that decide a branch or exit."""
    effect: Effect = Effect.NONE
    barrier: str = ""
    """Name of the CTA or cluster barrier at which the thread arrives or waits; `*` if its number is computed."""
    memory: tuple[Memory, ...] = ()
    reads_shared: bool = False
    writes_shared: bool = False
    reads_local: bool = False
    writes_local: bool = False
    source: str | None = None
    """Special register that is read: `tid`, `clock`, `window`…"""
    notes: tuple[str, ...] = field(default=())
    """Properties that a rule asks for by name: `clock`, `sleep`, `trap`…"""

    @property
    def guarded(self) -> bool:
        """Executed under a condition."""
        return bool(self.guard)
