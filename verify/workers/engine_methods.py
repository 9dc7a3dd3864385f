"""Methods that run the nano engine inside a worker: open it with an arm's decode backend, generate, report the ledger.

The text comes from the evaluator request by request; what the evaluator expects of the answers is never here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from k3_backend.geometry import geometry as geometry_of
from k3_backend.model import standard
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.step.run import DecodeBackend
from verify.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from verify.workers.arm import kernels
from verify.workers.main import Method, Session

__all__ = ["METHODS"]

_AREA = "engine"


@dataclass
class _Open:
    backend: DecodeBackend
    engine: Engine


def open_engine(
    session: Session,
    *,
    geometry: str,
    weights_seed: int,
    drafts: int,
    max_requests: int,
    max_step_tokens: int,
    pages: int,
    page_size: int,
) -> dict[str, Any]:
    """Make a fresh engine with empty pools. The standard arm runs no specialised op; the other one runs in `auto`."""
    torch.set_num_threads(session.threads)
    shape = geometry_of(geometry)
    held = session.areas.get(_AREA)
    if isinstance(held, _Open):
        held.backend.close()
    weights = _weights(session, geometry, weights_seed)
    slots = max_requests * (1 + drafts) + 1
    state = DecodeState.allocate(shape, slots=slots, pages=pages, page_size=page_size, taps=drafts + 3)
    specialized = session.kind == "specialized"
    backend = DecodeBackend(
        weights, kernels(session) if specialized else None, "auto" if specialized else "off", session.threads, state
    )
    config = EngineConfig(max_requests=max_requests, max_step_tokens=max_step_tokens, drafts=drafts)
    engine = Engine(config, state, backend.forward, lambda hidden: standard.logits(weights, hidden))
    session.areas[_AREA] = _Open(backend, engine)
    return {"parameters": weights.parameters}


def run(session: Session, *, requests: list[dict[str, Any]], abort_at: dict[str, int] | None = None) -> dict[str, Any]:
    """Run requests to completion.

    Args:
        session: with an open engine.
        requests: fields of `Request`, sampling parameters under `params`; `arrives` is the step at which it is queued
            (default 0), so that mixed batches occur.
        abort_at: request id to the step before which it is aborted.

    Returns:
        completions in order of finishing, the ledger of this run, and the number of steps.
    """
    opened = session.areas[_AREA]
    assert isinstance(opened, _Open)
    engine = opened.engine
    opened.backend.ledger.reset()
    arriving = sorted(((int(r.pop("arrives", 0)), _request(r)) for r in requests), key=lambda pair: pair[0])
    aborts = dict(abort_at or {})
    done: list[Completion] = []
    step = 0
    while arriving or engine.waiting or engine.running:
        while arriving and arriving[0][0] <= step:
            engine.add(arriving.pop(0)[1])
        for name in [name for name, at in aborts.items() if at <= step]:
            del aborts[name]
            ended = engine.abort(name)
            if ended is not None:
                done.append(ended)
        if engine.waiting or engine.running:
            with torch.inference_mode():
                done += engine.step()
        step += 1
    return {
        "completions": [_completion(c) for c in done],
        "ledger": opened.backend.ledger.snapshot(),
        "steps": step,
    }


def _weights(session: Session, geometry: str, seed: int) -> ModelWeights:
    """Seeded weights, kept between engines of one worker."""
    key = f"{_AREA}.weights.{geometry}.{seed}"
    if key not in session.areas:
        session.areas[key] = ModelWeights.seeded(geometry_of(geometry), seed)
    weights: ModelWeights = session.areas[key]
    return weights


def _request(fields: dict[str, Any]) -> Request:
    params = dict(fields["params"])
    for name in ("stop_ids", "allowed_ids"):
        if params.get(name) is not None:
            params[name] = tuple(params[name])
    plain = Request(id=fields["id"], prompt=tuple(fields["prompt"]), params=SamplingParams(**params))
    return replace(
        plain,
        forced=tuple(fields.get("forced", ())),
        record_distribution=bool(fields.get("record_distribution", False)),
    )


def _completion(completion: Completion) -> dict[str, Any]:
    return {
        "id": completion.id,
        "tokens": completion.tokens,
        "logprobs": completion.logprobs,
        "regrets": completion.regrets,
        "finish": completion.finish,
        "distribution": completion.distribution,
        "drafted": completion.drafted,
        "accepted": completion.accepted,
    }


METHODS: dict[str, Method] = {"engine.open": open_engine, "engine.run": run}
