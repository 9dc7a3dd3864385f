"""The real card: device memory as one arena, eager launches, captured graphs, late inputs and a contending stream.

Every run starts from the whole image, so nothing that an earlier call left behind survives, red zones included. The
image is staged in a second arena, from which the late-copy kernel (`late_copy.py`) fills the first one. No host code of
a candidate runs here: `k3_backend.aot.cuda.launch` loads images and launches them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cuda.bindings import driver

from k3_backend.aot.arguments import TORCH_DTYPES
from k3_backend.aot.cuda.launch import BoundCall, CudaError, CudaOp, check
from k3_backend.geometry import Geometry
from k3_backend.ops.interface import OpSpec
from verify.workers import late_copy
from verify.workers.card import Plan
from verify.workers.shared import View
from verify.workers.spoil import disturb

__all__ = ["CudaCard"]

EARLY_BYTE = 0xFF
"""What late inputs hold before they arrive: NaN as bf16 and f32, -1 as an integer."""
TABLE_WORDS = 3 * 64 + 2
CONTENDING_SIZE = 4096
"""Rows of the contending stream's bf16 matrix products: 0.2 ms each on an H200."""
CONTENDING_PRODUCTS = 8
HISTORY_BYTES = 64 << 20
"""Device memory for results of repeated runs that wait to be copied to the host."""


