"""The device memory of a timed chain: weights, states, caches, batch fields, and inputs that change with every replay.

Everything follows from the block's seed, the cell's key and the shapes, so all arms of a block hold the same. Weights
and caches serve all cells of a block; what a chain changes is put back by `Chain.start`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3_backend.geometry import Geometry
from k3_backend.model.program import BATCH_FIELDS, DTYPES, HALF_LAYERS, Site, program_buffers
from k3_backend.ops import OPS
from verify.workers.chain_contents import constant, filled, rng

__all__ = ["BANK", "Chain", "Inputs", "Memory"]

PAGE = 64
BANK = 5
"""Different inputs that replays go through. Odd, so that a kernel that skips every second call is seen."""
ALIGNMENT = 256
ROTATED_BYTES = 400_000_000
"""Bytes that one replay's caches have together at least: several times the last-level cache."""


class Inputs:
    """Inputs that change from replay to replay: one flat tensor, refilled from a bank inside the graph.

    Args:
        shapes: input -> its shape and dtype.
        device: where it lies.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._offsets: dict[str, tuple[int, int]] = {}
        at = 0
        for name, (shape, dtype) in shapes.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            self._offsets[name] = at, size
            at += -(-size // ALIGNMENT) * ALIGNMENT
        self.shapes = dict(shapes)
        self._flat = torch.zeros(1, at // 8, dtype=torch.int64, device=device)
        self._bank = torch.zeros(BANK, at // 8, dtype=torch.int64, device=device)
        self._index = torch.zeros(1, dtype=torch.int64, device=device)

    def views(self) -> dict[str, Tensor]:
        """Input -> its place, which a replay fills."""
        return {name: self._view(self._flat[0], name) for name in self.shapes}

    def drawn(self, number: int, name: str) -> Tensor:
        """An input's place in one entry of the bank."""
        return self._view(self._bank[number], name)

    def take(self) -> None:
        """Take the next entry of the bank; part of every replay."""
        torch.index_select(self._bank, 0, self._index, out=self._flat)
        self._index.add_(1).remainder_(BANK)

    def rewind(self) -> None:
        """Begin with the first entry again."""
        self._index.zero_()

    def _view(self, row: Tensor, name: str) -> Tensor:
        (shape, dtype), (at, size) = self.shapes[name], self._offsets[name]
        return row.view(torch.uint8)[at : at + size].view(dtype).view(shape)


@dataclass
class Chain:
    """What one cell's chain works on."""

    key: str
    seed: str
    program: tuple[Site, ...]
    buffers: dict[str, Tensor]
    """Binding -> tensor."""
    inputs: Inputs
    start_rows: dict[str, Tensor] = field(default_factory=dict)
    """Cache -> what the rows that the chain writes hold at the start."""

    def keep_rows(self) -> None:
        """Note the cache rows that the chain will write."""
        rows = self.buffers["slot_mapping"]
        caches = (name for name in self.buffers if name.startswith("kv_cache."))
        self.start_rows = {name: self.buffers[name].flatten(0, 1)[rows].clone() for name in caches}

    def start(self) -> None:
        """Contents at the start of the chain; everything else is not a number."""
        own = f"{self.key}/"
        with torch.inference_mode():
            for name, tensor in self.buffers.items():
                base = name.partition(".")[0]
                if base in BATCH_FIELDS or name in self.inputs.shapes:
                    continue
                if base == "kv_cache":
                    tensor.flatten(0, 1)[self.buffers["slot_mapping"]] = self.start_rows[name]
                elif base == "state":
                    filled(tensor, self.seed, own + name, 0.07)
                elif base in ("conv_state", "blocks", "prefix"):
                    filled(tensor, self.seed, own + name)
                else:
                    tensor.fill_(torch.nan)
            self._fill_bank(own)
            self.inputs.rewind()

    def _fill_bank(self, own: str) -> None:
        """Draw the inputs of all replays.

        Additions to a prefix are differences of independent draws: so the prefix is another one in every replay,
        however many there are, and comes back to the first draw, with which it begins.
        """
        for name, (shape, dtype) in self.inputs.shapes.items():
            base, _, number = name.partition(".")
            if base != "delta":
                for at in range(BANK):
                    filled(self.inputs.drawn(at, name), self.seed, f"{own}{name}/{at}")
                continue
            draws = [self.buffers[f"prefix.{number}"].float()]
            draws += [filled(torch.empty_like(draws[0]), self.seed, f"{own}{name}/{at}") for at in range(1, BANK)]
            for at in range(BANK):
                step = draws[(at + 1) % BANK] - draws[at]
                self.inputs.drawn(at, name).copy_(step.to(dtype).view(shape))


