"""Audit decision for CUDA kernels: is every access ordered, and does the code hold only what an op may hold?

Decides from facts that were read off machine code (`verify.gates.audit.cuda`), so it can be repeated from stored lines
without the cubin. Three kinds of answer: a fault that was seen; a property that this audit could not establish
(`UNPROVEN`), which is never a pass; and nothing. It cannot see what the arithmetic computes, who signals a barrier, or
whether another kernel wrote what a flag promises; the kernels gate's delayed and poisoned producers answer for those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verify.protocol.decision import Finding, OutcomeWord

__all__ = [
    "CODES", "LIMITS", "PROTOCOL_ID", "RULES", "UNPROVEN", "Limits", "Rule", "Seen", "judge", "judge_kernel", "outcome",
]  # fmt: skip

PROTOCOL_ID = "audit-cuda/1"

CODES = {
    "audit.cubin_malformed": "not a cubin whose code can be read",
    "audit.not_evaluated": "part of the kernel could not be analysed",
    "audit.parameter_table": "the launch descriptor's parameters are not those of the kernel",
    "audit.load_above_wait": "memory that an earlier kernel may still write is read before the wait",
    "audit.store_above_wait": "memory that an earlier kernel may still use is written before the wait",
    "audit.prefetch_above_wait": "memory that an earlier kernel may still write is prefetched into L1 before the wait",
    "audit.wait_missing": "a dependent launch has a path to other kernels' memory without any wait",
    "audit.wait_dropped": "the wait of the PTX is not in the machine code",
    "audit.wait_by_other_warp": "only a barrier with other warps stands before the access, not a wait",
    "audit.address_unknown": "an access through an address whose origin is not a parameter",
    "audit.load_after_relaxed_poll": "data are read after a relaxed poll without an acquire, or inside the poll",
    "audit.load_above_poll": "data that a poll orders are read before the poll",
    "audit.load_after_relaxed_atomic": "data of other CTAs are read after an atomic that admits this one, no acquire",
    "audit.relaxed_poll": "a loop polls memory without an acquire, and no memory-model argument is claimed",
    "audit.spill": "registers are spilled, or the kernel uses local memory",
    "audit.cache_hint": "a cache hint that outlives the access",
    "audit.missing_instruction": "an instruction class that the kernel claims to use is absent",
    "audit.occupancy": "shared memory, registers or threads do not allow the claimed CTAs per SM",
    "audit.clock": "reads a clock or a performance counter",
    "audit.sleep": "sleeps outside a polling loop",
    "audit.debug": "holds a trap, a breakpoint or a profiler trigger",
    "audit.external_call": "calls a function that is not in the file",
    "audit.device_state": "module variables in device memory, which outlive a launch",
}
"""Every reason code of this protocol and what it means."""

UNPROVEN = frozenset({"audit.not_evaluated", "audit.wait_by_other_warp", "audit.address_unknown"})
"""Codes that state a gap of the audit, not a fault of the kernel: without other findings the gate is inconclusive."""

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """One violation."""

    what: str
    expected: str
    at: str = ""
    """Offset in the kernel and source line, as far as known."""


@dataclass(frozen=True)
class Rule:
    """One property of a kernel."""

    code: str
    motivation: str
    """The failure that it prevents, with its row in the catalogue of failures where it has one."""
    check: Callable[[Facts], Iterator[Seen]]


@dataclass(frozen=True)
class Limits:
    """What one SM offers. Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

    registers: int = 65536
    register_unit: int = 256
    """Allocation granularity in registers per warp."""
    shared_bytes: int = 233472
    """228 KB."""
    reserved_bytes: int = 1024
    """Shared memory that the system takes per CTA."""
    max_shared_per_cta: int = 232448
    """227 KB."""
    threads: int = 2048
    threads_per_cta: int = 1024
    ctas: int = 32


LIMITS: Mapping[str, Limits] = {"sm_90": Limits(), "sm_100": Limits(), "sm_103": Limits()}
"""By architecture without its suffix; the three have equal figures."""

