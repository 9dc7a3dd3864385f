"""The peer table from its raw lines: medians, paired ratios, shares of the ceilings, and which figures are met.

Pure functions over the lines of `raw/bench.jsonl`, which a stranger's machine may have written: everything is checked
for type and range, nothing is taken from a line that can be computed from others. A peer that is missing has no number
anywhere. The table decides nothing about a candidate; `decide` says whether the record is whole and our results right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verify.protocol.decision import Decision, Finding, Line
from verify.protocol.fields import count, mapping, number_of, objects, samples, text
from verify.protocol.peer_figures import FIGURES, Need
from verify.protocol.peer_rows import OURS, Ceiling, Judged, Ratio, Row, Table, Timing, meant

__all__ = ["PROTOCOL_ID", "decide", "read_table"]

PROTOCOL_ID = "bench-cuda/2"
MOSTLY_READ = 0.1
"""Share of written bytes up to which the read ceiling is the matching one; above, the faster of copy and update."""
CONFIDENCE = 0.95
_KINDS = ("read", "write", "copy", "update")


def read_table(lines: Sequence[Line]) -> Table:
    """The table of a record.

    Raises:
        ValueError: a line that does not say what it must; names the line.
    """
    if not lines or lines[0].get("kind") != "header":
        raise ValueError("line 1: no header")
    header = lines[0]
    for name in ("head", "begun"):
        text(header, name, 1)
    mapping(header, "machine", 1)
    planned = {}
    for cell in objects(header, "planned", 1):
        planned[text(cell, "key", 1)] = _whole(cell)
    if len(planned) != len(header["planned"]):
        raise ValueError("line 1: a cell is planned twice")
    best: dict[str, Ceiling] = {}
    empty: list[float] = []
    found: dict[str, tuple[int, Line]] = {}
    for number, line in enumerate(lines[1:], start=2):
        kind = line.get("kind")
        if kind == "ceilings":
            _better(best, line, number)
            empty += _spacing(line, number)
        elif kind == "cell":
            key = text(line, "key", number)
            if key not in planned or key in found:
                raise ValueError(f"line {number}: cell {key[:80]!r} is not planned, or repeated")
            found[key] = (number, line)
        else:
            raise ValueError(f"line {number}: kind {str(kind)[:40]!r}")
    spacing = min(empty, default=None)
    rows = [_row(planned[key], *found[key], best, spacing) for key in planned if key in found]
    return Table(header, best, spacing, rows, [key for key in planned if key not in found])


def _whole(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """A planned cell whose fields have the types that figures and tables rest on."""
    for name in ("op", "geometry"):
        text(cell, name, 1)
    for name in ("batch", "tokens", "cache_bytes"):
        count(cell, name, 1)
    for name in ("context", "width", "sources"):
        if cell.get(name, 0) is not None:
            count(cell, name, 1)
    return cell


def decide(lines: Sequence[Line]) -> Decision:
    """`passed`: every planned cell has a line and our results are right in all that we run."""
    try:
        table = read_table(lines)
    except ValueError as error:
        return Decision("not_evaluated", [_finding("bench.malformed", str(error), "raw/bench.jsonl", "whole lines")])
    command = "python3 kit.py run --out R --resume"
    findings = []
    for row in table.rows:
        reason = row.failure or row.missing.get(OURS, "")
        if row.failure is not None or reason.startswith(("wrong results", "failed")):
            findings.append(_finding("bench.wrong", reason[:200], row.key, "right results, and no crash"))
    if findings:
        return Decision("failed", findings)
    if table.unmeasured or not table.ceilings:
        what = f"{len(table.unmeasured)} of {len(lines[0]['planned'])} cells were not measured"
        if not table.unmeasured:
            what = "no ceilings were measured"
        return Decision("not_evaluated", [_finding("bench.incomplete", what, "raw/bench.jsonl", "all", command)])
    return Decision("passed")


def _row(cell: Mapping[str, Any], number: int, line: Line, best: Mapping[str, Ceiling], empty: float | None) -> Row:
    key = str(cell["key"])
    read, write = (count(cell, name, 1) for name in ("read_bytes", "write_bytes"))
    ceiling = _matching(read, write, best)
    floor = None if ceiling is None else (read + write) / ceiling.gbps / 1e3
    if line.get("failure") is not None:
        return Row(key, cell, read + write, ceiling, floor, None, failure=text(line, "failure", number)[:300])
    arms: dict[str, Timing] = {}
    missing: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    for name, arm in sorted(mapping(line, "arms", number).items()):
        if not isinstance(arm, Mapping):
            raise ValueError(f"line {number}: arm {name[:40]!r} is no object")
        if arm.get("missing") is not None:
            missing[name] = text(arm, "missing", number)
        else:
            times[name] = samples(arm, number)
            arms[name] = _timing(arm, times[name], number)
    counts = {len(values) for values in times.values()}
    if len(counts) > 1:
        raise ValueError(f"line {number}: arms with {sorted(counts)} rounds")
    ratios = {}
    if OURS in times:
        ratios = {name: _ratio(times[name], times[OURS]) for name in times if name != OURS}
    share = None if floor is None or OURS not in arms else floor / arms[OURS].median
    plain = Row(
        key, cell, read + write, ceiling, floor, share, arms, missing, ratios,
        rotated_bytes=count(line, "rotated_bytes", number), calls=count(line, "calls", number),
    )  # fmt: skip
    return Row(**{**vars(plain), "judged": tuple(_judge(plain, empty))})


def _judge(row: Row, empty: float | None) -> Iterator[Judged]:
    for figure in FIGURES:
        if not meant(figure, row.cell):
            continue
        for need in figure.needs:
            if need.applies(int(row.cell["batch"]), int(row.cell["cache_bytes"])):
                state, found = _compare(need, row, empty)
                yield Judged(figure.row, need.text, state, found)


def _compare(need: Need, row: Row, empty: float | None) -> tuple[str, str]:
    ours = row.arms.get(OURS)
    if ours is None:
        return "unknown", row.missing.get(OURS, "not measured")
    if need.kind == "share":
        if row.share is None:
            return "unknown", "no ceiling was measured"
        return "met" if row.share >= need.limit else "missed", f"{row.share:.1%}"
    if need.kind == "spacing":
        if empty is None or row.floor_us is None:
            return "unknown", "no spacing or ceiling was measured"
        limit = empty + need.limit + need.floors * row.floor_us
        return "met" if ours.median <= limit else "missed", f"{ours.median:.2f} of {limit:.2f} us"
    peer = next((name for name in need.peers if name in row.ratios), None)
    if peer is None:
        return "unknown", "; ".join(f"{name}: {row.missing.get(name, 'not measured')}" for name in need.peers)
    ratio = row.ratios[peer]
    reached = ratio.low > need.limit if need.strict else ratio.low >= need.limit
    state = "met" if reached else "missed" if ratio.high < need.limit else "open"
    return state, f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f}) {peer}"


def _matching(read: int, write: int, best: Mapping[str, Ceiling]) -> Ceiling | None:
    """The ceiling that a call's mix of reading and writing is held to."""
    if write <= MOSTLY_READ * (read + write):
        return best.get("read")
    mixed = [best[kind] for kind in ("copy", "update") if kind in best]
    return max(mixed, key=lambda ceiling: ceiling.gbps, default=None)


