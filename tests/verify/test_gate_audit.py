from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gate_fixtures import FILES, SETTINGS, Bench, make_bench

from harness import sandbox
from harness.records import EvidenceClass, Outcome
from verify.gates import audit, build
from verify.gates.audit import elf
from verify.protocol.audit import CODES, RULES, decide, judge

POLICY = SETTINGS.audit["cpu"].model_dump(mode="json")
FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-nostartfiles",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-Wl,--build-id=none",
    "-Wl,--as-needed",
    "-Wl,-z,defs",
    "-Wl,-z,now",
    "-Wl,-z,noexecstack",
)
ENTRY = 'extern "C" __attribute__((visibility("default"))) int __tvm_ffi_op(void*, const void*, int, void*)'
NAMED = ENTRY.replace("(void*, const void*, int, void*)", "(void*, const void* at, int n, void* out)")
HONEST = ENTRY + " { return 0; }\n"
_REASON = sandbox.unavailable()
needs_sandbox = pytest.mark.skipif(_REASON is not None, reason=_REASON.message if _REASON else "")

BAD: dict[str, tuple[str, tuple[str, ...]]] = {
    "audit.undefined_symbol": (
        'extern "C" int getpid();\n' + ENTRY + " { return getpid(); }\n",
        (),
    ),
    "audit.needed_library": (
        HONEST,
        ("-Wl,--no-as-needed", "-lpthread", "-ldl", "-lresolv"),
    ),
    "audit.constructor": (
        "static volatile int x = 0;\n__attribute__((constructor)) static void early() { x = 1; }\n" + HONEST,
        (),
    ),
    "audit.ifunc": (
        'static int one() { return 1; }\nextern "C" { static int (*resolve())() { return one; } }\n'
        'extern "C" int pick() __attribute__((ifunc("resolve")));\n' + ENTRY + " { return pick(); }\n",
        (),
    ),
    "audit.unique_symbol": (
        'template <typename T> struct __attribute__((visibility("default"))) Memo { static inline int hits = 0; };\n'
        + ENTRY
        + " { return ++Memo<int>::hits; }\n",
        (),
    ),
    "audit.text_relocation": (
        'asm(".text\\n.globl hidden_table\\n.hidden hidden_table\\nhidden_table: .quad __tvm_ffi_op\\n");\n' + HONEST,
        ("-Wl,-z,notext",),
    ),
    "audit.relocation": ("static thread_local int x;\n" + ENTRY + " { return ++x; }\n", ()),
    "audit.executable_stack": (HONEST, ("-Wl,-z,execstack",)),
    "audit.writable_code": ('asm(".section .patch,\\"awx\\"\\n.byte 0\\n.text\\n");\n' + HONEST, ()),
    "audit.writable_state": ("static int calls;\n" + ENTRY + " { return ++calls; }\n", ()),
    "audit.thread_local": ("static __thread int calls;\n" + ENTRY + " { return ++calls; }\n", ()),
    "audit.exports": ('extern "C" __attribute__((visibility("default"))) int helper() { return 1; }\n' + HONEST, ()),
    "audit.section": ('__attribute__((section(".notes"), used)) static const int x = 1;\n' + HONEST, ()),
    "audit.dynamic_tag": (HONEST, ("-Wl,--audit=libevil.so",)),
    "audit.search_path": (HONEST, ("-Wl,-rpath,/tmp/evil",)),
    "audit.instruction": (
        ENTRY + ' { long r; asm volatile("syscall" : "=a"(r) : "a"(39L) : "rcx", "r11"); return int(r); }\n',
        (),
    ),
    "audit.segment_register": (ENTRY + ' { long r; asm volatile("mov %%fs:0, %0" : "=r"(r)); return int(r); }\n', ()),
}
"""One object per rule that breaks it: source and extra flags."""