_CODE_FACTS = ("accesses", "polls", "cache_policies", "sleeps_outside_polls", "notes", "classes", "waits")
"""What is known of a kernel whose code was read."""
_LOADS = ("load", "copy_in", "unknown")
_STORES = ("store", "atomic", "copy_out", "discard")
_HARMLESS_POLICIES = frozenset({
    "evict_normal", "evict_first", "evict_unchanged", "l1_evict_first", "l1_evict_unchanged", "l1_no_allocate",
    "l1_last_use", "applypriority",
})  # fmt: skip
"""Hints that make data leave a cache earlier, or not later, than without them."""


def outcome(findings: Sequence[Finding]) -> OutcomeWord:
    """Failed on any fault; inconclusive where the audit could not establish something; passed otherwise."""
    if any(finding.code not in UNPROVEN for finding in findings):
        return "failed"
    return "inconclusive" if findings else "passed"


def judge(facts: Facts | Sequence[Facts], where: str = "", next_step: str = "") -> list[Finding]:
    """Every violated rule of every kernel of a file (or of one kernel)."""
    kernels = [facts] if isinstance(facts, Mapping) else facts
    return [finding for kernel in kernels for finding in judge_kernel(kernel, where, next_step)]


def judge_kernel(facts: Facts, where: str = "", next_step: str = "") -> list[Finding]:
    """Every violated rule of one kernel; see `RULES`."""
    if facts["malformed"] is not None:
        expected = "a cubin as ptxas writes it, with the kernel that the launch descriptor names"
        return [Finding("audit.cubin_malformed", str(facts["malformed"]), where, expected, next_step)]
    findings = []
    for rule in RULES:
        for seen in rule.check(facts):
            place = ": ".join(part for part in (where, facts["kernel"]) if part)
            place += f" at {seen.at}" if seen.at else ""
            findings.append(Finding(rule.code, f"{CODES[rule.code]}: {seen.what}", place, seen.expected, next_step))
    return findings


def _dependent(facts: Facts) -> bool:
    """Launched before its predecessors have finished."""
    claims = facts["claims"]
    return bool(claims and claims["pdl"]) or bool(facts.get("waits"))


def _accesses(facts: Facts) -> list[Facts]:
    return list(facts.get("accesses", ()))


def _constant(row: Facts) -> bool:
    return bool(row["roles"]) and set(row["roles"]) == {"constant"}


def _describe(row: Facts) -> str:
    whose = ", ".join(f"{p}" for p in row["params"]) or "unknown memory"
    roles = f" ({', '.join(row['roles'])})" if row["roles"] else ""
    through = " through a pointer loaded from it" if row["via"] == "loaded" else ""
    return f"{row['count']} x {row['op']} of {whose}{roles}{through}"


def _at(row: Facts) -> str:
    return ", ".join(row["at"])


def _unordered(facts: Facts, touches: Sequence[str], *, follows: bool) -> Iterator[Facts]:
    """Accesses to other kernels' memory with nothing before them, in a dependent launch that has a wait somewhere."""
    if not _dependent(facts) or not facts.get("waits"):
        return
    for row in _accesses(facts):
        unordered = row["order"] in ("none", "poll") and row["wait_follows"] == follows and not _mailbox(row)
        if unordered and row["touch"] in touches and row["via"] != "unknown" and not _constant(row):
            yield row


def _mailbox(row: Facts) -> bool:
    """Reads of memory that peers write, ordered by its own flag: the poll itself, or what stands behind it."""
    ordered = row["order"] == "poll" or (row["poll"] == "flag" and row["strong"])
    return ordered and row["touch"] in _LOADS and set(row["roles"]) == {"workspace"}


def _load_above_wait(facts: Facts) -> Iterator[Seen]:
    for row in _unordered(facts, _LOADS, follows=True):
        yield Seen(_describe(row), "only constant parameters are read before griddepcontrol.wait (ACQBULK)", _at(row))


def _store_above_wait(facts: Facts) -> Iterator[Seen]:
    for row in _unordered(facts, _STORES, follows=True):
        yield Seen(_describe(row), "no store, atomic or discard before griddepcontrol.wait (ACQBULK)", _at(row))


def _prefetch_above_wait(facts: Facts) -> Iterator[Seen]:
    for follows in (True, False):
        for row in _unordered(facts, ("prefetch_l1",), follows=follows):
            yield Seen(_describe(row), "prefetches into L1 of constant parameters only, or into L2", _at(row))


