"""Check and time points of one call on this machine's GPU. Only trusted code runs on the host.

Method (`tuning/1`): every point first has to give the reference's numbers, within the kernels gate's tolerance, in each
input class of `KINDS` that the op has, twice the same bits, red zones intact. Then all points that do are captured as
CUDA graphs of calls on inputs of their own, rotated through more than `COLD_BYTES`, launched as programmatic
dependents, and replayed in turns, so that drift hits all alike. The op's standard path is timed the same way.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3_backend.aot.arguments import TORCH_DTYPES, BindError, call_sizes
from k3_backend.aot.cuda.launch import BoundCall, CudaError, CudaOp
from k3_backend.geometry import geometry
from k3_backend.ops import OPS
from k3_backend.ops.registry import standard
from verify.evaluator.execute import Expected, expect, measure
from verify.evaluator.inputs import Call, Case, kinds, make
from verify.protocol.kernels import exceeds
from verify.tuning.manifest import Timed

__all__ = ["COLD_BYTES", "METHOD", "Bench", "DeviceLostError", "in_use"]

METHOD = "tuning/1"
KINDS = ("gaussian", "wide", "spikes", "tail")
COLD_BYTES = 450_000_000
"""Inputs that a graph rotates through: more than any L2 in use holds several times over."""
LEAST_CALLS = 8
TURNS, REPLAYS = 3, 12
GUARD = 4096
"""Elements around every output that must stay as they were."""
_TRIES = 64
"""Seeds tried until a drawn case has the wanted specialised sizes."""
_DRAWERS = 8
"""Threads that draw inputs while other calls are timed."""


class DeviceLostError(Exception):
    """A point broke the CUDA context; nothing more can run in this process."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index = index
        """Of the point in its call."""


@dataclass(frozen=True)
class _Inputs:
    call: Call
    expected: Expected


