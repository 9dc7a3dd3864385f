"""What every gate needs around its own work: results from decisions, and a guard that never lets an error decide.

A gate measures, writes raw lines, asks its pure decision function, and calls `to_result`. Any exception on the way
but a full disk becomes `not_evaluated` with the traceback as evidence: a broken check says nothing about the candidate.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.errors import FasttrackError
from harness.evidence import DISK_ERRNOS, DiskError, disk_error
from harness.records import EvidenceClass, EvidenceRef, GateName, GateResult, Measurement, Missing, Outcome, Reason
from k3_backend.errors import BackendError, StorageError
from verify.context import GateContext
from verify.protocol.decision import Decision, Finding

__all__ = ["command_for", "gate_guard", "to_reason", "to_result"]

Gate = Callable[[GateContext], GateResult]


def to_reason(finding: Finding) -> Reason:
    """A decision's finding as a record."""
    return Reason(
        code=finding.code, message=finding.message, where=finding.where, expected=finding.expected, next=finding.next
    )


def to_result(
    gate: GateName,
    protocol_id: str,
    decision: Decision,
    evidence_class: EvidenceClass,
    evidence: Iterable[EvidenceRef],
    seconds: float,
    detail: Mapping[str, Any] | None = None,
) -> GateResult:
    """A gate's result from its decision.

    Args:
        gate: which gate speaks.
        protocol_id: its method and version.
        decision: what the pure decision function said.
        evidence_class: how the gate knows; dropped where nothing was evaluated.
        evidence: the raw files from which the decision can be recomputed.
        seconds: wall time of the gate.
        detail: tables for the report.
    """
    outcome = Outcome(decision.outcome)
    return GateResult(
        gate=gate,
        protocol_id=protocol_id,
        outcome=outcome,
        evidence_class=None if outcome is Outcome.NOT_EVALUATED else evidence_class,
        reasons=tuple(to_reason(f) for f in decision.findings),
        metrics={name: _metric(table) for name, table in decision.metrics.items()},
        evidence=tuple(evidence),
        detail=dict(detail or {}),
        seconds=seconds,
    )


def _metric(table: Mapping[str, Any]) -> Measurement | Missing:
    return Missing(**table) if "missing" in table else Measurement(**table)


def gate_guard(gate: GateName, protocol_id: str) -> Callable[[Gate], Gate]:
    """Decorator of a gate's `run`: an exception becomes `not_evaluated`, traceback in `raw/<gate>_error.jsonl`.

    Raises:
        DiskError, StorageError: a full or read-only disk. It would make every later candidate incomplete too, so the
            run stops before anything is recorded about this one, and goes on when it is resumed.
    """

    def wrap(run: Gate) -> Gate:
        @functools.wraps(run)
        def guarded(ctx: GateContext) -> GateResult:
            started = time.monotonic()
            try:
                return run(ctx)
            except (DiskError, StorageError):
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
                    raise disk_error(error, Path(error.filename or ctx.run_dir)) from error
                name = f"{gate}_error"
                line = {
                    "kind": "error",
                    "gate": gate,
                    "protocol": protocol_id,
                    "type": type(error).__name__,
                    "message": _without_folders(str(error), ctx),
                }
                trace = _without_folders(traceback.format_exc(), ctx)
                ctx.evidence.append(name, {**line, "traceback": trace})
                decision = Decision("not_evaluated", (_error_finding(gate, error, ctx),))
                return to_result(
                    gate,
                    protocol_id,
                    decision,
                    EvidenceClass.STATIC,
                    [ctx.evidence.ref(name)],
                    time.monotonic() - started,
                )

        return guarded

    return wrap


def _error_finding(gate: GateName, error: Exception, ctx: GateContext) -> Finding:
    def shown(text: str) -> str:
        return _without_folders(text, ctx)

    if isinstance(error, FasttrackError | BackendError):
        facts = (error.what, error.where, error.expected, error.next)
        return Finding(f"{gate}.environment", *map(shown, facts))
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else gate
    return Finding(
        f"{gate}.internal_error",
        shown(f"the gate itself failed ({type(error).__name__}: {error}); this says nothing about the candidate"),
        shown(where),
        "a gate that runs to its decision",
        command_for(gate, ctx),
    )


def _without_folders(text: str, ctx: GateContext) -> str:
    """Replace folders of this machine by what they are: the text goes into a bundle that others read."""
    folders = (
        (ctx.run_dir, "RUN"),
        (ctx.repo.root, "REPOSITORY"),
        (Path(__file__).parents[2], "FASTTRACK"),
        (Path(sys.prefix), "VENV"),
        (Path(sys.base_prefix), "PYTHON"),
        (Path.home(), "HOME"),
        (Path(tempfile.gettempdir()), "TMP"),
    )
    for folder, name in sorted(folders, key=lambda pair: -len(str(pair[0]))):
        text = text.replace(f"{folder}/", f"{name}/")
    return text


def command_for(gate: GateName, ctx: GateContext) -> str:
    """The command that runs one gate again on this candidate."""
    candidate = f"--candidate {ctx.candidate.head[:12]} --base {ctx.candidate.base[:12]}"
    return f"fasttrack verify {candidate} --target {ctx.target.name} --gates {gate}"
