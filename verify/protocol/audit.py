"""Audit decision for host objects: does the compiled code hold only what an op may hold?

Decides from facts that were read off each object (symbols, dynamic table, segments, relocations, instruction counts);
every rule is listed with its reason. Facts describe what the loader would do, so a rule holds whatever the source
looked like. It cannot see what the arithmetic computes, nor instructions that start inside others; the sandbox and the
kernels gate answer for those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verify.protocol import audit_cuda
from verify.protocol.decision import Decision, Finding, Line
from verify.protocol.lines import as_finding, incomplete, last_attempt, of_kind

__all__ = [
    "CODES",
    "FORBIDDEN_INSTRUCTIONS",
    "PROTOCOL_ID",
    "PROTOCOL_IDS",
    "RULES",
    "SECTIONS",
    "Rule",
    "decide",
    "judge",
]

PROTOCOL_ID = "audit-cpu/1"
PROTOCOL_IDS = (PROTOCOL_ID, audit_cuda.PROTOCOL_ID)
"""Of host objects, and of CUDA kernels, whose rules are in `audit_cuda`."""

SECTIONS = frozenset({
    ".gnu.hash", ".hash", ".dynsym", ".dynstr", ".gnu.version", ".gnu.version_r", ".rela.dyn", ".rela.plt",
    ".relr.dyn", ".plt", ".plt.got", ".plt.sec", ".text", ".rodata", ".eh_frame_hdr", ".eh_frame", ".data.rel.ro",
    ".dynamic", ".got", ".got.plt", ".comment", ".note.gnu.property", ".symtab", ".strtab", ".shstrtab",
})  # fmt: skip
"""What GNU ld emits for arithmetic without state, exceptions or load-time code."""

RELOCATIONS = frozenset({"R_X86_64_RELATIVE", "R_X86_64_GLOB_DAT", "R_X86_64_JUMP_SLOT", "R_X86_64_64"})

DYNAMIC_TAGS = frozenset({
    "DT_NULL", "DT_NEEDED", "DT_HASH", "DT_GNU_HASH", "DT_STRTAB", "DT_SYMTAB", "DT_STRSZ", "DT_SYMENT",
    "DT_PLTGOT", "DT_PLTRELSZ", "DT_PLTREL", "DT_JMPREL", "DT_RELA", "DT_RELASZ", "DT_RELAENT", "DT_RELACOUNT",
    "DT_RELR", "DT_RELRSZ", "DT_RELRENT", "DT_FLAGS", "DT_FLAGS_1", "DT_SONAME", "DT_VERNEED", "DT_VERNEEDNUM",
    "DT_VERSYM",
})  # fmt: skip
_OWN_RULE_TAGS = {
    "DT_INIT", "DT_FINI", "DT_INIT_ARRAY", "DT_INIT_ARRAYSZ", "DT_FINI_ARRAY", "DT_FINI_ARRAYSZ",
    "DT_PREINIT_ARRAY", "DT_PREINIT_ARRAYSZ", "DT_TEXTREL", "DT_RPATH", "DT_RUNPATH",
}  # fmt: skip
_OWN_RULE_SECTIONS = {
    ".data", ".bss", ".tdata", ".tbss", ".init", ".fini", ".init_array", ".fini_array", ".preinit_array", ".ctors",
    ".dtors",
}  # fmt: skip

FORBIDDEN_INSTRUCTIONS = frozenset({
    "syscall", "sysenter", "sysexit", "sysret", "sysretq", "int", "int1", "int3", "into", "iret", "iretq", "hlt",
    "in", "out", "ins", "insb", "insl", "outs", "outsb", "outsl", "rdtsc", "rdtscp", "rdpmc", "rdpru", "rdrand",
    "rdseed", "rdpid", "cpuid", "xgetbv", "xsetbv", "wrpkru", "rdpkru", "rdfsbase", "rdgsbase", "wrfsbase",
    "wrgsbase", "swapgs", "xbegin", "xend", "xabort", "xtest", "rdmsr", "wrmsr", "ptwrite", "umwait", "umonitor",
    "tpause", "monitor", "mwait", "senduipi", "enqcmd", "enqcmds", "lgdt", "lidt", "lldt", "ltr", "invlpg", "ljmp",
    "lcall", "lret", "(bad)",
})  # fmt: skip
"""System calls, clocks and counters, machine identification, random numbers, thread base registers; and bytes that do
not decode."""

CODES = {
    "audit.malformed": "not a 64-bit x86 ELF shared object that can be read",
    "audit.undefined_symbol": "imports a symbol outside the allow-list",
    "audit.needed_library": "depends on a library outside the allow-list",
    "audit.constructor": "code runs when the object is loaded or unloaded",
    "audit.ifunc": "resolver code runs at load time (IFUNC, IRELATIVE)",
    "audit.unique_symbol": "STB_GNU_UNIQUE symbols are shared between objects and pin them in memory",
    "audit.text_relocation": "relocations change code",
    "audit.relocation": "relocation type outside the allow-list",
    "audit.executable_stack": "asks for an executable stack",
    "audit.writable_code": "a segment is writable and executable",
    "audit.writable_state": "writable memory that keeps its content between calls",
    "audit.thread_local": "thread-local storage",
    "audit.exports": "exports something other than the op's entry point",
    "audit.section": "section outside the allow-list",
    "audit.dynamic_tag": "dynamic entry outside the allow-list",
    "audit.search_path": "brings its own library search path",
    "audit.instruction": "system, clock or undecodable instruction",
    "audit.segment_register": "addresses memory through fs or gs: the thread's control block",
    "audit.instructions_unread": "the instructions could not be read, so their rules are not evaluated",
    "audit.no_objects": "the build gate left nothing to audit",
    "audit.incomplete_record": "the raw lines do not hold a complete attempt",
    "audit.environment": "the machine could not run the gate",
    "audit.internal_error": "the gate itself failed",
    **audit_cuda.CODES,
}
"""Every reason code of this gate and what it means."""

Facts = Mapping[str, Any]
Seen = tuple[str, str]
"""(what was seen, what would be right)."""


@dataclass(frozen=True)
class _Case:
    """One object under judgement."""

    facts: Facts
    op: str
    policy: Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """One property of an object."""

    code: str
    motivation: str
    """The failure that it prevents."""
    check: Callable[[_Case], Iterator[Seen]]
    """Yields the violations of one object."""


def decide(lines: Sequence[Line]) -> Decision:
    """Failed on any violation; passed if every announced object was read in full; otherwise not evaluated."""
    attempt = last_attempt(lines)
    if attempt is None:
        return incomplete("audit", "no header line")
    header, body = attempt
    absent = [as_finding(line) for line in of_kind(body, "unavailable")]
    if absent:
        return Decision("not_evaluated", absent)
    objects = of_kind(body, "object")
    if [o["digest"] for o in objects] != [o["digest"] for o in header["objects"]] or not objects:
        return incomplete("audit", f"{len(objects)} of {len(header['objects'])} objects are recorded")
    if header.get("protocol") == audit_cuda.PROTOCOL_ID:
        return _decide_device(header, objects)
    findings = [
        finding
        for line in objects
        for finding in judge(
            line["facts"], line["op"], header["policy"], f"{line['op']}/{line['arch']}", header["next"]
        )
    ]
    if findings:
        return Decision("failed", findings, _metrics(objects))
    unread = [_unread(o, header) for o in objects if o["facts"]["instructions"] is None]
    return Decision("inconclusive" if unread else "passed", unread, _metrics(objects))


def _decide_device(header: Line, objects: Sequence[Line]) -> Decision:
    """CUDA artifacts: every kernel by the rules of `audit_cuda`; an artifact without kernels is no pass."""
    empty = [f"{o['op']}/{o['arch']}" for o in objects if not o["kernels"]]
    if empty:
        return incomplete("audit", f"no kernels are recorded for {', '.join(empty)}")
    kernels = [kernel for line in objects for kernel in line["kernels"]]
    findings = [f for k in kernels for f in audit_cuda.judge_kernel(k["facts"], k["where"], header["next"])]
    metrics: dict[str, dict[str, object]] = {
        "objects": {"value": float(len(objects)), "unit": "objects"},
        "kernels": {"value": float(len(kernels)), "unit": "kernels"},
    }
    return Decision(audit_cuda.outcome(findings), findings, metrics)


def judge(facts: Facts, op: str, policy: Mapping[str, Any], where: str, next_step: str) -> list[Finding]:
    """Every violated rule of one object; see `RULES`."""
    if facts["malformed"] is not None:
        return [
            Finding("audit.malformed", facts["malformed"], where, "what GNU ld writes for a shared object", next_step)
        ]
    return [
        Finding(rule.code, f"{CODES[rule.code]}: {seen}", where, expected, next_step)
        for rule in RULES
        for seen, expected in rule.check(_Case(facts, op, policy))
    ]


def _unread(line: Line, header: Line) -> Finding:
    return Finding(
        "audit.instructions_unread",
        f"instruction rules not evaluated: {line['facts']['instructions_missing']}",
        f"{line['op']}/{line['arch']}",
        "objdump of GNU binutils 2.38 or newer",
        f"apt-get install binutils; {header['next']}",
    )


def _metrics(objects: Sequence[Line]) -> dict[str, dict[str, object]]:
    readable = [o["facts"] for o in objects if o["facts"]["malformed"] is None]
    return {
        "objects": {"value": float(len(objects)), "unit": "objects"},
        "rules": {"value": float(len(RULES)), "unit": "rules"},
        "code_bytes": {"value": float(sum(f["code_bytes"] for f in readable)), "unit": "bytes"},
        "undefined_symbols": {"value": float(len({s for f in readable for s in f["undefined"]})), "unit": "symbols"},
    }


def _undefined(case: _Case) -> Iterator[Seen]:
    for name in sorted(set(case.facts["undefined"]) - set(case.policy["undefined_symbols"])):
        yield name, "one of " + ", ".join(case.policy["undefined_symbols"])


def _needed(case: _Case) -> Iterator[Seen]:
    for name in case.facts["needed"]:
        if name not in case.policy["needed_libraries"]:
            yield name, "one of " + ", ".join(case.policy["needed_libraries"])


def _constructors(case: _Case) -> Iterator[Seen]:
    entries = case.facts["load_time_entries"]
    count = sum(entries.values())
    if count > case.policy["constructors"]:
        listed = ", ".join(f"{n} in {tag}" for tag, n in sorted(entries.items()))
        yield listed, f"at most {case.policy['constructors']} entries"


def _ifunc(case: _Case) -> Iterator[Seen]:
    for name in case.facts["ifuncs"]:
        yield f"symbol {name}", "no symbol of type GNU_IFUNC"
    if case.facts["relocations"].get("R_X86_64_IRELATIVE"):
        yield f"{case.facts['relocations']['R_X86_64_IRELATIVE']} IRELATIVE relocations", "none"


def _unique(case: _Case) -> Iterator[Seen]:
    for name in case.facts["unique"]:
        yield name, "no symbol of binding GNU_UNIQUE (inline static data makes them)"


def _text_relocations(case: _Case) -> Iterator[Seen]:
    if case.facts["textrel"]:
        yield "DT_TEXTREL", "position-independent code"


def _relocations(case: _Case) -> Iterator[Seen]:
    for name, count in sorted(case.facts["relocations"].items()):
        if name not in RELOCATIONS and name != "R_X86_64_IRELATIVE":
            yield f"{count} x {name}", "one of " + ", ".join(sorted(RELOCATIONS))


def _stack(case: _Case) -> Iterator[Seen]:
    if case.facts["stack_flags"] is None:
        yield "no PT_GNU_STACK, so the stack becomes executable", "PT_GNU_STACK without X"
    elif "X" in case.facts["stack_flags"]:
        yield f"PT_GNU_STACK {case.facts['stack_flags']}", "PT_GNU_STACK without X"


def _writable_code(case: _Case) -> Iterator[Seen]:
    for segment in case.facts["segments"]:
        if "W" in segment["flags"] and "X" in segment["flags"]:
            yield f"{segment['type']} {segment['flags']} at {segment['vaddr']:#x}", "W or X, never both"


def _writable_state(case: _Case) -> Iterator[Seen]:
    if case.facts["writable_bytes"] > case.policy["writable_bytes"]:
        names = ", ".join(case.facts["writable_objects"][:8]) or "unnamed"
        yield (
            f"{case.facts['writable_bytes']} bytes ({names})",
            f"at most {case.policy['writable_bytes']} bytes that stay writable after relocation",
        )


def _thread_local(case: _Case) -> Iterator[Seen]:
    if case.facts["tls_bytes"]:
        yield f"{case.facts['tls_bytes']} bytes per thread", "none"


def _exports(case: _Case) -> Iterator[Seen]:
    wanted = f"__tvm_ffi_{case.op}"
    if case.facts["exported"] != [wanted]:
        yield ", ".join(case.facts["exported"]) or "nothing", f"exactly {wanted}"


def _sections(case: _Case) -> Iterator[Seen]:
    for name in case.facts["sections"]:
        if name not in SECTIONS and name not in _OWN_RULE_SECTIONS:
            yield name, "one of " + ", ".join(sorted(SECTIONS))


def _dynamic_tags(case: _Case) -> Iterator[Seen]:
    for tag in sorted(set(case.facts["dynamic_tags"]) - DYNAMIC_TAGS - _OWN_RULE_TAGS):
        yield tag, "what GNU ld writes without special options"


def _search_path(case: _Case) -> Iterator[Seen]:
    for path in case.facts["search_paths"]:
        yield path, "no RPATH or RUNPATH"


def _instructions(case: _Case) -> Iterator[Seen]:
    for name, count in sorted((case.facts["instructions"] or {}).items()):
        if name in FORBIDDEN_INSTRUCTIONS:
            yield f"{count} x {name}", "arithmetic, memory and branch instructions"


def _segment_registers(case: _Case) -> Iterator[Seen]:
    if case.facts["segment_accesses"]:
        yield f"{case.facts['segment_accesses']} accesses", "none"


RULES: tuple[Rule, ...] = (
    Rule(
        "audit.undefined_symbol",
        "an imported function can reach files, clocks, other threads or the launcher",
        _undefined,
    ),
    Rule("audit.needed_library", "loading a library runs its constructors", _needed),
    Rule("audit.constructor", "load-time code runs before any check and outside any timed call", _constructors),
    Rule("audit.ifunc", "a resolver is load-time code that can also choose code by machine or environment", _ifunc),
    Rule(
        "audit.unique_symbol",
        "state shared by all objects with the name survives unloading, so arms influence each other",
        _unique,
    ),
    Rule("audit.text_relocation", "code that the loader rewrites is not the code that was audited", _text_relocations),
    Rule("audit.relocation", "copy and thread-local relocations tie the object to state outside it", _relocations),
    Rule("audit.executable_stack", "code written to the stack escapes every static rule", _stack),
    Rule("audit.writable_code", "code that rewrites itself is not the code that was audited", _writable_code),
    Rule(
        "audit.writable_state", "a buffer that survives the call can return an earlier call's result", _writable_state
    ),
    Rule("audit.thread_local", "state per worker thread survives the call as well", _thread_local),
    Rule("audit.exports", "another exported name can interpose symbols of the launcher or of the other arm", _exports),
    Rule("audit.section", "sections that the rules do not know may be acted on by loader or tools", _sections),
    Rule("audit.dynamic_tag", "audit and filter entries make the loader run other code", _dynamic_tags),
    Rule("audit.search_path", "a search path replaces the libraries that were reviewed", _search_path),
    Rule("audit.instruction", "direct system calls and clock reads need no symbol", _instructions),
    Rule(
        "audit.segment_register",
        "the thread's control block leads to stack guards, errno and libc state",
        _segment_registers,
    ),
)
"""Each rule has a fixture that must be refused and an honest twin in tests/verify/test_gate_audit.py."""
