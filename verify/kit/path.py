"""The path gate on a GPU machine: replay planned half-layers, write one raw line per cell.

Each geometry's arm is loaded into a worker of its own; geometries run side by side, the cells of one in order. Inputs
are made, and results compared, in this process, whose memory no kernel of a candidate can reach; the worker knows no
expected value. Deciding is `verify.protocol.path_cuda`, here and wherever the lines travel.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from k3_backend.geometry import geometry
from k3_backend.ops import OPS
from verify.evaluator.client import Client
from verify.evaluator.execute import run_on
from verify.evaluator.failures import WorkerFailure
from verify.evaluator.half_layers import Constants, draw_constants
from verify.evaluator.inputs import Case
from verify.kit.card import CardDevice
from verify.kit.child import started_arm
from verify.kit.context import KitContext
from verify.kit.half_walk import Expected, expect, walk_half
from verify.kit.manifest import Unit
from verify.kit.path_plan import Planned, draw_plan, read_choices, symbols
from verify.protocol.kernels_cuda import EVALUATOR_FAILED
from verify.protocol.path_cuda import cell_findings, ledger_symbols
from verify.protocol.path_cuda_record import PROTOCOL_ID

__all__ = ["run"]

GATE = "path"
ARM = "candidate"
BUFFER_BYTES = 3 << 29
"""Image of device memory: weights of a half-layer and the largest pool."""
REPLAYS = 3
"""Graph replays of a cell; each reads what the one before wrote."""
LOAD_TIMEOUT_S = 240.0
MAX_BAD_CELLS = 3
"""Failing cells after which the rest of a geometry's cells is skipped: the outcome is decided."""


def run(kit: KitContext) -> None:
    """Run the planned cells that have no line yet, until all are done or the time is over."""
    header, plan = _plan(kit)
    done = {line["id"] for line in kit.results.lines(GATE) if line["kind"] in ("cell", "watermark")}
    waiting: dict[str, list[Planned]] = {}
    for planned in plan:
        if planned.id not in done:
            waiting.setdefault(planned.geometry, []).append(planned)
    left = sum(map(len, waiting.values()))
    kit.progress(f"{GATE}: {len(plan) - left} of {len(plan)} cells have a line; {len(waiting)} geometries to go")
    with ThreadPoolExecutor(max_workers=kit.jobs) as pool:
        for future in [pool.submit(_Geometry(kit, name, header).run, cells) for name, cells in waiting.items()]:
            future.result()


def _plan(kit: KitContext) -> tuple[Mapping[str, Any], list[Planned]]:
    """The stored header and plan of an interrupted run, else new ones, stored first of all."""
    lines = kit.results.lines(GATE)
    if not lines:
        manifest = kit.manifest
        folders = {unit: kit.artifact(ARM, unit) for unit in manifest.units(ARM)}
        arm = read_choices(folders, kit.schedules(ARM))
        plan = draw_plan(arm, manifest)
        header = {
            **kit.header(GATE, PROTOCOL_ID, ARM),
            "contexts": list(manifest.contexts),
            **manifest.plans[GATE],
            "weights_seed": secrets.randbits(62),
            "symbols": symbols(arm),
            "planned": [planned.id for planned in plan],
            "plan": [planned.to_json() for planned in plan],
        }
        kit.results.append(GATE, header)
    stored = kit.results.lines(GATE)[0]
    return stored, [Planned(**entry) for entry in stored["plan"]]


