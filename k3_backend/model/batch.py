"""One step's batch as the engine hands it over: tokens, lengths, state slots and cache rows of every request.

A `Batch` describes; it decides nothing and owns no state. Rows are request-major: the query tokens of request 0 in
order, then those of request 1, and so on. A padding request has its full query length, `seq_lens` 0, null slots
(id <= 0) and cache rows -1: it computes zeros and touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Batch", "BatchError", "cache_rows", "local_position"]


class BatchError(ValueError):
    """A batch whose fields contradict each other; the message says which field, its value and the rule."""


@dataclass(frozen=True)
class Batch:
    """N query tokens of B requests.

    Args:
        token_ids: [N] i64.
        query_lens: [B] i32, query tokens of each request in this step, >= 1; they sum to N.
        seq_lens: [B] i32, global length of each request including this step's tokens; 0 for padding.
        slots: [B, T] i32, state slots of each request: after query token t its recurrent state is stored in column
            t; column 0 also holds the conv window. Ids <= 0 are null. A prefill chunk uses column 0 only.
        accepted: [B] i32, query tokens of the request's previous step that were kept, in [1, T]; 1 after a prefill
            chunk. The recurrent state is read from column `accepted - 1`.
        block_table: [B, max_pages] i32, cache pages of each request in order of (local) position.
        slot_mapping: [N] i64, flat cache row of each query token, -1 to write none.
        decode: per request, True for a decode (or verify) row and False for a prefill chunk. A request's first
            tokens are always a prefill chunk: only that starts from empty state.

    Raises:
        BatchError: shapes or dtypes contradict each other.
    """

    token_ids: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    slots: Tensor
    accepted: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    decode: tuple[bool, ...]

    def __post_init__(self) -> None:
        rows, requests = self.token_ids.shape[0], len(self.decode)
        for name, shape, dtype in (
            ("token_ids", (rows,), torch.int64),
            ("query_lens", (requests,), torch.int32),
            ("seq_lens", (requests,), torch.int32),
            ("slots", (requests, self.slots.shape[-1]), torch.int32),
            ("accepted", (requests,), torch.int32),
            ("block_table", (requests, self.block_table.shape[-1]), torch.int32),
            ("slot_mapping", (rows,), torch.int64),
        ):
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise BatchError(
                    f"batch.{name}: shape {tuple(tensor.shape)}, dtype {tensor.dtype}; expected {shape}, {dtype} "
                    f"for {rows} rows of {requests} requests; next: build the batch from one scheduler output"
                )

    @property
    def rows(self) -> int:
        """N, query tokens in the step."""
        return self.token_ids.shape[0]

    @property
    def requests(self) -> int:
        """B, requests in the step, padding included."""
        return len(self.decode)

    @cached_property
    def pure_decode(self) -> bool:
        """Whether every request is a decode or verify row."""
        return all(self.decode)

    @cached_property
    def query_lens_list(self) -> list[int]:
        """`query_lens` as Python integers."""
        lens: list[int] = self.query_lens.tolist()
        return lens

    @cached_property
    def row_starts(self) -> list[int]:
        """First row of each request, and N at the end."""
        starts = [0]
        for length in self.query_lens_list:
            starts.append(starts[-1] + length)
        return starts

    @cached_property
    def uniform_tokens(self) -> int | None:
        """T if every request has exactly as many query tokens as slot columns (what the decode ops take), else None."""
        lens = set(self.query_lens_list)
        return self.slots.shape[1] if lens == {self.slots.shape[1]} else None

    def check(self) -> Batch:
        """Check the values too (costs a few host reads; the constructor checks shapes only).

        Raises:
            BatchError: names the field, the request and the rule.
        """
        columns = self.slots.shape[1]
        if self.row_starts[-1] != self.rows:
            raise BatchError(
                f"batch.query_lens: sum {self.row_starts[-1]}; expected the {self.rows} rows of token_ids; "
                "next: build the batch from one scheduler output"
            )
        for b, (query, seq, kept, decode) in enumerate(
            zip(self.query_lens_list, self.seq_lens.tolist(), self.accepted.tolist(), self.decode, strict=True)
        ):
            rules = (
                ("query_lens", query, query >= 1, ">= 1"),
                ("query_lens", query, not decode or query <= columns, f"<= {columns} slot columns for a decode row"),
                ("seq_lens", seq, seq == 0 or seq >= query, f"0 (padding) or >= query length {query}"),
                ("accepted", kept, 1 <= kept <= columns, f"in [1, {columns}]"),
            )
            for field, value, good, rule in rules:
                if not good:
                    raise BatchError(
                        f"batch.{field}[{b}]: {value}; expected {rule}; next: build the batch from one scheduler output"
                    )
        return self


def local_position(position: int, *, rank: int, size: int, interleave: int) -> int | None:
    """Position inside a decode-context-parallel shard, or None if the position lives on another rank.

    Position x lives on rank (x // interleave) % size, at local position
    (x // (interleave * size)) * interleave + x % interleave.
    """
    if (position // interleave) % size != rank:
        return None
    return position // (interleave * size) * interleave + position % interleave


def cache_rows(
    pages: list[int], first: int, count: int, page_size: int, *, rank: int = 0, size: int = 1, interleave: int = 1
) -> list[int]:
    """Flat cache rows of positions first .. first+count-1 of one request; -1 where another shard owns the position.

    Args:
        pages: the request's pages in order of local position.
        first: first global position.
        count: number of positions.
        page_size: rows per page.
        rank: this decode-context-parallel shard.
        size: number of shards.
        interleave: consecutive positions per shard.

    Raises:
        BatchError: a position lies behind the last page.
    """
    rows: list[int] = []
    for position in range(first, first + count):
        local = local_position(position, rank=rank, size=size, interleave=interleave)
        if local is None:
            rows.append(-1)
            continue
        if local // page_size >= len(pages):
            raise BatchError(
                f"block table of {len(pages)} pages: position {position} needs page {local // page_size}; "
                f"expected pages for every position; next: allocate pages before building the step"
            )
        rows.append(pages[local // page_size] * page_size + local % page_size)
    return rows
