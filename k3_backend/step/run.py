"""The decode backend: plan each step, run it specialised or fall back, and keep the ledger.

`DecodeBackend.forward` is the only entry that an engine calls. When the specialised path is chosen: `plan.py`. Which
state it changes: `capture.py`. How it returns to the standard path: `fallback.py`. Sampling, scheduling and cache
management are the engine's; this module owns static buffers, captures and the worker pool, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from k3_backend.aot.cpu.launch import KernelSet, Pool
from k3_backend.model.batch import Batch
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.step.capture import Capture, Shared, launchable_constants
from k3_backend.step.fallback import run_standard
from k3_backend.step.ledger import Ledger
from k3_backend.step.plan import Layout, Mode, PlanError, Planner, Refusal, Step

__all__ = ["DecodeBackend"]


class DecodeBackend:
    """Runs steps of one model on one state. Not thread-safe: captures own static buffers.

    Args:
        weights: the model; constants must not change afterwards.
        kernels: specialised ops of the weights' geometry, or None.
        mode: `off`, `auto` or `latency_specialized` (see `plan.Mode`).
        threads: workers of the specialised path, the caller included.
        state: pools that steps read and write.
        layout: parallel layout of the process.

    Raises:
        PlanError: `latency_specialized` cannot be kept; lists every reason.
    """

    def __init__(
        self,
        weights: ModelWeights,
        kernels: KernelSet | None,
        mode: Mode,
        threads: int,
        state: DecodeState,
        *,
        layout: Layout = Layout(),  # noqa: B008 - frozen
    ) -> None:
        self.mode = mode
        self.layout = layout
        self.threads = threads
        self.kernels = kernels
        self._weights = weights
        self._planner = Planner(mode, weights, kernels, state, layout)
        self.ledger = Ledger(self._planner.program(1))
        """Counts per site and refusal code since construction or `ledger.reset()`."""
        self._pool: Pool | None = None
        self._shared: Shared | None = None
        self._captures: dict[tuple[int, int], Capture] = {}

    @property
    def state(self) -> DecodeState:
        """The pools that steps work on."""
        return self._planner.state

    @property
    def pool(self) -> Pool | None:
        """Workers of the specialised path; None before its first step."""
        return self._pool

    def plan(self, batch: Batch) -> Step | Refusal:
        """Which path a batch takes, without running it."""
        return self._planner.plan(batch)

    def forward(self, batch: Batch) -> Tensor:
        """Run one step: hidden [N, D] bf16 with model.norm applied.

        The result of a specialised step is a view that the next step may overwrite; clone it to keep it.

        Raises:
            LaunchError: a specialised kernel failed in the middle of the step; the state is not usable any more.
            BackendError: the worker pool cannot be started (first specialised step only).
        """
        step = self.plan(batch)
        if isinstance(step, Refusal):
            return run_standard(self._weights, self.state, batch, step, self.ledger)
        hidden = self.capture(step.captured, step.tokens).run(batch)
        self.ledger.count_specialized_step()
        return hidden

    def capture(self, requests: int, tokens: int) -> Capture:
        """The capture of a planned shape, made on first use (milliseconds); engines may make them ahead of serving."""
        key = (requests, tokens)
        if key not in self._captures:
            program = self._planner.program(tokens)
            self._captures[key] = Capture(self._shared_parts(), program, requests=requests, tokens=tokens)
        return self._captures[key]

    def _shared_parts(self) -> Shared:
        """What captures share, made with the first of them, so that a backend that never specialises starts nothing."""
        if self.kernels is None or self._planner.static:
            raise PlanError(Refusal(self._planner.static))
        if self._pool is None:
            self._pool = self.kernels.runtime.pool(self.threads)
        if self._shared is None:
            constants = launchable_constants(self._weights, self._planner.program(1))
            self._shared = Shared(self._weights.embed, constants, self.kernels, self._pool, self.state, self.ledger)
        return self._shared

    def rebind(self, state: DecodeState) -> None:
        """Work on other pools from now on. Captures hold the old pools' addresses and are dropped; the ledger goes on.

        Raises:
            PlanError: `latency_specialized` cannot be kept on the new pools; the old ones stay bound.
        """
        self._planner = Planner(self.mode, self._weights, self.kernels, state, self.layout)
        self._captures.clear()
        if self._shared is not None:
            self._shared = replace(self._shared, state=state)

    def close(self) -> None:
        """Stop the workers and drop the captures; a later specialised step starts new ones."""
        self._captures.clear()
        self._shared = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None
