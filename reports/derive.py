"""Derived Parquet: one table per raw JSONL file, for queries with duckdb or pandas.

The table is a function of the raw lines alone: one row per line, one column per key, nested objects flattened with
dots. The column's type is the narrowest that holds every value of the key; what fits none is canonical JSON text.
Raw JSONL stays canonical: a check recomputes this table and compares, and nothing is ever decided from it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness import canonical

__all__ = ["parquet_bytes", "same_table", "table"]

_MAX_COLUMNS = 500
_MAX_VALUES = 20_000_000
_INT64 = range(-(2**63), 2**63)
_EXACT = range(-(2**53), 2**53 + 1)


def table(lines: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Build the table of a raw file's lines, columns sorted by name after `line` (counted from 0).

    Raises:
        ValueError: more keys or values than any gate writes.
    """
    rows = [_flatten(line) for line in lines]
    names = sorted({name for row in rows for name in row})
    if len(names) > _MAX_COLUMNS or len(names) * len(rows) > _MAX_VALUES:
        raise ValueError(
            f"{len(names)} keys in {len(rows)} lines; expected at most {_MAX_COLUMNS} and {_MAX_VALUES} values"
        )
    columns: dict[str, pa.Array] = {"line": pa.array(range(len(rows)), pa.int64())}
    for name in names:
        # A raw key called `line` would hide the row number.
        columns[name if name != "line" else "line_"] = _column([row.get(name) for row in rows])
    return pa.table(columns)


def parquet_bytes(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """Serialise the table; the bytes depend on the pyarrow version, the content does not."""
    buffer = io.BytesIO()
    pq.write_table(table(lines), buffer, compression="zstd", write_statistics=False, store_schema=True)
    return buffer.getvalue()


def same_table(stored: bytes, lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether stored Parquet bytes hold exactly the table of these lines.

    Identical bytes are not parsed at all. Otherwise (another pyarrow version wrote them) the footer must announce the
    expected rows and columns, and no more data than the raw lines have, before anything is decompressed.

    Raises:
        pyarrow.ArrowException: the bytes are not Parquet.
        OSError: the bytes are cut or corrupt.
    """
    if stored == parquet_bytes(lines):
        return True
    expected = table(lines)
    file = pq.ParquetFile(io.BytesIO(stored))
    footer = file.metadata
    if (footer.num_rows, file.schema_arrow) != (expected.num_rows, expected.schema):
        return False
    announced = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    if announced > 16 * expected.nbytes + (1 << 20):
        return False
    return bool(file.read().equals(expected))


def _flatten(line: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in line.items():
        name = prefix + key
        if isinstance(value, Mapping) and value:
            row |= _flatten(value, f"{name}.")
        else:
            row[name] = value
    return row


def _column(values: list[Any]) -> pa.Array:
    present = [value for value in values if value is not None]
    if not present:
        return pa.array(values, pa.string())
    scalar = _number_type(present)
    if scalar is not None:
        return pa.array(values, scalar)
    if all(isinstance(value, bool) for value in present):
        return pa.array(values, pa.bool_())
    if all(isinstance(value, str) for value in present):
        return pa.array(values, pa.string())
    if all(isinstance(value, list) for value in present):
        inner = _number_type([item for value in present for item in value])
        if inner is not None:
            return pa.array(values, pa.list_(inner))
    return pa.array([None if value is None else canonical.line(value).decode() for value in values], pa.string())


def _number_type(values: list[Any]) -> pa.DataType | None:
    """int64 or float64 if every value fits without loss; None otherwise, and for no values at all."""
    if not values or any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return None
    if all(isinstance(value, int) for value in values):
        return pa.int64() if all(value in _INT64 for value in values) else None
    return pa.float64() if all(isinstance(value, float) or value in _EXACT for value in values) else None
