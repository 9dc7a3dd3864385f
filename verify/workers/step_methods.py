"""Methods that time whole decode steps: fill the pools, set a chain of batches, run it, hand out what it left behind.

A *chain* is N decode steps from one start state, each with its own tokens, at a context that stays within `CYCLE`
positions of the asked one. Every step's hidden rows are kept, and states evolve from step to step, so a step that was
skipped or answered from memory shows in what the evaluator compares afterwards. The chain runs in slices, one
request each; the evaluator's clock around it is the measurement, this process's own clock only a cross-check. All arms
run the same chain: the standard arm through `model.standard.decode` (or, as a peer of `fasttrack bench`, the same step
through torch.compile), the others through the decode backend as an engine would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_backend.geometry import geometry as geometry_of
from k3_backend.model import standard
from k3_backend.model.batch import Batch
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.step.run import DecodeBackend
from verify.workers import op_chain
from verify.workers.arm import kernels
from verify.workers.contents import fill_cache, fill_state, generator, prompts
from verify.workers.cpus import settle, unsettle
from verify.workers.main import Method, Session
from verify.workers.op_methods import as_tensor

__all__ = ["CYCLE", "METHODS"]

_AREA = "step"
PAGE = 64
CYCLE = 8
"""Query positions that a chain goes through again and again, so that its context stays what the cell says."""
_SAMPLED_SLOTS = 2
"""State slots per layer that are handed out for comparison."""


StandardStep = Callable[[ModelWeights, DecodeState, Batch], Tensor]


@dataclass
class _Chain:
    batches: list[Batch]
    slots: Tensor
    """[B * T] i64, every state slot of the chain."""
    rows: Tensor
    """[B * CYCLE-ish] i64, every flat cache row that the chain writes."""
    start_rows: dict[int, Tensor]
    """Layer -> those rows before the chain."""
    outputs: Tensor
    """[calls, N, D] bf16 in the shared buffer."""
    done: int = 0
    """Steps run since the last reset."""
    kept: list[Tensor] = field(default_factory=list)


@dataclass
class _Open:
    seed: str
    weights: ModelWeights
    state: DecodeState
    start: DecodeState
    """The pristine KDA pools; its KV pools are the working ones."""
    backend: DecodeBackend | None
    standard: StandardStep
    """The step of an arm without backend."""
    chain: _Chain | None = None


def open_model(
    session: Session,
    *,
    geometry: str,
    seed: str,
    requests: int,
    tokens: int,
    cached: int,
    compile_mode: str | None = None,
    cache: str = "",
) -> dict[str, Any]:
    """Make the seeded model and fill pools for the largest cell of the block.

    Args:
        session: the worker's.
        geometry: name.
        seed: secret of this block.
        requests: largest batch.
        tokens: largest T.
        cached: largest batch * (context + T), in cache rows.
        compile_mode: mode of torch.compile for the standard step; eager if null.
        cache: folder that keeps what was compiled.
    """
    torch.set_num_threads(1)  # all arms do this at once; with more threads each, they wait for each other
    shape = geometry_of(geometry)
    weights = ModelWeights.seeded(shape, int(generator(seed, "weights").integers(1 << 62)))
    pages = 1 + requests + -(-cached // PAGE)
    state = DecodeState.allocate(shape, slots=1 + requests * tokens, pages=pages, page_size=PAGE, taps=tokens + 2)
    for name, pool in state.tensors().items():
        rng = generator(seed, name)
        if pool.dtype == torch.bfloat16:
            fill_cache(pool.view(torch.int16).numpy().view(np.uint16)[1:], rng)
        else:
            fill_state(pool.view(torch.int32).numpy().view(np.uint32)[1:], rng)
    pristine = DecodeState(
        geometry=shape,
        kv_cache=state.kv_cache,
        conv_state={layer: pool.clone() for layer, pool in state.conv_state.items()},
        state={layer: pool.clone() for layer, pool in state.state.items()},
    )
    backend = None
    if session.kind == "specialized":
        backend = DecodeBackend(weights, kernels(session), "auto", session.threads, state)
    step: StandardStep = standard.decode
    if compile_mode is not None:
        from verify.workers.compiled import compiled_step  # importing the compiler takes two seconds

        step = compiled_step(compile_mode, cache)
    torch.set_num_threads(session.threads)
    session.areas[_AREA] = _Open(seed, weights, state, pristine, backend, step)
    return {"parameters": weights.parameters}


def chain(
    session: Session, *, key: str, batch: int, context: int, tokens: int, calls: int, outputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Set the chain of a cell: the same key and seed give the same chain in every arm, whatever the number of calls.

    Args:
        session: with an open model.
        key: the cell's, decides its secrets together with the block's seed.
        batch: B.
        context: cached tokens per request.
        tokens: T.
        calls: steps of the chain.
        outputs: view that receives every step's hidden rows, bf16 [calls, B * T, D].
    """
    unsettle()  # the backend makes its threads in the first step
    opened = _open(session)
    rng = generator(opened.seed, f"chain/{key}")
    pages = -(-(context + tokens) // PAGE)
    table = (rng.permutation(opened.state.pages - 1)[: batch * pages] + 1).reshape(batch, pages)
    slots = (rng.permutation(opened.state.slots - 1)[: batch * tokens] + 1).reshape(batch, tokens)
    ids = torch.from_numpy(prompts(batch, calls * tokens, rng).reshape(batch, calls, tokens))
    accepted = torch.from_numpy(generator(opened.seed, f"accepted/{key}").integers(1, tokens + 1, (calls, batch)))
    lengths = [context + tokens - at for at in range(min(CYCLE, context // 2 + 1))]
    shared = {
        "query_lens": torch.full((batch,), tokens, dtype=torch.int32),
        "slots": torch.from_numpy(slots).to(torch.int32),
        "block_table": torch.from_numpy(table).to(torch.int32),
        "decode": (True,) * batch,
    }
    places = [(torch.full((batch,), n, dtype=torch.int32), _cache_rows(table, n - tokens, tokens)) for n in lengths]
    batches = []
    for call in range(calls):
        seq_lens, mapping = places[call % len(places)]
        batches.append(
            Batch(
                token_ids=ids[:, call].reshape(-1).contiguous(),
                seq_lens=seq_lens,
                accepted=accepted[call].to(torch.int32),
                slot_mapping=mapping,
                **shared,  # type: ignore[arg-type]
            )
        )
    _restore(opened)  # the rows that the previous chain wrote
    rows = torch.unique(torch.cat([mapping for _, mapping in places]))
    start_rows = {layer: pool.flatten(0, 1)[rows].clone() for layer, pool in opened.state.kv_cache.items()}
    opened.chain = _Chain(
        batches, torch.from_numpy(slots.reshape(-1).astype(np.int64)), rows, start_rows, as_tensor(session, outputs)
    )
    return {}


def reset(session: Session, *, warm: int) -> dict[str, Any]:
    """Run a few untimed steps, then go back to the start state; poison outputs and scratch, zero the ledger."""
    opened = _open(session)
    made = _made(opened)
    with torch.inference_mode():
        for batch in made.batches[:warm]:
            _step(opened, batch)
    _restore(opened)
    made.done = 0
    made.kept.clear()
    made.outputs.view(torch.int16).fill_(0x7FC0)  # NaN
    if opened.backend is not None:
        settle()  # the warm steps have made all threads
        opened.backend.ledger.reset()
        op_chain.poison_scratch(opened.backend)
    return {}


def run(session: Session, *, count: int) -> dict[str, Any]:
    """Run the next steps of the chain: `ns` on this process's clock."""
    opened = _open(session)
    made = _made(opened)
    backend = opened.backend
    part = slice(made.done, made.done + count)
    batches, outputs = made.batches[part], made.outputs[part]
    if len(batches) != count:
        raise ValueError(f"{count} steps asked for, {len(batches)} are left of the chain")
    with torch.inference_mode():
        start = time.perf_counter_ns()
        if backend is None:
            # Results are owned by the caller on this path; they are copied out after the clock.
            step = opened.standard
            made.kept += [step(opened.weights, opened.state, batch) for batch in batches]
        else:
            for output, batch in zip(outputs, batches, strict=True):
                output.copy_(backend.forward(batch))
        elapsed = time.perf_counter_ns() - start
    made.done += count
    return {"ns": elapsed}


def finish(session: Session) -> dict[str, Any]:
    """Copy results that timed calls left in private memory to the shared buffer; `steps` since the reset, by path."""
    opened = _open(session)
    made = _made(opened)
    for output, hidden in zip(made.outputs, made.kept, strict=False):
        output.copy_(hidden)
    backend = opened.backend
    steps = {"specialized": 0, "standard": made.done} if backend is None else backend.ledger.snapshot()["steps"]
    return {"steps": steps}


def collect(session: Session, *, sample: str, target: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a part of the state that the evaluator chooses after the run.

    Args:
        session: after `step.run`.
        sample: secret that picks slots and cache rows.
        target: f32 view [elements]; receives conv windows, recurrent states and cache rows, layer by layer.

    Returns:
        `elements` written.
    """
    opened = _open(session)
    made = _made(opened)
    rng = generator(sample, "sample")
    out = as_tensor(session, target)
    written = 0
    parts = []
    for layer in opened.state.geometry.kda_layers:
        picked = made.slots[torch.from_numpy(rng.permutation(len(made.slots))[:_SAMPLED_SLOTS])]
        parts += [opened.state.conv_state[layer][picked], opened.state.state[layer][picked]]
    for layer in opened.state.geometry.mla_layers:
        count = min(len(made.rows), CYCLE * _SAMPLED_SLOTS)
        picked = made.rows[torch.from_numpy(rng.permutation(len(made.rows))[:count])]
        parts.append(opened.state.kv_cache[layer].flatten(0, 1)[picked])
    for part in parts:
        flat = part.reshape(-1).float()
        out[written : written + flat.numel()] = flat
        written += flat.numel()
    return {"elements": written}


def close(session: Session) -> dict[str, Any]:
    """Stop the pool and forget the model."""
    opened = _open(session)
    if opened.backend is not None:
        opened.backend.close()
    del session.areas[_AREA]
    return {}


def _step(opened: _Open, batch: Batch) -> Tensor:
    if opened.backend is None:
        return opened.standard(opened.weights, opened.state, batch)
    return opened.backend.forward(batch)


def _restore(opened: _Open) -> None:
    """Put back what the chain has written."""
    made = opened.chain
    if made is None:
        return
    for pools, start in ((opened.state.state, opened.start.state), (opened.state.conv_state, opened.start.conv_state)):
        for layer, pool in pools.items():
            pool[made.slots] = start[layer][made.slots]
    for layer, rows in made.start_rows.items():
        opened.state.kv_cache[layer].flatten(0, 1)[made.rows] = rows


def _cache_rows(table: np.ndarray[Any, Any], first: int, count: int) -> Tensor:
    """Flat cache rows of positions first .. first+count-1 of every request, i64 [B * count]."""
    positions = np.arange(first, first + count)
    rows = table[:, positions // PAGE] * PAGE + positions % PAGE
    return torch.from_numpy(rows.reshape(-1).astype(np.int64))


def _open(session: Session) -> _Open:
    opened = session.areas.get(_AREA)
    if not isinstance(opened, _Open):
        raise LookupError("step.open comes first")
    return opened


def _made(opened: _Open) -> _Chain:
    if opened.chain is None:
        raise LookupError("step.chain comes first")
    return opened.chain


METHODS: dict[str, Method] = {
    "step.open": open_model,
    "step.chain": chain,
    "step.reset": reset,
    "step.run": run,
    "step.finish": finish,
    "step.collect": collect,
    "step.close": close,
    **op_chain.METHODS,
}
