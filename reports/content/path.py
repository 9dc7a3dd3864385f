"""The path proof's tables: what the ledger counted per step and site, and whether watermarks were noticed.

Counts are the raw lines' own; distances and their tolerances come from the protocol's functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from reports import protocols
from reports.document import Block, Code, Content, Details, Paragraph, Table, Word
from reports.load import Loaded
from verify.protocol import kernels

__all__ = ["path_blocks"]

Line = Mapping[str, Any]


def path_blocks(loaded: Loaded) -> list[Block]:
    """Tables of the path gate; empty where no step was recorded."""
    lines = loaded.raw.get("path", ())
    cells = [line for line in lines if line.get("kind") == "cell" and line["failure"] is None]
    tolerances = [line for line in lines if line.get("kind") == "tolerance"]
    if not cells or not tolerances:
        return []
    protocol = protocols.implementation("path", loaded.results["path"].protocol_id)
    allowed = protocol.step_tolerance(tolerances[0]["standard"])
    marks = [
        line for line in lines if line.get("kind") == "watermark" and line["failure"] is None and not line["refusals"]
    ]
    lead = (
        "The ledger counts, natively and per site, which implementation ran. A judged step must have run the "
        "specialised kernel at every site and nothing else; its result must lie near the standard step's."
    )
    blocks: list[Block] = [Paragraph(lead), _steps(cells, allowed)]
    if marks:
        blocks += [Paragraph(_WATERMARK), _watermarks(marks, allowed, protocol)]
    return [*blocks, Details("Ledger by site, summed over the judged steps", (_sites(cells),))]


_WATERMARK = (
    "A watermark makes one op deliberately wrong. If a comparison did not notice it, it never saw that op's result."
)


def _steps(cells: Sequence[Line], allowed: Mapping[str, float]) -> Table:
    rows: list[tuple[Content, ...]] = []
    for cell in cells:
        sites = cell["ledger"]["sites"]
        shares = [float(d[name]) / limit for d in cell["distances"] for name, limit in allowed.items()]
        rows.append(
            (
                Code(str(cell["id"])),
                "judged" if cell["mode"] == "auto" else f"control: {cell['mode']}",
                f"{cell['steps']}",
                f"{sum(site['specialized'] for site in sites):,}",
                f"{sum(site['standard'] for site in sites):,}",
                f"{sum(cell['ledger']['fallbacks'].values()):,}",
                f"{100 * max(shares):.0f} %" if shares else "–",
            )
        )
    columns = ("step", "role", "runs", "specialised launches", "standard launches", "fallbacks", "of tolerance")
    return Table("Steps and what ran in them", columns, rows, frozenset({2, 3, 4, 5, 6}))


def _watermarks(marks: Sequence[Line], allowed: Mapping[str, float], protocol: ModuleType) -> Table:
    rows: list[tuple[Content, ...]] = []
    for mark in marks:
        step = any(protocol.step_exceeds(distance, allowed) for distance in mark["distances"])
        rows.append((Code(str(mark["spoil"])), _noticed(step), _noticed(kernels.case_fails(mark["case"]))))
    return Table("Watermarks", ("op", "step comparison", "kernels comparison"), rows)


def _noticed(seen: bool) -> Word:
    return Word("noticed", "good") if seen else Word("not noticed", "bad")


def _sites(cells: Sequence[Line]) -> Table:
    totals: dict[tuple[str, str, str], list[int]] = {}
    for cell in cells:
        if cell["mode"] != "auto":
            continue
        for site in cell["ledger"]["sites"]:
            layer = "final" if site["layer"] is None else str(site["layer"])
            entry = totals.setdefault((layer, str(site["site"]), str(site["op"])), [0, 0])
            entry[0] += site["specialized"]
            entry[1] += site["standard"]
    rows = [
        (layer, Code(site), Code(op), f"{specialised:,}", f"{standard:,}")
        for (layer, site, op), (specialised, standard) in totals.items()
    ]
    return Table("Launches by site", ("layer", "site", "op", "specialised", "standard"), rows, frozenset({3, 4}))
