"""The real sampler: one sandboxed worker per arm and block, whole steps and single ops, on the evaluator's clock."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from k3_backend.geometry import Geometry
from verify.evaluator.worker import ArmSpec, Worker
from verify.gates.arms import side_by_side
from verify.gates.perf.ops import OpCell
from verify.protocol.perf_plan import CellPlan
from verify.timing.compare import Left
from verify.timing.load import ForeignTime
from verify.timing.sampler import ArmFault, Paths, Slice, as_fault
from verify.workers.shared import View

__all__ = ["WorkerBlock", "WorkerSampler"]

BUFFER_BYTES = 1 << 30
"""Shared buffer per arm; memory is taken when touched."""
START_S = 120.0
CALL_S = 60.0
"""Deadline of a request: honest ones take a fraction of a second."""
COMPILE_S = 900.0
_SAMPLE_ELEMENTS = 1 << 24
_MAX_STEPS = 1 << 12
"""Of a slice of whole steps, far above what its duration needs."""


class WorkerSampler:
    """Starts workers.

    Args:
        arms: arm name -> what it runs; `control` is another process of `best`.
        geometry: of the model.
        base_tree: protected code that workers import.
        run_dir: for logs.
        threads: per arm.
        compiled: standard arms that go through torch.compile, by mode; the gate has none.
        scratch: folder that such arms may write; needed if there are any.
    """

    def __init__(
        self,
        arms: Mapping[str, ArmSpec],
        geometry: Geometry,
        *,
        base_tree: Path,
        run_dir: Path,
        threads: int,
        compiled: Mapping[str, str] | None = None,
        scratch: Path | None = None,
    ) -> None:
        self._arms = {**arms, "control": arms["best"]} if "best" in arms else dict(arms)
        self._geometry = geometry
        self._where: dict[str, Path] = {"base_tree": base_tree, "run_dir": run_dir}
        self._threads = threads
        self._scratch = scratch
        self._compiled = {
            arm: {"compile_mode": mode, "cache": str((scratch or Path()) / "inductor")}
            for arm, mode in (compiled or {}).items()
        }

    @contextlib.contextmanager
    def block(self, arms: Sequence[str], seed: str, cells: Sequence[CellPlan]) -> Iterator[WorkerBlock]:
        """See `Sampler.block`."""
        with contextlib.ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for arm in arms:  # not in threads: a sandbox dies with the thread that started it
                with as_fault(arm):
                    workers[arm] = stack.enter_context(self._start(arm))
            yield WorkerBlock(workers, self._geometry, seed, cells, self._compiled)

    def _start(self, arm: str) -> contextlib.AbstractContextManager[Worker]:
        scratch = self._scratch if arm in self._compiled else None
        return Worker.start(
            self._arms[arm],
            **self._where,
            threads=self._threads,
            buffer_bytes=BUFFER_BYTES,
            scratch=scratch,
            timed=True,
        )


class WorkerBlock:
    """See `Block`."""

    def __init__(
        self,
        workers: Mapping[str, Worker],
        geometry: Geometry,
        seed: str,
        cells: Sequence[CellPlan],
        compiled: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._workers = workers
        self._compiled = compiled
        self._geometry = geometry
        self._seed = seed
        self._ops: dict[str, OpCell] = {}
        self._samples: dict[str, str] = {}
        self._outputs: dict[str, View] = {}
        self._slices: dict[str, tuple[int, int]] = {}
        """Arm -> calls per slice, and slices run since the last reset."""
        self._clock = ForeignTime(workers.values())
        steps = [cell.cell for cell in cells if cell.is_step]
        if steps:
            sizes = {
                "requests": max(int(c["batch"]) for c in steps),
                "tokens": max(int(c["tokens"]) for c in steps),
                "cached": max(int(c["batch"]) * (int(c["context"]) + int(c["tokens"])) for c in steps),
            }
            side_by_side({arm: partial(self._open, arm, sizes) for arm in workers})  # not timed

    def prepare(self, arm: str, cell: CellPlan, calls: int, slices: int) -> None:
        """See `Block.prepare`."""
        worker = self._workers[arm]
        worker.buffer.reset()
        self._slices[arm] = calls, 0
        if not cell.is_step:
            refused = self._op(cell).place(arm, worker, calls, self._guard(arm), self._compiled.get(arm, {}))
            if refused is not None:
                raise ArmFault(arm, "error", f"{cell.key}: {refused}")
            return
        size = cell.cell
        rows = int(size["batch"]) * int(size["tokens"])
        steps = (calls + _untimed(calls)) * slices
        outputs = worker.buffer.view("bf16", (steps, rows, self._geometry.hidden))
        self._outputs[arm] = outputs
        self._call(
            arm,
            "step.chain",
            key=cell.key,
            batch=size["batch"],
            context=size["context"],
            tokens=size["tokens"],
            calls=steps,
            outputs=outputs.to_json(),
        )

    def most(self, cell: CellPlan) -> int:
        """See `Block.most`."""
        return _MAX_STEPS if cell.is_step else self._op(cell).most

    def reset(self, arm: str, cell: CellPlan) -> None:
        """See `Block.reset`."""
        calls, _ = self._slices[arm]
        self._slices[arm] = calls, 0
        # The first call of a compiled arm compiles.
        wait = COMPILE_S if arm in self._compiled else CALL_S
        self._call(arm, f"{_prefix(cell)}reset", timeout_s=wait, warm=calls if cell.is_step else 1)

    def slice(self, arm: str, cell: CellPlan) -> Slice:
        """See `Block.slice`."""
        calls, done = self._slices[arm]
        self._slices[arm] = calls, done + 1
        if not cell.is_step:
            self._call(arm, "step.op_clear")
        elif untimed := _untimed(calls):
            self._call(arm, "step.run", count=untimed)
        with self._guard(arm):
            answer, seconds = self._workers[arm].timed_call(f"{_prefix(cell)}run", timeout_s=CALL_S, count=calls)
        return Slice(round(seconds * 1e9), int(answer["ns"]))

    def again(self, arm: str, cell: CellPlan, calls: int) -> None:  # noqa: ARG002
        """See `Block.again`."""
        self._slices[arm] = calls, self._slices[arm][1] + 1
        self._call(arm, "step.op_clear")
        self._call(arm, "step.op_run", count=calls)

    def paths(self, arm: str, cell: CellPlan) -> Paths:
        """See `Block.paths`."""
        steps = self._call(arm, f"{_prefix(cell)}finish")["steps"]
        return Paths(int(steps["specialized"]), int(steps["standard"]))

    def left(self, arm: str, cell: CellPlan) -> Left:
        """See `Block.left`."""
        worker = self._workers[arm]
        self._call(arm, f"{_prefix(cell)}finish")
        if not cell.is_step:
            calls, runs = self._slices[arm]
            return self._op(cell).left(arm, worker, calls, first=runs == 1)
        sample = self._samples.setdefault(cell.key, secrets.token_hex(16))
        mark = worker.buffer.used
        target = worker.buffer.view("f32", (_SAMPLE_ELEMENTS,))
        count = int(self._call(arm, "step.collect", sample=sample, target=target.to_json())["elements"])
        state = worker.buffer.array(target)[:count].copy()
        worker.buffer.reset(mark)
        return Left({"hidden": bf16_values(worker.buffer.array(self._outputs[arm]))}, {"state": state})

    def reference(self, cell: CellPlan, left: Left) -> Mapping[str, float]:
        """See `Block.reference`."""
        return {} if cell.is_step else self._op(cell).reference(left)

    def facts(self, arm: str, cell: CellPlan) -> Mapping[str, Any]:  # noqa: ARG002
        """None: the header names the artifacts, and no site of a step has a choice."""
        return {}

    def foreign_share(self) -> float:
        """See `Block.foreign_share`."""
        return self._clock.share()

    def _open(self, arm: str, sizes: Mapping[str, int]) -> None:
        options = self._compiled.get(arm, {})
        self._call(
            arm,
            "step.open",
            timeout_s=START_S,
            geometry=self._geometry.name,
            seed=self._seed,
            **options,
            **sizes,
        )

    def _op(self, cell: CellPlan) -> OpCell:
        if cell.key not in self._ops:
            self._ops[cell.key] = OpCell(cell, self._geometry, self._seed)
        return self._ops[cell.key]

    def _call(self, arm: str, method: str, timeout_s: float = CALL_S, **params: Any) -> dict[str, Any]:
        with self._guard(arm):
            return self._workers[arm].call(method, timeout_s=timeout_s, **params)

    def _guard(self, arm: str) -> contextlib.AbstractContextManager[None]:
        return as_fault(arm)


def _prefix(cell: CellPlan) -> str:
    """Of the worker's methods."""
    return "step." if cell.is_step else "step.op_"


def _untimed(calls: int) -> int:
    """Steps that go before the timed ones of a slice, since the other arms' slices have emptied the caches.

    None where one step fills a slice: it streams more than the caches next to a core hold anyway.
    """
    return 1 if calls > 1 else 0


def bf16_values(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """f32 values of a bf16 tensor given as its bits in u16; a copy."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