TWINS = {
    "constant tables, relocated pointers, libm": (
        "#include <math.h>\nstatic const float table[4] = {1, 2, 3, 4};\n"
        'static const char* const names[] = {"a", "b"};\n'
        + NAMED
        + " { *static_cast<float*>(out) = expf(table[n & 3]) + names[n & 1][0]; return at != nullptr; }\n",
        ("-lm",),
    ),
    "switch tables, function pointers, memcpy of a large block": (
        "#include <string.h>\nstatic int a(int n) { return n + 1; }\nstatic int b(int n) { return n * 3; }\n"
        "static int (*const table[])(int) = {a, b};\n"
        + NAMED
        + " { memcpy(out, at, size_t(n) * 64); switch (n) { case 1: return 7; case 2: return 9; case 3: return -4;"
        " case 4: return 8; case 5: return 1; } return table[n & 1](n); }\n",
        (),
    ),
    "aligned locals and vector instructions": (
        "#include <immintrin.h>\n"
        + NAMED
        + " { alignas(64) float t[16] = {}; __m256 v = _mm256_loadu_ps(static_cast<const float*>(at));"
        " _mm256_storeu_ps(t + (n & 7), v);"
        " _mm256_storeu_ps(static_cast<float*>(out), _mm256_loadu_ps(t)); return 0; }\n",
        ("-march=x86-64-v3",),
    ),
    "the smallest op": (HONEST, ()),
}
"""Objects that resemble the bad ones and break no rule."""


