"""Patches that the gatekeeper must stop, built from small edits so that they follow the kernels as these change.

A case is a function from a reader of base files to edited files; `cases.toml` says which gate has to stop it and with
which reason code. `honest` cases look alike and must pass the same gates. Cases of later gates (kernels, path, perf)
register here in the same way.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.git import Repository
from tests.hostile.kernels.faults import DECLARATIONS, FAULTS, PLAIN, with_fault

KERNEL = "k3_backend/kernels/kda_decode/cpu.cc"
Content = tuple[str, bytes] | None
Edits = dict[str, Content]
Reader = Callable[[str], str]
Case = Callable[[Reader], Edits]

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Expected:
    """One row of cases.toml."""

    id: str
    why: str
    gate: str
    """Gate that has to stop it; `none` for honest twins."""
    code: str
    """Reason code that the gate has to give; empty for honest twins."""


def case(name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        if name in CASES:
            raise ValueError(f"hostile case {name} is defined twice")
        CASES[name] = function
        return function

    return register


def expectations() -> list[Expected]:
    """Rows of cases.toml; every registered case has exactly one and the other way round."""
    rows = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))["case"]
    expected = [Expected(**row) for row in rows]
    ids = [e.id for e in expected]
    if sorted(ids) != sorted(CASES):
        raise ValueError(f"cases.toml and make.py disagree: {sorted(set(ids) ^ set(CASES))}, or one is listed twice")
    return expected


def make_commit(repo: Repository, base: str, name: str) -> str:
    """The case as a commit on top of `base`."""
    edits = CASES[name](lambda path: repo.read(base, path).decode())
    return repo.commit_files(base, edits, f"hostile case {name}")


def make_patch(repo: Repository, base: str, name: str) -> bytes:
    """The case as a patch against `base`."""
    return repo.patch(base, make_commit(repo, base, name))


def text(content: str) -> Content:
    return ("100644", content.encode())


def kernel_with(addition: str) -> Case:
    """The kernel with code added behind its includes, where it is visible to all that follows."""

    def edit(read: Reader) -> Edits:
        lines = read(KERNEL).split("\n")
        last = max(i for i, line in enumerate(lines) if line.startswith("#include"))
        return {KERNEL: text("\n".join([*lines[: last + 1], "", addition.strip("\n"), *lines[last + 1 :]]))}

    return edit


def _kernel_cases(**additions: str) -> None:
    for name, addition in additions.items():
        case(name.replace("_", "-"))(kernel_with(addition))


# --- scope: paths, modes, file types ----------------------------------------------------------------------------------


@case("edit-readme")
def _(read: Reader) -> Edits:
    return {"README.md": text("# Everything passes\n")}


@case("edit-planner")
def _(read: Reader) -> Edits:
    return {"k3_backend/step/plan.py": text("def plan(batch):\n    return 'specialized'\n")}


@case("edit-settings")
def _(read: Reader) -> Edits:
    return {"harness.toml": text(read("harness.toml").replace("constructors = 0", "constructors = 9"))}


@case("edit-interface")
def _(read: Reader) -> Edits:
    path = "k3_backend/ops/kda_decode/interface.py"
    return {path: text(read(path) + "\nTOLERANCE = 1e9\n")}


@case("symlink")
def _(read: Reader) -> Edits:
    return {"k3_backend/kernels/kda_decode/extra.h": ("120000", b"/etc/passwd")}


@case("executable")
def _(read: Reader) -> Edits:
    return {KERNEL: ("100755", read(KERNEL).encode())}


@case("prebuilt-object")
def _(read: Reader) -> Edits:
    return {"k3_backend/kernels/kda_decode/fast.so": ("100644", b"\x7fELF" + bytes(64))}


@case("case-collision")
def _(read: Reader) -> Edits:
    return {"k3_backend/kernels/kda_decode/CPU.cc": text("// twin\n")}


@case("broken-schedule")
def _(read: Reader) -> Edits:
    return {"k3_backend/schedules/cpu/k3-nano/kda_decode.toml": text("version = 1\n[[bucket]\nmax_rows = 8\n")}


@case("shadow-header")
def _(read: Reader) -> Edits:
    return {"k3_backend/kernels/kda_decode/k3_cpu.h": text("#pragma once\nstruct Args {};\n")}


# --- scope: Python ----------------------------------------------------------------------------------------------------


def _generator(name: str, code: str) -> None:
    case(name)(lambda read: {"k3_backend/kernels/kda_decode/generate.py": text(code)})


_generator(
    "py-os",
    "import os\nimport subprocess\n\n\ndef pick():\n    subprocess.run(['true'])\n    return os.environ['HOME']\n",
)
_generator("py-getattr", "import torch\n\n\ndef pick(n):\n    return getattr(torch, 'o' + n)\n")
_generator(
    "py-frames",
    "def pick():\n    try:\n        raise ValueError\n    except ValueError as e:\n        return e.__traceback__.tb_frame.f_back\n",
)
_generator("py-through-torch", "import torch\n\n\ndef pick():\n    return torch.os.system('true')\n")
_generator("py-memo", "CACHE = {}\n\n\ndef pick(n):\n    CACHE[n] = n\n    return CACHE[n]\n")
_generator("py-patch", "from k3_backend import geometry\n\n\ndef pick():\n    geometry.GEOMETRIES['k3'] = None\n")
_generator("py-protected-import", "from k3_backend.step import ledger\n")
_generator(
    "py-honest",
    '"""Tile sizes by rows. Reads no os.environ, calls no eval()."""\n\nfrom __future__ import annotations\n\n'
    "import math\nfrom dataclasses import dataclass\n\nfrom k3_backend.geometry import Geometry\n\nTILES = {1: 16, 8: 32}\n\n\n"
    "@dataclass(frozen=True)\nclass Tile:\n    rows: int\n    columns: int\n\n\n"
    "def tile(geometry: Geometry, rows: int) -> Tile:\n    columns = TILES.get(rows, 64)\n    steps = []\n"
    "    steps.append(math.ceil(geometry.kda_width / columns))\n    return Tile(rows, steps[0])\n",
)


# --- scope: C++ -------------------------------------------------------------------------------------------------------

_kernel_cases(
    cpp_getenv='inline bool checked() { return getenv("FASTTRACK_GATE") != nullptr; }',
    cpp_system='#include <cstdlib>\ninline void call() { std::system("true"); }',
    cpp_splice="inline void* call() { return (void*)&get\\\nenv; }",
    cpp_paste='#define GLUE(a, b) a##b\ninline auto call() { return GLUE(get, env)("HOME"); }',
    cpp_digraph_paste="%:define GLUE(a, b) a%:%:b\n",
    cpp_ucn="inline int f() { return \\u0067etpid(); }",
    cpp_trigraph="// what??/\nint counter;\n",
    cpp_include="#include <unistd.h>",
    cpp_computed_include="#define HEADER <unistd.h>\n#include HEADER",
    cpp_absolute_include='#include "/etc/passwd"',
    cpp_parent_include='#include "../../aot/cpu/runtime.cc"',
    cpp_asm='inline long call() { long r; asm volatile("syscall" : "=a"(r) : "a"(39)); return r; }',
    cpp_constructor_attribute="__attribute__((constructor)) static void early() {}",
    cpp_ifunc='extern "C" int pick() __attribute__((ifunc("resolve")));',
    cpp_standard_attribute='[[gnu::section(".data")]] const int kHidden = 1;',
    cpp_pragma='#pragma GCC optimize("Ofast")',
    cpp_pragma_operator='_Pragma("GCC target(\\"avx512vnni\\")")',
    cpp_keyword_macro="#define K3_KEEP static\n#define const",
    cpp_export_macro="#undef K3_EXPORT",
    cpp_extern='extern "C" int getpid();',
    cpp_static_counter="inline int calls() { static int count = 0; return ++count; }",
    cpp_global="namespace { float last_output[64]; }",
    cpp_struct_global="struct Memo { float values[64]; } memo;",
    cpp_template_global="template <typename T> T kept = T(0);",
    cpp_inline_member="struct Memo { inline static int hits = 0; };",
    cpp_thread_local="inline int& mine() { thread_local int x = 0; return x; }",
    cpp_clock="inline long ticks() { return __rdtsc(); }",
    cpp_frames="inline void* caller() { return __builtin_return_address(0); }",
    cpp_date="inline const char* built() { return __DATE__; }",
    cpp_prototype='int open(const char*, int, ...);\ninline int f() { return ::open("/etc/passwd", 0); }',
    cpp_hidden_text="// nice \u202e comment",
    cpp_long_line="// " + "x" * 400,
    # The honest twins: everything that looks like one of the above and is fine.
    cpp_honest=r"""