class _Geometry:
    """Runs one geometry's waiting cells. A worker that died is replaced as long as the outcome is open."""

    def __init__(self, kit: KitContext, name: str, header: Mapping[str, Any]) -> None:
        self.kit, self.name, self.header = kit, name, header
        units = (unit for unit in kit.manifest.units(ARM) if unit.geometry == name)
        self.units = {unit.op: unit for unit in units if unit.op in OPS}
        """Artifacts of a step's ops; an op beside a step has no site in a half-layer."""
        self.entries = {entry["id"]: entry for entry in header["plan"]}
        self.bad: Counter[str] = Counter()
        self.ledgers = ledger_symbols(kit.results.lines(GATE))
        self.profile = False
        self.constants: dict[str, Constants] = {}
        self.last: tuple[tuple[Any, ...], Expected] | None = None
        for line in kit.results.lines(GATE):
            if line["kind"] == "cell" and self.entries.get(line["id"], {}).get("geometry") == name:
                self._count(line)

    def run(self, waiting: Sequence[Planned]) -> None:
        """Run cells until none is left or the time is over."""
        left, total = list(waiting), len(waiting)
        while left and not self.kit.over():
            if self.bad["cells"] >= MAX_BAD_CELLS:
                while left:
                    self._cell(None, left.pop(0))
                return
            with ExitStack() as stack:
                worker = self._load(stack)
                if worker is None:
                    return
                alive = True
                while left and alive and self.bad["cells"] < MAX_BAD_CELLS and not self.kit.over():
                    alive = self._cell(worker, left.pop(0))
                    self.kit.progress(f"{GATE}: {self.name}: {total - len(left)} of {total} cells")

    def _load(self, stack: ExitStack) -> Client | None:
        """A worker with the geometry's arm loaded, recorded; None if that failed."""
        line: dict[str, Any] = {"kind": "load", "geometry": self.name, "failure": None, "images": {}}
        line |= {"device": None, "profiler": {"obstacle": None, "ledger": None}}
        worker = None
        try:
            worker = stack.enter_context(
                started_arm(
                    self.name, {op: self.kit.artifact(ARM, unit) for op, unit in self.units.items()},
                    self.kit.schedules(ARM), code=self.kit.code, logs=self.kit.logs, buffer_bytes=BUFFER_BYTES,
                    bootstrap=self.kit.machine.bootstrap,
                )
            )  # fmt: skip
            answer = worker.call(
                "half.load", timeout_s=LOAD_TIMEOUT_S, arch=self.kit.manifest.arch, geometry_name=self.name,
                nbytes=BUFFER_BYTES,
            )  # fmt: skip
            digests = {op: self.kit.manifest.arms[ARM][unit.key] for op, unit in self.units.items()}
            line["images"] = {
                op: {"digest": digests.get(op), "images": images} for op, images in answer["images"].items()
            }
            line |= {"device": answer["device"], "profiler": self.kit.without_folders(answer["profiler"])}
            self.profile = answer["profiler"]["obstacle"] is None
        except WorkerFailure as failure:
            line["failure"], worker = self.kit.without_folders(failure.record()), None
        self.kit.results.append(GATE, line)
        self.ledgers = ledger_symbols(self.kit.results.lines(GATE))
        return worker

    def _cell(self, worker: Client | None, planned: Planned) -> bool:
        """Run one cell and record its line; False if the worker is of no more use. Without one it is only recorded.

        Any error of a worker ends it: one on the device lasts as long as its context.
        """
        line: dict[str, Any] = {"kind": "watermark" if planned.spoil else "cell", "id": planned.id}
        line |= {"mode": planned.mode, "failure": None, "skipped": None, "replays": REPLAYS, "sites": []}
        line |= {"ledger": None, "kernels": None, "results": {}, "changed": []}
        alive, began = True, time.monotonic()
        if worker is None:
            line["skipped"] = f"{MAX_BAD_CELLS} cells failed"
        else:
            try:
                rng = np.random.default_rng(secrets.randbits(128))
                line |= walk_half(worker, planned, self._expected(planned), rng, REPLAYS, profile=self.profile)
                if planned.spoil:
                    line["case"] = self._spoiled_case(worker, planned)
            except WorkerFailure as failure:
                line["failure"], alive = self.kit.without_folders(failure.record()), False
            except Exception as error:  # this process's own mistake says nothing about the candidate, and is no pass
                text = f"{EVALUATOR_FAILED}: {type(error).__name__}: {error}"
                line["skipped"], alive = str(self.kit.without_folders(text))[:500], False
        line["seconds"] = time.monotonic() - began
        self.kit.results.append(GATE, line)
        self._count(line)
        return alive

    def _expected(self, planned: Planned) -> Expected:
        """The cell's inputs and expected values; kept for the next one, since all watermarks share them."""
        key = (planned.half, planned.batch, planned.tokens, planned.context, planned.seed)
        if self.last is None or self.last[0] != key:
            if planned.half not in self.constants:
                seed = int(self.header["weights_seed"])
                self.constants[planned.half] = draw_constants(geometry(self.name), planned.half, seed)
            self.last = (key, expect(planned, self.constants[planned.half], REPLAYS, self.kit.evaluator))
        return self.last[1]

    def _spoiled_case(self, worker: Client, planned: Planned) -> dict[str, Any]:
        """One case of the kernels gate with the op spoiled: its comparison must break."""
        unit: Unit = self.units[planned.spoil]
        worker.call(
            "card.load", timeout_s=LOAD_TIMEOUT_S, op=unit.op, arch=unit.arch, geometry_name=unit.geometry,
            nbytes=BUFFER_BYTES,
        )  # fmt: skip
        worker.call("card.spoil", timeout_s=LOAD_TIMEOUT_S)
        case = Case(unit.op, "gaussian", planned.batch, planned.tokens, 1, secrets.token_hex(16), unit.geometry)
        line: dict[str, Any] = {**_fields(case), "id": case.id, "failure": None, "skipped": None}
        device = CardDevice(worker, self.kit.evaluator, contended=False)
        run_on(device, case, np.random.default_rng(secrets.randbits(128)), line)
        return line

    def _count(self, line: Mapping[str, Any]) -> None:
        """Skip the rest where the outcome is decided."""
        if line["kind"] == "cell" and line["skipped"] is None:
            entry = self.entries[line["id"]]
            self.bad["cells"] += any(True for _ in cell_findings(self.header, entry, line, self.ledgers))


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}
