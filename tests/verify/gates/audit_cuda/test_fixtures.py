"""Every rule of the device-code audit refuses its fixture and lets the honest twin pass, on both architectures."""

from __future__ import annotations

import json

import pytest

from tests.verify.gates.audit_cuda.conftest import CASES, Built
from verify.protocol.audit_cuda import CODES, RULES, UNPROVEN, judge


@pytest.mark.parametrize("name", [n for n, (_, code) in CASES.items() if code])
def test_refuses(built: Built, name: str) -> None:
    """The fault stays in the machine code and the audit sees it."""
    code = CASES[name][1]
    findings = judge([built.facts(name)], name, "next")
    assert code in {f.code for f in findings}
    finding = next(f for f in findings if f.code == code)
    assert finding.message.startswith(CODES[code])
    assert name in finding.where


@pytest.mark.parametrize("name", [n for n, (_, code) in CASES.items() if code is None])
def test_honest_twin_passes(built: Built, name: str) -> None:
    """No false alarm on code that does the same in the right order."""
    assert judge([built.facts(name)], name, "next") == []


def test_decision_needs_only_the_stored_facts(built: Built) -> None:
    """A stranger re-decides from JSON lines, without the cubin."""
    for name in ("load_above_wait", "poll_then_load", "evict_last", "division"):
        facts = built.facts(name)
        stored = json.loads(json.dumps(facts))
        assert judge([stored], name, "next") == judge([facts], name, "next")


def test_findings_name_the_source_line(built: Built) -> None:
    """A reviewer gets file and line where the compiler was asked for line information."""
    finding = judge([built.facts("load_above_wait")], "k", "next")[0]
    assert "kernels.py:" in finding.where


def test_same_answer_on_repetition(built: Built) -> None:
    """Facts of the same bytes are equal, so that two machines can compare digests."""
    first = built.facts("role_without_wait")
    Built.all_facts.cache_clear()
    assert built.facts("role_without_wait") == first


def test_every_rule_has_a_code_and_a_motivation() -> None:
    """A rule without a failure behind it is noise."""
    assert {r.code for r in RULES} <= CODES.keys()
    assert CODES.keys() >= UNPROVEN
    assert all(len(r.motivation) > 20 for r in RULES)
