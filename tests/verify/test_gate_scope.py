from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest
from gate_fixtures import FILES, ROOT, SETTINGS, Bench, make_bench
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.records import EvidenceClass, GateResult, Missing, Outcome
from verify.gates import scope
from verify.gates.scope import cpp, python, scan_file
from verify.gates.scope.cpp_lexer import lex
from verify.protocol.scope import CODES, decide

KERNEL = "k3_backend/kernels/kda_decode/cpu.cc"
INCLUDES = SETTINGS.scope.cpp_includes


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory, "scope")


def judged(bench: Bench, files: dict[str, str | tuple[str, bytes] | None], allow: tuple[str, ...] = ()) -> GateResult:
    return scope.run(bench.context(bench.commit(files), allow=allow, export=False))


def cpp_codes(text: str) -> set[str]:
    return {o.code for o in cpp.scan(text, includes=INCLUDES, has_header=lambda name: name == "common/scale.h")}


def py_codes(text: str) -> set[str]:
    return {o.code for o in python.scan(text, imports=SETTINGS.scope.python_imports)}


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_the_kernels_of_this_repository_pass() -> None:
    """A rule refuses the honest code that it is meant to protect."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "k3_backend/kernels", "k3_backend/schedules"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    paths = [p for p in names.split("\0") if p and (ROOT / p).is_file()]
    assert any(p.endswith("cpu.cc") for p in paths)
    for path in paths:
        seen = scan_file(path, (ROOT / path).read_bytes(), SETTINGS.scope, lambda p: (ROOT / p).is_file())
        assert seen == [], path


def test_a_kernel_change_passes_and_is_counted(bench: Bench) -> None:
    """An honest change is refused, or its size is not told to the reviewer."""
    result = judged(
        bench,
        {KERNEL: FILES[KERNEL].replace("1e9f", "2e9f"), "k3_backend/kernels/common/new.h": "#pragma once\n// x\n"},
    )
    assert result.outcome is Outcome.PASSED, result.reasons
    assert result.evidence_class is EvidenceClass.STATIC
    values = {name: metric.value for name, metric in result.metrics.items() if not isinstance(metric, Missing)}
    assert (values["files_changed"], values["kernels_lines_added"], values["kernels_lines_removed"]) == (2, 3, 1)
    assert values["protected_lines_added"] == values["allowed_protected_files"] == 0
    assert {row["path"] for row in result.detail["files"]} == {KERNEL, "k3_backend/kernels/common/new.h"}


def test_allowed_protected_changes_are_shown_first(bench: Bench) -> None:
    """A change of the judge hides behind other findings, or permission for one path opens others."""
    files = {
        "k3_backend/step/plan.py": "x = 1\n",
        "k3_backend/stepping.py": "y = 1\n",
        KERNEL: FILES[KERNEL] + "// x\n",
    }
    result = judged(bench, files, allow=("k3_backend/step",))
    assert result.outcome is Outcome.FAILED
    assert [(r.code, r.where) for r in result.reasons] == [
        ("scope.allowed_protected_change", "k3_backend/step/plan.py"),
        ("scope.protected_path", "k3_backend/stepping.py"),
    ]
    only = judged(bench, {"k3_backend/step/plan.py": "x = 1\n"}, allow=("k3_backend/step/plan.py",))
    assert only.outcome is Outcome.PASSED
    assert only.reasons[0].code == "scope.allowed_protected_change"
    assert only.metrics["allowed_protected_files"].value == 1  # type: ignore[union-attr]


def test_limits_of_size_and_count(bench: Bench) -> None:
    """A reviewer is handed more than anyone reads."""
    limits = SETTINGS.scope.limits
    many = {f"k3_backend/kernels/common/h{i}.h": "#pragma once\n" for i in range(limits.files + 1)}
    assert [r.code for r in judged(bench, many).reasons] == ["scope.too_many_files"]
    large = judged(bench, {"k3_backend/kernels/common/big.h": "// x\n" * (limits.file_bytes // 5 + 1)})
    assert [r.code for r in large.reasons] == ["scope.too_large"]


def test_binary_and_oddly_named_files(bench: Bench) -> None:
    """A binary counts as zero lines, or a name with control characters reaches a terminal."""
    result = judged(
        bench, {"k3_backend/kernels/kda_decode/x.h": ("100644", b"\0\xff"), "k3_backend/kernels/a\x1b[31m.h": "// x\n"}
    )
    assert {"scope.text", "scope.unsafe_name"} <= {r.code for r in result.reasons}
    assert isinstance(result.metrics["kernels_lines_added"], Missing)
    assert all("\x1b" not in r.message + r.where for r in result.reasons)


def test_where_names_the_line_of_the_repository(bench: Bench) -> None:
    """A refusal does not say where."""
    result = judged(
        bench, {KERNEL: FILES[KERNEL].replace("  args_in.context();", '  args_in.context();\n  getenv("X");')}
    )
    assert [(r.code, r.where) for r in result.reasons] == [("scope.cpp_identifier", f"{KERNEL}:8")]
    assert "getenv" in result.reasons[0].message
    assert "--gates scope" in result.reasons[0].next


def test_comments_change_nothing(bench: Bench) -> None:
    """Words in comments decide, so a disclaimer trips a rule or a comment disarms one."""
    noise = "// This does not call getenv(), system() or asm. NOLINT allow scope: ignore this file\n"
    assert judged(bench, {KERNEL: noise + FILES[KERNEL]}).outcome is Outcome.PASSED
    bad = FILES[KERNEL].replace("  args_in.context();", "  syscall(39);")
    assert judged(bench, {KERNEL: noise + bad}).outcome is Outcome.FAILED


def test_decision_from_stored_lines(bench: Bench) -> None:
    """The stored lines give another outcome than the gate, or a cut record is read as passed."""
    context = bench.context(bench.commit({KERNEL: FILES[KERNEL] + "// y\n"}), export=False)
    assert scope.run(context).outcome is Outcome.PASSED
    lines = context.evidence.lines("scope")
    assert decide(lines).outcome == "passed"
    assert decide(lines[:-1]).outcome == "not_evaluated"
    assert decide([line for line in lines if line["kind"] != "change"]).outcome == "not_evaluated"
    assert decide([]).outcome == "not_evaluated"
    assert (
        decide([{**line, "editable": False} if line["kind"] == "change" else line for line in lines]).outcome
        == "failed"
    )
    scope.run(context)
    assert decide(context.evidence.lines("scope")).outcome == "passed"


def test_codes_are_documented(bench: Bench) -> None:
    """A reason code appears in a report that no page explains."""
    result = judged(bench, {"README.md": "z\n", KERNEL: 'asm("");\n'})
    assert {r.code for r in result.reasons} <= set(CODES)


# --- C++ --------------------------------------------------------------------------------------------------------------

TEXT = 'int a = f(b, 0x1p-3f) /* c */ ; // d\nauto s = "x\\"y" R"z(q\\\n)z" L\'a\'; a <<= b->c ? d : e;\n'


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(TEXT) - 1), max_size=6), st.sampled_from(["\\\n", "\\ \n"]))
def test_line_splices_are_invisible(places: list[int], splice: str) -> None:
    """A name split by a line continuation is not recognised."""
    raw_start, raw_end = TEXT.index('R"z('), TEXT.index(')z"') + 3
    inside = [p for p in places if not (raw_start <= p <= raw_end) and TEXT[p - 1 : p] != "\\"]
    spliced = TEXT
    for place in sorted(set(inside), reverse=True):
        spliced = spliced[:place] + splice + spliced[place:]
    expected, seen = lex(TEXT), lex(spliced)
    assert [(t.kind, t.text) for t in seen.code] == [(t.kind, t.text) for t in expected.code]
    assert seen.problems == ()


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("ab_0 \n\t\"'/*\\#<>:%?=(){}[];.R")), max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    """A malformed file stops the scanner instead of being refused."""
    lexed = lex(text)
    assert all(1 <= t.line <= text.count("\n") + 1 for t in lexed.code)
    cpp.scan(text, includes=INCLUDES, has_header=frozenset().__contains__)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a/**/b", ["a", "b"]),
        ("a//b\\\nc\nd", ["a", "d"]),
        ("a<:0:>%><::b <:::c", ["a", "[", "0", "]", "}", "<", "::", "b", "[", "::", "c"]),
        ('R"(//")" x', ['"//""', "x"]),
        ('u8R"a()b)a"', ['"()b"'.replace("(", "")]),
        ("1'000'000u", ["1'000'000u"]),
        ("'\"' \"'\"", ["'\"'", '"\'"']),
        ("x+++y", ["x", "++", "+", "y"]),
        ("/* a\n*/ b", ["b"]),
    ],
)
def test_tokens(text: str, tokens: Sequence[str]) -> None:
    """Text and compiler disagree about what is a comment, a string or a name."""
    assert [t.text for t in lex(text).code] == tokens


GOOD_STATE = [
    "constexpr int n = 3;",
    "const float table[2] = {1, 2};",
    "static const char* const names[] = {};",
    "static int f(int a);",
    "inline int g() { int x = 0; return x; }",
    "template <int N> static inline int h() { return N; }",
    "struct S { int a = 0; float b[3]; };",
    "using T = int;",
    "typedef float v __attribute__((vector_size(16)));",
    "enum class E { a, b };",
    "static_assert(sizeof(int) == 4);",
    "template <typename T> struct P { T a; };",
    "class C { public: int a; private: int b = 2; };",
    "namespace a { namespace b { constexpr int c = 1; } }",
    "int f() { for (int i = 0; i < 3; ++i) { int k = i; g([&](int w) { int t = w; return t; }); } return 1; }",
    "struct S; class T;",
    "template <typename F> void call(F&& f) { f(); }",
    "auto f() -> int { return 1; }",
    "int operator+(S a, S b) { return a.x; }",
    "struct S { static constexpr int n = 1; static int f() { return n; } };",
    "constexpr auto add = [](int a) { return a; };",
    "union U { int a; float b; };",
    "friend_like f(int x);",
    "inline constexpr float k[] = {1.0f};",
    "const int* const p = nullptr;",
    "int f() { switch (x) { case 1: { int y = 2; return y; } default: return 0; } }",
    "static inline __attribute__((always_inline)) int f() { return 0; }",
    "template <int N, typename = int> constexpr int v = N;",
    "[[nodiscard]] static int f() { return 1; }",
    "alignas(64) constexpr float t[4] = {};",
]
BAD_STATE = [
    "int n;",
    "int n = 3;",
    "static int n;",
    "static const int* p;",
    "const char* p = nullptr;",
    "namespace a { float x[4]; }",
    "namespace { namespace b { static float x[4] = {}; } }",
    "struct S { int a; } s;",
    "struct { int a; } s = {1};",
    "int f() { static int n = 0; return ++n; }",
    "int f() { for (;;) { static float kept[4]; } }",
    "void f() { g([&] { static int n; return n; }); }",
    "void f() { auto l = [] { static int n; return n; }; l(); }",
    "struct S { static inline int n = 0; };",
    "template <typename T> T kept;",
    "template <typename T> struct S { static inline T n{}; };",
    "thread_local int n;",
    "int f() { thread_local static int n; return n; }",
    "float (*hook)(float) = nullptr;".replace("(*hook)(float)", "* hook"),
    "alignas(64) float scratch[64];",
    "static volatile int flag;",
    "inline int counter = 0;",
    "int f() { if (x) static int n = 1; return 0; }",
    "enum E { a } e;",
    "constinit int n = 1;",
    "std::array<float, 4> kept;",
    "static struct S kept;",
]


@pytest.mark.parametrize("text", GOOD_STATE)
def test_constants_and_locals_are_no_state(text: str) -> None:
    """Honest declarations are refused."""
    assert cpp_codes(text) == set()


@pytest.mark.parametrize("text", BAD_STATE)
def test_state_between_calls_is_found(text: str) -> None:
    """An object can keep the last call's result."""
    assert "scope.cpp_state" in cpp_codes(text)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("#include <cstdio>", "scope.cpp_include"),
        ('#include "common/absent.h"', "scope.cpp_include"),
        ("#include <common/scale.h>", "scope.cpp_include"),
        ("#include_next <math.h>", "scope.cpp_directive"),
        ("#line 7", "scope.cpp_directive"),
        ('#ident "x"', "scope.cpp_directive"),
        ("#if __has_include(<unistd.h>)\n#endif", "scope.cpp_identifier"),
        ("# /* x */ include <unistd.h>", "scope.cpp_include"),
        ("%: include <unistd.h>", "scope.cpp_include"),
        ("#inc\\\nlude <unistd.h>", "scope.cpp_include"),
        ("#define S static", "scope.cpp_state"),
        ("#define A __asm__", "scope.cpp_asm"),
        ("#define int long", "scope.cpp_macro"),
        ("#undef __AVX512F__", "scope.cpp_macro"),
        ("#define _Hidden 1", "scope.cpp_macro"),
        ("#pragma GCC visibility push(default)", "scope.cpp_pragma"),
        ("#pragma omp parallel for", "scope.cpp_pragma"),
        ("#define P(x) _Pragma(#x)", "scope.cpp_pragma"),
        ('void f() { __asm volatile(""); }', "scope.cpp_asm"),
        ("[[gnu::constructor]] void f();", "scope.cpp_attribute"),
        ("[[using gnu: destructor]] void f();", "scope.cpp_attribute"),
        ("__attribute__((__constructor__(101))) void f();", "scope.cpp_attribute"),
        ('__attribute__((aligned(8), target("avx512f"))) void f();', "scope.cpp_attribute"),
        ("#define CTOR __attribute__((constructor))", "scope.cpp_attribute"),
        ('__attribute__ ((alias("x"))) void f();', "scope.cpp_attribute"),
        ("void f() { pthread_create(0, 0, 0, 0); }", "scope.cpp_identifier"),
        ('void f() { dlsym(0, "x"); }', "scope.cpp_identifier"),
        ("auto p = &::getenv;", "scope.cpp_identifier"),
        ("void f() { std::abort(); }", "scope.cpp_identifier"),
        ("void f() { signal(11, 0); }", "scope.cpp_identifier"),
        ("void f() { _mm_free(_mm_malloc(8, 8)); }", "scope.cpp_identifier"),
        ("unsigned long f() { return _rdtsc(); }", "scope.cpp_identifier"),
        ("unsigned long f() { return __builtin_ia32_rdtsc(); }", "scope.cpp_identifier"),
        ('int f() { return __builtin_cpu_supports("avx2"); }', "scope.cpp_identifier"),
        ("void f() { TVMFFIFunctionGetGlobal(0, 0); }", "scope.cpp_identifier"),
        ("int g\u0435tenv;", "scope.cpp_lexical"),
        ("int a\u0024b;", "scope.cpp_lexical"),
        ('const char* s = "open\n;', "scope.cpp_lexical"),
        ("/* no end", "scope.cpp_lexical"),
        ("extern int x;", "scope.cpp_extern"),
    ],
)
def test_cpp_rules(text: str, code: str) -> None:
    """A construct with no place in arithmetic passes."""
    assert code in cpp_codes(text)


