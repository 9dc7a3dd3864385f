"""Attention half-layers on the evaluator's side: secret inputs, the standard path and the fp64 reference over replays.

A half-layer is run several times on the same buffers, as a replayed graph does: states, conv windows and the prefix
that one run wrote are what the next one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_backend.geometry import Geometry, LayerKind, geometry
from k3_backend.model.batch import cache_rows
from k3_backend.model.program import OpFunction, Site, execute_sites, program_buffers
from k3_backend.ops import OPS
from k3_backend.ops.registry import reference, standard
from verify.evaluator.inputs import Case, make
from verify.evaluator.inputs.dense import attn_res_masks
from verify.evaluator.inputs.masks import Masks
from verify.workers.half_layer import constant_name, half_layer

__all__ = ["HalfLayer", "constant_views", "draw", "draw_constants", "rows_of", "run_reference", "run_standard"]

PAGE = 64
_STANDARD_ON_HOST = frozenset({"mla_decode"})
"""Ops whose eager standard path calls a kernel that torch has for the CPU only."""
Constants = Mapping[str, Mapping[str, Tensor]]
"""Site key -> weights by argument name."""


@dataclass(frozen=True)
class HalfLayer:
    """Everything the evaluator knows about one half-layer before it runs."""

    program: tuple[Site, ...]
    constants: Constants
    tensors: Mapping[str, Tensor]
    """Activations, states and batch fields by binding; clean values on the host."""
    masks: Masks
    """Over bindings: which states the half-layer writes, and what must not matter."""
    produced: Mapping[str, tuple[str, tuple[int, ...]]]
    """Binding of every output of a site -> (dtype, shape)."""
    judged: tuple[str, ...]
    """Bindings whose final contents are compared: the result and the states."""


def draw_constants(g: Geometry, half: LayerKind, seed: int) -> dict[str, dict[str, Tensor]]:
    """Weights of a half-layer's sites, from the kernels gate's own distributions.

    Args:
        g: the model's dimensions.
        half: `kda` or `mla`.
        seed: secret.
    """
    widths = {"kda": g.kda_proj_rows, "mla": g.mla_proj_rows}
    drawn: dict[str, dict[str, Tensor]] = {}
    for site in half_layer(g, half, 1):
        if site.op == "input_projection":
            generator = torch.Generator().manual_seed(seed)
            weight = torch.randn(widths[half], g.hidden, generator=generator).mul_(g.hidden**-0.5)
            drawn[site.key] = {"w": weight.to(torch.bfloat16)}
            continue
        call = make(Case(site.op, "gaussian", 1, 1, 1, f"{seed:x}", g.name))
        names = [spec.name for spec in OPS[site.op].tensors if spec.role == "constant"]
        drawn[site.key] = {name: value for name in names if (value := call.tensors[name]) is not None}
    return drawn


def draw(
    geometry_name: str, half: LayerKind, *, batch: int, tokens: int, context: int, seed: int, constants: Constants
) -> HalfLayer:
    """Draw one half-layer's inputs.

    Args:
        geometry_name: name of the dimensions.
        half: `kda` or `mla`.
        batch: B, requests, none of them padding.
        tokens: T, query tokens per request.
        context: cached tokens of the longest request before this step; the others have between half of that and that.
        seed: secret.
        constants: from `draw_constants`.
    """
    g, rows = geometry(geometry_name), batch * tokens
    program = half_layer(g, half, tokens)
    generator = torch.Generator().manual_seed(seed)
    buffers = {b.name: b for b in program_buffers(g, program, rows)}
    mix, core = program[0], next(site for site in program if site.op in ("kda_decode", "mla_decode"))
    tensors: dict[str, Tensor] = {
        mix.bindings[name]: torch.randn(buffers[mix.bindings[name]].shape, generator=generator).to(torch.bfloat16)
        for name in ("prefix", "delta", "blocks")
    }
    arguments = {name: tensors[mix.bindings[name]] for name in ("prefix", "delta", "blocks")}
    front = attn_res_masks(dict(arguments), dict(mix.attrs))
    masks = Masks(
        {mix.bindings[name]: mask for name, mask in front.written.items()},
        {mix.bindings[name]: mask for name, mask in front.free.items()},
    )
    if half == "kda":
        more, owned = _kda(g, core, batch, tokens, seed)
    else:
        more, owned = _mla(g, core, batch, tokens, context, generator)
    masks = Masks({**masks.written, **owned.written}, {**masks.free, **owned.free})
    produced = {
        site.bindings[spec.name]: (spec.dtype, buffers[site.bindings[spec.name]].shape)
        for site in program
        for spec in OPS[site.op].tensors
        if spec.role == "output"
    }
    states = (name for name, written in masks.written.items() if bool(written.any()))
    return HalfLayer(program, constants, {**tensors, **more}, masks, produced, (program[-1].bindings["out"], *states))


def _kda(g: Geometry, core: Site, batch: int, tokens: int, seed: int) -> tuple[dict[str, Tensor], Masks]:
    """Slots, conv windows and states as the kernels gate draws them."""
    call = make(Case("kda_decode", "gaussian", batch, tokens, 1, f"{seed:x}", g.name))
    names = ("slots", "accepted", "conv_state", "state")
    tensors = {core.bindings[name]: value for name in names if (value := call.tensors[name]) is not None}
    return tensors, Masks(
        {core.bindings[name]: mask for name, mask in call.masks.written.items()},
        {core.bindings[name]: mask for name, mask in call.masks.free.items() if name in names},
    )


def _mla(
    g: Geometry, core: Site, batch: int, tokens: int, context: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], Masks]:
    """A paged cache in which requests lie scattered, and where this step's rows go."""
    cache = core.bindings["kv_cache"]
    pages = -(-(context + tokens) // PAGE)
    total = 1 + batch * pages + 2
    pool = torch.randn(total, PAGE, g.mla_row, generator=generator).to(torch.bfloat16)
    table = (torch.randperm(total - 1, generator=generator) + 1)[: batch * pages].reshape(batch, pages)
    kept = torch.randint(context // 2, context + 1, (batch,), generator=generator)
    kept[0] = context
    rows = [r for b, first in enumerate(kept.tolist()) for r in cache_rows(table[b].tolist(), first, tokens, PAGE)]
    written = torch.zeros(total * PAGE, dtype=torch.bool)
    written[rows] = True
    old = torch.zeros(total, PAGE, dtype=torch.bool)
    for pages_of, length in zip(table, kept.tolist(), strict=True):
        positions = torch.arange(length)
        old[pages_of[positions // PAGE], positions % PAGE] = True
    tensors = {
        cache: pool,
        "block_table": table.to(torch.int32),
        "seq_lens": (kept + tokens).to(torch.int32),
        "slot_mapping": torch.tensor(rows, dtype=torch.int64),
    }
    return tensors, Masks({cache: written.view(total, PAGE)}, {cache: ~old})


def run_standard(half: HalfLayer, replays: int, device: torch.device) -> dict[str, Tensor]:
    """Judged bindings after so many runs of the standard path, on `device`."""
    buffers = {name: tensor.to(device, copy=True) for name, tensor in half.tensors.items()}
    return _run(half, replays, device, buffers, lambda site: _standard(site.op, device))


def run_reference(half: HalfLayer, replays: int, device: torch.device) -> dict[str, Tensor]:
    """The same by the ops' references, everything between them kept in f64."""
    buffers = {
        name: tensor.to(device).double() if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in half.tensors.items()
    }
    return _run(half, replays, device, buffers, lambda site: reference(site.op))


def _run(
    half: HalfLayer,
    replays: int,
    device: torch.device,
    buffers: dict[str, Tensor],
    op: Callable[[Site], OpFunction],
) -> dict[str, Tensor]:
    # One layer has each site name once.
    weights = {site.name: {n: t.to(device) for n, t in half.constants[site.key].items()} for site in half.program}
    with device:  # ops do not name the device of their inputs wherever they make a tensor
        for _ in range(replays):
            execute_sites(half.program, op, lambda _, name: weights[name], buffers)
    return {name: buffers[name] for name in half.judged}


def _standard(op: str, device: torch.device) -> OpFunction:
    """The op's eager standard path with arguments and results on `device`."""
    path = standard(op)
    if device.type == "cpu" or op not in _STANDARD_ON_HOST:
        return path

    def on_host(tensors: Mapping[str, Tensor | None], attrs: Mapping[str, int | float]) -> Mapping[str, Tensor]:
        here = {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}
        with torch.device("cpu"):
            return {name: value.to(device) for name, value in path(here, attrs).items()}

    return on_host


def rows_of(half: HalfLayer, name: str, tensor: Tensor) -> Tensor:
    """A judged tensor as rows that distances are measured over: results by token, states by what was written.

    A recurrent state's row is one head's whole matrix: single rows of it may decay to nothing.
    """
    written = half.masks.written.get(name)
    kept = tensor if written is None else tensor[written.to(tensor.device)]
    return kept.flatten(0, 1).flatten(1) if kept.dim() == 4 else kept.reshape(-1, kept.shape[-1])


def constant_views(half: HalfLayer) -> dict[str, Tensor]:
    """All weights under the names that the worker knows them by."""
    return {
        constant_name(site, name): tensor for site in half.program for name, tensor in half.constants[site.key].items()
    }
