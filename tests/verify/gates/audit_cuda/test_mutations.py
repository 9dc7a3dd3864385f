"""Faults planted into compiled code: each honest kernel loses its wait or its acquire, and the audit must notice."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.verify.gates.audit_cuda.conftest import ALONE, CASES, PARAMS, Built, claims
from verify.gates.audit.cuda import facts, inspect_cubin
from verify.gates.audit.cuda.nvdisasm import Disassembly, disassemble
from verify.protocol.audit_cuda import judge

HONEST = [n for n, (_, code) in CASES.items() if code is None and n not in ALONE]
WITH_WAIT = [n for n in HONEST if CASES[n][0].get("pdl", True)]
WITH_ACQUIRE = [
    "poll_fence_load", "poll_acquire_load", "poll_fenced_load", "mailbox_after_poll", "ticket_with_acquire",
    "mailbox_above_wait",
]  # fmt: skip
_listings: dict[str, str] = {}


def _codes(
    built: Built, name: str, change: Callable[[list[str]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    """Codes found in one kernel after its lines were changed."""
    cubin = built.cubin(name)
    if built.arch not in _listings:
        _listings[built.arch] = disassemble(cubin).text
    text = _listings[built.arch]
    start = re.search(rf"^\t\.section\t\.text\.kernel_cutlass_{name}_ptr", text, re.MULTILINE)
    assert start is not None
    end = text.find("\t.section\t", start.end())
    end = len(text) if end < 0 else end
    body = change(text[start.start() : end].split("\n"))
    # Only this kernel: the others would be analysed for nothing.
    changed = text[: text.index("\n//-----")] + "\n" + "\n".join(body)
    monkeypatch.setattr(facts, "disassemble", lambda _: Disassembly(changed, None, None))
    entry = next(
        f["kernel"] for f in built.all_facts("kernels") if f["kernel"].startswith(f"kernel_cutlass_{name}_ptr")
    )
    return {f.code for f in judge(inspect_cubin(cubin, entry=entry, params=PARAMS, claims=claims(name)), name, "next")}


def _without(pattern: str) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        assert any(re.search(pattern, line) for line in lines), pattern
        return [re.sub(pattern + r"[^;]*;", "NOP ;", line) for line in lines]

    return change


def _wait_at_the_end(lines: list[str]) -> list[str]:
    waits = [line for line in lines if "ACQBULK" in line]
    rest = [line for line in lines if "ACQBULK" not in line]
    last = max(i for i, line in enumerate(rest) if re.search(r"\bEXIT\b", line))
    return rest[:last] + waits[:1] + rest[last:]


@pytest.mark.parametrize("name", HONEST)
def test_unchanged(built: Built, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness of this test adds no finding of its own."""
    allowed = {"audit.not_evaluated"} if name == "division" else set()
    assert _codes(built, name, lambda lines: lines, monkeypatch) <= allowed


@pytest.mark.parametrize("name", WITH_WAIT)
def test_wait_removed(built: Built, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of a dependent launch passes without its wait."""
    assert "audit.wait_missing" in _codes(built, name, _without("ACQBULK"), monkeypatch)


@pytest.mark.parametrize("name", WITH_WAIT)
def test_wait_moved_to_the_end(built: Built, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the wait ordered stands above it now."""
    found = _codes(built, name, _wait_at_the_end, monkeypatch)
    assert found & {"audit.load_above_wait", "audit.store_above_wait", "audit.wait_missing", "audit.wait_by_other_warp"}


@pytest.mark.parametrize("name", WITH_ACQUIRE)
def test_acquire_removed(built: Built, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll or a ticket without its fence orders nothing."""
    strip = _without(r"(?:@P\d )?(?:CCTL\.IVALL|MEMBAR)")
    found = _codes(built, name, strip, monkeypatch)
    assert found & {"audit.load_after_relaxed_poll", "audit.load_after_relaxed_atomic", "audit.relaxed_poll"}
