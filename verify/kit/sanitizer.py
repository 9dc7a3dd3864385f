"""compute-sanitizer over small calls: memory errors, races and reads of uninitialised memory inside a kernel.

What no comparison of bytes can show: an access that stays inside somebody's allocation, a hazard that happened to end
well. The tool's exit status and summary decide, and only errors that it ascribes to one of the artifact's own kernels
count. Where it cannot run (it is not installed, or the machine's driver refuses it) the line says so.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k3_backend.aot.cuda.descriptor import Descriptor
from k3_backend.ops import ALL_OPS
from verify.evaluator.execute import run_on
from verify.evaluator.failures import WorkerFailure
from verify.evaluator.inputs import Case
from verify.kit.card import EagerDevice
from verify.kit.child import started
from verify.kit.context import KitContext
from verify.kit.manifest import Unit
from verify.protocol.kernels_cuda import SANITIZERS

__all__ = ["check_unit"]

TOOL = "compute-sanitizer"
ERRORS_STATUS = 86
BUFFER_BYTES = 1 << 30
_TIMEOUT_S = 300.0
_LOG_CHARS = 2000
_OPTIONS = {
    # Python's own questions to the driver (cuGetProcAddress of a name that this driver lacks) are no errors of a kernel.
    "memcheck": ("--report-api-errors", "no"),
    # A warp writes, joins at a warp barrier and lets one lane arrive: ordered, but only by way of another thread.
    "racecheck": ("--racecheck-indirect-barrier-dependency", "yes"),
    "initcheck": ("--report-api-errors", "no"),
}
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")
_SHAPES = ((2, 1), (1, 4))
"""(requests, T) of the calls: small, because every access is followed."""


def check_unit(kit: KitContext, arm: str, unit: Unit, why_not: str | None) -> list[dict[str, Any]]:
    """One raw line per tool; `why_not` says why nothing is run."""
    path = shutil.which(TOOL)
    if why_not is None and path is None:
        why_not = f"{TOOL} is not installed"
    lines = []
    for tool in SANITIZERS:
        line: dict[str, Any] = {"kind": "sanitizer", "unit": unit.key, "tool": tool, "status": "not_evaluated"}
        line |= {"reason": why_not, "summary": None, "log": None, "cases": []}
        if why_not is None and kit.over():
            line["reason"] = "the time was over"
        elif why_not is None and path is not None:
            line |= _run(kit, arm, unit, tool, path)
        lines.append(line)
    return lines


def _run(kit: KitContext, arm: str, unit: Unit, tool: str, path: str) -> dict[str, Any]:
    folder = kit.artifact(arm, unit)
    variants = Descriptor.read(folder, ALL_OPS[unit.op]).variants
    entries = sorted({launch.entry for variant in variants for launch in variant.launches})
    with tempfile.TemporaryDirectory(prefix="sanitizer-") as name:
        log = Path(name) / "log"
        wrapper = (
            path, "--tool", tool, *_OPTIONS[tool], "--log-file", str(log), "--error-exitcode", str(ERRORS_STATUS), "--print-limit", "20",
        )  # fmt: skip
        cases, status, problem = [], None, None
        try:
            with started(
                unit.op, folder, kit.schedules(arm), code=kit.code, logs=kit.logs, buffer_bytes=BUFFER_BYTES,
                bootstrap=kit.machine.bootstrap, wrapper=wrapper, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            ) as worker:  # fmt: skip
                worker.call(
                    "card.load", timeout_s=_TIMEOUT_S, op=unit.op, arch=unit.arch, geometry_name=unit.geometry,
                    nbytes=0, separate=True,
                )  # fmt: skip
                for batch, tokens in _SHAPES:
                    case = Case(unit.op, "gaussian", batch, tokens, 1, secrets.token_hex(16), unit.geometry)
                    run_on(EagerDevice(worker, kit.evaluator, _TIMEOUT_S), case, np.random.default_rng(), {})
                    cases.append(case.id)
                status = worker.finish(_TIMEOUT_S)
        except WorkerFailure as failure:
            problem = str(failure)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return {**judge(text, status, problem, entries), "cases": cases}


def judge(text: str, status: int | None, problem: str | None, entries: Sequence[str]) -> dict[str, Any]:
    """Status of one run from the tool's log and exit status.

    Args:
        text: the log.
        status: exit status; null if the process did not end by itself.
        problem: what broke off the calls; null if they all ran.
        entries: kernels of the artifact.
    """
    found = _SUMMARY.findall(text)
    summary = found[-1] if found else None
    kept = {"summary": summary, "log": None}
    named = any(entry in text for entry in entries)
    if named and (status == ERRORS_STATUS or (problem is not None and summary is not None)):
        return {**kept, "status": "errors", "reason": None, "log": text[:_LOG_CHARS]}
    if status == 0 and problem is None and summary is not None:
        return {**kept, "status": "clean", "reason": None}
    reason = problem or f"status {status}, {summary or 'no summary'}"
    return {**kept, "status": "not_evaluated", "reason": reason[:300], "log": text[:_LOG_CHARS] or None}