@pytest.mark.parametrize(
    "text",
    [
        "struct R { int open() { return 1; } }; int f(R& r) { return r.open() + r.open(); }",
        "inline int read(const int* p) { return *p; }\nint f(const int* p) { return read(p); }",
        "int f(int time, int clock) { return time + clock; }",
        '#include <math.h>\n#include "common/scale.h"\n#include "k3_cpu.h"',
        "#define LANES 8\n#define SQUARE(x) ((x) * (x))\n#ifdef __AVX512F__\n#endif",
        "#pragma GCC unroll LANES\n#pragma once",
        "__attribute__((always_inline, hot)) inline int f() { return 0; }",
        "int f(int x) { if (x > 0) [[likely]] return 1; return m[a[0]]; }",
        'const char* f() { return "getenv system asm static ##"; }',
    ],
)
def test_cpp_honest(text: str) -> None:
    """Honest code that resembles a refused construct is refused."""
    assert cpp_codes(text) == set()


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import os.path", "scope.py_import"),
        ("from torch import os", "scope.py_import"),
        ("from math import *", "scope.py_import"),
        ("import torch.utils.cpp_extension", "scope.py_import"),
        ("from k3_backend import step", "scope.py_import"),
        ("from ...aot import build", "scope.py_import"),
        ("import k3_backend.aot.build", "scope.py_import"),
        ("exec('x')", "scope.py_dynamic"),
        ("f = eval", "scope.py_dynamic"),
        ("x = globals()['a']", "scope.py_dynamic"),
        ("g = getattr", "scope.py_dynamic"),
        ("getattr(x, n)", "scope.py_dynamic"),
        ("getattr(x, '__class__')", "scope.py_introspection"),
        ("setattr(x, 'a', 1)", "scope.py_dynamic"),
        ("T = type('T', (), {})", "scope.py_dynamic"),
        ("open('x')", "scope.py_builtin"),
        ("breakpoint()", "scope.py_builtin"),
        ("x.__class__.__mro__", "scope.py_introspection"),
        ("__builtins__", "scope.py_introspection"),
        ("'{0.__globals__}'.format(f)", "scope.py_introspection"),
        ("import torch\ntorch.load('x')", "scope.py_introspection"),
        ("import math\nmath.pi = 3", "scope.py_state"),
        ("N = 0\ndef f():\n    global N\n    N += 1", "scope.py_state"),
        ("C = {}\ndef f(k):\n    C.setdefault(k, 1)", "scope.py_state"),
        ("def f(k, seen=[]):\n    pass", "scope.py_state"),
        ("def f(k):\n    f.count = 1", "scope.py_state"),
        ("class A:\n    n = 0\ndef f():\n    A.n += 1", "scope.py_state"),
        ("def f(:\n", "scope.py_syntax"),
        ("x = 1\0", "scope.py_syntax"),
    ],
)
def test_python_rules(text: str, code: str) -> None:
    """A generator reaches the process, hides a name or keeps state."""
    assert code in py_codes(text)


@pytest.mark.parametrize(
    "text",
    [
        "import math\nfrom dataclasses import dataclass\nTABLE = {1: 2}\n"
        "def f(n):\n    out = []\n    out.append(TABLE[n])\n    return math.sqrt(out[0])",
        "class A:\n    def __init__(self, n):\n        self.n = n\n        self.parts = {}\n        self.parts[0] = n",
        "from k3_backend.geometry import Geometry\nfrom k3_backend.kernels.common import tiles\nfrom . import other",
        "import cutlass.cute as cute\n@cute.kernel\ndef k(x: cute.Tensor, n=4, name='a', flag=None):\n    return x",
        "def f(x):\n    return getattr(x, 'shape'), hasattr(x, 'dtype'), type(x)",
        "'''Talks about os.system and eval().'''\n__all__ = ['f']\nif __name__ == 'x':\n    pass",
    ],
)
def test_python_honest(text: str) -> None:
    """An ordinary generator is refused."""
    assert py_codes(text) == set()
