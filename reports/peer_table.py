"""The peer table as Markdown, for the README and for reports, and as JSON: one text from `verify.protocol.peers`.

Every number comes from the record; a peer that is missing shows a dash, and its reason below the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from k3_backend.geometry import geometry
from verify.protocol.peer_figures import HALF_CONTEXTS, HALF_LAYERS
from verify.protocol.peer_rows import OURS, Row, Table

__all__ = [
    "as_json", "by_op", "ceilings", "label", "machine", "markdown", "mean", "short", "short_rows", "summary",
    "unmeasured",
]  # fmt: skip

_TITLES = {
    "input_projection": "Input projection", "kda_decode": "KDA decode", "attn_res": "AttnRes",
    "mla_query": "MLA query path (q_b, W_UK)", "mla_value": "MLA value path (W_UV)", "mla_decode": "MLA decode core",
    "kda_half_layer": "KDA half-layer", "mla_half_layer": "MLA half-layer",
}  # fmt: skip
_DASH = "–"
_PARTS = frozenset({"in_place", "fla_recurrence"})
"""Peers that do a part of an op for comparison; nobody could use them in its place."""


def markdown(table: Table) -> str:
    """The whole page of a read record."""
    parts = [machine(table), *ceilings(table), _grid(*summary(table))]
    for title, columns, rows, notes in by_op(table):
        parts += [f"### {title}", _grid(columns, rows)]
        parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
    parts += [f"{line}" for line in unmeasured(table)]
    return "\n\n".join(parts) + "\n"


def short(table: Table) -> str:
    """A few rows of every op with the fastest peer, for a README; the full page has all of them."""
    return "\n\n".join([machine(table), _grid(*short_rows(table)), mean(table)]) + "\n"


def by_op(table: Table) -> Iterator[tuple[str, list[str], list[list[str]], list[str]]]:
    """Title, columns, rows and notes of every op that has rows."""
    for op, title in _TITLES.items():
        rows = [row for row in table.rows if row.cell["op"] == op]
        if rows:
            yield title, *_rows(rows), _notes(rows)


def mean(table: Table) -> str:
    """The half-layers' geometric mean in a sentence."""
    demand, judged = table.mean()
    return f"{demand.name.capitalize()}: {judged.found}."


def unmeasured(table: Table) -> list[str]:
    """A sentence about planned cells without a line, if there are any."""
    missing = table.unmeasured
    return [f"Not measured: {len(missing)} cells, {', '.join(missing)}."] if missing else []


def short_rows(table: Table) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the short table."""
    body = []
    for row in table.rows:
        ours = row.arms.get(OURS)
        if not _shown_in_short(row.cell) or ours is None:
            continue
        found = {name: timing.median for name, timing in row.arms.items() if name in row.ratios and name not in _PARTS}
        peer = min(found, key=lambda name: found[name], default=None)
        ratio = None if peer is None else row.ratios[peer]
        sites = ", ".join(fallback.partition(":")[0] for fallback in ours.fallbacks)
        body.append([
            f"{_TITLES[str(row.cell['op'])]}, {label(row.cell)}" + (f" (standard path in {sites})" if sites else ""),
            f"{ours.median:.1f}",
            _DASH if row.share is None else f"{row.share:.0%}",
            _DASH if peer is None else f"{peer} {found[peer]:.1f}",
            _DASH if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f}{_DASH}{ratio.high:.2f})",
        ])  # fmt: skip
    return ["call", "ours us", "share of ceiling", "fastest peer us", "ratio (95 %)"], body


def summary(table: Table) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: per figure of the issue, in how many demands it is met."""
    rows = []
    for figure, states in table.figures():
        total = sum(states.values())
        whole = "yes" if total and states["met"] == total else "not measured" if not total else "no"
        rows.append([str(figure.row), figure.name, whole, *(str(states[s]) for s in states)])
    demand, judged = table.mean()
    whole = "yes" if judged.state == "met" else "no"
    counts = ["1" if judged.state == state else "0" for state in ("met", "missed", "open", "unknown")]
    rows.append([str(demand.row), f"{demand.name}: {judged.found}; {judged.demand}", whole, *counts])
    return ["row", "figure", "met in every cell", "met", "missed", "open", "unknown"], rows


def label(cell: Mapping[str, Any]) -> str:
    """A cell's name for people."""
    g = geometry(str(cell["geometry"]))
    size = f"{'B' if cell['op'] in ('kda_decode', 'mla_decode', *HALF_LAYERS) else 'M'} {cell['batch']}"
    if cell["op"] == "input_projection":
        return f"{cell['width']} x {g.hidden}, {size}"
    if cell["op"] == "attn_res":
        return f"{cell['sources']} saved rows, {size}"
    if cell["op"] == "mla_decode":
        return f"{g.heads} heads, {size}, {int(cell['context']) // 1024}k ({int(cell['cache_bytes']) / 1e6:.0f} MB)"
    if cell["context"] is not None:
        size += f", {int(cell['context']) // 1024}k"
    return f"{g.heads} heads, {size}" + (f", T {cell['tokens']}" if cell["tokens"] > 1 else "")


def as_json(table: Table) -> dict[str, Any]:
    """The table as one JSON object; what could not be had is null beside its reason."""
    return {
        "protocol": table.header["protocol"],
        "ceilings": {kind: asdict(ceiling) for kind, ceiling in table.ceilings.items()},
        "empty_us": table.empty_us,
        "rows": [_row_json(row) for row in table.rows],
        "unmeasured": list(table.unmeasured),
        "figures": [{"row": f.row, "name": f.name, "op": f.op, **states} for f, states in table.figures()],
        "half_layers_mean": asdict(table.mean()[1]),
    }


