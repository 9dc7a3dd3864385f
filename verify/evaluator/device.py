"""Where the calls of a case run: what the evaluator's sequence (`execute.py`) needs of a machine, and the host's own.

A device has the shared buffer as its image: `run` makes the image the contents of the call's memory, runs the bound
call and leaves in the image what the call left in memory. On the host both are the same bytes; on a GPU they are copied
(`verify.kit.card`). A device judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from verify.evaluator.client import Client
from verify.evaluator.inputs import Call
from verify.evaluator.memory import SharedBuffer
from verify.workers.shared import View

__all__ = ["CALL_TIMEOUT_S", "Bound", "Device", "HostDevice", "Refused", "Scratch"]

CALL_TIMEOUT_S = 20.0
"""Deadline of one call of one op; honest calls take milliseconds even on a busy machine."""

LATE_RUNS = 3
"""Runs with random delays, each with other delays."""

Layout = Sequence[tuple[str, str, tuple[int, ...]]]
"""(name, dtype, shape) of a call's tensors in placement order."""


class Refused(Exception):  # noqa: N818 - an event, not a mistake
    """The launcher does not take the call; no planner would launch it."""


class Scratch(NamedTuple):
    """Workspace of a kernel that the caller owns."""

    name: str
    dtype: str
    elements: int
    zeroed: bool
    """Zero before the first call and again after each one; else its content must not matter."""


class Bound(NamedTuple):
    """A call whose arguments are packed."""

    handle: int
    tunables: Mapping[str, int]


class Device(Protocol):
    """One machine's way of running calls.

    Raises:
        WorkerFailure: from any method: the worker crashed, hung, or a kernel returned an error.
        Refused: from `begin` and `bind`.
    """

    buffer: SharedBuffer
    """Image of the memory in which calls run."""
    guard_bytes: int
    """Red zone on each side of a tensor."""
    reference_at: torch.device
    """Where the evaluator computes and compares expected values."""

    def standard_at(self, op: str) -> torch.device:
        """Where the evaluator runs the op's standard path."""
        ...

    def begin(self, call: Call, layout: Layout) -> tuple[Scratch, ...]:
        """Forget earlier calls; say which workspaces this one needs."""
        ...

    def bind(self, call: Call, views: Mapping[str, View]) -> Bound:
        """Pack a call over the placed tensors."""
        ...

    def run(self, handle: int, run: str, scratch: int | None) -> Iterable[str]:
        """Run a bound call; yields codes of what it left behind.

        Args:
            handle: from `bind`.
            run: name of the run; a device may launch runs differently (eagerly, from a captured graph, late).
            scratch: byte that fills a launcher's own scratch first; leave it as it is if null.
        """
        ...

    def disturbed(self, call: Call, views: Mapping[str, View], bound: Bound, seed: int) -> Iterator[tuple[str, int]]:
        """(name, handle) of further runs on the first inputs, each disturbed in its timing."""
        ...

    def repeated(self, bound: Bound, views: Mapping[str, View]) -> Iterator[Mapping[str, Tensor]]:
        """What undisturbed replays on the placed contents left in the viewed tensors, one after the other."""
        ...

    def tasks(self) -> frozenset[int]:
        """Processes and threads that calls may have left behind."""
        ...


class HostDevice:
    """A sandboxed worker on this host: the image is the memory."""

    guard_bytes = 4096
    """A page, so that an overrun by a row of the small geometries stays inside it."""
    reference_at = torch.device("cpu")

    def __init__(self, worker: Client) -> None:
        self.worker = worker
        self.buffer = worker.buffer

    def standard_at(self, op: str) -> torch.device:  # noqa: ARG002 - every device has the same signature
        """The host."""
        return self.reference_at

    def begin(self, call: Call, layout: Layout) -> tuple[Scratch, ...]:  # noqa: ARG002
        """Forget earlier calls; the launch pool's scratch is not the caller's."""
        self.worker.call("op.release", timeout_s=CALL_TIMEOUT_S)
        return ()

    def bind(self, call: Call, views: Mapping[str, View]) -> Bound:
        """Pack a call for an undisturbed pool."""
        return self._bind(call, views, None)

    def run(self, handle: int, run: str, scratch: int | None) -> Iterable[str]:  # noqa: ARG002
        """Replay the launch list."""
        answer: dict[str, Any] = self.worker.call("op.replay", timeout_s=CALL_TIMEOUT_S, handle=handle, scratch=scratch)
        return () if answer.get("denormals") else ("denormals_off",)

    def disturbed(self, call: Call, views: Mapping[str, View], bound: Bound, seed: int) -> Iterator[tuple[str, int]]:  # noqa: ARG002
        """Runs whose workers arrive late, each time otherwise."""
        if call.case.threads > 1:
            late = self._bind(call, views, seed)
            for _ in range(LATE_RUNS):
                yield "late", late.handle

    def repeated(self, bound: Bound, views: Mapping[str, View]) -> Iterator[Mapping[str, Tensor]]:  # noqa: ARG002
        """None: the launch lists of the CPU have no order that a repetition would vary."""
        return iter(())

    def tasks(self) -> frozenset[int]:
        """All processes and threads of the worker."""
        return self.worker.tasks()

    def _bind(self, call: Call, views: Mapping[str, View], jitter: int | None) -> Bound:
        answer = self.worker.call(
            "op.bind",
            timeout_s=CALL_TIMEOUT_S,
            op=call.case.op,
            tensors={name: view.to_json() for name, view in views.items()},
            attrs=dict(call.attrs),
            rows=call.case.rows,
            threads=call.case.threads,
            jitter=jitter,
        )
        if "refused" in answer:
            raise Refused(str(answer["refused"]))
        return Bound(int(answer["handle"]), answer["tunables"])
