"""The standard path through torch.compile: the second peer of `fasttrack bench`.

The whole decode step is one graph with static shapes, so every batch and context compiles anew on its first, untimed
call. The compiler works inside the sandbox and keeps its results in the folder that the worker may write, so that a
second run of the same model need not compile again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor

from k3_backend.model import standard
from k3_backend.model.batch import Batch
from k3_backend.model.program import batch_fields, decode_program
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.ops import registry
from k3_backend.ops.registry import Standard

__all__ = ["compiled_op", "compiled_step"]

P = ParamSpec("P")
R = TypeVar("R")

_COMPILERS = 2
_GRAPHS = 256
"""Graphs that one function may have: one per cell of a matrix."""


def compiled_step(mode: str, cache: str) -> Callable[[ModelWeights, DecodeState, Batch], Tensor]:
    """`standard.decode` with its device part compiled as one graph."""
    compiled = _compile(standard.decode_step, mode, cache)

    def step(weights: ModelWeights, state: DecodeState, batch: Batch) -> Tensor:
        tokens = batch.uniform_tokens
        assert tokens is not None
        program = decode_program(weights.geometry, tokens, weights.expert_format)
        return compiled(weights, program, batch.token_ids, {**batch_fields(batch), **state.tensors()})

    return step


@lru_cache(maxsize=64)
def compiled_op(op: str, mode: str, cache: str) -> Standard:
    """An op's standard implementation, compiled."""
    return _compile(registry.standard(op), mode, cache)


def _compile(function: Callable[P, R], mode: str, cache: str) -> Callable[P, R]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch._dynamo.config.recompile_limit = _GRAPHS
    torch._inductor.config.compile_threads = _COMPILERS
    compiled: Callable[P, R] = torch.compile(function, mode=mode, dynamic=False, fullgraph=True)
    return compiled
