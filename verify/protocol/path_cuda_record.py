"""What a complete record of the path gate on a GPU machine holds: its form, and the scope that its plan must cover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from verify.protocol import chain
from verify.protocol.decision import Finding, Line

__all__ = ["HALF_LAYERS", "PROTOCOL_ID", "coverage", "judged", "lacks", "malformed", "unfinished"]

PROTOCOL_ID = "path-cuda/2"

Half = Literal["kda", "mla"]

HALF_LAYERS: Mapping[Half, tuple[str, ...]] = {
    "kda": ("attn_res", "input_projection", "kda_decode"),
    "mla": ("attn_res", "input_projection", "mla_query", "mla_decode", "mla_value"),
}
"""Ops of an attention half-layer in order, by kind of attention."""
_CORE: Mapping[Half, str] = {"kda": "kda_decode", "mla": "mla_decode"}
"""The op that makes a geometry one of this half-layer: with an artifact of it, the half-layer is claimed."""
LEAST_REPLAYS = 2
"""Replays of a cell: the second reads what the first wrote."""
_KINDS = ("load", "cell", "watermark")


def judged(artifacts: Mapping[str, str], geometries: Sequence[str]) -> tuple[tuple[str, Half], ...]:
    """(geometry, kind of half-layer) that a set of artifacts claims.

    Args:
        artifacts: keys `<op>/<arch>/<geometry>`.
        geometries: the rank shapes that one GPU of the target runs; an artifact of others has no half-layer here.
    """
    held = {(key.split("/")[2], key.split("/")[0]) for key in artifacts}
    return tuple((name, half) for name in sorted(geometries) for half, core in _CORE.items() if (name, core) in held)


def lacks(header: Line, what: str, where: str) -> Finding:
    """The finding on something that a complete record would hold."""
    rule = "every declared batch, every T, mode off, and each op's watermark, for every claimed half-layer"
    return Finding("path.incomplete_record", what, where, rule, str(header["command"]))


def coverage(header: Line) -> Iterator[Finding]:
    """What the plan should hold and does not."""
    plan = list(header["plan"])
    claimed = judged(header["artifacts"], header["geometries"])
    if not claimed:
        yield lacks(header, "no artifact of an attention core, so no half-layer to run", "the kit's artifacts")
    for geometry, half in claimed:
        where = f"{half} half-layer on {geometry}"
        held = {key.split("/")[0] for key in header["artifacts"] if key.split("/")[2] == geometry}
        absent = [f"artifact of {op}" for op in HALF_LAYERS[half] if op not in held]
        own = [entry for entry in plan if (entry["geometry"], entry["half"]) == (geometry, half)]
        auto = [entry for entry in own if entry["mode"] == "auto" and not entry["spoil"]]
        plain = {int(entry["batch"]) for entry in auto if int(entry["tokens"]) == 1}
        absent += [f"batch {batch}" for batch in header["batches"] if batch not in plain]
        absent += [f"T = {t}" for t in header["tokens"] if t not in {int(entry["tokens"]) for entry in auto}]
        if half == "mla":
            absent += [f"context {c}" for c in header["contexts"] if c not in {int(entry["context"]) for entry in auto}]
        absent += [] if any(entry["mode"] == "off" for entry in own) else ["mode off"]
        absent += [] if any(map(_whole, auto)) else ["a cell without a fallback"]
        spoiled = {entry["spoil"] for entry in own if _whole(entry)}
        absent += [f"watermark of {op}" for op in HALF_LAYERS[half] if op not in spoiled]
        for entry in own:
            ops = [site["op"] for site in entry["sites"]]
            if ops != list(HALF_LAYERS[half]):
                absent.append(f"sites of {entry['id']}")
        if absent:
            yield lacks(header, f"{where}: the plan lacks {', '.join(absent[:5])}", where)


def _whole(entry: Line) -> bool:
    """Whether every site of a planned cell is specialised."""
    return all(site["path"] == "specialized" for site in entry["sites"])


def unfinished(header: Line, lines: Sequence[Line]) -> Iterator[Finding]:
    """Planned cells without a line, and lines that say why nothing was run."""
    left = sorted(set(map(str, header["planned"])) - {str(line["id"]) for line in lines})
    if left:
        yield lacks(header, f"{len(left)} planned cells are missing", left[0])
    for line in lines:
        if line["skipped"] is not None:
            yield lacks(header, f"a cell was skipped: {line['skipped']}", str(line["id"]))


def malformed(lines: Sequence[Line]) -> Finding | None:
    """Why the lines cannot be decided on, or None. Missing cells are judged later: a failure may explain them."""
    if not lines or lines[0].get("kind") != "header":
        return _incomplete("no header line", "line 1")
    header = lines[0]
    if header.get("protocol") != PROTOCOL_ID:
        return _incomplete(f"protocol {header.get('protocol')!r}; this decides {PROTOCOL_ID}", "line 1")
    number = chain.broken(chain.start(str(header["kit"]), str(header["nonce"]), str(header["gate"])), lines)
    if number is not None:
        return _incomplete(f"line {number} does not follow from the lines before it", "the chain of lines")
    if not header.get("planned") or not header.get("artifacts"):
        return _incomplete("no cell or artifact was planned", "line 1")
    plan = {str(entry["id"]): entry for entry in header["plan"]}
    if list(plan) != list(map(str, header["planned"])):
        return _incomplete("the plan's cells are not the planned ones", "line 1")
    found: set[str] = set()
    for number, line in enumerate(lines[1:], start=2):
        if line.get("kind") not in _KINDS:
            return _incomplete(f"line of kind {line.get('kind')!r}", f"line {number}")
        if line["kind"] == "load":
            continue
        name = str(line["id"])
        if name not in plan or name in found:
            return _incomplete("a cell that was not planned, or one that was recorded twice", name)
        found.add(name)
        if (line["kind"] == "watermark") != bool(plan[name]["spoil"]) or line["mode"] != plan[name]["mode"]:
            return _incomplete("a line of another kind or mode than planned", name)
        judged_line = line["failure"] is None and line["skipped"] is None
        if judged_line and (int(line["replays"]) < LEAST_REPLAYS or not line["results"]):
            return _incomplete(f"{line['replays']} replays, {len(line['results'])} results", name)
    if not any(line["kind"] == "load" for line in lines[1:]):
        return _incomplete("the images were never loaded", "loads")
    return None


def _incomplete(message: str, where: str) -> Finding:
    rule = "one header, at least one load, and every planned cell once, chained"
    return Finding("path.incomplete_record", message, where, rule, "fasttrack verify --gates path")
