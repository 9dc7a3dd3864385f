"""Inputs for op tests: one decode step's tensors over pools in which everything that no request owns is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from model_engine import weights_of
from torch import Tensor

from k3_backend.geometry import ExpertFormat, Geometry
from k3_backend.model.batch import cache_rows
from k3_backend.model.program import Site, bind, decode_program
from k3_backend.model.state import DecodeState

Arguments = dict[str, Tensor | None]
PAGE = 8


@dataclass(frozen=True)
class Step:
    """Buffers of one step, by binding name, and the sites that read them."""

    g: Geometry
    expert_format: ExpertFormat
    tokens: int
    buffers: dict[str, Tensor]

    def sites(self) -> tuple[Site, ...]:
        return decode_program(self.g, self.tokens, self.expert_format)

    def arguments(self, site: Site) -> Arguments:
        constants = weights_of(self.g, 0, self.expert_format).constants(site.layer, site.name)
        return bind(site, self.buffers, constants)

    def first(self, op: str) -> tuple[Site, Arguments]:
        """The first site of an op with its arguments."""
        site = next(site for site in self.sites() if site.op == op)
        return site, self.arguments(site)


def step_of(
    g: Geometry,
    requests: int,
    tokens: int,
    *,
    seed: int = 0,
    null: tuple[int, ...] = (),
    expert_format: ExpertFormat = "bf16",
    longest: int = 40,
) -> Step:
    """A verify (T > 1) or decode (T = 1) step with random activations in every buffer.

    Args:
        g: dimensions.
        requests: B.
        tokens: T.
        seed: of every draw.
        null: requests that are padding: slots 0 or -1, length 0, no cache rows.
        expert_format: format of the routed experts.
        longest: largest sequence length, including the step's tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    pages = -(-longest // PAGE)
    state = DecodeState.allocate(g, requests * tokens + 1, requests * pages + 1, PAGE, tokens + 2)
    slots = (torch.randperm(requests * tokens, generator=generator) + 1).view(requests, tokens).int()
    table = (torch.randperm(requests * pages, generator=generator) + 1).view(requests, pages).int()
    lengths = torch.randint(tokens, longest + 1, (requests,), generator=generator).int()
    lengths[0] = longest
    accepted = torch.randint(1, tokens + 1, (requests,), generator=generator).int()
    for i, b in enumerate(null):
        slots[b], lengths[b], accepted[b] = -(i % 2), 0, 1

    for pool in state.tensors().values():
        pool.fill_(torch.nan)
    mapping = []
    for b in range(requests):
        length = int(lengths[b])
        owned = cache_rows(table[b].tolist(), 0, length, PAGE)
        for pool in state.kv_cache.values():
            pool.view(-1, g.mla_row)[owned] = normal(length, g.mla_row)
        if length:
            for pool in state.conv_state.values():
                pool[slots[b].long()] = normal(tokens, tokens + 2, 3 * g.kda_width)
            for pool in state.state.values():
                shape = (tokens, g.heads, g.kda_head_dim, g.kda_head_dim)
                pool[slots[b].long()] = torch.randn(shape, generator=generator) * 0.3
        mapping += owned[-tokens:] if length else [-1] * tokens

    m = requests * tokens
    ids = torch.rand(m, g.experts, generator=generator).argsort(-1)[:, : g.top_k]
    chosen = torch.rand(m, g.top_k, generator=generator)
    buffers = {
        "prefix": normal(m, g.hidden),
        "delta": normal(m, g.hidden),
        "blocks": normal(m, g.attn_res_blocks, g.hidden),
        "x": normal(m, g.hidden),
        "kda_proj": normal(m, g.kda_proj_rows),
        "kda_out": normal(m, g.kda_width),
        "mla_proj": normal(m, g.mla_proj_rows),
        "query": normal(m, g.heads, g.mla_row) * 0.6,
        "partial": normal(1, m, g.heads, g.kv_lora),
        "lse": torch.randn(1, m, g.heads, generator=generator),
        "mla_out": normal(m, g.mla_width),
        "topk_ids": ids.int(),
        "topk_weights": chosen / chosen.sum(-1, keepdim=True),
        "latent": normal(m, g.latent),
        "slots": slots,
        "accepted": accepted,
        "block_table": table,
        "seq_lens": lengths,
        "slot_mapping": torch.tensor(mapping),
        **state.tensors(),
    }
    return Step(g, expert_format, tokens, buffers)


def copied(arguments: Arguments) -> Arguments:
    """Arguments whose tensors may be written."""
    return {name: None if tensor is None else tensor.clone() for name, tensor in arguments.items()}


def bits(tensor: Tensor) -> Tensor:
    """Raw bits, for comparisons in which NaN equals NaN."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