def _ratio(peer: Sequence[float], ours: Sequence[float]) -> Ratio:
    paired = np.sort(np.array(peer) / np.array(ours))
    rank = max(1, _rank(len(paired)))
    return Ratio(float(np.median(paired)), float(paired[rank - 1]), float(paired[-rank]))


def _rank(rounds: int) -> int:
    """The k for which the k-th least and the k-th greatest of so many values hold the median between them.

    The chance that fewer than k values lie below the median is at most half of what `CONFIDENCE` leaves.
    """
    below, rank = 0.0, 0
    while below + (chance := math.comb(rounds, rank) / 2**rounds) <= (1.0 - CONFIDENCE) / 2:
        below += chance
        rank += 1
    return rank


def _timing(arm: Mapping[str, Any], times: Sequence[float], number: int) -> Timing:
    low, median, high = (float(value) for value in np.percentile(times, (25, 50, 75)))
    device = arm.get("device_us")
    device = None if device is None else number_of(device, number)
    if not isinstance(arm.get("pdl"), bool):
        raise ValueError(f"line {number}: pdl is no boolean")
    fallbacks = arm.get("fallbacks", [])
    if not isinstance(fallbacks, list) or not all(isinstance(item, str) for item in fallbacks):
        raise ValueError(f"line {number}: fallbacks are no texts")
    note = text(arm, "note", number)
    return Timing(median, low, high, len(times), device, arm["pdl"], note, tuple(item[:200] for item in fallbacks))


def _better(best: dict[str, Ceiling], line: Line, number: int) -> None:
    """Keep the fastest method of every ceiling, over all times that ceilings were measured."""
    for kind, methods in mapping(line, "gbps", number).items():
        if kind not in _KINDS or not isinstance(methods, Mapping):
            raise ValueError(f"line {number}: ceiling {str(kind)[:40]!r}")
        for method, value in methods.items():
            gbps = number_of(value, number)
            if kind not in best or gbps > best[kind].gbps:
                best[kind] = Ceiling(kind, gbps, str(method)[:80])


def _spacing(line: Line, number: int) -> list[float]:
    spaced = mapping(line, "empty_us", number)
    return [number_of(spaced["1"], number)] if "1" in spaced else []


def _finding(code: str, message: str, where: str, expected: str, then: str = "run the kit again") -> Finding:
    return Finding(code, message, where, expected, then)
