"""Methods that time chains on a GPU: N half-layers, or N calls of one op, as one graph, each on weights of its own.

A chain's number N is such that one replay reads more than the caches hold. Every replay begins with inputs of its own:
trusted work inside the graph takes them from a bank, so the result of a call that was left out, or answered from
memory, has nothing to do with the right one. States go on from replay to replay. The evaluator's clock around a request
is the measurement, this process's (CUDA events) a cross-check; nothing is judged here. What touches the GPU is behind
`Engine`, so that the sequence can be tried without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from k3_backend.geometry import Geometry, geometry
from k3_backend.model.program import Site, chain_program
from k3_backend.ops import OPS
from verify.workers.chain_contents import rng
from verify.workers.chain_memory import Chain, Memory
from verify.workers.main import Method, Session
from verify.workers.shared import View

__all__ = ["METHODS", "Engine", "Graph", "install"]

_AREA = "chain"
T = TypeVar("T")
SAMPLED = 2
"""Copies, and slots or rows of each, that are handed out for comparison."""


class Graph(Protocol):
    """A program that can be replayed."""

    @property
    def choices(self) -> Sequence[Mapping[str, Any]]:
        """Per site, as `k3_backend.step.cuda.SiteChoice.record`."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Binding -> where its latest value lies."""
        ...

    def replay(self, count: int) -> int:
        """Replay and wait; nanoseconds on this process's clock."""
        ...

    def counts(self) -> Mapping[str, Sequence[int]]:
        """Site key -> replays by path, (specialised, standard), since `reset`."""
        ...

    def reset(self) -> None:
        """Set the counts to zero."""
        ...


class Engine(Protocol):
    """A device with an arm's kernels."""

    @property
    def device(self) -> torch.device:
        """Where all tensors of chains lie."""
        ...

    def load(self, artifacts: Mapping[str, Path], schedules: Path | None, g: Geometry, arch: str) -> dict[str, Any]:
        """Load an arm; facts for the raw line."""
        ...

    def capture(
        self,
        g: Geometry,
        program: Sequence[Site],
        buffers: Mapping[str, Tensor],
        constants: Callable[[Site], Mapping[str, Tensor]],
        before: Callable[[], None],
    ) -> Graph:
        """Record a program; what `buffers` hold afterwards is of no account."""
        ...


@dataclass
class _Made:
    """The chain that is set."""

    chain: Chain
    graph: Graph
    outputs: dict[str, tuple[str, list[str]]]
    """Output -> (dtype, binding of every copy)."""


@dataclass
class _Opened:
    engine: Engine
    memory: Memory
    made: _Made | None = None


def install(session: Session, engine: Engine) -> None:
    """Use this engine for the session; the default is `cuda_chain.CudaEngine`, made on first use."""
    session.areas["chain.engine"] = engine


