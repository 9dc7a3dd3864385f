"""The kernels gate on a GPU machine: draw a secret plan, run its cases, write one raw line per case.

The plan is drawn here, after the kit's digests were fixed and compared, and stored in the header. Each op of each
geometry is a unit of its own, in a worker of its own; units run side by side, the cases of one unit in order. Expected
values stay in this process. Deciding is `verify.protocol.kernels`, here and wherever the lines travel.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from k3_backend.aot.cuda.choices import Choices
from k3_backend.geometry import geometry
from k3_backend.ops import ALL_OPS
from verify.evaluator.client import Client
from verify.evaluator.execute import run_on
from verify.evaluator.failures import WorkerError, WorkerFailure
from verify.evaluator.inputs import kinds
from verify.evaluator.plan import Planned, draw_plan, from_json
from verify.kit import mutants
from verify.kit.card import CardDevice
from verify.kit.child import started
from verify.kit.context import KitContext
from verify.kit.manifest import Unit
from verify.kit.sanitizer import check_control, check_unit
from verify.protocol.kernels import case_fails
from verify.protocol.kernels_cuda import EVALUATOR_FAILED, PROTOCOL_ID, REPLAYS
from verify.protocol.sanitizers import CONTROLS

__all__ = ["run"]

GATE = "kernels"
BUFFER_BYTES = 3 << 29
"""Image of device memory: the largest state pool (64 requests of 8 tokens, 12 heads) and room for repeated results."""
FEW_REPLAYS = 8
REPLAY_BYTES = {FEW_REPLAYS: 1 << 29, REPLAYS: 8 << 30}
"""Results that are compared per case, by wanted replays; fewer replays where each result is large."""
_SPARSE = frozenset({"padding", "empty", "spikes", "equal"})
"""Classes whose results hold little that could differ between replays."""
LOAD_TIMEOUT_S = 180.0
MAX_BAD_CASES = 3
"""Failing cases after which the rest of a unit's cases is skipped: the outcome is decided."""


def run(kit: KitContext, arm: str = "candidate") -> None:
    """Run the planned cases of an arm that have no line yet, until all are done or the time is over."""
    plan = _plan(kit, arm)
    done = {line["id"] for line in kit.results.lines(GATE) if line["kind"] == "case"}
    waiting: dict[Unit, list[Planned]] = {}
    for unit in kit.manifest.units(arm):
        cases = [p for p in plan if (p.case.op, p.case.geometry) == (unit.op, unit.geometry) and p.case.id not in done]
        if cases:
            waiting[unit] = cases
    left = sum(map(len, waiting.values()))
    kit.progress(f"{GATE}: {len(plan) - left} of {len(plan)} cases have a line; {len(waiting)} units to go")
    counter = _Counter(kit.progress, left)
    with ThreadPoolExecutor(max_workers=kit.jobs) as pool:
        for future in [pool.submit(_Unit(kit, arm, unit, plan, counter).run, cases) for unit, cases in waiting.items()]:
            future.result()
    _sanitize(kit, arm)
    mutants.run(kit, plan)


def _sanitize(kit: KitContext, arm: str) -> None:
    """Memory checkers over every unit that has no line of them yet, and once over kernels whose races are known."""
    lines = kit.results.lines(GATE)
    done = {line["unit"] for line in lines if line["kind"] == "sanitizer"}
    known = {line["control"] for line in lines if line["kind"] == "sanitizer_control"}
    failed = {line["unit"] for line in lines if line["kind"] == "load" and line["failure"] is not None}

    def control(name: str) -> None:
        kit.results.append(GATE, kit.without_folders(check_control(kit, name)))

    def check(unit: Unit) -> None:
        why_not = "its images could not be loaded" if unit.key in failed else kit.no_sanitizer
        for line in check_unit(kit, arm, unit, why_not):
            kit.results.append(GATE, kit.without_folders(line))
        kit.progress(f"{GATE}: checkers over {unit.key}")

    waiting = [unit for unit in kit.manifest.units(arm) if unit.key not in done]
    if not kit.over():
        with ThreadPoolExecutor(max_workers=kit.jobs) as pool:
            controls = pool.map(control, [name for name in CONTROLS if name not in known])
            list(pool.map(check, waiting))
            list(controls)


def _plan(kit: KitContext, arm: str) -> list[Planned]:
    """The stored plan of an interrupted run, else a new one, stored first of all."""
    lines = kit.results.lines(GATE)
    if lines:
        return [from_json(planned) for planned in lines[0]["plan"]]
    manifest, plan = kit.manifest, []
    for unit in manifest.units(arm):
        plan += draw_plan(
            [unit.op], geometry=unit.geometry, batches=manifest.batches, tokens=manifest.tokens, draws=manifest.draws,
            edges={unit.op: _edges(kit, arm, unit)}, threads=(1,),
        )  # fmt: skip
    header = {
        **kit.header(GATE, PROTOCOL_ID, arm),
        "ops": sorted({unit.op for unit in manifest.units(arm)}),
        "planned": [planned.case.id for planned in plan],
        "plan": [planned.to_json() for planned in plan],
        "classes": {unit.op: list(kinds(unit.op)) for unit in manifest.units(arm)},
    }
    kit.results.append(GATE, header)
    return plan


