"""Whole decode steps on the evaluator's side: secret states and batches, the standard step, the fp64 reference step.

Both run the same program as the specialised path, from the same pools. Chains of steps follow each other, so that what
one step writes is what the next one reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3_backend.geometry import Geometry
from k3_backend.model.batch import Batch, cache_rows
from k3_backend.model.program import batch_fields, decode_program, execute
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.ops.registry import reference, standard
from verify.evaluator.inputs.masks import Masks

__all__ = ["Chain", "batch_json", "draw_chain", "ownership", "reference_steps", "standard_steps"]

PAGE = 16


@dataclass(frozen=True)
class Chain:
    """A secret start and the batches that follow it."""

    state: DecodeState
    """Initial pools; runs work on clones."""
    batches: tuple[Batch, ...]


def draw_chain(g: Geometry, *, requests: int, tokens: int, context: int, steps: int, seed: int) -> Chain:
    """Draw pools of plausible scale and `steps` uniform decode batches on scattered slots and pages.

    Args:
        g: the model's dimensions.
        requests: B.
        tokens: T, query tokens per request.
        context: cached tokens of the longest request before the first step; the others have between 0 and that.
        steps: batches, each accepting a random part of the previous one's tokens.
        seed: secret.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    pages = -(-(context + steps * tokens) // PAGE)
    state = DecodeState.allocate(
        g, slots=1 + requests * tokens + 2, pages=1 + requests * pages + 2, page_size=PAGE, taps=tokens + 2
    )
    for name, pool in state.tensors().items():
        pool.normal_(generator=generator).mul_(0.1 if name.startswith("state") else 1.0)
    slots = (torch.randperm(state.slots - 1, generator=generator) + 1)[: requests * tokens].reshape(requests, tokens)
    table = (torch.randperm(state.pages - 1, generator=generator) + 1)[: requests * pages].reshape(requests, pages)
    kept = integers(0, context, requests)
    kept[0] = context
    accepted = integers(1, tokens, requests)
    batches = []
    for _ in range(steps):
        rows = [r for b, first in enumerate(kept.tolist()) for r in cache_rows(table[b].tolist(), first, tokens, PAGE)]
        batches.append(
            Batch(
                token_ids=integers(0, g.vocab - 1, requests * tokens),
                query_lens=torch.full((requests,), tokens, dtype=torch.int32),
                seq_lens=(kept + tokens).to(torch.int32),
                slots=slots.to(torch.int32),
                accepted=accepted.to(torch.int32),
                block_table=table.to(torch.int32),
                slot_mapping=torch.tensor(rows, dtype=torch.int64),
                decode=(True,) * requests,
            ).check()
        )
        accepted = integers(1, tokens, requests)
        kept = kept + accepted
    return Chain(state, tuple(batches))


def standard_steps(weights: ModelWeights, chain: Chain) -> list[Tensor]:
    """Hidden [N, D] bf16 of every step on the standard path."""
    pools = chain.state.clone().tensors()
    return [_run(weights, pools, batch, exact=False) for batch in chain.batches]


def reference_steps(weights: ModelWeights, chain: Chain) -> list[Tensor]:
    """Hidden [N, D] f64 of every step by the ops' references, states kept in f64."""
    pools = {name: pool.double() for name, pool in chain.state.tensors().items()}
    return [_run(weights, pools, batch, exact=True) for batch in chain.batches]


def ownership(chain: Chain) -> Masks:
    """What the chain may write, and what belongs to no request; over [slots] or [pages, page] of every pool."""
    state = chain.state
    g, page = state.geometry, state.page_size
    mine, first = torch.zeros(state.slots, dtype=torch.bool), torch.zeros(state.slots, dtype=torch.bool)
    rows = torch.zeros(state.pages * page, dtype=torch.bool)
    held = torch.zeros(state.pages, page, dtype=torch.bool)
    for batch in chain.batches:
        mine[batch.slots.flatten().long()] = True
        first[batch.slots[:, 0].long()] = True
        rows[batch.slot_mapping] = True
        for table, length in zip(batch.block_table.long(), batch.seq_lens.tolist(), strict=True):
            positions = torch.arange(length)
            held[table[positions // page], positions % page] = True
    written: dict[str, Tensor] = {}
    free: dict[str, Tensor] = {}
    for layer in g.mla_layers:
        written[f"kv_cache.{layer}"], free[f"kv_cache.{layer}"] = rows.view(state.pages, page), ~held
    for layer in g.kda_layers:
        written[f"state.{layer}"], free[f"state.{layer}"] = mine, ~mine
        written[f"conv_state.{layer}"], free[f"conv_state.{layer}"] = first, ~first
    return Masks(written=written, free=free)


def batch_json(batch: Batch) -> dict[str, Any]:
    """A batch as a control message carries it."""
    names = ("token_ids", "query_lens", "seq_lens", "slots", "accepted", "block_table", "slot_mapping")
    return {**{name: getattr(batch, name).tolist() for name in names}, "decode": list(batch.decode)}


def _run(weights: ModelWeights, pools: dict[str, Tensor], batch: Batch, *, exact: bool) -> Tensor:
    """One step; pools are updated (in place by the standard path, by replacement by the reference)."""
    g = weights.geometry
    tokens = batch.uniform_tokens
    assert tokens is not None
    kind = torch.float64 if exact else torch.bfloat16
    buffers: dict[str, Tensor] = {
        **pools,
        **batch_fields(batch),
        "prefix": weights.embed[batch.token_ids].to(kind),
        "blocks": torch.zeros(batch.rows, g.attn_res_blocks, g.hidden, dtype=kind),
    }
    program = decode_program(g, tokens, weights.expert_format)
    if exact:
        hidden = execute(program, lambda site: reference(site.op), weights.constants, buffers)
    else:
        hidden = execute(program, lambda site: standard(site.op), weights.constants, buffers)
    pools.update({name: buffers[name] for name in pools})
    return hidden
