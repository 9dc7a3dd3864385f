"""Token mixing of a ragged batch: prefill chunks beside decode rows, in the standard path.

Everything else of a layer works row by row and needs no knowledge of requests; KDA and attention do. Decode rows go
through the decode ops' standard functions, grouped by their number of query tokens; prefill chunks go through the
chunked delta rule and tiled attention. Host reads are free to happen here: this path is never compiled or replayed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_backend.model.batch import Batch
from k3_backend.model.kda_prefill import CHUNK, delta_rule
from k3_backend.ops.kda_decode import standard as kda
from k3_backend.ops.maths import Attributes, Tensors, need
from k3_backend.ops.mla_decode import standard as mla

__all__ = ["MixedBatch"]

SCORES_PER_TILE = 1 << 24
"""Largest number of (query head, cache row) pairs per attention call of a prefill chunk; bounds the mask's memory."""


@dataclass(frozen=True)
class _Prefill:
    """One live prefill chunk."""

    request: int
    first_row: int
    tokens: int
    start: int
    """Global position of its first token; 0 starts from empty state."""


class MixedBatch:
    """Index structures of one ragged batch, computed once and used by every layer.

    Args:
        batch: the step's batch; checked.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch.check()
        seq_lens = batch.seq_lens.tolist()
        slots = batch.slots.tolist()
        accepted = batch.accepted.tolist()
        groups: dict[int, list[int]] = defaultdict(list)
        self._prefills: list[_Prefill] = []
        for b, tokens in enumerate(batch.query_lens_list):
            if batch.decode[b]:
                groups[tokens].append(b)
            elif seq_lens[b] > 0 and slots[b][0] > 0 and slots[b][accepted[b] - 1] > 0:
                self._prefills.append(_Prefill(b, batch.row_starts[b], tokens, seq_lens[b] - tokens))
        self._groups = [
            (
                tokens,
                torch.tensor(requests),
                torch.tensor([batch.row_starts[b] + i for b in requests for i in range(tokens)]),
            )
            for tokens, requests in groups.items()
        ]

    def kda_decode(self, t: Tensors, a: Attributes) -> dict[str, Tensor]:
        """KDA token mixing; same contract as the op's standard function, over the ragged batch."""
        proj, slots, accepted = need(t, "proj"), need(t, "slots"), need(t, "accepted")
        out = torch.zeros(proj.shape[0], need(t, "f_b").shape[0], dtype=torch.bfloat16)
        for _, requests, rows in self._groups:
            part = {**t, "proj": proj[rows], "slots": slots[requests], "accepted": accepted[requests]}
            out[rows] = kda.standard(part, a)["out"]
        if self._prefills:
            self._kda_prefill(t, a, out)
        return {"out": out}

    def mla_decode(self, t: Tensors, a: Attributes) -> dict[str, Tensor]:
        """MLA core; same contract as the op's standard function, over the ragged batch."""
        query, table, seq_lens = need(t, "query"), need(t, "block_table"), need(t, "seq_lens")
        out = torch.zeros(*query.shape[:2], int(a["kv_lora"]), dtype=torch.bfloat16)
        lse = torch.full(query.shape[:2], -torch.inf)
        for tokens, requests, rows in self._groups:
            part = {**t, "query": query[rows], "block_table": table[requests], "seq_lens": seq_lens[requests]}
            result = mla.standard(part, {**a, "tokens": tokens})
            out[rows], lse[rows] = result["out"], result["lse"]
        for chunk in self._prefills:
            _attend_chunk(chunk, query, need(t, "kv_cache"), table[chunk.request], a, out, lse)
        return {"out": out, "lse": lse}

    def _kda_prefill(self, t: Tensors, a: Attributes, out: Tensor) -> None:
        """Fill the prefill rows of `out` and advance the chunks' states in their slots."""
        proj, conv_state, state, conv_w = (need(t, n) for n in ("proj", "conv_state", "state", "conv_w"))
        width, history = conv_w.shape[0], conv_w.shape[1] - 1
        longest = max(chunk.tokens for chunk in self._prefills)
        padded = -(-longest // CHUNK) * CHUNK
        lengths = torch.tensor([chunk.tokens for chunk in self._prefills])
        fresh = torch.tensor([chunk.start == 0 for chunk in self._prefills])
        requests = torch.tensor([chunk.request for chunk in self._prefills])
        slots, column = need(t, "slots")[requests].long(), need(t, "accepted")[requests].long() - 1
        read = slots.gather(1, column.unsqueeze(1)).squeeze(1)

        step = torch.arange(padded)
        real = step < lengths.unsqueeze(1)
        index = torch.tensor([chunk.first_row for chunk in self._prefills]).unsqueeze(1) + step
        rows = proj[torch.where(real, index, 0)].masked_fill_(~real.unsqueeze(2), 0.0)

        at = column.unsqueeze(1) + torch.arange(history)
        old = conv_state[slots[:, :1], at].masked_fill_(fresh.view(-1, 1, 1), 0.0)
        window = torch.cat([old, rows[..., :width]], 1)
        q, k, v = kda.normalised_qkv(kda.causal_conv(window, conv_w), need(t, "dt_bias").shape, a["l2_eps"])
        log_decay, beta = kda.gates(t, a, rows)
        log_decay.masked_fill_(~real.view(*real.shape, 1, 1), 0.0)
        beta.masked_fill_(~real.view(*real.shape, 1, 1), 0.0)

        S = state[read].masked_fill_(fresh.view(-1, 1, 1, 1), 0.0)
        o, S = delta_rule(q, k, v, log_decay, beta, S)
        state[slots[:, 0]] = S
        last = lengths.unsqueeze(1) + torch.arange(history)
        conv_state[slots[:, 0], :history] = window.gather(1, last.unsqueeze(2).expand(-1, -1, width))
        out[index[real]] = kda.gated_norm(t, a, o, rows)[real]


def _attend_chunk(
    chunk: _Prefill, query: Tensor, cache: Tensor, table: Tensor, a: Attributes, out: Tensor, lse: Tensor
) -> None:
    """Causal attention of one chunk, in tiles of query rows; each tile reads only the cache rows that it can see."""
    page_size, heads, kv_lora = cache.shape[1], query.shape[1], int(a["kv_lora"])
    tile = max(1, SCORES_PER_TILE // (heads * (chunk.start + chunk.tokens)))
    for first in range(0, chunk.tokens, tile):
        count = min(tile, chunk.tokens - first)
        seen = mla.visible_rows(chunk.start + first + torch.arange(1, count + 1), a)
        position = torch.arange(max(int(seen[-1]), 1))
        index = table[position // page_size].long() * page_size + position % page_size
        rows = slice(chunk.first_row + first, chunk.first_row + first + count)
        part_out, part_lse = mla.attend(query[rows], cache, index.unsqueeze(0), seen.unsqueeze(0), a["scale"], kv_lora)
        out[rows], lse[rows] = part_out[0], part_lse[0]