class Bench:
    """All points of one op, loaded on the current device.

    Args:
        op: op name.
        root: folder of the archive.
    """

    def __init__(self, op: str, root: Path) -> None:
        self.spec = OPS[op]
        self.root = root
        self._loaded: dict[str, CudaOp] = {}
        self._pool = ThreadPoolExecutor(_DRAWERS)
        self._device = torch.device("cuda", torch.cuda.current_device())

    def draw(self, timed: Timed, seed: str) -> list[Future[Call]]:
        """Begin to draw a call's inputs, on the host; `seed` is secret and decides all values."""
        wanted = [kind for kind in KINDS if kind in kinds(self.spec.name)]
        return [self._pool.submit(self._inputs, timed, kind, seed) for kind in wanted]

    def lines(self, timed: Timed, drawn: Sequence[Future[Call]], broken: Mapping[int, str]) -> Iterator[dict[str, Any]]:
        """Raw lines of one call: the standard path's, then one per point.

        Args:
            timed: the call.
            drawn: its inputs, from `draw`.
            broken: points that broke an earlier session's context, with what was said; they are not run.

        Raises:
            DeviceLostError: a point broke the context.
        """
        cases = [_Inputs(f.result(), expect(f.result(), self._device, self._device)) for f in drawn]
        outcomes = []
        for index in range(len(timed.points)):
            if index in broken:
                outcomes.append({"wrong": broken[index], "share": None})
                continue
            with in_use(index):
                outcomes.append(self._check(timed, index, cases))
        first = cases[0].call
        sets = self._sets(first)
        calls = -(-max(LEAST_CALLS, len(sets)) // len(sets)) * len(sets)
        runs: list[Callable[[int], None]] = [self._standard(first, sets)]
        order = [index for index, outcome in enumerate(outcomes) if outcome["wrong"] is None]
        runs += [self._point(timed, index, first, sets) for index in order]
        owners = [None, *order]
        graphs = []
        for owner, run in zip(owners, runs, strict=True):
            with in_use(owner):
                graphs.append(_captured(run, calls))
        samples = _in_turns(graphs, calls, owners)
        common = {"call": timed.key, "geometry": timed.geometry, "sizes": dict(timed.sizes), "rows": timed.rows}
        common |= {"calls": calls, "input_sets": len(sets), "bytes": _bytes(first)}
        yield {"kind": "standard", **common, "us": samples[0]}
        for index, outcome in enumerate(outcomes):
            us = samples[1 + order.index(index)] if index in order else None
            yield {"kind": "point", **common, "tunables": dict(timed.points[index]), **outcome, "us": us}

    def _load(self, timed: Timed, index: int) -> CudaOp:
        folder = timed.folders[index]
        if folder not in self._loaded:
            self._loaded[folder] = CudaOp(self.root / folder, self.spec, geometry(timed.geometry))
        return self._loaded[folder]

    def _inputs(self, timed: Timed, kind: str, seed: str) -> Call:
        """A case of a class whose specialised sizes are the call's."""
        for attempt in range(_TRIES):
            case = Case(self.spec.name, kind, timed.rows, 1, 1, f"{seed}{attempt:04x}", timed.geometry)
            call = make(case)
            sizes = call_sizes(self.spec, geometry(timed.geometry), call.tensors) | dict(call.attrs)
            if all(sizes.get(name, 1) == value for name, value in timed.sizes.items()):
                return call
        raise ValueError(f"no case of {self.spec.name} has {dict(timed.sizes)} in {_TRIES} draws")

    def _check(self, timed: Timed, index: int, cases: Sequence[_Inputs]) -> dict[str, Any]:
        """`wrong`: why the point must not be used, or null; `share`: largest error as a share of its tolerance."""
        share = 0.0
        for inputs in cases:
            call = inputs.call
            tensors = _on_device(call)
            guards = {name: _guarded(*shape) for name, shape in call.outputs.items()}
            outputs = {name: guard[1] for name, guard in guards.items()}
            try:
                bound = self._load(timed, index).bind({**tensors, **outputs}, call.attrs, timed.points[index])
            except BindError as error:
                return {"wrong": f"{call.case.kind}: refused: {error}", "share": None}
            got = self._run(call, bound, tensors, outputs)
            again = self._run(call, bound, tensors, outputs)
            rows, choices = measure(call, inputs.expected, got, "tuning")
            assert not choices, "ops that choose are not tuned by rows"
            for row in rows:
                if over := exceeds(row["candidate"], row["tolerance"]):
                    return {"wrong": f"{call.case.kind}: {row['tensor']}: {', '.join(over)}", "share": None}
                share = max(share, *(row["candidate"][m] / limit for m, limit in row["tolerance"].items()))
            if any(not torch.equal(_raw(got[name]), _raw(again[name])) for name in got):
                return {"wrong": f"{call.case.kind}: other bits in the second call", "share": None}
            if any(not bool(edge.isnan().all()) for whole, _ in guards.values() for edge in _edges(whole)):
                return {"wrong": f"{call.case.kind}: wrote outside an output", "share": None}
        return {"wrong": None, "share": share}

    def _run(
        self, call: Call, bound: BoundCall, tensors: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Results of one call on the case's own states, among NaN."""
        for name in call.masks.written:
            original = call.tensors[name]
            assert original is not None
            tensors[name].copy_(original)
        for output in outputs.values():
            output.fill_(float("nan") if output.is_floating_point() else -1)
        bound.launch()
        torch.cuda.synchronize()
        kept = {name: output.clone() for name, output in outputs.items()}
        for name, rows in call.masks.written.items():
            if rows.any():
                kept[name] = tensors[name][rows.cuda()]
        return kept

    def _sets(self, call: Call) -> list[dict[str, Any]]:
        """Copies of a call's tensors and outputs, each with memory of its own."""
        count = max(1, -(-COLD_BYTES // _bytes(call)))
        count = min(count, 512)
        return [
            _on_device(call) | {n: torch.empty(s, dtype=_dtype(d), device="cuda") for n, (d, s) in call.outputs.items()}
            for _ in range(count)
        ]

    def _point(self, timed: Timed, index: int, call: Call, sets: Sequence[Mapping[str, Any]]) -> Callable[[int], None]:
        op = self._load(timed, index)
        bound = [op.bind(tensors, call.attrs, timed.points[index]) for tensors in sets]
        return lambda at: bound[at % len(bound)].launch()

    def _standard(self, call: Call, sets: Sequence[Mapping[str, Any]]) -> Callable[[int], None]:
        path = standard(self.spec.name, "cuda")
        inputs = [{n: t for n, t in tensors.items() if n not in call.outputs} for tensors in sets]

        def run(at: int) -> None:
            with torch.device("cuda"):
                path(inputs[at % len(inputs)], call.attrs)

        return run


@contextmanager
def in_use(index: int | None) -> Iterator[None]:
    """A failure of the device is this point's; one of the standard path (null) stays what it is.

    Raises:
        DeviceLostError: the device failed.
    """
    try:
        yield
    except (CudaError, torch.AcceleratorError) as error:
        if index is None:
            raise
        raise DeviceLostError(index, f"the device failed: {str(error).splitlines()[0][:200]}") from error


def _captured(run: Callable[[int], None], calls: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        run(0)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(calls):
            run(at)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _in_turns(graphs: Sequence[torch.cuda.CUDAGraph], calls: int, owners: Sequence[int | None]) -> list[list[float]]:
    """Microseconds per call of every replay of every graph; `owners` are the points whose graphs they are."""
    samples: list[list[float]] = [[] for _ in graphs]
    for turn in range(TURNS):
        for at in range(len(graphs)):
            index = (at + turn) % len(graphs)
            with in_use(owners[index]):
                samples[index] += _replayed(graphs[index], calls)
    return samples


def _replayed(graph: torch.cuda.CUDAGraph, calls: int) -> list[float]:
    """Microseconds per call of `REPLAYS` replays; waits for each, so that a failure shows here."""
    samples: list[float] = []
    graph.replay()  # the first one after another graph's does not count
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(round(begin.elapsed_time(end) * 1e3 / calls, 4))
    return samples


def median(samples: Sequence[float]) -> float:
    """Of one point's microseconds."""
    return statistics.median(samples)


def _on_device(call: Call) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.cuda() for name, tensor in call.tensors.items()}


def _bytes(call: Call) -> int:
    """Of all inputs once and all outputs once."""
    inputs = sum(t.numel() * t.element_size() for t in call.tensors.values() if t is not None)
    return inputs + sum(_dtype(d).itemsize * _elements(s) for d, s in call.outputs.values())


def _elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _dtype(name: str) -> torch.dtype:
    return TORCH_DTYPES[name]  # type: ignore[index]


def _guarded(dtype: str, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory with NaN around, the output inside it)."""
    whole = torch.full((_elements(shape) + 2 * GUARD,), float("nan"), dtype=_dtype(dtype), device="cuda")
    return whole, whole[GUARD:-GUARD].view(tuple(shape))


def _edges(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return whole[:GUARD], whole[-GUARD:]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
