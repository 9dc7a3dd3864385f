"""compute-sanitizer over small calls: memory errors, races and reads of uninitialised memory inside a kernel.

What no comparison of bytes can show: an access that stays inside somebody's allocation, a hazard that happened to end
well. Only errors that a tool ascribes to one of the artifact's own kernels count. Where it cannot run (it is not
installed, or the machine's driver refuses it) the line says so. racecheck also runs over kernels whose races are known.
Lines say what was seen; what it is worth is decided in `verify.protocol.sanitizers`.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k3_backend.aot.cuda.descriptor import Descriptor, LaunchSpec
from k3_backend.ops import ALL_OPS
from verify.evaluator.execute import run_on
from verify.evaluator.failures import WorkerFailure
from verify.evaluator.inputs import Case
from verify.kit.card import EagerDevice
from verify.kit.child import started
from verify.kit.context import KitContext
from verify.kit.manifest import Unit
from verify.kit.mbarriers import kernels_with_mbarriers
from verify.protocol.sanitizers import SANITIZERS, TOOL_WITH_CONTROLS

__all__ = ["check_control", "check_unit"]

TOOL = "compute-sanitizer"
ERRORS_STATUS = 86
BUFFER_BYTES = 1 << 30
_TIMEOUT_S = 300.0
_LOG_CHARS = 2000
_OPTIONS = {
    # Python's own questions to the driver (cuGetProcAddress of a name that it lacks) are no errors of a kernel.
    "memcheck": ("--report-api-errors", "no", "--print-limit", "20"),
    # Every hazard is printed: those that are not could be of another kind.
    "racecheck": ("--print-limit", "100000"),
    "initcheck": ("--report-api-errors", "no", "--print-limit", "20"),
}
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")
_COUNT = re.compile(r"(\d+) (error|warning)s?\b")
_FIRST_ACCESS = re.compile(r"= (Error|Warning): Race reported between (\w+) access at (\S+?)(?:\+0x|\s|$)")
_NEXT_ACCESS = re.compile(r"=\s+and (\w+) access at (\S+?)(?:\+0x|\s|$)")
_OTHER_ERROR = re.compile(r"= Error: (?!Race reported between)")
_SHAPES = ((2, 1), (1, 4))
"""(requests, T) of the calls: small, because every access is followed."""
_START_CONTROL = (
    "import sys; sys.path.insert(0, sys.argv[1]); from verify.workers.race_controls import main; main(sys.argv[2])"
)


def check_unit(kit: KitContext, arm: str, unit: Unit, why_not: str | None) -> list[dict[str, Any]]:
    """One raw line per tool; `why_not` says why nothing is run."""
    path, why_not = _tool(why_not)
    lines = []
    for tool in SANITIZERS:
        line: dict[str, Any] = {"kind": "sanitizer", "unit": unit.key, "tool": tool, "cases": [], "uses": []}
        line |= _not_run("the time was over" if why_not is None and kit.over() else why_not)
        if line["reason"] is None:
            line |= _run(kit, arm, unit, tool, path)
        lines.append(line)
    return lines


def check_control(kit: KitContext, name: str) -> dict[str, Any]:
    """The raw line of a kernel whose races are known, under racecheck."""
    path, why_not = _tool(kit.no_sanitizer)
    line: dict[str, Any] = {"kind": "sanitizer_control", "control": name, "tool": TOOL_WITH_CONTROLS, "version": None}
    line |= _not_run("the time was over" if why_not is None and kit.over() else why_not)
    if line["reason"] is None:
        line |= {"version": _version(path), **_run_control(kit.code, name, path)}
    return line


def _tool(why_not: str | None) -> tuple[str, str | None]:
    """(the tool's path, why it is not run)."""
    path = shutil.which(TOOL)
    return (path or TOOL), (f"{TOOL} is not installed" if why_not is None and path is None else why_not)


def _not_run(reason: str | None) -> dict[str, Any]:
    return {"status": "not_evaluated", "reason": reason, "summary": None, "log": None, **_counted("", None)}


def _version(path: str) -> str | None:
    """The tool's own words, in one line; null if it gives none."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return " ".join(done.stdout.split())[:300] or None


def _wrapper(path: str, tool: str, log: Path) -> tuple[str, ...]:
    return (path, "--tool", tool, *_OPTIONS[tool], "--log-file", str(log), "--error-exitcode", str(ERRORS_STATUS))


def _run_control(code: Path, name: str, path: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sanitizer-") as folder:
        log = Path(folder) / "log"
        argv = [*_wrapper(path, TOOL_WITH_CONTROLS, log), sys.executable, "-B", "-c", _START_CONTROL, str(code), name]
        status, problem = None, None
        try:
            done = subprocess.run(
                argv, cwd=code, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S,
                check=False,
            )  # fmt: skip
            status = done.returncode
            if status not in (0, ERRORS_STATUS) or "Traceback" in done.stderr:
                problem = f"status {status}: {''.join(done.stderr.splitlines()[-1:])}"
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        line = judge(_text(log), status, problem, [name])
        if problem is not None:  # a control that did not compute what it must says nothing about the tool
            line |= {"status": "not_evaluated", "reason": problem[:300]}
        return line


def _run(kit: KitContext, arm: str, unit: Unit, tool: str, path: str) -> dict[str, Any]:
    folder = kit.artifact(arm, unit)
    launches = [launch for v in Descriptor.read(folder, ALL_OPS[unit.op]).variants for launch in v.launches]
    with tempfile.TemporaryDirectory(prefix="sanitizer-") as name:
        log = Path(name) / "log"
        cases, status, problem = [], None, None
        try:
            with started(
                unit.op, folder, kit.schedules(arm), code=kit.code, logs=kit.logs, buffer_bytes=BUFFER_BYTES,
                bootstrap=kit.machine.bootstrap, wrapper=_wrapper(path, tool, log),
                environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
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
        text = _text(log)
    line = judge(text, status, problem, sorted({launch.entry for launch in launches}))
    return {**line, "cases": cases, "uses": _uses(folder, [launch for launch in launches if launch.entry in text])}


def _uses(folder: Path, launches: Sequence[LaunchSpec]) -> list[str]:
    """What bears on order among what these launches' kernels use: mbarriers by the image's table, clusters."""
    uses = {"clusters"} if any(launch.cluster > 1 for launch in launches) else set()
    for image in {launch.image for launch in launches}:
        found = kernels_with_mbarriers((folder / image).read_bytes())
        if any(launch.image == image and launch.entry in found for launch in launches):
            uses.add("mbarriers")
    return sorted(uses)


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""


def judge(text: str, status: int | None, problem: str | None, entries: Sequence[str]) -> dict[str, Any]:
    """What one run came to, from the tool's log and exit status.

    Args:
        text: the log.
        status: exit status; null if the process did not end by itself.
        problem: what broke off the calls; null if they all ran.
        entries: kernels under test.
    """
    found = _SUMMARY.findall(text)
    summary = found[-1] if found else None
    kept = {"summary": summary, "log": None, **_counted(text, summary)}
    named = any(entry in text for entry in entries)
    if named and (status == ERRORS_STATUS or (problem is not None and summary is not None)):
        return {**kept, "status": "errors", "reason": None, "log": text[:_LOG_CHARS]}
    if status == 0 and problem is None and summary is not None:
        return {**kept, "status": "clean", "reason": None}
    reason = problem or f"status {status}, {summary or 'no summary'}"
    return {**kept, "status": "not_evaluated", "reason": reason[:300], "log": text[:_LOG_CHARS] or None}


def _counted(text: str, summary: str | None) -> dict[str, Any]:
    """Errors and warnings by the summary, and racecheck's reports by kind: `error Read-Write`, `error other`.

    Which access is named first says nothing about time: a write over what was read before is reported as "Write access
    ... and Read access" as well.
    """
    counts = {word: int(number) for number, word in _COUNT.findall(summary or "")}
    hazards: Counter[str] = Counter()
    severity = first = ""
    for line in text.splitlines():
        if match := _FIRST_ACCESS.search(line):
            severity, first = match[1].lower(), match[2]
        elif match := _NEXT_ACCESS.search(line):
            hazards[f"{severity} {'-'.join(sorted((first, match[1])))}"] += 1
        elif _OTHER_ERROR.search(line):
            hazards["error other"] += 1
    return {"errors": counts.get("error", 0), "warnings": counts.get("warning", 0), "hazards": dict(hazards)}
