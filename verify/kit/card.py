"""A GPU as a device of the evaluator's sequence: calls run in a worker, over an image in shared memory.

Inputs are made, and results compared, in the evaluator's process, whose memory no kernel of a candidate can reach: the
worker has a CUDA context of its own and knows no expected values. After any error of a run the worker is given up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.evaluator.client import Client
from verify.evaluator.device import Bound, Layout, Refused, Scratch
from verify.evaluator.execute import as_tensor
from verify.evaluator.failures import WorkerCrashed, WorkerError
from verify.evaluator.inputs import Call
from verify.workers.shared import View

__all__ = ["CardDevice", "EagerDevice"]

GUARD_BYTES = 64 << 10
"""Red zone: four rows of the widest tensors (7168 bf16), so that an overrun by a tile's row stays inside it."""
LATE_DELAYS_NS = (2_000, 30_000, 200_000)
"""How late inputs arrive: within a launch's own latency, after it, and long after every CTA waits."""
CONTENDED_RUNS = 2
_CHUNK_BYTES = 64 << 20
_RUN_TIMEOUT_S = 60.0
"""Deadline of one call; honest ones take milliseconds, repetitions seconds."""
_MODES = {"first": "eager", "again": "eager", "late": "late", "contended": "contended"}
_WORKSPACE = "workspace "
"""Before a workspace's name, which may also be a tensor's."""
_STANDARD_ON_HOST = frozenset({"mla_decode"})
"""Ops whose standard path calls a kernel that torch has for the CPU only."""


class CardDevice:
    """One worker with one op loaded."""

    guard_bytes = GUARD_BYTES

    timeout_s = _RUN_TIMEOUT_S

    def __init__(
        self, worker: Client, evaluator: torch.device, replays: int = 0, replay_bytes: int = 0, *, contended: bool
    ) -> None:
        self.worker = worker
        self.buffer = worker.buffer
        self.reference_at = evaluator
        self.replays = replays
        """Wanted repetitions of the case's first call."""
        self.replay_bytes = replay_bytes
        """Results that are compared at most; fewer repetitions where each result is large, but one."""
        self.contended = contended
        """Whether another stream works beside some runs."""
        self._plan: Mapping[str, Any] = {}
        self._delays: list[int] = []

    def standard_at(self, op: str) -> torch.device:
        """The evaluator's GPU, where torch has the op's standard path there."""
        return torch.device("cpu") if op in _STANDARD_ON_HOST else self.reference_at

    def begin(self, call: Call, layout: Layout) -> tuple[Scratch, ...]:
        """Choose tunables; say which workspaces the variant needs."""
        shapes = {name: View(0, dtype, shape).to_json() for name, dtype, shape in layout}
        answer = self._call("card.begin", layout=shapes, attrs=dict(call.attrs), rows=call.case.rows)
        if "refused" in answer:
            raise Refused(str(answer["refused"]))
        self._plan = answer
        scratch = (Scratch(*entry) for entry in answer["scratch"])
        return tuple(entry._replace(name=_WORKSPACE + entry.name) for entry in scratch)

    def bind(self, call: Call, views: Mapping[str, View]) -> Bound:  # noqa: ARG002 - every device has the same signature
        """Pack the call over the arena."""
        answer = self._call(
            "card.bind",
            plan=self._plan["plan"],
            views={name: view.to_json() for name, view in views.items() if not name.startswith(_WORKSPACE)},
            scratch={
                name.removeprefix(_WORKSPACE): view.to_json()
                for name, view in views.items()
                if name.startswith(_WORKSPACE)
            },
        )
        return Bound(int(answer["handle"]), self._plan["tunables"])

    def run(self, handle: int, run: str, scratch: int | None) -> tuple[str, ...]:  # noqa: ARG002
        """Image to device memory, launch, and back. Replays with changed contents come from a captured graph."""
        delay = self._delays.pop() if run == "late" else 0
        self._call("card.run", handle=handle, mode=_MODES.get(run, "graph"), used=self.buffer.used, delay_ns=delay)
        return ()

    def disturbed(self, call: Call, views: Mapping[str, View], bound: Bound, seed: int) -> Iterator[tuple[str, int]]:  # noqa: ARG002
        """Late inputs with every delay, in random order; then another stream's work beside the call."""
        order = np.random.default_rng(seed).permutation(len(LATE_DELAYS_NS))
        self._delays = [LATE_DELAYS_NS[at] for at in order]
        for _ in order:
            yield "late", bound.handle
        if self.contended:
            for _ in range(CONTENDED_RUNS):
                yield "contended", bound.handle

    def repeated(self, bound: Bound, views: Mapping[str, View]) -> Iterator[Mapping[str, Tensor]]:
        """Results of replays on the same contents, as copies from shared memory."""
        size = sum(view.nbytes for view in views.values())
        left = min(self.replays, max(1, self.replay_bytes // max(1, size)))
        mark = self.buffer.used
        while left > 0:
            count = min(left, max(1, _CHUNK_BYTES // max(1, size)))
            at = self.buffer.alloc(count * size)
            self._call(
                "card.repeat", handle=bound.handle, used=mark, at=at, count=count,
                views=[view.to_json() for view in views.values()],
            )  # fmt: skip
            for index in range(count):
                yield self._found(views, at + index * size)
            self.buffer.reset(mark)
            left -= count

    def tasks(self) -> frozenset[int]:
        """None: no host code of a candidate runs in the worker."""
        return frozenset()

    def _found(self, views: Mapping[str, View], at: int) -> dict[str, Tensor]:
        found = {}
        for name, view in views.items():
            data = self.buffer.bytes[at : at + view.nbytes].copy()
            found[name] = as_tensor(View(0, view.dtype, view.shape).array(data), view.dtype)
            at += view.nbytes
        return found

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        try:
            return self.worker.call(method, timeout_s=self.timeout_s, **params)
        except WorkerError as error:
            if method not in ("card.run", "card.repeat"):
                raise
            # An error on the device lasts as long as its context: what runs next would fail for this call's reason.
            raise WorkerCrashed(str(error), method=method, log=error.log, detail=error.detail) from error


class EagerDevice(CardDevice):
    """The same without graphs, disturbance or repetition, and with patience: for workers under a checker."""

    def __init__(self, worker: Client, evaluator: torch.device, timeout_s: float) -> None:
        super().__init__(worker, evaluator, contended=False)
        self.timeout_s = timeout_s

    def run(self, handle: int, run: str, scratch: int | None) -> tuple[str, ...]:  # noqa: ARG002
        """Every run launches by itself."""
        return super().run(handle, "first", scratch)

    def disturbed(self, call: Call, views: Mapping[str, View], bound: Bound, seed: int) -> Iterator[tuple[str, int]]:  # noqa: ARG002
        """None."""
        return iter(())