def _row_json(row: Row) -> dict[str, Any]:
    plain = asdict(row)
    plain["arms"] = {**plain["arms"], **dict.fromkeys(row.missing)}
    return plain


def machine(table: Table) -> str:
    """Hardware, driver, packages, time and commit in a sentence; what the record does not say is "not known"."""
    told = table.header["machine"]
    gpu, packages = told.get("gpu") or {}, told.get("packages") or {}
    known = {"driver": gpu.get("driver"), "CUDA": told.get("cuda"), "torch": packages.get("torch")}
    parts = [f"1x {gpu.get('name') or 'GPU, name not known'}"]
    where = ", ".join([*parts, *(f"{name} {value or 'not known'}" for name, value in known.items())])
    return f"{where}, {table.header['begun']}, commit {str(table.header['head'])[:12]}."


def ceilings(table: Table) -> list[str]:
    """What the peers are, what ceilings were reached, and how to read the numbers."""
    packages = table.header.get("packages") or {}
    brought = ", ".join(packages.get("distributions", [])) or "none"
    standard = ", ".join(f"{name} {version}" for name, version in (table.header.get("standard") or {}).items())
    found = "; ".join(f"{c.kind} {c.gbps / 1e3:.2f} TB/s ({c.method})" for c in table.ceilings.values())
    spacing = "not measured" if table.empty_us is None else f"{table.empty_us:.2f} us"
    return [
        f"Brought for peers: {brought}. The standard path: {standard or 'not known'}.",
        f"Ceilings of the same run: {found or 'not measured'}. Empty launches follow each other in {spacing}.",
        "Times are medians in us per call with quartiles: graphs of at least 8 calls over distinct inputs, arms in "
        "turns in one process, half-layers in one process per arm; device is the profiler's sum over our kernels. In "
        "brackets a peer's time divided by ours with the 95 % bounds of its median. Share: bytes read and written once "
        "(of a half-layer its weights, caches and states), over the matching ceiling.",
    ]


def _shown_in_short(cell: Mapping[str, Any]) -> bool:
    batches = {"mla_decode": (1, 16, 64), "input_projection": (1, 16, 64), "attn_res": (1, 64)}
    return (
        cell["batch"] in batches.get(str(cell["op"]), (1, 8, 64))
        and cell["geometry"] != "k3-slice-tp16"
        and cell["tokens"] == 1
        and cell["sources"] in (None, 8)
        and cell["context"] in (None, *(HALF_CONTEXTS if cell["op"] in HALF_LAYERS else (8192, 32_768)))
    )


def _rows(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    peers = list(dict.fromkeys(name for row in rows for name in (*row.arms, *row.missing) if name != OURS))
    columns = ["call", "floor", "ours", "device", "share", *peers, "figures"]
    body = []
    for row in rows:
        ours = row.arms.get(OURS)
        body.append([
            label(row.cell),
            _DASH if row.floor_us is None else f"{row.floor_us:.2f}",
            _DASH if ours is None else f"{ours.median:.2f} ({ours.low:.2f}{_DASH}{ours.high:.2f})",
            _DASH if ours is None or ours.device_us is None else f"{ours.device_us:.2f}",
            _DASH if row.share is None else f"{row.share:.0%}",
            *(_peer(row, name) for name in peers),
            _judged(row),
        ])  # fmt: skip
    return columns, body


def _peer(row: Row, name: str) -> str:
    timing = row.arms.get(name)
    if timing is None:
        return _DASH
    ratio = row.ratios.get(name)
    if ratio is None:
        return f"{timing.median:.2f}"
    return f"{timing.median:.2f} ({ratio.value:.2f}; {ratio.low:.2f}{_DASH}{ratio.high:.2f})"


def _judged(row: Row) -> str:
    """`met`, or the demands that are not, in words; why a number is missing stands below the table."""
    if not row.judged:
        return _DASH
    known = [f"{j.state}: {j.demand} ({j.found})" for j in row.judged if j.state in ("missed", "open")]
    unknown = [j for j in row.judged if j.state == "unknown"]
    known += [f"unknown: {len(unknown)} of {len(row.judged)}"] if unknown else []
    return "; ".join(known) or "met"


def _notes(rows: Sequence[Row]) -> list[str]:
    """What peers leave out, and why some have no number."""
    told = {name: t.note for row in rows for name, t in row.arms.items() if t.note}
    notes = [f"{name}: {note}" for name, note in sorted(told.items())]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.missing.items():
            reasons.setdefault((name, reason), []).append(label(row.cell))
    for (name, reason), cells in sorted(reasons.items()):
        where = "every call" if len(cells) == len(rows) else ", ".join(cells)
        notes.append(f"{name} has no number ({where}): {reason}")
    notes += [f"{label(row.cell)} failed: {row.failure}" for row in rows if row.failure]
    for site, calls in sorted(_fallbacks(rows).items()):
        notes.append(f"ours takes the standard path ({', '.join(calls)}) at {site}")
    short = [row for row in rows if row.rotated_bytes is not None and row.rotated_bytes < 400_000_000]
    if short:
        least = min(row.rotated_bytes or 0 for row in short)
        notes.append(f"inputs of {len(short)} calls rotate through less than 400 MB (at least {least / 1e6:.0f} MB)")
    return notes


def _fallbacks(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Site and reason -> the calls in which our arm took the standard path there."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for fallback in row.arms[OURS].fallbacks if OURS in row.arms else ():
            found.setdefault(fallback, []).append(label(row.cell))
    return found


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join(
        f"| {' | '.join(text.replace('|', '/').replace(chr(10), ' ') for text in line)} |" for line in lines
    )