def _edges(kit: KitContext, arm: str, unit: Unit) -> list[int]:
    """Rows at which the unit's schedule changes bucket."""
    folder, schedules = kit.artifact(arm, unit), kit.schedules(arm)
    schedule = Choices.read(folder, schedules, ALL_OPS[unit.op], geometry(unit.geometry), unit.arch).schedule
    return sorted({bucket.max_rows for bucket in schedule.buckets})


class _Counter:
    """Says how far all units are."""

    def __init__(self, say: Callable[[str], None], total: int) -> None:
        self._say, self._total, self._done = say, total, 0
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def step(self, what: str) -> None:
        with self._lock:
            self._done += 1
            seconds = time.monotonic() - self._started
            self._say(f"{GATE}: {self._done} of {self._total} cases, {seconds:.0f} s ({what})")


class _Unit:
    """Runs one unit's waiting cases. A worker that died is replaced; the unit that killed it is not run again."""

    def __init__(self, kit: KitContext, arm: str, unit: Unit, plan: Sequence[Planned], counter: _Counter) -> None:
        self.kit, self.arm, self.unit, self.counter = kit, arm, unit, counter
        self.bad: Counter[str] = Counter()
        self.stopped: str | None = None
        own = [p.case for p in plan if (p.case.op, p.case.geometry) == (unit.op, unit.geometry)]
        plain = [case for case in own if case.kind not in _SPARSE] or own
        self.often = min(plain, key=lambda case: (case.rows, case.id)).id
        for line in kit.results.lines(GATE):
            if line["kind"] == "case" and (line["op"], line["geometry"]) == (unit.op, unit.geometry):
                self._count(line)

    def run(self, waiting: Sequence[Planned]) -> None:
        """Run cases until none is left or the time is over."""
        left = list(waiting)
        while left and not self.kit.over():
            if self.stopped is not None:
                while left:
                    self._case(None, left.pop(0))
                return
            with ExitStack() as stack:
                worker = self._load(stack)
                if worker is None:
                    return
                while left and self.stopped is None and not self.kit.over():
                    if not self._case(worker, left.pop(0)):
                        break

    def _load(self, stack: ExitStack) -> Client | None:
        """A worker with the unit loaded, recorded; None if that failed."""
        line: dict[str, Any] = {"kind": "load", "unit": self.unit.key, "failure": None, "receipt": None}
        worker = None
        try:
            worker = stack.enter_context(
                started(
                    self.unit.op, self.kit.artifact(self.arm, self.unit), self.kit.schedules(self.arm),
                    code=self.kit.code, logs=self.kit.logs, buffer_bytes=BUFFER_BYTES,
                    bootstrap=self.kit.machine.bootstrap,
                )
            )  # fmt: skip
            answer = worker.call(
                "card.load", timeout_s=LOAD_TIMEOUT_S, op=self.unit.op, arch=self.unit.arch,
                geometry_name=self.unit.geometry, nbytes=BUFFER_BYTES,
            )  # fmt: skip
            digest = self.kit.manifest.arms[self.arm][self.unit.key]
            line["receipt"] = {"digest": digest, **answer}
        except WorkerFailure as failure:
            line["failure"], worker = self.kit.without_folders(failure.record()), None
        self.kit.results.append(GATE, line)
        return worker

    def _case(self, worker: Client | None, planned: Planned) -> bool:
        """Run one case and record its line; False if the worker is gone. Without a worker it is only recorded."""
        case = planned.case
        line: dict[str, Any] = {**planned.to_json(), "kind": "case", "class": case.kind, "rows": case.rows}
        line |= {"skipped": self.stopped, "refused": None, "failure": None}
        alive, began = True, time.monotonic()
        if worker is not None:
            often = case.id == self.often
            replays = REPLAYS if often else FEW_REPLAYS
            device = CardDevice(
                worker, self.kit.evaluator, replays, REPLAY_BYTES[replays], contended=planned.contended or often
            )
            try:
                run_on(device, case, np.random.default_rng(secrets.randbits(128)), line)
            except WorkerFailure as failure:
                line["failure"] = self.kit.without_folders(failure.record())
                alive = isinstance(failure, WorkerError)
            except Exception as error:  # this process's own mistake says nothing about the candidate, and is no pass
                line["skipped"] = str(self.kit.without_folders(f"{EVALUATOR_FAILED}: {type(error).__name__}: {error}"))[
                    :500
                ]
                alive = False
        line["seconds"] = time.monotonic() - began
        self.kit.results.append(GATE, line)
        self._count(line)
        self.counter.step(case.id)
        return alive

    def _count(self, line: dict[str, Any]) -> None:
        """Stop a unit whose outcome is decided: after a fatal failure, or after several bad cases."""
        failure = line["failure"]
        self.bad["cases"] += case_fails(line)
        if failure is not None and failure["failure"] != WorkerError.kind:
            self.stopped = f"the worker ended in case {line['id']}"
        elif self.bad["cases"] >= MAX_BAD_CASES:
            self.stopped = f"{MAX_BAD_CASES} cases failed"