def compiled(folder: Path, source: str, flags: tuple[str, ...] = ()) -> Path:
    (folder / "op.cc").write_text(source)
    out = folder / "op.so"
    done = subprocess.run(
        ["g++", *FLAGS, "-o", str(out), str(folder / "op.cc"), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


def codes(path: Path, op: str = "op") -> set[str]:
    return {f.code for f in judge(audit.inspect(path), op, POLICY, "op/test", "again")}


def test_every_rule_has_a_fixture_that_breaks_it() -> None:
    """A rule exists that nobody has seen fail."""
    assert {rule.code for rule in RULES} == set(BAD)
    assert all(rule.motivation and rule.code in CODES for rule in RULES)


@needs_sandbox
@pytest.mark.parametrize("code", BAD)
def test_bad_object_is_refused(tmp_path: Path, code: str) -> None:
    """An object that breaks the rule passes."""
    source, flags = BAD[code]
    assert code in codes(compiled(tmp_path, source, flags))


@needs_sandbox
@pytest.mark.parametrize("name", TWINS)
def test_honest_twin_passes(tmp_path: Path, name: str) -> None:
    """A rule refuses ordinary compiled arithmetic."""
    source, flags = TWINS[name]
    assert codes(compiled(tmp_path, source, flags)) == set()


@needs_sandbox
def test_messages_name_the_variable_and_the_symbol(tmp_path: Path) -> None:
    """A refusal leaves its reader without the name that has to go."""
    path = compiled(
        tmp_path,
        'extern "C" int getpid();\nstatic int kept_from_last_call;\n'
        + ENTRY
        + " { return kept_from_last_call += getpid(); }\n",
    )
    findings = {f.code: f for f in judge(audit.inspect(path), "op", POLICY, "op/x86-64-v3", "again")}
    assert "kept_from_last_call" in findings["audit.writable_state"].message
    assert "getpid" in findings["audit.undefined_symbol"].message
    assert findings["audit.undefined_symbol"].where == "op/x86-64-v3"
    assert "memcpy" in findings["audit.undefined_symbol"].expected


@needs_sandbox
def test_entry_point_belongs_to_the_op(tmp_path: Path) -> None:
    """An object of one op is accepted in the place of another."""
    assert codes(compiled(tmp_path, HONEST), op="other") == {"audit.exports"}


@pytest.mark.parametrize("damage", ["text", "cut", "header", "arch", "dynamic"])
def test_files_that_are_no_object_are_findings(tmp_path: Path, damage: str) -> None:
    """A file that is no object crashes the gate, or passes because nothing was found in it."""
    data = bytearray(compiled(tmp_path, HONEST).read_bytes())
    if damage == "text":
        data = bytearray(b"not an object\n")
    elif damage == "cut":
        del data[100:]
    elif damage == "header":
        data[0x20:0x28] = b"\xff" * 8
    elif damage == "arch":
        data[0x12:0x14] = (183).to_bytes(2, "little")
    else:
        for at in range(64, 64 + 56 * 12, 56):
            if int.from_bytes(data[at : at + 4], "little") == 2:
                data[at : at + 4] = (0x6FFFFFF0).to_bytes(4, "little")
    path = tmp_path / "damaged.so"
    path.write_bytes(data)
    assert codes(path) == {"audit.malformed"}


def test_without_disassembler_the_outcome_is_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that were not evaluated count as met."""
    path = compiled(tmp_path, HONEST)
    monkeypatch.setattr(elf.shutil, "which", lambda *_args, **_options: None)
    facts = audit.inspect(path)
    header = {
        "kind": "header",
        "policy": POLICY,
        "objects": [{"op": "op", "arch": "a", "digest": "d"}],
        "next": "again",
    }
    decision = decide([header, {"kind": "object", "op": "op", "arch": "a", "digest": "d", "facts": facts}])
    assert decision.outcome == "inconclusive"
    assert decision.findings[0].code == "audit.instructions_unread"
    assert "objdump not found" in decision.findings[0].message


def test_decision_needs_every_announced_object() -> None:
    """A record with objects missing, or none at all, is read as passed."""
    header: dict[str, Any] = {
        "kind": "header",
        "policy": POLICY,
        "objects": [{"op": "op", "arch": "a", "digest": "d"}],
        "next": "n",
    }
    assert decide([]).outcome == "not_evaluated"
    assert decide([header]).findings[0].code == "audit.incomplete_record"
    assert decide([{**header, "objects": []}]).outcome == "not_evaluated"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory, "audit")


@needs_sandbox
def test_gate_reads_every_architecture_and_redecides_from_its_lines(bench: Bench) -> None:
    """An architecture is left out, or the stored lines give another outcome than the gate."""
    header = FILES["k3_backend/kernels/common/scale.h"].replace("x + x", "3 * x")
    context = bench.context(bench.commit({"k3_backend/kernels/common/scale.h": header}))
    assert build.run(context).outcome is Outcome.PASSED
    result = audit.run(context)
    assert result.outcome is Outcome.PASSED, result.reasons
    assert result.evidence_class is EvidenceClass.STATIC
    assert {row["arch"] for row in result.detail["objects"]} == set(SETTINGS.target("cpu").archs)
    lines = context.evidence.lines("audit")
    assert decide(lines).outcome == "passed"
    spoiled = [
        {**line, "facts": {**line["facts"], "writable_bytes": 8}} if line["kind"] == "object" else line
        for line in lines
    ]
    assert decide(spoiled).outcome == "failed"


def test_gate_without_objects_or_rules_is_not_evaluated(bench: Bench) -> None:
    """Nothing to read counts as nothing found."""
    head = bench.commit({"README.md": "x\n"})
    alone = audit.run(bench.context(head))
    assert (alone.outcome, alone.reasons[0].code) == (Outcome.NOT_EVALUATED, "audit.no_objects")
    assert "--gates build" in alone.reasons[0].next
    other = audit.run(bench.context(head, target="gb300"))
    assert (other.outcome, other.reasons[0].code) == (Outcome.NOT_EVALUATED, "audit.no_objects")
    assert other.protocol_id == "audit-cuda/1"


@needs_sandbox
def test_an_object_that_changed_after_its_build_is_not_audited(bench: Bench) -> None:
    """The audited bytes are not the built ones."""
    context = bench.context(bench.commit({"README.md": "y\n"}))
    assert build.run(context).outcome is Outcome.PASSED
    artifact = context.built[0]
    copy = context.run_dir / "altered"
    copy.mkdir()
    for file in artifact.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes() + (b"\0" if file.suffix == ".so" else b""))
    context.built = (replace(artifact, path=copy),)
    result = audit.run(context)
    assert result.outcome is Outcome.NOT_EVALUATED
    assert result.reasons[0].code == "audit.environment"
