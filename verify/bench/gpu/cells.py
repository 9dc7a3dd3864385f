"""Which cells the peer table has, and the bytes that one call of each must move.

Bytes are the definition of issue 3: every input read once, every output and state written once. Of an input that is
a part of a wider tensor, such as the gate's columns of a projection, only that part counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from k3_backend.geometry import Geometry, geometry

__all__ = ["BATCHES", "PAGE", "PeerCell", "moved_bytes", "plan", "width"]

BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
MLA_BATCHES = (1, 4, 16, 64)
MLA_CONTEXTS = (1024, 8192, 32_768, 131_072)
RES_BATCHES = (1, 4, 16, 64)
RES_SOURCES = (1, 4, 8)
VERIFY = ((1, 8), (4, 8), (16, 8))
"""(batch, T) of the speculative cells of kda_decode."""
PAGE = 64
"""Cache rows per page."""
GEOMETRIES = ("k3-slice-tp8", "k3-slice-tp16")
RES_GEOMETRY = "k3"
"""AttnRes does not depend on the ranks; the slices have too few layers for eight saved rows."""
_BF16, _F32, _I32, _I64 = 2, 4, 4, 8


@dataclass(frozen=True)
class PeerCell:
    """One row of the table."""

    op: str
    geometry: str
    batch: int
    tokens: int = 1
    context: int | None = None
    """Cached tokens per request, this step's included; `mla_decode` only."""
    site: str | None = None
    """`kda` or `mla`: whose packing an `input_projection` has."""
    sources: int | None = None
    """Saved rows that `attn_res` mixes."""

    @property
    def rows(self) -> int:
        """M."""
        return self.batch * self.tokens

    @property
    def key(self) -> str:
        """Name of the cell in lines and tables."""
        parts = [self.op, self.geometry, f"B{self.batch}", f"T{self.tokens}"]
        parts += [] if self.context is None else [f"C{self.context}"]
        parts += [] if self.site is None else [self.site]
        parts += [] if self.sources is None else [f"n{self.sources}"]
        return "/".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The cell with its bytes, for a header line."""
        read, write = moved_bytes(self)
        facts = {"key": self.key, "read_bytes": read, "write_bytes": write, "cache_bytes": _cache_bytes(self)}
        return {**asdict(self), **facts, "width": width(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PeerCell:
        """Inverse of `to_json`; derived entries are computed again."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


def plan(units: Iterable[tuple[str, str]]) -> list[PeerCell]:
    """Cells of the table, in the order in which they are measured.

    Args:
        units: (op, geometry) of the artifacts at hand.
    """
    cells: list[PeerCell] = []
    at_hand = set(units)
    residual = [PeerCell("attn_res", RES_GEOMETRY, batch, sources=n) for n in RES_SOURCES for batch in RES_BATCHES]
    for name in GEOMETRIES:
        sites = [PeerCell("input_projection", name, batch, site=site) for site in ("kda", "mla") for batch in BATCHES]
        recurrent = [PeerCell("kda_decode", name, batch) for batch in BATCHES]
        recurrent += [PeerCell("kda_decode", name, batch, tokens=tokens) for batch, tokens in VERIFY]
        dense = [PeerCell(op, name, batch) for op in ("mla_query", "mla_value") for batch in BATCHES]
        core = [PeerCell("mla_decode", name, b, context=c) for b in MLA_BATCHES for c in MLA_CONTEXTS]
        cells += [*sites, *recurrent, *dense, *core, *(residual if name == GEOMETRIES[0] else [])]
    return [cell for cell in cells if (cell.op, cell.geometry) in at_hand]


def width(cell: PeerCell) -> int | None:
    """Output rows N of a projection; None for other ops."""
    if cell.op != "input_projection":
        return None
    g = geometry(cell.geometry)
    return g.mla_proj_rows if cell.site == "mla" else g.kda_proj_rows


def moved_bytes(cell: PeerCell) -> tuple[int, int]:
    """(read, written) bytes of one call.

    Raises:
        KeyError: an op that the table does not have.
    """
    return _BYTES[cell.op](cell, geometry(cell.geometry))


def _cache_bytes(cell: PeerCell) -> int:
    return cell.batch * (cell.context or 0) * geometry(cell.geometry).mla_row * _BF16


def _projection(cell: PeerCell, g: Geometry) -> tuple[int, int]:
    n = width(cell)
    assert n is not None
    return (cell.rows + n) * g.hidden * _BF16, cell.rows * n * _BF16


def _kda(cell: PeerCell, g: Geometry) -> tuple[int, int]:
    rows, batch, channels = cell.rows, cell.batch, 3 * g.kda_width
    state = g.heads * g.kda_head_dim**2 * _F32
    constants = channels * g.conv_width * _F32 + g.kda_width * g.kda_gate_rank * _BF16
    constants += (g.heads + g.heads * g.kda_head_dim) * _F32 + g.kda_head_dim * _BF16
    described = (batch * cell.tokens + batch) * _I32
    used = 4 * g.kda_width + g.kda_gate_rank + g.heads
    read = rows * used * _BF16 + constants + described + batch * (3 * channels * _BF16 + state)
    write = batch * ((cell.tokens + 2) * channels * _BF16 + cell.tokens * state) + rows * g.kda_width * _BF16
    return read, write


def _attn_res(cell: PeerCell, g: Geometry) -> tuple[int, int]:
    assert cell.sources is not None
    row = g.hidden * _BF16
    return cell.rows * (2 + cell.sources) * row + 3 * row, cell.rows * 2 * row  # prefix, delta, saved; prefix, out


def _mla_query(cell: PeerCell, g: Geometry) -> tuple[int, int]:
    rows = cell.rows
    weights = g.heads * (g.nope + g.pe) * g.q_lora + g.heads * g.nope * g.kv_lora + g.q_lora + g.kv_lora
    read = (weights + rows * (g.q_lora + g.mla_row)) * _BF16 + rows * _I64
    return read, rows * (g.heads + 1) * g.mla_row * _BF16


def _mla_value(cell: PeerCell, g: Geometry) -> tuple[int, int]:
    rows = cell.rows
    read = (g.heads * g.v_dim * g.kv_lora + rows * (g.heads * g.kv_lora + g.mla_width)) * _BF16
    return read + rows * g.heads * _F32, rows * g.mla_width * _BF16


def _mla_decode(cell: PeerCell, g: Geometry) -> tuple[int, int]:
    assert cell.context is not None
    pages = -(-cell.context // PAGE)
    read = cell.rows * g.heads * g.mla_row * _BF16 + _cache_bytes(cell) + cell.batch * (pages + 1) * _I32
    return read, cell.rows * g.heads * (g.kv_lora * _BF16 + _F32)


_BYTES = {
    "input_projection": _projection, "kda_decode": _kda, "attn_res": _attn_res, "mla_query": _mla_query,
    "mla_value": _mla_value, "mla_decode": _mla_decode,
}  # fmt: skip