def _wait_missing(facts: Facts) -> Iterator[Seen]:
    if not _dependent(facts):
        return
    wait = "griddepcontrol.wait (ACQBULK) on every path to memory that other kernels write or read"
    if facts.get("waits"):
        for row in _unordered(facts, (*_LOADS, *_STORES), follows=False):
            yield Seen(f"{_describe(row)} on a path without a wait", wait, _at(row))
        return
    rows = [
        r for r in _accesses(facts) if not _constant(r) and not _mailbox(r) and not r["touch"].startswith("prefetch")
    ]
    if rows:
        yield Seen(f"no wait in the kernel; first {_describe(rows[0])}", wait, _at(rows[0]))


def _wait_dropped(facts: Facts) -> Iterator[Seen]:
    ptx = facts.get("ptx")
    if ptx and ptx["waits"] and not facts.get("waits") and not facts["unevaluated"]:
        yield Seen(f"{ptx['waits']} in the PTX, none in the machine code", "at least one ACQBULK")


def _wait_by_other_warp(facts: Facts) -> Iterator[Seen]:
    if not _dependent(facts) or not facts.get("waits"):
        return
    for row in _accesses(facts):
        if row["order"] == "barrier" and not _constant(row) and not row["touch"].startswith("prefetch"):
            yield Seen(
                _describe(row),
                "griddepcontrol.wait by this warp, or by some warp before a barrier of the whole CTA",
                _at(row),
            )


def _address_unknown(facts: Facts) -> Iterator[Seen]:
    for row in _accesses(facts):
        if row["via"] == "unknown" and not row["touch"].startswith("prefetch"):
            yield Seen(_describe(row), "an address that derives from a pointer parameter", _at(row))


def _after_poll(facts: Facts) -> Iterator[Seen]:
    for row in _accesses(facts):
        if row["poll"] in ("after", "inside") and row["touch"] in _LOADS and not row["strong"] and not _constant(row):
            exempt = facts["roles_declared"] and row["order"] == "waited" and set(row["roles"]) <= {"activation"}
            if exempt and row["via"] == "parameter":
                continue
            place = "inside the polling loop" if row["poll"] == "inside" else "after the poll, with no acquire between"
            yield Seen(f"{_describe(row)} {place}", "ld.acquire, or a fence between the poll and the data", _at(row))


def _above_poll(facts: Facts) -> Iterator[Seen]:
    """Plain loads before a poll: of memory that peers write, or that stand after the poll in the PTX."""
    if not facts.get("polls"):
        return
    expected = "the load behind the poll and an acquire, in the machine code"
    early: dict[tuple[str, ...], list[Facts]] = {}
    total: dict[tuple[str, ...], int] = {}
    for row in _accesses(facts):
        if row["touch"] == "load" and not row["strong"] and not _constant(row) and row["poll"] != "flag":
            key = tuple(row["params"])
            total[key] = total.get(key, 0) + row["count"]
            if row["poll"] == "before":
                early.setdefault(key, []).append(row)
    asked = (facts.get("ptx") or {}).get("loads")
    for key, rows in early.items():
        if {role for row in rows for role in row["roles"]} == {"workspace"}:
            yield Seen(f"{_describe(rows[0])} before the poll", expected, _at(rows[0]))
        elif asked is not None:
            same = [a for a in asked if set(a["params"]) & set(key) and a["poll"] != "flag"]
            before = sum(a["count"] for a in same if a["poll"] == "before")
            seen = sum(row["count"] for row in rows)
            # The assembler may also copy loads when it unrolls a loop; then the totals differ.
            if not before or (seen > before and total[key] == sum(a["count"] for a in same)):
                yield Seen(
                    f"{seen} x {rows[0]['op']} of {', '.join(key)} before the poll, {before} in the PTX",
                    expected,
                    ", ".join(_at(row) for row in rows),
                )


def _after_ticket(facts: Facts) -> Iterator[Seen]:
    for row in _accesses(facts):
        plain = row["touch"] in _LOADS and not row["strong"]
        if row["poll"] == "ticket" and plain and "workspace" in row["roles"]:
            yield Seen(_describe(row), "an acquire (fence or atom.acquire) between the atomic and the data", _at(row))


