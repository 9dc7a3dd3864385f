"""Evals gate: does the candidate's whole path give the same texts the same probabilities as the standard path?

On the untrained nano model it compares next-token and recall log probabilities of both arms, paired by sample, through
decode steps in batches. `verify.protocol.evals` decides by non-inferiority. It cannot see loss of skill: the model has
none; that needs a trained checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import numpy as np

from harness.records import EvidenceClass, GateResult
from verify.context import GateContext
from verify.evals.suites import SCORED_TOKENS, SUITES, forced_text, own_text_asks, recall_asks
from verify.evaluator.engine import Answer, Ask, EngineArm
from verify.evaluator.worker import ArmSpec, Worker, WorkerFailure
from verify.gates.arms import UNTIMED_STANDARD_THREADS, candidate_arm, obstacle, side_by_side, standard_arm
from verify.gates.common import gate_guard, to_result
from verify.protocol import evals as protocol

__all__ = ["PROTOCOL_ID", "run"]

PROTOCOL_ID = protocol.PROTOCOL_ID
GATE: Final = "evals"
THREADS = 2
BATCH = 24
REPEAT_BATCH = 16
"""Batch of the standard arm's second run, in another process: the A/A difference holds the noise of batching."""

Answers = Mapping[str, Answer]


class _ArmFailedError(Exception):
    """An arm's worker died; the line about it is written."""


@gate_guard(GATE, PROTOCOL_ID)
def run(ctx: GateContext) -> GateResult:
    """Score both arms on the same texts and decide."""
    started = time.monotonic()
    blocked = obstacle(GATE, ctx)
    if blocked is not None:
        return to_result(GATE, PROTOCOL_ID, blocked, EvidenceClass.HARDWARE, [], time.monotonic() - started)
    seed, samples = int.from_bytes(os.urandom(8)), ctx.tier.eval_samples
    contexts = ctx.target.contexts
    header = {
        "kind": "header", "gate": GATE, "protocol": PROTOCOL_ID, "geometry": ctx.target.geometry, "seed": str(seed),
        "suites": list(SUITES), "samples": samples, "scored_tokens": SCORED_TOKENS,
        "margin_nats": protocol.MARGIN_NATS, "alpha": protocol.ALPHA,
        "arms": {"candidate": dict(ctx.candidate.artifacts)},
    }  # fmt: skip
    ctx.evidence.append(GATE, header)
    try:
        texts: Future[list[Ask]] = Future()
        scored = side_by_side(
            {
                "standard": lambda: _standard(ctx, seed, samples, (contexts[0] // 2, contexts[0]), texts),
                "repeat": lambda: _score(
                    ctx, "standard", standard_arm(), UNTIMED_STANDARD_THREADS, texts, REPEAT_BATCH
                ),
                "candidate": lambda: _score(ctx, "candidate", candidate_arm(ctx), THREADS, texts, BATCH),
            }
        )
    except _ArmFailedError:
        pass
    else:
        for ask in texts.result():
            ctx.evidence.append(GATE, _line(ask, {name: answers[ask.id] for name, answers in scored.items()}))
    ctx.evidence.append(GATE, {"kind": "end"})
    decision = protocol.decide(ctx.evidence.lines(GATE))
    return to_result(
        GATE, PROTOCOL_ID, decision, EvidenceClass.HARDWARE, [ctx.evidence.ref(GATE)], time.monotonic() - started
    )


def _standard(
    ctx: GateContext, seed: int, samples: int, contexts: tuple[int, int], texts: Future[list[Ask]]
) -> Answers:
    """Let the standard arm write the texts, hand them over, then score it on them."""
    seeds = np.random.SeedSequence(seed).generate_state(len(SUITES))
    recall = [
        recall_asks(suite, int(s), samples, context)
        for suite, s, context in zip(SUITES[1:], seeds[1:], contexts, strict=True)
    ]
    try:
        with _engine(ctx, "standard", standard_arm(), UNTIMED_STANDARD_THREADS) as arm:
            writing = own_text_asks(int(seeds[0]), samples)
            written = _generate(arm, writing, BATCH)
            asks = [forced_text(ask, written[ask.id]) for ask in writing]
            asks += [ask for group in recall for ask in group]
            texts.set_result(asks)
            return _generate(arm, asks, BATCH)
    except BaseException as error:
        if not texts.done():  # the others wait
            texts.set_exception(error)
        raise


def _score(ctx: GateContext, name: str, spec: ArmSpec, threads: int, texts: Future[list[Ask]], batch: int) -> Answers:
    with _engine(ctx, name, spec, threads) as arm:
        return _generate(arm, texts.result(), batch)


@contextmanager
def _engine(ctx: GateContext, name: str, spec: ArmSpec, threads: int) -> Iterator[EngineArm]:
    """An arm's engine; a worker that dies leaves a failure line.

    Raises:
        _ArmFailedError: the line is written.
    """
    ctx.progress(f"evals: {name} arm")
    try:
        with Worker.start(
            spec, base_tree=ctx.base_tree, run_dir=ctx.run_dir / "logs", threads=threads, buffer_bytes=1 << 16
        ) as worker:
            yield EngineArm(worker, ctx.target.geometry, specialized=spec.kind == "specialized")
    except (WorkerFailure, ValueError) as failure:
        record = failure.record() if isinstance(failure, WorkerFailure) else {}
        ctx.evidence.append(GATE, {"kind": "failure", "arm": name, "message": str(failure), "record": record})
        raise _ArmFailedError(name) from failure


def _generate(arm: EngineArm, asks: Sequence[Ask], batch: int) -> Answers:
    longest = max(len(ask.prompt) + ask.max_tokens for ask in asks)
    arm.open(tokens=longest, max_requests=batch, max_step_tokens=1024)
    return arm.run([replace(ask, arrives=0) for ask in asks]).answers


def _line(ask: Ask, arms: Mapping[str, Answer]) -> dict[str, object]:
    classes = {name: "ok" if answer.finish == "length" else answer.finish for name, answer in arms.items()}
    scores = {name: float(np.mean(a.logprobs)) if classes[name] == "ok" else None for name, a in arms.items()}
    pairs = list(zip(arms["standard"].logprobs, arms["candidate"].logprobs, strict=False))
    return {
        "kind": "sample",
        "suite": ask.id.rpartition("-")[0],
        "id": ask.id,
        "tokens": len(ask.forced),
        "prompt_tokens": len(ask.prompt),
        "classes": classes,
        "agreement": float(np.mean([abs(a - b) < 0.05 for a, b in pairs])) if pairs else None,
        **scores,
    }
