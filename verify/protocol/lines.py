"""Reading raw lines: which attempt counts, and which lines of a kind it has.

Raw files are append-only. A gate that was interrupted starts again with a new header line, so a decision looks at the
lines from the last header on.
"""

from __future__ import annotations

from collections.abc import Sequence

from verify.protocol.decision import Decision, Finding, Line

__all__ = ["as_finding", "incomplete", "last_attempt", "of_kind"]


def last_attempt(lines: Sequence[Line]) -> tuple[Line, Sequence[Line]] | None:
    """(header, following lines) of the last attempt; None if there is no header."""
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].get("kind") == "header":
            return lines[index], lines[index + 1 :]
    return None


def of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    """Lines of one kind, in order."""
    return [line for line in lines if line.get("kind") == kind]


def as_finding(line: Line) -> Finding:
    """A line that states the parts of a finding itself."""
    return Finding(line["code"], line["message"], line["where"], line["expected"], line["next"])


def incomplete(gate: str, what: str) -> Decision:
    """The decision on a record that does not hold what its header announces: nothing was evaluated."""
    return Decision(
        "not_evaluated",
        (
            Finding(
                f"{gate}.incomplete_record",
                what,
                f"raw/{gate}.jsonl",
                "a complete record of one attempt",
                f"fasttrack verify --gates {gate}",
            ),
        ),
    )
