"""Faults of CPU kernels, as replacements of single statements of the plain KDA kernel beside this file.

Each names the finding that the kernels gate has to give. Some would never reach that gate, since scope or audit refuse
their means; they show that the run-time boundary holds by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PLAIN = (FOLDER / "kda_decode.cc").read_text(encoding="utf-8")
DECLARATIONS = (FOLDER / "kda_decode.toml").read_text(encoding="utf-8")

_RUN = "all(c);"
_STORE = "memcpy(to, S, kState * sizeof(float));"
_NULL = "memset(c.out + b * c.tokens * kWidth, 0, size_t(c.tokens) * kWidth * sizeof(uint16_t));"
_REQUEST = "request(c, b);"
_SKIP = "if (slots[t] <= 0) continue;"
_OUT_BYTES = "size_t(c.batch * c.tokens * kWidth) * sizeof(uint16_t)"


@dataclass(frozen=True)
class Fault:
    """One way to be wrong."""

    name: str
    why: str
    old: str
    """Statement of the plain kernel."""
    new: str
    code: str
    """Reason code that the kernels gate has to give."""
    also: str = ""
    """Code under which it may show instead on a busy machine."""
    kind: str = "gaussian"
    """Input class in which it shows."""
    includes: str = ""
    stopped_earlier: bool = False
    """Scope or audit refuse it already."""
    fatal: bool = False
    """The worker does not survive it."""
    lasting: bool = False
    """The worker cannot be trusted with another case."""


FAULTS = (
    Fault(
        "layout",
        "stores the state [K, V] instead of [V, K]",
        _STORE,
        "for (int v = 0; v < kDim; ++v) for (int d = 0; d < kDim; ++d) to[d * kDim + v] = S[v * kDim + d];",
        "kernels.mismatch",
    ),
    Fault(
        "bf16-state",
        "keeps the state in bf16 precision",
        _STORE,
        "for (int i = 0; i < kState; ++i) to[i] = rounded(S[i]);",
        "kernels.mismatch",
        kind="hold",
    ),
    Fault(
        "last-state",
        "forgets the state after the last draft token",
        _SKIP,
        "if (slots[t] <= 0 || (t > 0 && t + 1 == c.tokens)) continue;",
        "kernels.mismatch",
    ),
    Fault(
        "batch-1",
        "is right only for batch 1: every request gets the first one's projection",
        _REQUEST,
        "{ Call first = c; first.proj = c.proj - b * c.tokens * kColumns; request(first, b); }",
        "kernels.mismatch",
    ),
    Fault(
        "past-output",
        "writes one element past its output",
        _RUN,
        "all(c); c.out[c.batch * c.tokens * kWidth] = 0;",
        "kernels.out_of_bounds_write",
    ),
    Fault(
        "neighbour-slot",
        "writes into a state slot of a request that is not in the batch",
        _RUN,
        "all(c); int64_t s = 1; for (int64_t i = 0; i < c.batch * c.tokens; ++i) if (c.slots[i] == s) { ++s; i = -1; }"
        " c.state[s * kHeads * kState] = 1.0f;",
        "kernels.unowned_state_changed",
    ),
    Fault(
        "edits-input",
        "changes its input so that a later check would agree",
        _RUN,
        "all(c); c.proj[0] ^= 1;",
        "kernels.input_changed",
    ),
    Fault(
        "unwritten-padding",
        "leaves the output of padded requests as it was",
        _NULL,
        ";",
        "kernels.output_not_written",
        kind="padding",
    ),
    Fault(
        "last-output",
        "returns the last call's output from the launch scratch",
        _RUN,
        "int64_t* memo = static_cast<int64_t*>(c.context->scratch); void* kept = memo + 2;"
        " if (memo[0] == 0x6b656570 && memo[1] == c.batch) { memcpy(c.out, kept, " + _OUT_BYTES + "); }"
        " else { all(c); memo[0] = 0x6b656570; memo[1] = c.batch; memcpy(kept, c.out, " + _OUT_BYTES + "); }",
        "kernels.stale_output",
    ),
    Fault(
        "fingerprint",
        "remembers outputs under the first values of the inputs",
        _RUN,
        "int64_t* memo = static_cast<int64_t*>(c.context->scratch); void* kept = memo + 2;"
        " if (memo[0] == 0x6b656570 && !memcmp(memo + 1, c.proj, 8)) { memcpy(c.out, kept, " + _OUT_BYTES + "); }"
        " else { all(c); memo[0] = 0x6b656570; memcpy(memo + 1, c.proj, 8); memcpy(kept, c.out, " + _OUT_BYTES + "); }",
        "kernels.stale_output",
        also="kernels.mismatch",  # the state that it skips is always wrong; its output only where the nudge tells
    ),
    Fault(
        "old-scratch",
        "reads scratch memory that it has not written",
        _RUN,
        "all(c); c.out[0] ^= *static_cast<const uint8_t*>(c.context->scratch) & 1;",
        "kernels.nondeterministic",
    ),
    Fault(
        "race",
        "assumes that the other worker has arrived after a while",
        _RUN,
        "volatile int32_t* here = static_cast<int32_t*>(c.context->scratch); here[0] = here[1] = 0; all(c);"
        " k3::parallel(c.context, 2, [&](int32_t w, int32_t n) { here[w] = 1;"
        " for (volatile int i = 0; i < 5000; i = i + 1) {} if (n == 2 && !here[1 - w]) c.out[w] ^= 0x4000; });",
        "kernels.nondeterministic",
        also="kernels.mismatch",
    ),
    Fault(
        "denormals",
        "leaves the floating-point unit flushing denormals",
        _RUN,
        "all(c); _mm_setcsr(_mm_getcsr() | 0x8040);",
        "kernels.denormals_off",
        includes="#include <immintrin.h>",
        stopped_earlier=True,
        lasting=True,
    ),
    Fault(
        "static-memo",
        "returns the last call's output from static memory",
        _RUN,
        "static uint16_t kept[1 << 20]; static bool filled;"
        " if (filled) memcpy(c.out, kept, " + _OUT_BYTES + ");"
        " else { all(c); memcpy(kept, c.out, " + _OUT_BYTES + "); filled = true; }",
        "kernels.stale_output",
        stopped_earlier=True,
    ),
    Fault(
        "late-thread",
        "finishes its work on a thread of its own after it has returned",
        _RUN,
        "all(c); pthread_t t; pthread_create(&t, nullptr, [](void* out) -> void* { sleep(1);"
        " *static_cast<volatile uint16_t*>(out) = 0; return nullptr; }, c.out); pthread_detach(t);",
        "kernels.threads_left",
        includes="#include <pthread.h>\n#include <unistd.h>",
        stopped_earlier=True,
        lasting=True,
    ),
    Fault("crash", "crashes", _RUN, "*reinterpret_cast<volatile int*>(8) = 1;", "kernels.crash", fatal=True),
    Fault(
        "hang",
        "never returns",
        _RUN,
        "for (volatile int64_t i = 0;; i = i + 1) {}",
        "kernels.timeout",
        fatal=True,
    ),
    Fault(
        "prints-pass",
        "prints PASS and exits with 0",
        _RUN,
        'puts("PASS"); fflush(stdout); _exit(0);',
        "kernels.crash",
        includes="#include <stdio.h>\n#include <unistd.h>",
        stopped_earlier=True,
        fatal=True,
    ),
)


def with_fault(fault: Fault) -> str:
    """The plain kernel with one fault."""
    return _replaced(_with_includes([fault]), fault.old, fault.new)


def with_all() -> str:
    """The plain kernel in which the tunable `fault` = n selects FAULTS[n - 1], and 0 none."""
    text = _with_includes(FAULTS)
    for old in dict.fromkeys(fault.old for fault in FAULTS):
        branches = [
            f"if (c.fault == {number}) {{ {fault.new} }} else "
            for number, fault in enumerate(FAULTS, 1)
            if fault.old == old
        ]
        text = _replaced(text, old, "".join(branches) + f"{{ {old} }}")
    return text


def all_declarations() -> str:
    """`cpu.toml` of `with_all`."""
    return DECLARATIONS.replace("[0]", str(list(range(len(FAULTS) + 1))))


def _with_includes(faults: Iterable[Fault]) -> str:
    lines = dict.fromkeys(line for fault in faults for line in fault.includes.split("\n") if line)
    return PLAIN.replace("#include <math.h>", "\n".join(["#include <math.h>", *lines]), 1)


def _replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"{text.count(old)} places of {old!r} in the plain kernel; expected one")
    # A line for each statement: the scope gate refuses lines that nobody can review.
    return text.replace(old, new.replace("; ", ";\n"))