def _relaxed_poll(facts: Facts) -> Iterator[Seen]:
    claims = facts["claims"]
    if claims and claims["polling"]:
        return
    for poll in facts.get("polls", ()):
        if poll["unacquired_at"] is not None:
            kind = "relaxed" if poll["strong"] else "weak"
            yield Seen(
                f"{kind} {poll['op']}; no acquire before {poll['unacquired_at']}",
                "ld.acquire or a fence after the loop, or a written memory-model argument in the launch descriptor",
                poll["at"],
            )


def _spill(facts: Facts) -> Iterator[Seen]:
    if facts["level"] == "ptx":
        return  # ptxas may still turn local arrays into registers
    resources = facts["resources"]
    seen = [f"{resources[name]} {name}" for name in ("frame_bytes", "stack_bytes") if resources[name]]
    if facts.get("local_accesses"):
        seen.append(f"{facts['local_accesses']} local loads and stores")
    if seen:
        yield Seen(", ".join(seen), "no stack and no local memory")


def _cache_hint(facts: Facts) -> Iterator[Seen]:
    for row in facts.get("cache_policies", ()):
        if row["policy"] not in _HARMLESS_POLICIES:
            yield Seen(
                f"{row['policy']} on {row['count']} x {row['op']}",
                "no hint that keeps lines longer, and no fractional or computed policy",
                _at(row),
            )


def _missing_instruction(facts: Facts) -> Iterator[Seen]:
    claims = facts["claims"]
    if not claims or "classes" not in facts:
        return
    for name in claims["expects"]:
        if not facts["classes"].get(name):
            yield Seen(name, f"at least one instruction of class {name}")


def _limits(facts: Facts) -> Limits | None:
    return LIMITS.get((facts["arch"] or "").rstrip("af"))


