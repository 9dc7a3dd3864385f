"""Methods that time chains on a GPU: N half-layers, or N calls of one op, as one graph, each on weights of its own.

A chain's number N is such that one replay reads more than the caches hold. Every replay begins with inputs of its own:
trusted work inside the graph takes them from a bank, so the result of a call that was left out, or answered from
memory, has nothing to do with the right one. States go on from replay to replay. The evaluator's clock around a request
is the measurement, this process's (CUDA events) a cross-check; nothing is judged here. What touches the GPU is behind
`Engine`, so that the sequence can be tried without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from k3_backend.geometry import Geometry, geometry
from k3_backend.model.program import BATCH_FIELDS, DTYPES, HALF_LAYERS, Site, chain_program, program_buffers
from k3_backend.ops import OPS
from verify.workers.chain_contents import constant, filled, rng
from verify.workers.main import Method, Session
from verify.workers.shared import View

__all__ = ["METHODS", "Engine", "Graph", "install"]

_AREA = "chain"
T = TypeVar("T")
PAGE = 64
BANK = 5
"""Different inputs that replays go through. Odd, so that a kernel that skips every second call is seen."""
ALIGNMENT = 256
ROTATED_BYTES = 400_000_000
"""Bytes that one replay's caches have together at least: several times the last-level cache."""
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
class _Chain:
    program: tuple[Site, ...]
    geometry: Geometry
    key: str
    tokens: int
    buffers: dict[str, Tensor]
    inputs: _Inputs
    start_rows: dict[str, Tensor]
    """Cache -> what the rows that the chain writes hold at the start."""
    graph: Graph
    outputs: dict[str, tuple[str, list[str]]]
    """Output -> (dtype, binding of every copy)."""


@dataclass
class _Opened:
    engine: Engine
    seed: str
    weights: dict[tuple[str, str], dict[str, Tensor]] = field(default_factory=dict)
    """(geometry/scope, site key) -> constants; shared by the cells of a block."""
    caches: dict[str, Tensor] = field(default_factory=dict)
    """Geometry -> cache memory of the largest cell so far, bf16 [rows, ROW]."""
    chain: _Chain | None = None


class _Inputs:
    """Inputs that change from replay to replay: one flat tensor, refilled from a bank inside the graph."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self.offsets: dict[str, tuple[int, int]] = {}
        at = 0
        for name, (shape, dtype) in shapes.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            self.offsets[name] = at, size
            at += -(-size // ALIGNMENT) * ALIGNMENT
        self.shapes = dict(shapes)
        self.flat = torch.zeros(1, at // 8, dtype=torch.int64, device=device)
        self.bank = torch.zeros(BANK, at // 8, dtype=torch.int64, device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)

    def views(self) -> dict[str, Tensor]:
        """Input -> its place, which a replay fills."""
        return {name: self._view(self.flat[0], name) for name in self.shapes}

    def drawn(self, number: int) -> dict[str, Tensor]:
        """Input -> its place in one entry of the bank."""
        return {name: self._view(self.bank[number], name) for name in self.shapes}

    def take(self) -> None:
        """Take the next entry of the bank; part of every replay."""
        torch.index_select(self.bank, 0, self.index, out=self.flat)
        self.index.add_(1).remainder_(BANK)

    def _view(self, row: Tensor, name: str) -> Tensor:
        (shape, dtype), (at, size) = self.shapes[name], self.offsets[name]
        return row.view(torch.uint8)[at : at + size].view(dtype).view(shape)


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
    session.areas[_AREA] = _Opened(engine, seed)
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
    opened.chain = None  # frees the last cell's graph and buffers first
    g = geometry(geometry_name)
    program = chain_program(scope, g, copies, tokens)
    device = opened.engine.device
    buffers = {
        buffer.name: torch.zeros(buffer.shape, dtype=DTYPES[buffer.dtype], device=device)
        for buffer in program_buffers(g, program, batch * tokens)
    }
    fresh = _fresh(program, scope)
    inputs = _Inputs({name: (tuple(buffers[name].shape), buffers[name].dtype) for name in fresh}, device)
    buffers |= inputs.views()
    buffers |= _metadata(opened, key, batch, context, tokens, device)
    buffers |= _pools(opened, g, program, batch, tokens, buffers)
    weights = opened.weights

    def constants(site: Site) -> Mapping[str, Tensor]:
        where = f"{g.name}/{scope}", site.key
        if where not in weights:
            weights[where] = _constants(g, site, opened.seed, where, device, buffers)
        return weights[where]

    graph = opened.engine.capture(g, program, buffers, constants, inputs.take)
    rows = buffers["slot_mapping"]
    start_rows = {
        name: pool.flatten(0, 1)[rows].clone() for name, pool in buffers.items() if name.startswith("kv_cache.")
    }
    outputs: dict[str, tuple[str, list[str]]] = {}
    for site in program:
        for spec in OPS[site.op].tensors:
            bound = site.bindings.get(spec.name, "")
            if spec.role == "output" and bound.endswith(f".{site.layer}"):
                outputs.setdefault(spec.name, (spec.dtype, []))[1].append(bound)
    opened.chain = _Chain(program, g, key, tokens, buffers, inputs, start_rows, graph, outputs)
    described = {
        name: {"dtype": dtype, "shape": [len(bound), *graph.tensors[bound[0]].shape]}
        for name, (dtype, bound) in outputs.items()
    }
    return {"choices": list(graph.choices), "outputs": described}


def reset(session: Session, *, warm: int) -> dict[str, Any]:
    """Replay untimed, so often; then go back to the start: states, inputs and rows; outputs become NaN, counts zero."""
    opened = _open(session)
    made = _made(opened)
    made.graph.replay(warm)
    _start(opened, made)
    return {}


def run(session: Session, *, count: int) -> dict[str, Any]:
    """Replay: `ns` on this process's clock."""
    return {"ns": _made(_open(session)).graph.replay(count)}


