"""Captured inputs: what an op really receives in mid-decode of the seeded model.

Stand-alone inputs miss the correlations that real activations have (outlier channels, nearly equal AttnRes scores,
states that grew from a text). Here the standard path decodes a few steps of random tokens, with random acceptance where
the step has drafts, and the arguments of one random site of the wanted op are taken from the last step.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from k3_backend.geometry import Geometry, geometry
from k3_backend.model.batch import cache_rows
from k3_backend.model.program import Site, bind, decode_program
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.ops.registry import standard
from verify.evaluator.inputs.draw import Draw
from verify.evaluator.inputs.masks import Inputs, Tensors

__all__ = ["captured", "stand_in"]

_PAGE = 16
_STEPS = 6
"""Decode steps before the captured one, in cases of up to `_SMALL_ROWS` rows."""
_FEW_STEPS = 2
"""The same in larger cases, whose steps cost more."""
_SMALL_ROWS = 16
_MODELS = 3
"""Different seeded models in use; which one is part of the case's seed."""


_LARGE_HIDDEN = 1024
"""Geometries wider than this are captured from a shallower model: its weights are drawn in seconds, not minutes."""
_LARGE_MODELS = 1
_FEW_EXPERTS = 8
_RANK_HEADS = 12
"""Heads of the widest rank; whole models have more."""
_lock = threading.Lock()


@lru_cache(maxsize=_MODELS)
def _model(name: str, seed: int) -> ModelWeights:
    return ModelWeights.seeded(stand_in(geometry(name)), seed)


def stand_in(g: Geometry) -> Geometry:
    """The geometry of the model that is run: `g` itself, or one with its attention and AttnRes shapes but less depth.

    Everything that shapes the attention side is kept: hidden size, ranks, saved AttnRes rows. Layers, experts and
    vocabulary, which only the other side sees, are cut. Whole models' heads are cut too: of a rank's ops only the MLA
    core over a DCP shard has them (`_all_heads`).
    """
    if g.hidden <= _LARGE_HIDDEN:
        return g
    layers = max(4, 2 * g.attn_res_blocks)
    return replace(
        g,
        layers=layers,
        mla_layers=tuple(range(1, layers, 2)) if g.attn_res_blocks > 1 else (layers - 1,),
        attn_res_block=2 if g.attn_res_blocks > 1 else layers,
        heads=g.heads if g.heads <= _RANK_HEADS else _RANK_HEADS // 2,
        latent=min(g.latent, 512),
        experts=_FEW_EXPERTS,
        top_k=min(g.top_k, _FEW_EXPERTS // 2),
        expert_width=min(g.expert_width, 192),
        shared_width=min(g.shared_width, 384),
        dense_width=min(g.dense_width, 1024),
        vocab=1024,
        bos=1020,
        eos=1021,
        pad=1022,
        media=1023,
    )


def captured(d: Draw) -> Inputs:
    """Arguments of one random site of `d.case.op` for the case's batch and tokens."""
    g, batch, tokens = stand_in(d.geometry), d.case.batch, d.case.tokens
    seed = d.fixed.integer(0, (_MODELS if g is d.geometry else _LARGE_MODELS) - 1)
    with _lock:  # cases of several ops may be made at a time
        weights = _model(d.geometry.name, seed)
    program = decode_program(g, tokens)
    candidates = [site for site in program if site.op == d.case.op]
    wanted = candidates[d.fixed.integer(0, len(candidates) - 1)]
    steps = _STEPS if d.case.rows <= _SMALL_ROWS else _FEW_STEPS
    pages = -(-(steps + 1) * tokens // _PAGE)
    state = DecodeState.allocate(
        g, slots=1 + batch * tokens + 2, pages=1 + batch * pages + 2, page_size=_PAGE, taps=tokens + 2
    )
    slots = (d.permutation(state.slots - 1) + 1)[: batch * tokens].reshape(batch, tokens).to(torch.int32)
    table = (d.permutation(state.pages - 1) + 1)[: batch * pages].reshape(batch, pages).to(torch.int32)
    kept = torch.zeros(batch, dtype=torch.int64)
    accepted = torch.ones(batch, dtype=torch.int64)
    for step in range(steps + 1):
        fields = _fields(kept, accepted, slots, table, tokens)
        ids = d.integers(0, g.vocab - 1, (batch * tokens,))
        taken = _run(weights, state, fields, ids, program, wanted=wanted if step == steps else None)
        accepted = d.integers(1, tokens, (batch,))
        kept = kept + accepted
    assert taken is not None
    return taken if g.heads == d.geometry.heads or d.case.op != "mla_decode" else _all_heads(taken, d.geometry.heads)


def _all_heads(inputs: Inputs, heads: int) -> Inputs:
    """The MLA core's arguments with a whole model's heads: a rank's again and again, each time weaker by 1/32."""
    tensors, attrs = inputs
    query = tensors["query"]
    assert query is not None
    head = torch.arange(heads)
    weaker = 1.0 - torch.div(head, query.shape[1], rounding_mode="floor") / 32
    return {**tensors, "query": (query[:, head % query.shape[1]] * weaker.view(1, -1, 1)).to(torch.bfloat16)}, attrs


def _fields(kept: Tensor, accepted: Tensor, slots: Tensor, table: Tensor, tokens: int) -> dict[str, Tensor]:
    """Batch fields of a step whose requests hold `kept` [B] tokens so far."""
    rows = [
        row
        for b, first in enumerate(kept.tolist())
        for row in cache_rows([int(p) for p in table[b]], first, tokens, _PAGE)
    ]
    return {
        "slots": slots,
        "accepted": accepted.to(torch.int32),
        "block_table": table,
        "seq_lens": (kept + tokens).to(torch.int32),
        "slot_mapping": torch.tensor(rows, dtype=torch.int64),
    }


def _run(
    weights: ModelWeights,
    state: DecodeState,
    fields: Mapping[str, Tensor],
    ids: Tensor,
    program: tuple[Site, ...],
    *,
    wanted: Site | None,
) -> Inputs | None:
    """One decode step of the standard path; stops at `wanted` and returns copies of its arguments."""
    g = weights.geometry
    prefix = weights.embed[ids].clone()
    blocks = torch.zeros(len(ids), g.attn_res_blocks, g.hidden, dtype=torch.bfloat16)
    buffers: dict[str, Tensor] = {"prefix": prefix, "blocks": blocks, **fields, **state.tensors()}
    for site in program:
        arguments = bind(site, buffers, weights.constants(site.layer, site.name))
        if site is wanted:
            return _copy(arguments), dict(site.attrs)
        for name, value in standard(site.op)(arguments, site.attrs).items():
            buffers[site.bindings[name]] = value
    return None


def _copy(arguments: Mapping[str, Tensor | None]) -> Tensors:
    return {name: None if value is None else value.contiguous().clone() for name, value in arguments.items()}