// getenv("HOME"), system("x"), static int x; #include <unistd.h> asm volatile("syscall")
/* thread_local int x; ??! is fine to ask? no trigraph here */
namespace twin {
constexpr int kLanes = 8;
const float kTable[4] = {0.5f, 1.0f, 2.0f, 4.0f};
constexpr const char* kText = "getenv static extern \" asm";
constexpr char kRaw[] = R"x(syscall ) " \u0041 %: ##)x";
static inline int rounded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }
template <int N> [[nodiscard]] inline __attribute__((always_inline)) int twice() { return 2 * N; }
struct alignas(64) Tile { float values[16]; int open; };
struct Reader { const float* at; float read() const { return *at; } };
inline float use(const Reader& r, Tile& t) {
  auto write = [&](int i, float v) { t.values[i] = v; };
  write(0, r.read());
#pragma GCC unroll 4
  for (int i = 4; i < 8; ++i) t.values[i] = 0.0f;
  _Pragma("GCC ivdep") for (int i = 0; i < 4; ++i) t.values[i] += kTable[i];
  t.open = twice<2>() <:: kLanes ? 1 : 0;
  return t.values[0];
}
}  // namespace twin
""".replace("twice<2>() <:: kLanes ? 1 : 0", "twice<2>() < ::twin::kLanes ? 1 : 0"),
)


# --- build ------------------------------------------------------------------------------------------------------------

_kernel_cases(
    build_syntax="inline int broken() { return 1 }",
    build_undefined="int missing_function(int);\ninline int call_missing(int n) { return missing_function(n); }\n"
    "__attribute__((noinline)) int keep_missing(int n) { return call_missing(n); }",
    build_template_bomb="template <int N> struct Deep { static constexpr int value = Deep<N + 1>::value; };\nconstexpr int kDeep = Deep<0>::value;",
    build_constexpr_bomb="constexpr int spin() { int n = 0; while (n >= 0) { n = (n + 1) % 1000; } return n; }\nconstexpr int kSpun = spin();",
)


@case("build-op-removed")
def _(read: Reader) -> Edits:
    return {KERNEL: None}


@case("build-unknown-op")
def _(read: Reader) -> Edits:
    return {
        "k3_backend/kernels/warm_up/cpu.cc": text('#include "k3_cpu.h"\n'),
        "k3_backend/kernels/warm_up/cpu.toml": text(""),
    }


# --- audit: passes scope and build, yet the object holds what it must not ---------------------------------------------

_kernel_cases(
    audit_constructor="namespace {\n__attribute__((noinline)) int warm_up(int n) {\n  int s = 0;\n  for (volatile int i = 0; i < n; i = i + 1) s += i;\n"
    "  return s;\n}\nconst int kWarm = warm_up(3);\n}  // namespace",
    audit_symbol="#include <cmath>\n__attribute__((noinline)) float erf_of(float x) { return std::erf(x); }",
)


# --- kernels: passes scope, build and audit, and computes something else than the op (see kernels/faults.py) -----------

_TARGET_SCHEDULE = "k3_backend/schedules/cpu/k3-nano/kda_decode.toml"


def plain_kernel(source: str, max_rows: int = 512) -> Case:
    """The whole KDA kernel replaced by a plain one, with a schedule that covers `max_rows` rows."""
    schedule = f"version = 1\n\n[[bucket]]\nmax_rows = {max_rows}\nfault = 0\n"
    return lambda read: {
        KERNEL: text(source),
        "k3_backend/kernels/kda_decode/cpu.toml": text(DECLARATIONS),
        _TARGET_SCHEDULE: text(schedule),
    }


for _fault in FAULTS:
    if not _fault.stopped_earlier:
        case(f"kernels-{_fault.name}")(plain_kernel(with_fault(_fault)))
case("kernels-honest")(plain_kernel(PLAIN))

# --- path: right wherever it runs, but it does not run where it is claimed to ------------------------------------------

case("path-refusing-schedule")(plain_kernel(PLAIN, max_rows=1))