def finish(session: Session) -> dict[str, Any]:
    """Replays since the reset, per site and path."""
    return {"counts": {key: list(pair) for key, pair in _made(_open(session)).graph.counts().items()}}


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
    made = _made(_open(session))
    for name, (_, bound) in made.outputs.items():
        target = _placed(session, outputs[name])
        picked = _pick(bound, sample, "outputs", target.shape[0])
        target.copy_(torch.stack([made.graph.tensors[one] for one in picked]).view(target.shape))
    out = _placed(session, states)
    written = 0
    for part in _sampled(made, sample):
        flat = part.reshape(-1).float().cpu()
        out[written : written + flat.numel()] = flat
        written += flat.numel()
    return {"elements": written}


def _sampled(made: _Chain, sample: str) -> list[Tensor]:
    """Parts of states: of some copies, rows that the chain has written."""
    numbers = sorted({site.layer for site in made.program if site.layer is not None})
    picked = _pick(numbers, sample, "copies")
    parts = []
    for name in sorted(made.buffers):
        base, _, number = name.partition(".")
        if not number or int(number) not in picked or base not in ("prefix", "state", "conv_state", "kv_cache"):
            continue
        pool = made.buffers[name]
        if base == "prefix":
            rows = list(range(pool.shape[0]))
        elif base == "kv_cache":
            pool, rows = pool.flatten(0, 1), made.buffers["slot_mapping"].tolist()
        else:
            rows = made.buffers["slots"].flatten().tolist()
        chosen = _pick(rows, sample, base)
        parts.append(pool[torch.tensor(chosen, device=pool.device)])
    return parts


def _pick(values: Sequence[T], sample: str, what: str, count: int = SAMPLED) -> list[T]:
    order = torch.randperm(len(values), generator=rng(sample, what, torch.device("cpu")))[:count]
    return [values[at] for at in order.tolist()]


def _start(opened: _Opened, made: _Chain) -> None:
    """Contents at the start of the chain; everything else is not a number."""
    seed, own = opened.seed, f"{made.key}/"
    with torch.inference_mode():
        for name, tensor in made.buffers.items():
            base = name.partition(".")[0]
            if base in BATCH_FIELDS or name in made.inputs.shapes:
                continue
            if base == "kv_cache":
                tensor.flatten(0, 1)[made.buffers["slot_mapping"]] = made.start_rows[name]
            elif base == "state":
                filled(tensor, seed, own + name, 0.07)
            elif base in ("conv_state", "blocks", "prefix"):
                filled(tensor, seed, own + name)
            else:
                tensor.fill_(torch.nan)
        for _, bound in made.outputs.values():
            for one in bound:
                made.graph.tensors[one].fill_(torch.nan)
        _fill_bank(made, seed, own)
        made.inputs.index.zero_()
    made.graph.reset()


def _fill_bank(made: _Chain, seed: str, own: str) -> None:
    """Draw the inputs of all replays.

    Additions to a prefix are differences of independent draws: so the prefix is another one in every replay, however
    many there are, and comes back to the first draw, with which it begins.
    """
    for name in made.inputs.shapes:
        base, _, number = name.partition(".")
        shape, dtype = made.inputs.shapes[name]
        if base != "delta":
            for at in range(BANK):
                filled(made.inputs.drawn(at)[name], seed, f"{own}{name}/{at}")
            continue
        prefix = made.buffers[f"prefix.{number}"]
        draws = [prefix.float()]
        draws += [filled(torch.empty_like(draws[0]), seed, f"{own}{name}/{at}") for at in range(1, BANK)]
        for at in range(BANK):
            made.inputs.drawn(at)[name].copy_((draws[(at + 1) % BANK] - draws[at]).to(dtype).view(shape))


