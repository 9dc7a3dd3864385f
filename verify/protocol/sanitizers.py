"""What the words of compute-sanitizer's tools are worth: judged beside kernels whose races are known.

A raw line of kind `sanitizer` carries what a tool said about an artifact, one of kind `sanitizer_control` what
racecheck said, in the same session, about a kernel that has a race or has none (`verify.workers.race_controls`).

A race that racecheck misses makes every `clean` worthless. A race that it reports in a kernel without one shows an
order that this version does not follow; hazards of that kind then prove nothing. An artifact's hazards are set aside
only if every one is of a kind that such a control was charged with, and if the artifact's kernels that are named use
what that control uses. What is set aside is no pass: the check counts as not evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verify.protocol.decision import Line

__all__ = ["CONTROLS", "RACY", "SANITIZERS", "TOOL_WITH_CONTROLS", "Verdict", "verdicts"]

SANITIZERS = ("memcheck", "racecheck", "initcheck")
"""Tools of compute-sanitizer; each has one line per artifact, which may say why it was not run."""

TOOL_WITH_CONTROLS = "racecheck"

RACY = "racy"
"""The control that has a race."""

RACE_FREE: Mapping[str, frozenset[str]] = {
    "elected_arrival": frozenset({"mbarriers"}),
    "elected_announcement": frozenset({"mbarriers"}),
    "elected_release": frozenset({"mbarriers"}),
    "init_then_announce": frozenset({"mbarriers", "clusters"}),
}
"""Controls without one -> what a kernel has to use before their ordering can be its own."""

CONTROLS = (RACY, *RACE_FREE)

_WEAKER = {"error": ("error", "warning"), "warning": ("warning",)}
"""A tool that is wrong about an error may be wrong about a warning between the same accesses, not the reverse."""


@dataclass(frozen=True)
class Verdict:
    """What one check of an artifact comes to."""

    line: Line
    status: str
    """`clean`, `errors` or `not_evaluated`."""
    reason: str | None
    """Why it was not evaluated."""


def verdicts(lines: Sequence[Line]) -> list[Verdict]:
    """Judge all checks of a record, in order."""
    controls = {str(line["control"]): line for line in lines if line["kind"] == "sanitizer_control"}
    return [_verdict(line, controls) for line in lines if line["kind"] == "sanitizer"]


def _verdict(line: Line, controls: Mapping[str, Line]) -> Verdict:
    status, reason = str(line["status"]), line["reason"]
    if line["tool"] != TOOL_WITH_CONTROLS or status == "not_evaluated":
        return Verdict(line, status, reason)
    if status == "clean":
        missed = _missed(controls.get(RACY))
        return Verdict(line, "clean" if missed is None else "not_evaluated", missed)
    blamed = _blamed(line, controls)
    if not blamed:
        return Verdict(line, "errors", None)
    return Verdict(
        line, "not_evaluated",
        f"{line['summary']}: all of kinds that racecheck also reports in {', '.join(blamed)}, where there is no race",
    )  # fmt: skip


def _missed(racy: Line | None) -> str | None:
    """Why `clean` says nothing, or None."""
    if racy is None:
        return f"control {RACY} was not run"
    if racy["status"] == "errors":
        return None
    return f"racecheck did not report the race of control {RACY} ({racy['reason'] or racy['summary']})"


def _blamed(line: Line, controls: Mapping[str, Line]) -> list[str]:
    """Controls that account for all of an artifact's hazards; empty if any hazard is left."""
    hazards, uses = line["hazards"], set(line["uses"])
    if int(line["errors"]) and not any(kind.startswith("error ") for kind in hazards):
        return []  # counted by the tool, and of no kind that could be read
    blamed: set[str] = set()
    for kind in hazards:
        names = [
            name
            for name, needs in RACE_FREE.items()
            if needs <= uses and name in controls and kind in _charged(controls[name])
        ]
        if not names:
            return []
        blamed.update(names)
    return sorted(blamed)


def _charged(control: Line) -> set[str]:
    """Kinds of hazards that a race-free control discredits: of races between accesses, and of nothing else."""
    kinds: set[str] = set()
    for kind in control["hazards"] if control["status"] == "errors" else ():
        severity, _, accesses = str(kind).partition(" ")
        if "-" in accesses:
            kinds.update(f"{weaker} {accesses}" for weaker in _WEAKER[severity])
    return kinds