def open_arm(session: Session, *, arch: str, seed: str, geometries: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Load an arm.

    Args:
        session: the worker's; its artifacts are named `<op>/<geometry>`.
        arch: of the artifacts.
        seed: secret of this block.
        geometries: geometry -> ops that the arm has a kernel for.
    """
    engine: Engine | None = session.areas.get("chain.engine")
    if engine is None:
        from verify.workers.cuda_chain import CudaEngine

        engine = session.areas["chain.engine"] = CudaEngine()
    facts = {
        name: engine.load(
            {op: session.artifacts[f"{op}/{name}"] for op in ops}, session.schedules, geometry(name), arch
        )
        for name, ops in geometries.items()
    }
    session.areas[_AREA] = _Opened(engine, Memory(seed, engine.device))
    return {"loaded": facts}


def chain(
    session: Session,
    *,
    key: str,
    scope: str,
    geometry_name: str,
    batch: int,
    context: int,
    tokens: int,
    copies: int,
) -> dict[str, Any]:
    """Set a cell's chain: the same key and seed give the same chain in every arm.

    Args:
        session: with an open arm.
        key: the cell's, decides its secrets together with the block's seed.
        scope: of `chain_program`.
        geometry_name: of the shapes.
        batch: B.
        context: cached tokens per request.
        tokens: T.
        copies: half-layers or calls of one replay.

    Returns:
        `choices` per site, and `outputs`: name -> dtype and shape [copies, ...].
    """
    opened = _open(session)
    opened.made = None  # frees the last cell's graph and buffers first
    g = geometry(geometry_name)
    program = chain_program(scope, g, copies, tokens)
    made = opened.memory.chain(g, scope, program, key, batch, context, tokens)

    def constants(site: Site) -> Mapping[str, Tensor]:
        return opened.memory.constants(g, scope, site, made.buffers)

    graph = opened.engine.capture(g, program, made.buffers, constants, made.inputs.take)
    made.keep_rows()
    outputs: dict[str, tuple[str, list[str]]] = {}
    for site in program:
        for spec in OPS[site.op].tensors:
            bound = site.bindings.get(spec.name, "")
            if spec.role == "output" and bound.endswith(f".{site.layer}"):
                outputs.setdefault(spec.name, (spec.dtype, []))[1].append(bound)
    opened.made = _Made(made, graph, outputs)
    described = {
        name: {"dtype": dtype, "shape": [len(bound), *graph.tensors[bound[0]].shape]}
        for name, (dtype, bound) in outputs.items()
    }
    return {"choices": list(graph.choices), "outputs": described}


def reset(session: Session, *, warm: int) -> dict[str, Any]:
    """Replay untimed, so often; then go back to the start: states, inputs and rows; outputs become NaN, counts zero."""
    made = _made(session)
    made.graph.replay(warm)
    made.chain.start()
    with torch.inference_mode():
        for _, bound in made.outputs.values():
            for one in bound:
                made.graph.tensors[one].fill_(torch.nan)
    made.graph.reset()
    return {}


def run(session: Session, *, count: int) -> dict[str, Any]:
    """Replay: `ns` on this process's clock."""
    return {"ns": _made(session).graph.replay(count)}


def finish(session: Session) -> dict[str, Any]:
    """Replays since the reset, per site and path."""
    return {"counts": {key: list(pair) for key, pair in _made(session).graph.counts().items()}}


def collect(session: Session, *, sample: str, outputs: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """Copy parts of what the last replay left, outputs and states, that the evaluator chooses after the run.

    Args:
        session: after `chain.run`.
        sample: secret that picks copies, slots and rows.
        outputs: view per output, in its dtype: [picked copies, ...], as many as the evaluator wants.
        states: f32 view [elements].

    Returns:
        `elements` of states written.
    """
    made = _made(session)
    for name, (_, bound) in made.outputs.items():
        target = _placed(session, outputs[name])
        picked = _pick(bound, sample, "outputs", target.shape[0])
        target.copy_(torch.stack([made.graph.tensors[one] for one in picked]).view(target.shape))
    out = _placed(session, states)
    written = 0
    for part in _sampled(made.chain, sample):
        flat = part.reshape(-1).float().cpu()
        out[written : written + flat.numel()] = flat
        written += flat.numel()
    return {"elements": written}


def _sampled(chain: Chain, sample: str) -> list[Tensor]:
    """Parts of states: of some copies, rows that the chain has written."""
    numbers = sorted({site.layer for site in chain.program if site.layer is not None})
    picked = _pick(numbers, sample, "copies")
    parts = []
    for name in sorted(chain.buffers):
        base, _, number = name.partition(".")
        if not number or int(number) not in picked or base not in ("prefix", "state", "conv_state", "kv_cache"):
            continue
        pool = chain.buffers[name]
        if base == "prefix":
            rows = list(range(pool.shape[0]))
        elif base == "kv_cache":
            pool, rows = pool.flatten(0, 1), chain.buffers["slot_mapping"].tolist()
        else:
            rows = chain.buffers["slots"].flatten().tolist()
        chosen = _pick(rows, sample, base)
        parts.append(pool[torch.tensor(chosen, device=pool.device)])
    return parts


def _pick(values: Sequence[T], sample: str, what: str, count: int = SAMPLED) -> list[T]:
    order = torch.randperm(len(values), generator=rng(sample, what, torch.device("cpu")))[:count]
    return [values[at] for at in order.tolist()]


def _placed(session: Session, view: Mapping[str, Any]) -> Tensor:
    """A tensor over the shared buffer."""
    resolved = View.from_json(view)
    array = resolved.array(session.buffer)
    if resolved.dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _open(session: Session) -> _Opened:
    opened = session.areas.get(_AREA)
    if not isinstance(opened, _Opened):
        raise LookupError("chain.open comes first")
    return opened


def _made(session: Session) -> _Made:
    made = _open(session).made
    if made is None:
        raise LookupError("chain.set comes first")
    return made


METHODS: dict[str, Method] = {
    "chain.open": open_arm,
    "chain.set": chain,
    "chain.reset": reset,
    "chain.run": run,
    "chain.finish": finish,
    "chain.collect": collect,
}