def _occupancy(facts: Facts) -> Iterator[Seen]:
    claims, resources = facts["claims"], facts["resources"]
    if not claims:
        return
    limits = _limits(facts)
    if limits is None or resources["registers"] is None:
        return
    wanted = claims["min_ctas_per_sm"]
    warps = -(-claims["block"] // 32)
    unit = limits.register_unit
    per_warp = -(-resources["registers"] * 32 // unit) * unit
    shared = max(resources["static_smem"] + claims["dynamic_smem"], 0)
    required = resources["required_threads"]
    if required and required[0] * required[1] * required[2] != claims["block"]:
        yield Seen(f"compiled for {required[0] * required[1] * required[2]} threads", f"{claims['block']} threads")
    for used, per_sm, what in (
        (per_warp * warps, limits.registers, "registers"),
        (shared + limits.reserved_bytes, limits.shared_bytes, "bytes of shared memory"),
        (warps * 32, limits.threads, "threads"),
        (1, limits.ctas, "CTAs"),
    ):
        if used * wanted > per_sm:
            yield Seen(f"{used} {what} per CTA allow {per_sm // used} CTAs per SM", f"at least {wanted}")
    if shared > limits.max_shared_per_cta or claims["block"] > limits.threads_per_cta:
        yield Seen(
            f"{shared} bytes of shared memory and {claims['block']} threads per CTA",
            f"at most {limits.max_shared_per_cta} bytes and {limits.threads_per_cta} threads",
        )


def _noted(facts: Facts, *names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        places = facts.get("notes", {}).get(name)
        if places:
            yield name, ", ".join(places)


def _clock(facts: Facts) -> Iterator[Seen]:
    for name, at in _noted(facts, "clock"):
        yield Seen(name, "no read of clock, globaltimer or performance counters", at)


def _sleep(facts: Facts) -> Iterator[Seen]:
    places = facts.get("sleeps_outside_polls")
    if places:
        yield Seen("nanosleep", "nanosleep in polling loops only", ", ".join(places))


def _debug(facts: Facts) -> Iterator[Seen]:
    for name, at in _noted(facts, "trap", "performance_trigger"):
        yield Seen(name, "none", at)


def _external_call(facts: Facts) -> Iterator[Seen]:
    for name in facts["undefined_functions"]:
        yield Seen(name, "no function outside the file")


def _device_state(facts: Facts) -> Iterator[Seen]:
    if facts["device_bytes"]:
        yield Seen(f"{facts['device_bytes']} bytes", "no variables in global memory")


def _parameter_table(facts: Facts) -> Iterator[Seen]:
    table = facts["parameter_table"]
    if table["declared"] is not None and table["declared"] != table["cubin"]:
        yield Seen(f"(offset, size) {table['declared']}", f"{table['cubin']}, as the cubin states")


def _not_evaluated(facts: Facts) -> Iterator[Seen]:
    for gap in facts["unevaluated"]:
        yield Seen(f"{gap['what']}: {gap['why']}", "code that the audit understands in full", gap["at"])
    absent = [name for name in _CODE_FACTS if name not in facts]
    if absent and not facts["unevaluated"]:
        yield Seen(f"facts: {', '.join(absent)} not recorded", "facts of the whole kernel")
    if facts["claims"] and _limits(facts) is None:
        yield Seen(f"occupancy: no figures for {facts['arch']}", f"one of {', '.join(LIMITS)}")


RULES: tuple[Rule, ...] = (
    Rule(
        "audit.not_evaluated",
        "a check that skips what it does not understand reports clean code that nobody looked at",
        _not_evaluated,
    ),
    Rule(
        "audit.parameter_table",
        "roles are given by parameter offset: a wrong table makes every other rule look at the wrong memory",
        _parameter_table,
    ),
    Rule(
        "audit.load_above_wait",
        "B07, and K3's own first lesson: the compiler moved activation loads above the dependency wait",
        _load_above_wait,
    ),
    Rule(
        "audit.store_above_wait",
        "the predecessor may still read what is overwritten, or write what was stored (B09)",
        _store_above_wait,
    ),
    Rule(
        "audit.prefetch_above_wait",
        "L1 is not coherent: a line that was fetched early may answer the load after the wait; L2 is coherent",
        _prefetch_above_wait,
    ),
    Rule("audit.wait_missing", "B08, B09 and B10: one warp role or one kernel lacked the wait", _wait_missing),
    Rule("audit.wait_dropped", "B12: toolchains drop instructions; the source proves nothing", _wait_dropped),
    Rule(
        "audit.wait_by_other_warp",
        "B08: whether the barrier was signalled by a warp that had waited is not visible in the code of this warp",
        _wait_by_other_warp,
    ),
    Rule(
        "audit.address_unknown",
        "memory that no parameter names is memory that no role, canary or poison covers",
        _address_unknown,
    ),
    Rule(
        "audit.load_after_relaxed_poll",
        "the assembler moves plain loads around relaxed polling loops (sm_103a, seen); B11: the order is nobody's",
        _after_poll,
    ),
    Rule(
        "audit.load_above_poll",
        "ptxas moves a plain load above a whole polling loop where its address is read on every path (seen on sm_103a)",
        _above_poll,
    ),
    Rule(
        "audit.load_after_relaxed_atomic",
        "the last CTA to arrive reads partial results that the others wrote: without an acquire they may be stale",
        _after_ticket,
    ),
    Rule("audit.relaxed_poll", "B11: a relaxed spin is right only beside the one load it was made for", _relaxed_poll),
    Rule(
        "audit.spill",
        "local memory traffic is hidden work that grows with a toolchain change and costs latency at small batch",
        _spill,
    ),
    Rule("audit.cache_hint", "C11: operands kept in L2 through the flush make a kernel look faster", _cache_hint),
    Rule(
        "audit.missing_instruction",
        "a silent fall-back to scalar code passes every numerical test",
        _missing_instruction,
    ),
    Rule(
        "audit.occupancy",
        "a grid that was sized for co-resident CTAs and polls between them hangs when they do not fit (B10, B12)",
        _occupancy,
    ),
    Rule("audit.clock", "time is the evaluator's: code that reads a clock can act otherwise when measured", _clock),
    Rule("audit.sleep", "a sleep outside a poll hides a race by timing", _sleep),
    Rule("audit.debug", "a trap ends the whole process of a serving engine; a trigger talks to a profiler", _debug),
    Rule("audit.external_call", "vprintf and malloc serialise the device and keep state", _external_call),
    Rule("audit.device_state", "a buffer that survives a launch can return an earlier result", _device_state),
)
"""Each rule has a test in which it refuses and one in which it passes (docs/audit.md)."""