class Memory:
    """What the chains of one block share.

    Args:
        seed: secret of the block.
        device: where all of it lies.
    """

    def __init__(self, seed: str, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._weights: dict[tuple[str, str], dict[str, Tensor]] = {}
        """(geometry/scope, site key) -> constants."""
        self._caches: dict[str, Tensor] = {}
        """Geometry -> cache rows of the largest cell so far, bf16 [rows, ROW]."""

    def chain(
        self, g: Geometry, scope: str, program: tuple[Site, ...], key: str, batch: int, context: int, tokens: int
    ) -> Chain:
        """Allocate a chain; its contents come with `Chain.start`."""
        buffers = {
            buffer.name: torch.zeros(buffer.shape, dtype=DTYPES[buffer.dtype], device=self._device)
            for buffer in program_buffers(g, program, batch * tokens)
        }
        shapes = {name: (tuple(buffers[name].shape), buffers[name].dtype) for name in _inputs_of(program, scope)}
        inputs = Inputs(shapes, self._device)
        buffers |= inputs.views()
        buffers |= self._batch_fields(key, batch, context, tokens)
        buffers |= self._pools(g, program, batch, tokens, buffers["block_table"].numel())
        return Chain(key, self._seed, program, buffers, inputs)

    def constants(self, g: Geometry, scope: str, site: Site, buffers: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights of a site, the same in all cells of a geometry and scope."""
        where = f"{g.name}/{scope}", site.key
        if where not in self._weights:
            spec = OPS[site.op]
            call = {"N": buffers[site.bindings["out"]].shape[-1]} if site.op == "input_projection" else {}
            sizes = {**spec.sizes(g), **call}
            self._weights[where] = {
                one.name: constant(
                    one, tuple(d if isinstance(d, int) else sizes[d] for d in one.dims), DTYPES[one.dtype], self._seed,
                    f"{where[0]}/{where[1]}/{one.name}", self._device,
                )
                for one in spec.tensors
                if one.role == "constant"
            }  # fmt: skip
        return self._weights[where]

    def _batch_fields(self, key: str, batch: int, context: int, tokens: int) -> dict[str, Tensor]:
        """Scattered slots and pages, every request at the same length."""
        host = torch.device("cpu")
        pages = -(-(context + tokens) // PAGE)
        order = torch.randperm(batch * pages, generator=rng(self._seed, f"pages/{key}", host)) + 1
        table = order.view(batch, pages)
        slots = torch.randperm(batch * tokens, generator=rng(self._seed, f"slots/{key}", host)) + 1
        positions = torch.arange(context, context + tokens)
        mapping = table[:, positions // PAGE] * PAGE + positions % PAGE
        fields = {
            "slots": slots.view(batch, tokens).to(torch.int32),
            "accepted": torch.ones(batch, dtype=torch.int32),
            "block_table": table.to(torch.int32),
            "seq_lens": torch.full((batch,), context + tokens, dtype=torch.int32),
            "slot_mapping": mapping.reshape(-1),
        }
        return {name: fields[name].contiguous().to(self._device) for name in BATCH_FIELDS}

    def _pools(self, g: Geometry, program: Sequence[Site], batch: int, tokens: int, table: int) -> dict[str, Tensor]:
        """States of every copy. Caches are shared in turn where fewer than all exceed `ROTATED_BYTES`."""
        bound = dict.fromkeys(name for site in program for name in site.bindings.values())
        slots, head, device = 1 + batch * tokens, g.kda_head_dim, self._device
        pools: dict[str, Tensor] = {}
        for name in bound:
            base = name.partition(".")[0]
            if base == "state":
                pools[name] = torch.zeros(slots, g.heads, head, head, device=device)
            elif base == "conv_state":
                pools[name] = torch.zeros(slots, tokens + 2, 3 * g.kda_width, dtype=torch.bfloat16, device=device)
        caches = [name for name in bound if name.startswith("kv_cache.")]
        if caches:
            pages = 1 + table
            rows = pages * PAGE
            distinct = min(len(caches), -(-ROTATED_BYTES // (rows * g.mla_row * 2)))
            memory = self._cache_rows(g, rows * distinct)
            for at, name in enumerate(caches):
                first = rows * (at % distinct)
                pools[name] = memory[first : first + rows].view(pages, PAGE, g.mla_row)
        return pools

    def _cache_rows(self, g: Geometry, rows: int) -> Tensor:
        """Cache rows of a geometry; drawn again where a cell needs more of them."""
        held = self._caches.get(g.name)
        if held is None or held.shape[0] < rows:
            self._caches.pop(g.name, None)
            del held
            held = torch.empty(rows, g.mla_row, dtype=torch.bfloat16, device=self._device)
            self._caches[g.name] = filled(held, self._seed, f"cache/{g.name}/{rows}")
        return held


def _inputs_of(program: Sequence[Site], scope: str) -> list[str]:
    """Bindings of the inputs that come from outside the chain."""
    if scope in HALF_LAYERS:
        return [site.bindings["delta"] for site in program if "delta" in site.bindings]
    return [
        site.bindings[spec.name]
        for site in program
        for spec in OPS[site.op].tensors
        if spec.role == "activation" and spec.name in site.bindings and spec.name != "kv_cache"
    ]
