"""Timing on one GPU: graphs of many calls over distinct inputs, arms in turns, and the profiler's reading beside it.

A graph's time is taken between two events around its replay and divided by its calls, so what a launch costs in a chain
is in it and what a single launch costs on the host is not. Rounds go through all arms in turns, beginning with another
one each time: a drift of clocks meets all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._autograd import DeviceType

from verify.bench.gpu.arm import Arm

__all__ = ["ROUNDS", "calls_for", "capture", "profiled", "quick_us", "rounds"]

ROUNDS = 30
"""Replays of each arm that are timed."""
GRAPH_US = 1500.0
"""A graph lasts about this long at least, so that the events around it weigh little."""
PROFILED_CALLS = 8
_QUICK_REPLAYS = 5
_WARM_UP = 3


def calls_for(sets: int, estimate_us: float) -> int:
    """Calls of a graph: a whole number of rounds over all sets, and long enough."""
    return sets * max(1, round(GRAPH_US / max(estimate_us * sets, 1e-3)))


def capture(launches: Sequence[Callable[[], object]], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` launches, over and over through the list. What compiles at first use has done so."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for launch in launches[:_WARM_UP]:
            launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            launches[index % len(launches)]()
    return graph


def quick_us(launches: Sequence[Callable[[], object]], calls: int | None = None) -> float:
    """Best of a few replays, in us per call: for choosing, and for ceilings."""
    calls = calls or len(launches)
    graph = capture(launches, calls)
    graph.replay()
    return min(_replay_us(graph) for _ in range(_QUICK_REPLAYS)) / calls


def rounds(graphs: Mapping[str, torch.cuda.CUDAGraph], calls: int, count: int = ROUNDS) -> dict[str, list[float]]:
    """Us per call of every arm in every round."""
    names = list(graphs)
    for name in names:
        graphs[name].replay()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(count):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_replay_us(graphs[name]) / calls)
    return samples


def profiled(arm: Arm) -> dict[str, Any]:
    """Device time per call by the profiler, summed over kernels, and their names; null beside the reason if it cannot.

    Calls are launched one by one, over sets that no cache holds any more; kernels of dependent launches that overlap
    count twice.
    """
    launches = arm.launches[:PROFILED_CALLS]
    torch.cuda.synchronize()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for launch in launches:
                launch()
            torch.cuda.synchronize()
        kineto = profile.profiler
        assert kineto is not None
        events = [e for e in kineto.kineto_results.events() if e.device_type() == DeviceType.CUDA]
    except RuntimeError as error:
        return {"device_us": None, "device_missing": str(error)[:200], "kernels": []}
    if not events:
        return {"device_us": None, "device_missing": "the profiler saw no kernel", "kernels": []}
    total = sum(event.duration_ns() for event in events) / 1e3
    names = sorted({event.name()[:120] for event in events})
    return {"device_us": total / len(launches), "device_missing": None, "kernels": names}


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
