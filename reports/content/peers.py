"""The peer table of a bundle, in the words of `reports.peer_table`."""

from __future__ import annotations

from collections.abc import Sequence

from reports import peer_table
from reports.document import Block, Details, Items, Paragraph, Section, Table
from reports.load import Loaded
from reports.text import count
from verify.protocol.peer_rows import Table as PeerTable
from verify.protocol.peers import read_table

__all__ = ["peers_section"]

_TITLE = "Beside peers on the same GPU"


def peers_section(loaded: Loaded) -> list[Section]:
    """The section, where a table was measured. Lines that are no peer table are refused by the bundle's check."""
    if loaded.bundle.peers is None:
        return []
    try:
        blocks = _blocks(read_table(loaded.peers))
    except (ValueError, KeyError) as error:  # KeyError: an op or geometry that this checkout does not have
        blocks = [Paragraph(f"The raw lines are no peer table that can be shown: {error}.")]
    return [Section("peers", _TITLE, blocks)]


def _blocks(table: PeerTable) -> list[Block]:
    blocks: list[Block] = [
        Paragraph("Measured in the same run of the same kit, for comparison; no verdict rests on it."),
        Paragraph(peer_table.machine(table)),
        *(Paragraph(line) for line in peer_table.ceilings(table)),
        _table("Figures, and in how many cells they are met", *peer_table.summary(table)),
        _table("Some calls beside the fastest peer", *peer_table.short_rows(table)),
        Paragraph(peer_table.mean(table)),
        *(Paragraph(line) for line in peer_table.unmeasured(table)),
    ]
    for title, columns, rows, notes in peer_table.by_op(table):
        inside: list[Block] = [_table(title, columns, rows), *([Items(notes)] if notes else [])]
        blocks.append(Details(f"{title}: {count(len(rows), 'call')}", inside, paper=False))
    return blocks


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(caption, columns, rows)
