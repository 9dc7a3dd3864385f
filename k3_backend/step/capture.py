"""A captured decode step: static buffers and the launch list that works on them.

One capture serves every batch of up to `requests` requests with `tokens` query tokens each. `run` copies the batch's
metadata and token embeddings into the static buffers, replays the list once and returns a view of the result. State
changed by a run: exactly the pools of the `DecodeState` that the capture was made for, at the slots, cache rows and
pages that the batch names. Rows beyond the batch are null requests: slot 0, length 0, cache row -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from k3_backend.aot.cpu.launch import TENSOR_ALIGNMENT, KernelSet, LaunchList, Pool
from k3_backend.model.batch import Batch
from k3_backend.model.program import Site, allocate_buffers, bind
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.step.ledger import Ledger
from k3_backend.step.plan import max_pages

__all__ = ["Capture", "Constants", "Shared", "launchable_constants"]

Constants = Mapping[tuple[int | None, str], Mapping[str, Tensor]]
"""(layer, site name) -> weights by argument name."""


def launchable_constants(weights: ModelWeights, program: tuple[Site, ...]) -> Constants:
    """Weights of every site as kernels require them; only a tensor that is not contiguous and aligned is copied."""

    def fit(tensor: Tensor) -> Tensor:
        good = tensor.is_contiguous() and tensor.data_ptr() % TENSOR_ALIGNMENT == 0
        return tensor if good else tensor.contiguous().clone()

    return {
        (site.layer, site.name): {name: fit(t) for name, t in weights.constants(site.layer, site.name).items()}
        for site in program
    }


@dataclass(frozen=True)
class Shared:
    """What all captures of one backend work with."""

    embed: Tensor
    """[vocab, D] bf16 token embeddings."""
    constants: Constants
    """From `launchable_constants`."""
    kernels: KernelSet
    pool: Pool
    """Workers that replay the lists."""
    state: DecodeState
    """Pools, bound by address: another DecodeState needs other captures."""
    ledger: Ledger
    """Counts every finished launch."""


class _Window(NamedTuple):
    """Views of the static buffers that one size of batch fills or reads."""

    slots: Tensor
    accepted: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    prefix: Tensor
    padding: Tensor
    """Prefix rows behind the batch."""
    hidden: Tensor


class Capture:
    """The specialised step for one captured shape.

    Args:
        shared: weights, kernels, workers, state and ledger.
        program: sites for T = tokens.
        requests: B, padding included.
        tokens: T, query tokens per request.

    Raises:
        BindError, ScheduleError: a buffer or schedule does not fit a kernel; `Planner.plan` excludes the latter.
    """

    def __init__(self, shared: Shared, program: tuple[Site, ...], *, requests: int, tokens: int) -> None:
        rows = requests * tokens
        self.requests = requests
        self.tokens = tokens
        self._embed = shared.embed
        state = shared.state
        self._buffers = allocate_buffers(state.geometry, rows)
        self._metadata = {
            "slots": torch.zeros(requests, tokens, dtype=torch.int32),
            "accepted": torch.ones(requests, dtype=torch.int32),
            "block_table": torch.zeros(requests, max_pages(state), dtype=torch.int32),
            "seq_lens": torch.zeros(requests, dtype=torch.int32),
            "slot_mapping": torch.full((rows,), -1, dtype=torch.int64),
        }
        self._filled = 0
        """Requests of the last batch; rows behind it are null already."""
        self._windows: dict[int, _Window] = {}
        self.launches = LaunchList(shared.pool)
        tensors = {**self._buffers, **self._metadata, **state.tensors()}
        for site in program:
            self.launches.add(
                shared.kernels[site.op],
                bind(site, tensors, shared.constants[site.layer, site.name]),
                site.attrs,
                rows=rows,
                layer=site.layer,
                site=site.name,
                counter=shared.ledger.counter(site),
            )

    def run(self, batch: Batch) -> Tensor:
        """Run one step.

        Args:
            batch: at most `requests` requests of exactly `tokens` query tokens (as planned).

        Returns:
            hidden [N, D] bf16 with model.norm applied: a view of a static buffer, valid until the next run of this
            capture. Clone it to keep it.

        Raises:
            LaunchError: a kernel failed; state that earlier launches of this step wrote stays written.
        """
        window = self._load(batch)
        self.launches.replay()
        return window.hidden

    def _load(self, batch: Batch) -> _Window:
        """Copy a batch into the static buffers and make the rows behind it null."""
        if batch.requests < self._filled:
            self._clear(batch.requests)
        self._filled = batch.requests
        window = self._window(batch.requests)
        window.slots.copy_(batch.slots)
        window.accepted.copy_(batch.accepted)
        window.seq_lens.copy_(batch.seq_lens)
        window.slot_mapping.copy_(batch.slot_mapping)
        # Columns behind the batch's own keep old page ids: positions there lie beyond every seq_len.
        window.block_table[:, : batch.block_table.shape[1]].copy_(batch.block_table)
        torch.index_select(self._embed, 0, batch.token_ids, out=window.prefix)
        if batch.requests < self.requests:
            # A null request's prefix would grow from step to step, since nothing ever restarts it from an embedding.
            window.padding.zero_()
        return window

    def _window(self, requests: int) -> _Window:
        """Views for a number of requests, made once: slicing anew would cost as much as the copies themselves."""
        if requests not in self._windows:
            rows = requests * self.tokens
            meta, prefix = self._metadata, self._buffers["prefix"]
            self._windows[requests] = _Window(
                slots=meta["slots"][:requests],
                accepted=meta["accepted"][:requests],
                seq_lens=meta["seq_lens"][:requests],
                slot_mapping=meta["slot_mapping"][:rows],
                block_table=meta["block_table"][:requests],
                prefix=prefix[:rows],
                padding=prefix[rows:],
                hidden=self._buffers["hidden"][:rows],
            )
        return self._windows[requests]

    def _clear(self, first: int) -> None:
        """Make requests first.. null."""
        self._metadata["slots"][first:] = 0
        self._metadata["accepted"][first:] = 1
        self._metadata["seq_lens"][first:] = 0
        self._metadata["block_table"][first:] = 0
        self._metadata["slot_mapping"][first * self.tokens :] = -1
