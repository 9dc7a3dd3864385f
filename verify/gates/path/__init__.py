"""Path gate: did the claimed kernels run, everywhere they are claimed to, in the very steps that were judged?

Measures: decode steps of a seeded model through the decode backend in a sandboxed worker, for every claimed batch and
number of query tokens; ledger, refusals and results of each; the same with the backend off; and, per op, a watermark.
On a GPU target the steps are attention half-layers, replayed through a kit (`verify.kit.path`).
Decides with `verify.protocol.path`. Cannot see: numbers of single ops (kernels) and speed (perf).
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from harness.records import EvidenceClass, GateResult
from k3_backend.geometry import geometry
from k3_backend.model.program import decode_program
from verify.context import Arms, GateContext
from verify.evaluator.execute import run_case
from verify.evaluator.inputs import Case
from verify.evaluator.receipts import receipts
from verify.evaluator.steps import Chain, draw_chain, reference_steps, standard_steps
from verify.evaluator.walk import distance, walk
from verify.evaluator.worker import Worker, WorkerError, WorkerFailure
from verify.gates.arms import candidate_arm, identity, obstacle, side_by_side
from verify.gates.common import command_for, gate_guard, to_result
from verify.gates.kit import from_kit
from verify.protocol import path_cuda
from verify.protocol.decision import Line
from verify.protocol.path import MEASURES, PROTOCOL_ID, decide
from verify.workers.path_model import path_model

__all__ = ["PROTOCOL_ID", "run"]

THREADS = 2
STEPS = 2
"""Steps per cell: the second reads what the first wrote."""
BUFFER_BYTES = 2 << 30
OPEN_TIMEOUT_S = 120.0
CACHED_TOKENS = 8_192
"""Cached tokens per cell, over all requests."""
CALIBRATION = ((1, 1), (3, 2), (8, 1))
"""(batch, tokens) of the chains on which the standard path earns the tolerance."""
SMALL_TIER_DRAWS = 4
"""Tiers with fewer kernel cases per class than this run several query tokens per request only within
`SMALL_TIER_ROWS` rows, to end within a minute."""
SMALL_TIER_ROWS = 64
WATERMARK = (3, 1)
"""(batch, tokens) of the watermarked steps and cases; 3 is captured as it is."""
WATERMARK_CONTEXT = 4
"""Cached tokens there: the average over few values is large, so that attention weighs as much as other ops do."""


@dataclass(frozen=True)
class _Planned:
    """One chain of steps, or one watermark."""

    id: str
    mode: str
    """Switch of the backend: `auto`, or `off` for the standard arm."""
    batch: int
    tokens: int
    context: int
    """Cached tokens of the longest request."""
    seed: int
    spoil: str = ""
    """Op that is made deliberately wrong."""


@gate_guard("path", PROTOCOL_ID)
def run(ctx: GateContext) -> GateResult:
    """Run the planned steps, or go on with those of an interrupted attempt, and decide."""
    if ctx.target.device != "cpu":
        return from_kit("path", path_cuda.PROTOCOL_ID, ctx, decide, _cuda_detail)
    started = time.monotonic()
    why_not = obstacle("path", ctx)
    if why_not is not None:
        return to_result("path", PROTOCOL_ID, why_not, EvidenceClass.STATIC, [], time.monotonic() - started)
    assert ctx.arms is not None
    header = _header(ctx, ctx.arms)
    _Campaign(ctx, ctx.arms, header).run()
    decision = decide(ctx.evidence.lines("path"))
    evidence = [ctx.evidence.ref("path")]
    return to_result("path", PROTOCOL_ID, decision, EvidenceClass.HARDWARE, evidence, time.monotonic() - started)


def _header(ctx: GateContext, arms: Arms) -> dict[str, Any]:
    """The stored header of an interrupted attempt on the same artifacts, else a new one, stored first of all."""
    earlier = ctx.evidence.lines("path")
    if earlier:
        if earlier[0].get("artifacts") != identity(arms) or earlier[0].get("protocol") != PROTOCOL_ID:
            raise RuntimeError("raw/path.jsonl belongs to other artifacts or another protocol")
        return earlier[0]
    plan = _plan(ctx, sorted(arms.candidate))
    header = {
        "kind": "header",
        "gate": "path",
        "protocol": PROTOCOL_ID,
        "target": ctx.target.name,
        "tier": ctx.tier.name,
        "geometry": ctx.target.geometry,
        "model_seed": secrets.randbits(62),
        "artifacts": identity(arms),
        "sites": [[site.layer, site.op, site.name] for site in decode_program(geometry(ctx.target.geometry))],
        "planned": [planned.id for planned in plan],
        "plan": [asdict(planned) for planned in plan],
        "command": command_for("path", ctx),
    }
    ctx.evidence.append("path", header)
    return header


def _plan(ctx: GateContext, ops: list[str]) -> list[_Planned]:
    """Every declared batch and number of query tokens, two secret batches, the standard arm, each op's watermark."""
    chooser = random.SystemRandom()
    contexts = ctx.target.contexts_of(ctx.tier)
    shapes = set(product(ctx.target.batches_of(ctx.tier), (1 + drafts for drafts in ctx.target.drafts)))
    if ctx.tier.kernel_cases < SMALL_TIER_DRAWS:
        shapes = {(batch, tokens) for batch, tokens in shapes if tokens == 1 or batch * tokens <= SMALL_TIER_ROWS}
    shapes |= {(chooser.randint(1, max(ctx.target.batches)), 1) for _ in range(2)}
    plan = []
    for batch, tokens in sorted(shapes):
        context = min(chooser.choice(contexts), CACHED_TOKENS // batch)
        plan.append(_Planned(f"auto/b{batch}/t{tokens}", "auto", batch, tokens, context, secrets.randbits(62)))
    batch, tokens = WATERMARK
    plan.append(_Planned(f"off/b{batch}/t{tokens}", "off", batch, tokens, contexts[0], secrets.randbits(62)))
    seed = secrets.randbits(62)  # one chain for all ops
    for op in ops:
        plan.append(_Planned(f"watermark/{op}", "auto", batch, tokens, WATERMARK_CONTEXT, seed, op))
    return plan


class _Campaign:
    """Runs what is planned and not yet recorded. A worker that died is replaced."""

    def __init__(self, ctx: GateContext, arms: Arms, header: Mapping[str, Any]) -> None:
        self.ctx = ctx
        self.arms = arms
        self.header = header
        self.geometry = geometry(str(header["geometry"]))
        self.weights = path_model(self.geometry.name, int(header["model_seed"]))
        self.rng = np.random.default_rng(secrets.randbits(128))
        self._last: tuple[tuple[int, int, int, int], Chain, list[Tensor]] | None = None

    def run(self) -> None:
        """Measure the tolerance once, then every planned line; ends early only if the objects cannot be loaded."""
        done = {line.get("id") for line in self.ctx.evidence.lines("path")}
        left = [_Planned(**fields) for fields in self.header["plan"] if fields["id"] not in done]
        total = len(left)
        while left:
            with Worker.start(
                candidate_arm(self.ctx),
                base_tree=self.ctx.base_tree,
                run_dir=self.ctx.run_dir / "workers",
                threads=THREADS,
                buffer_bytes=BUFFER_BYTES,
            ) as worker:
                both: dict[str, Callable[[], bool]] = {
                    "load": partial(self._open, worker),
                    "tolerance": self._measure_tolerance,
                }
                if not side_by_side(both)["load"]:
                    return
                while left and self._line(worker, left.pop(0)):
                    self.ctx.progress(f"path: {total - len(left)} of {total} chains of steps")

    def _measure_tolerance(self) -> bool:
        """Add the tolerance to the record if it is not there; whether that had to be done."""
        if any(line["kind"] == "tolerance" for line in self.ctx.evidence.lines("path")):
            return False
        self.ctx.evidence.append("path", self._tolerance())
        return True

    def _tolerance(self) -> dict[str, Any]:
        """Largest distance of standard steps from the fp64 reference, on a few small chains."""
        rows = []
        for batch, tokens in CALIBRATION:
            chain = self._chain(batch, tokens, self.ctx.target.contexts[0], secrets.randbits(62))
            pairs = zip(standard_steps(self.weights, chain), reference_steps(self.weights, chain), strict=True)
            rows += [{"batch": batch, "tokens": tokens, **distance(usual, exact)} for usual, exact in pairs]
        return {
            "kind": "tolerance",
            "standard": {name: max(row[name] for row in rows) for name in MEASURES},
            "rows": rows,
        }

    def _chain(self, batch: int, tokens: int, context: int, seed: int) -> Chain:
        return draw_chain(self.geometry, requests=batch, tokens=tokens, context=context, steps=STEPS, seed=seed)

    def _expected(self, planned: _Planned) -> tuple[Chain, list[Tensor]]:
        """The chain and its standard steps; kept for the next line, since all watermarks share one chain."""
        key = (planned.batch, planned.tokens, planned.context, planned.seed)
        if self._last is None or self._last[0] != key:
            chain = self._chain(*key)
            self._last = (key, chain, standard_steps(self.weights, chain))
        return self._last[1], self._last[2]

    def _open(self, worker: Worker) -> bool:
        """Load objects and model and record which files were mapped; False if that failed."""
        line: dict[str, Any] = {"kind": "load", "failure": None, "receipts": {}}
        try:
            seed = int(self.header["model_seed"])
            worker.call("path.open", timeout_s=OPEN_TIMEOUT_S, geometry_name=self.geometry.name, seed=seed)
            line["receipts"] = receipts(worker.tasks(), {**self.arms.candidate, "runtime": self.arms.runtime})
        except WorkerFailure as failure:
            line["failure"] = failure.record()
        self.ctx.evidence.append("path", line)
        return line["failure"] is None

    def _line(self, worker: Worker, planned: _Planned) -> bool:
        """Run one chain and record its line; False if the worker is gone."""
        line: dict[str, Any] = {**asdict(planned), "kind": "watermark" if planned.spoil else "cell", "failure": None}
        chain, expected = self._expected(planned)
        spoil = [planned.spoil] if planned.spoil else []
        alive, started = True, time.monotonic()
        try:
            line |= walk(worker, chain, expected, self.rng, mode=planned.mode, threads=THREADS, spoil=spoil)
            if planned.spoil:
                line["case"] = self._spoiled_case(worker, planned)
        except WorkerFailure as failure:
            line["failure"] = failure.record()
            alive = isinstance(failure, WorkerError)
        line["seconds"] = time.monotonic() - started
        self.ctx.evidence.append("path", line)
        return alive

    def _spoiled_case(self, worker: Worker, planned: _Planned) -> dict[str, Any]:
        """One case of the kernels gate with the op still spoiled: its comparison must break."""
        seed = secrets.token_hex(16)
        case = Case(planned.spoil, "gaussian", planned.batch, planned.tokens, THREADS, seed, self.geometry.name)
        line: dict[str, Any] = {**asdict(case), "id": case.id, "failure": None, "skipped": None}
        run_case(worker, case, self.rng, line)
        return line


def _cuda_detail(lines: Sequence[Line]) -> dict[str, Any]:
    """Per half-layer for the report: cells, kernels seen by the profiler, and declared fallbacks with their reasons."""
    table: dict[str, Any] = {}
    entries = {entry["id"]: entry for entry in lines[0]["plan"]}
    for line in lines:
        if line["kind"] not in ("cell", "watermark"):
            continue
        entry = entries[line["id"]]
        row = table.setdefault(
            path_cuda.label(entry), {"cells": 0, "watermarks": 0, "kernels": {}, "declared_fallbacks": {}}
        )
        row["watermarks" if entry["spoil"] else "cells"] += 1
        named = {launch["name"] for site in entry["sites"] for launch in site["launches"]}
        for kernel in line["kernels"] or ():
            if kernel["name"] in named:
                row["kernels"][kernel["name"]] = row["kernels"].get(kernel["name"], 0) + int(kernel["count"])
        if entry["mode"] == "auto":
            for site in entry["sites"]:
                if site["path"] == "standard":
                    row["declared_fallbacks"][f"{site['op']}: {site['message']}"] = line["id"]
    return {"half_layers": table}