class CudaCard:
    """One op on the current device."""

    def load(self, folder: Path, spec: OpSpec, geometry: Geometry, nbytes: int) -> dict[str, Any]:
        """Load the images and the trusted kernel; reserve both arenas."""
        self.op = CudaOp(folder, spec, geometry)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.arena = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self.staging = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self.table = torch.zeros(TABLE_WORDS, dtype=torch.int64, device="cuda")
        self.history = torch.empty(HISTORY_BYTES, dtype=torch.uint8, device="cuda")
        self.square = torch.zeros(CONTENDING_SIZE, CONTENDING_SIZE, dtype=torch.bfloat16, device="cuda")
        self.calls: list[_Call] = []
        self.spoiled = False
        self.producer = _Producer()
        torch.cuda.synchronize()
        return {
            "name": torch.cuda.get_device_name(),
            "multiprocessors": self.op.multiprocessors,
            "late_copy": self.producer.obstacle is None,
            "late_copy_obstacle": self.producer.obstacle,
        }

    def scratch(self, plan: Plan, layout: Mapping[str, View]) -> Sequence[tuple[str, str, int, bool]]:
        """Bind the call to unused memory once, and look at what the launcher allocated."""
        tensors = {
            name: torch.empty(view.shape, dtype=TORCH_DTYPES[view.dtype], device="cuda")  # type: ignore[index]
            for name, view in layout.items()
        }
        bound = self.op.bind(tensors, plan.attrs, plan.tunables)
        zeroed = {workspace.name: workspace.zeroed for workspace in bound.variant.workspaces}
        names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        return [(name, names[t.dtype], t.numel(), zeroed[name]) for name, t in bound.workspaces.items()]

    def bind(self, plan: Plan, views: Mapping[str, View], scratch: Mapping[str, View]) -> int:
        """Pack a call over the arena. Earlier calls are forgotten."""
        tensors = {name: self._tensor(view) for name, view in views.items()}
        work = {name: self._tensor(view) for name, view in scratch.items()}
        bound = self.op.bind(tensors, plan.attrs, plan.tunables, work)
        roles = {tensor.name: tensor.role for tensor in plan.spec.tensors}
        late = [view for name, view in views.items() if roles[name] != "constant"] + list(scratch.values())
        launch = partial(_launch_spoiled, bound, plan.spec, tensors) if self.spoiled else bound.launch
        self.calls = [_Call(launch, late)]
        torch.cuda.synchronize()
        return 0

    def spoil(self) -> None:
        """Disturb results right after the kernels of every call bound from now on."""
        self.spoiled = True

    def run(self, handle: int, mode: str, image: npt.NDArray[np.uint8], delay_ns: int) -> None:
        """Run once in a mode of `card.MODES`."""
        call, host = self.calls[handle], torch.from_numpy(image)
        used = host.numel()
        with torch.cuda.stream(self.stream):
            if mode == "late":
                self._stage(call, host, delay_ns)
            else:
                self.arena[:used].copy_(host)
            self.stream.synchronize()
            if mode == "eager":
                call.launch()
            elif mode == "late":
                self._late_graph(call).replay()
            else:
                if mode == "contended":
                    self._contend()
                call.graph(self.stream).replay()
                if mode == "contended":
                    self._contend()
            torch.cuda.synchronize()
            host.copy_(self.arena[:used])

    def repeat(
        self, handle: int, image: npt.NDArray[np.uint8], views: Sequence[View], out: npt.NDArray[np.uint8], count: int
    ) -> None:
        """Replay the graph with the late copy, without delay, so that each replay starts from the same contents."""
        call, host = self.calls[handle], torch.from_numpy(image)
        size = sum(view.nbytes for view in views)
        batch = max(1, min(count, HISTORY_BYTES // max(1, size)))
        history = self.history if size <= HISTORY_BYTES else torch.empty(size, dtype=torch.uint8, device="cuda")
        target = torch.from_numpy(out)
        with torch.cuda.stream(self.stream):
            self._stage(call, host, 0)
            graph = self._late_graph(call)
            for first in range(0, count, batch):
                done = min(batch, count - first)
                for index in range(done):
                    graph.replay()
                    at = index * size
                    for view in views:
                        history[at : at + view.nbytes].copy_(self.arena[view.offset : view.offset + view.nbytes])
                        at += view.nbytes
                torch.cuda.synchronize()
                target[first * size : (first + done) * size].copy_(history[: done * size])

    def _stage(self, call: _Call, host: torch.Tensor, delay_ns: int) -> None:
        """Constants and red zones in place, everything else still to come: in the arena there is only poison."""
        used = host.numel()
        self.staging[:used].copy_(host)
        self.arena[:used].copy_(self.staging[:used])
        ranges = []
        for view in call.late:
            self.arena[view.offset : view.offset + view.nbytes].fill_(EARLY_BYTE)
            ranges.append((self.arena.data_ptr() + view.offset, self.staging.data_ptr() + view.offset, view.nbytes))
        words = torch.tensor(late_copy.table(delay_ns, ranges), dtype=torch.int64)
        self.table[: words.numel()].copy_(words)

    def _late_graph(self, call: _Call) -> torch.cuda.CUDAGraph:
        """Late copy, then the call, as neighbours in one graph."""
        if call.late_graph is None:
            call.late_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(call.late_graph, stream=self.stream):
                self.producer.launch(self.table, call.late, self.arena, self.staging)
                call.launch()
        return call.late_graph

    def _contend(self) -> None:
        """Work for another stream that keeps multiprocessors and memory busy."""
        with torch.cuda.stream(self.side):
            for _ in range(CONTENDING_PRODUCTS):
                torch.mm(self.square, self.square)
                self.staging.add_(1)

    def _tensor(self, view: View) -> torch.Tensor:
        dtype = TORCH_DTYPES[view.dtype]  # type: ignore[index]
        return self.arena[view.offset : view.offset + view.nbytes].view(dtype).view(view.shape)


class _Call:
    """A bound call with its graphs, captured when first needed: a kernel must have run once before."""

    def __init__(self, launch: Callable[[], None], late: Sequence[View]) -> None:
        self.launch = launch
        self.late = late
        self.late_graph: torch.cuda.CUDAGraph | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def graph(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """The call alone."""
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                self.launch()
        return self._graph


def _launch_spoiled(bound: BoundCall, spec: OpSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    bound.launch()
    disturb(spec, tensors)


class _Producer:
    """The late-copy kernel. Where the driver cannot assemble PTX, plain copies stand in, and the load line says so."""

    BLOCKS, THREADS = 32, 256

    def __init__(self) -> None:
        self.obstacle: str | None = None
        try:
            text = late_copy.PTX.encode() + b"\0"
            self._library = check(driver.cuLibraryLoadData(text, [], [], 0, [], [], 0), "cuLibraryLoadData late copy")
            kernel = check(driver.cuLibraryGetKernel(self._library, late_copy.ENTRY.encode()), "cuLibraryGetKernel")
            self._function = driver.CUfunction(int(kernel))
        except CudaError as error:
            self.obstacle = str(error)

    def launch(self, table: torch.Tensor, late: Sequence[View], arena: torch.Tensor, staging: torch.Tensor) -> None:
        """Enqueue the copies that `table` describes on torch's current stream."""
        if self.obstacle is not None:
            for view in late:
                part = slice(view.offset, view.offset + view.nbytes)
                arena[part].copy_(staging[part])
            return
        address = ctypes.c_uint64(table.data_ptr())
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(address))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.BLOCKS, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.THREADS, 1, 1
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0), "launch of the late copy")