def _fresh(program: Sequence[Site], scope: str) -> list[str]:
    """Bindings of the inputs that come from outside the chain."""
    if scope in HALF_LAYERS:
        return [site.bindings["delta"] for site in program if "delta" in site.bindings]
    return [
        site.bindings[spec.name]
        for site in program
        for spec in OPS[site.op].tensors
        if spec.role == "activation" and spec.name in site.bindings and spec.name != "kv_cache"
    ]


def _metadata(
    opened: _Opened, key: str, batch: int, context: int, tokens: int, device: torch.device
) -> dict[str, Tensor]:
    """Batch fields: scattered slots and pages, every request at the same length."""
    host = torch.device("cpu")
    pages = -(-(context + tokens) // PAGE)
    order = torch.randperm(batch * pages, generator=rng(opened.seed, f"pages/{key}", host)) + 1
    table = order.view(batch, pages)
    slots = torch.randperm(batch * tokens, generator=rng(opened.seed, f"slots/{key}", host)) + 1
    positions = torch.arange(context, context + tokens)
    mapping = table[:, positions // PAGE] * PAGE + positions % PAGE
    fields = {
        "slots": slots.view(batch, tokens).to(torch.int32),
        "accepted": torch.ones(batch, dtype=torch.int32),
        "block_table": table.to(torch.int32),
        "seq_lens": torch.full((batch,), context + tokens, dtype=torch.int32),
        "slot_mapping": mapping.reshape(-1),
    }
    return {name: fields[name].contiguous().to(device) for name in BATCH_FIELDS}


def _pools(
    opened: _Opened, g: Geometry, program: Sequence[Site], batch: int, tokens: int, buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """States of every copy. Caches are shared in turn where fewer than all exceed `ROTATED_BYTES`."""
    device = opened.engine.device
    bound = dict.fromkeys(name for site in program for name in site.bindings.values())
    slots, head = 1 + batch * tokens, g.kda_head_dim
    pools: dict[str, Tensor] = {}
    for name in bound:
        base = name.partition(".")[0]
        if base == "state":
            pools[name] = torch.zeros(slots, g.heads, head, head, device=device)
        elif base == "conv_state":
            pools[name] = torch.zeros(slots, tokens + 2, 3 * g.kda_width, dtype=torch.bfloat16, device=device)
    caches = [name for name in bound if name.startswith("kv_cache.")]
    if caches:
        pages = 1 + buffers["block_table"].numel()
        rows = pages * PAGE
        distinct = min(len(caches), -(-ROTATED_BYTES // (rows * g.mla_row * 2)))
        memory = _cache_memory(opened, g, rows * distinct)
        for at, name in enumerate(caches):
            first = rows * (at % distinct)
            pools[name] = memory[first : first + rows].view(pages, PAGE, g.mla_row)
    return pools


def _cache_memory(opened: _Opened, g: Geometry, rows: int) -> Tensor:
    """Cache rows of a geometry; drawn again where a cell needs more of them."""
    memory = opened.caches.get(g.name)
    if memory is None or memory.shape[0] < rows:
        opened.caches.pop(g.name, None)
        del memory
        memory = torch.empty(rows, g.mla_row, dtype=torch.bfloat16, device=opened.engine.device)
        opened.caches[g.name] = filled(memory, opened.seed, f"cache/{g.name}/{rows}")
    return opened.caches[g.name]


def _constants(
    g: Geometry, site: Site, seed: str, where: tuple[str, str], device: torch.device, buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights of a site."""
    spec = OPS[site.op]
    call = {"N": buffers[site.bindings["out"]].shape[-1]} if site.op == "input_projection" else {}
    sizes = {**spec.sizes(g), **call}
    return {
        one.name: constant(
            one, tuple(d if isinstance(d, int) else sizes[d] for d in one.dims), DTYPES[one.dtype], seed,
            f"{where[0]}/{where[1]}/{one.name}", device,
        )
        for one in spec.tensors
        if one.role == "constant"
    }  # fmt: skip


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


def _made(opened: _Opened) -> _Chain:
    if opened.chain is None:
        raise LookupError("chain.set comes first")
    return opened.chain


METHODS: dict[str, Method] = {
    "chain.open": open_arm,
    "chain.set": chain,
    "chain.reset": reset,
    "chain.run": run,
    "chain.finish": finish,
    "chain.collect": collect,
}
