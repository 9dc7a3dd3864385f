"""The whole model on the standard path: what stock serving computes, in eager bf16 torch.

`decode` runs a pure, uniform decode or verify batch through the program of sites, each with its op's standard
function: the baseline arm. `forward` takes any batch, prefill chunks and ragged mixtures included: the path that every
refused step falls back to. Both update the state pools in place. Sampling and scheduling are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from k3_backend.model.batch import Batch, BatchError
from k3_backend.model.mixed import MixedBatch
from k3_backend.model.program import OpFunction, Site, batch_fields, decode_program, execute
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.ops import OPS
from k3_backend.ops.registry import standard

__all__ = ["decode", "decode_step", "forward", "logits"]

_STANDARD: Mapping[str, OpFunction] = {op: standard(op) for op in OPS}


def decode(weights: ModelWeights, state: DecodeState, batch: Batch) -> Tensor:
    """One decode (T = 1) or verify (T > 1) step of a uniform batch.

    Args:
        weights: the model.
        state: pools, updated in place.
        batch: pure decode; every request has as many query tokens as slot columns.

    Returns:
        hidden [N, D] bf16, `model.norm` applied; rows of padding requests mean nothing.

    Raises:
        BatchError: the batch is not a pure, uniform decode batch.
    """
    tokens = batch.uniform_tokens
    if tokens is None or not batch.pure_decode:
        raise BatchError(
            f"decode: query lengths {sorted(set(batch.query_lens_list))} over {batch.slots.shape[1]} slot columns, "
            f"{batch.decode.count(False)} prefill chunks; expected a pure decode batch of one query length; "
            "next: call forward"
        )
    program = decode_program(weights.geometry, tokens, weights.expert_format)
    return decode_step(weights, program, batch.token_ids, {**batch_fields(batch), **state.tensors()})


def decode_step(
    weights: ModelWeights, program: tuple[Site, ...], token_ids: Tensor, memory: Mapping[str, Tensor]
) -> Tensor:
    """`decode` without the host's checks: what an arm that uses torch.compile compiles, in one graph.

    Args:
        weights: the model.
        program: `decode_program` of the model, the step's T and the expert format.
        token_ids: [N] i64.
        memory: batch fields and state pools by binding name (`batch_fields`, `DecodeState.tensors`); pools are
            updated in place.

    Returns:
        hidden [N, D] bf16.
    """
    return _run(weights, program, token_ids, memory, _standard_of)


def forward(weights: ModelWeights, state: DecodeState, batch: Batch) -> Tensor:
    """One step of any batch: prefill chunks, decode rows of any query length, or both.

    Args:
        weights: the model.
        state: pools, updated in place. A chunk at position 0 starts from empty state, whatever its slot holds.
        batch: the step.

    Returns:
        hidden [N, D] bf16, `model.norm` applied.

    Raises:
        BatchError: the batch contradicts itself.
    """
    if batch.pure_decode and batch.uniform_tokens is not None:
        return decode(weights, state, batch)
    mixed = MixedBatch(batch)
    mixers: dict[str, OpFunction] = {"kda_decode": mixed.kda_decode, "mla_decode": mixed.mla_decode}
    program = decode_program(weights.geometry, 1, weights.expert_format)
    memory = {**batch_fields(batch), **state.tensors()}
    return _run(weights, program, batch.token_ids, memory, lambda site: mixers.get(site.op) or _standard_of(site))


def logits(weights: ModelWeights, hidden: Tensor) -> Tensor:
    """Vocabulary scores [N, vocab] f32 of hidden rows [N, D] (bf16 product, as stock serving)."""
    return functional.linear(hidden, weights.lm_head).float()


def _standard_of(site: Site) -> OpFunction:
    return _STANDARD[site.op]


def _run(
    weights: ModelWeights,
    program: tuple[Site, ...],
    token_ids: Tensor,
    memory: Mapping[str, Tensor],
    op: Callable[[Site], OpFunction],
) -> Tensor:
    g = weights.geometry
    buffers = {
        "prefix": functional.embedding(token_ids, weights.embed),
        "blocks": torch.empty(token_ids.shape[0], g.attn_res_blocks, g.hidden, dtype=torch.bfloat16),
        **memory,
    }
    return execute(program, op, weights.constants, buffers)
