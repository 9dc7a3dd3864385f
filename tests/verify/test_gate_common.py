from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from gate_fixtures import ROOT, Bench, make_repo

from harness.errors import FasttrackError
from harness.evidence import DiskError
from harness.records import EvidenceClass, GateResult, Measurement, Missing, Outcome
from k3_backend.errors import StorageError
from verify.context import GateContext
from verify.gates.common import command_for, gate_guard, to_result
from verify.protocol import audit, build, kernels, path, scope
from verify.protocol.decision import Decision, Finding

CODED = (("scope", scope), ("build", build), ("audit", audit), ("kernels", kernels), ("path", path))
FINDING = Finding("scope.mode", "m", "w", "e", "n")


@pytest.fixture
def context(tmp_path: Path) -> GateContext:
    bench = Bench(make_repo(tmp_path / "repo"), tmp_path / "scratch")
    return bench.context(bench.commit({"README.md": "x\n"}), export=False)


def test_an_exception_is_not_evaluated_with_its_traceback(context: GateContext) -> None:
    """A broken check reports a clean or a failed candidate, or takes the whole run down."""

    @gate_guard("audit", "audit/1")
    def run(ctx: GateContext) -> GateResult:
        raise ZeroDivisionError("in the gate")

    result = run(context)
    assert (result.outcome, result.evidence_class) == (Outcome.NOT_EVALUATED, None)
    assert result.reasons[0].code == "audit.internal_error"
    assert "says nothing about the candidate" in result.reasons[0].message
    assert result.reasons[0].next == command_for("audit", context)
    assert result.evidence[0].path == "raw/audit_error.jsonl"
    line = context.evidence.lines("audit_error")[0]
    assert "ZeroDivisionError: in the gate" in line["traceback"]
    assert "def run" not in result.reasons[0].where


def test_a_clear_error_keeps_its_four_parts(context: GateContext) -> None:
    """A missing tool is reported as a bug of the gate."""

    @gate_guard("build", "build/1")
    def run(ctx: GateContext) -> GateResult:
        raise FasttrackError("g++ not found", where="PATH", expected="g++ 12", next="apt-get install g++")

    reason = run(context).reasons[0]
    assert (reason.code, reason.message, reason.where) == ("build.environment", "g++ not found", "PATH")
    assert (reason.expected, reason.next) == ("g++ 12", "apt-get install g++")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DiskError("full", where="w", expected="e", next="n"), DiskError),
        (StorageError("full", where="w", expected="e", next="n"), StorageError),
        (OSError(errno.ENOSPC, "No space left on device"), DiskError),
        (OSError(errno.EROFS, "Read-only file system", "/x"), DiskError),
    ],
)
def test_a_full_disk_stops_the_run_and_records_nothing(
    context: GateContext, error: Exception, kind: type[Exception]
) -> None:
    """The gate counts as finished, so a resumed run never asks it again: the candidate is lost to a full disk."""

    @gate_guard("audit", "audit/1")
    def run(ctx: GateContext) -> GateResult:
        raise error

    with pytest.raises(kind):
        run(context)
    assert context.evidence.lines("audit_error") == []


def test_errors_name_no_folder_of_this_machine(context: GateContext) -> None:
    """Bundles are published: a traceback would tell where and as whom somebody works."""

    @gate_guard("build", "build/1")
    def run(ctx: GateContext) -> GateResult:
        raise OSError(f"cannot read {ctx.run_dir}/x and {Path.home()}/y")

    reason = run(context).reasons[0]
    line = context.evidence.lines("build_error")[0]
    for text in (reason.message, reason.where, line["message"], line["traceback"]):
        assert str(Path.home()) not in text
        assert str(context.run_dir) not in text
    assert "cannot read RUN/x and HOME/y" in line["message"]
    assert reason.where.startswith("FASTTRACK/")


def test_interrupts_pass_through(context: GateContext) -> None:
    """Ctrl-C becomes a verdict."""

    @gate_guard("scope", "scope/1")
    def run(ctx: GateContext) -> GateResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(context)


def test_results_follow_the_decision() -> None:
    """A result says something that its decision did not."""
    decision = Decision("failed", (FINDING,), {"a": {"value": 1.0, "unit": "x", "low": 0.5}, "b": {"missing": "why"}})
    result = to_result("scope", "scope/1", decision, EvidenceClass.STATIC, [], 0.1, {"t": 1})
    assert result.reasons[0].model_dump() == {
        "code": "scope.mode",
        "message": "m",
        "where": "w",
        "expected": "e",
        "next": "n",
    }
    assert result.metrics == {"a": Measurement(value=1.0, unit="x", low=0.5), "b": Missing(missing="why")}
    assert (
        to_result(
            "scope", "scope/1", Decision("not_evaluated", (FINDING,)), EvidenceClass.STATIC, [], 0.1
        ).evidence_class
        is None
    )


def test_the_page_of_reasons_is_complete() -> None:
    """A report's code is not explained, or the page explains one that no gate gives."""
    page = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    for name, module in CODED:
        assert dict(re.findall(rf"^\| `({name}\.\w+)` \| (.+) \|$", page, re.MULTILINE)) == module.CODES


def test_codes_are_well_formed_and_belong_to_their_gate() -> None:
    """A reason code changes shape or is explained under another gate."""
    for name, module in CODED:
        assert all(code.startswith(f"{name}.") and text for code, text in module.CODES.items())
