"""The decode step as data: which op runs where, in which order, on which named buffers.

Both arms of a step execute this one program. It decides data flow and op attributes; it computes nothing itself and
knows nothing of batches, devices or kernels. Every activation, state and metadata argument of an op is bound to a
named buffer; constants come from `ModelWeights.constants(site.layer, site.name)`. An argument is its buffer viewed in
the shape that the op's interface names (`[M, W]` and `[1, M, W]` are the same bytes), so a step needs one allocation
per buffer name.

Before the first site the caller fills `prefix` with the token embeddings; after the last one `hidden` holds the
model's output with `model.norm` applied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from k3_backend.geometry import Geometry, LayerKind
from k3_backend.model.batch import Batch
from k3_backend.ops import OPS
from k3_backend.ops.interface import DType, Shape

__all__ = [
    "BATCH_FIELDS",
    "DTYPES",
    "HALF_LAYERS",
    "Buffer",
    "OpFunction",
    "Site",
    "allocate_buffers",
    "batch_fields",
    "bind",
    "chain_program",
    "decode_program",
    "execute",
    "execute_sites",
    "half_layer_program",
    "program_buffers",
    "step_buffers",
]

DTYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
BATCH_FIELDS = ("slots", "accepted", "block_table", "seq_lens", "slot_mapping")
"""Bindings that are fields of the batch."""


@dataclass(frozen=True)
class Site:
    """One op call of the decode step."""

    layer: int | None
    """0-based layer; None after the last one."""
    op: str
    """Key of `k3_backend.ops.OPS`."""
    name: str
    """Site name within the layer, such as `attn_res.mlp`; the key of its constants."""
    attrs: dict[str, int | float]
    """The op's attributes."""
    bindings: dict[str, str]
    """Argument name -> step buffer, batch field or state pool (`state.0`). Constants are not listed."""

    reads: tuple[tuple[str, str, int], ...] = field(init=False, repr=False)
    """(argument, binding, rank in the interface) of every bound tensor that the op reads, constants aside."""

    def __post_init__(self) -> None:
        reads = tuple(
            (spec.name, self.bindings[spec.name], len(spec.dims))
            for spec in OPS[self.op].tensors
            if spec.role not in ("constant", "output") and spec.name in self.bindings
        )
        object.__setattr__(self, "reads", reads)

    @property
    def key(self) -> str:
        """Unique name within the program: `7.attn_res.mlp`, `final.attn_res.final`."""
        return f"{'final' if self.layer is None else self.layer}.{self.name}"


@dataclass(frozen=True)
class Buffer:
    """One step buffer."""

    name: str
    shape: Shape
    dtype: DType


def step_buffers(g: Geometry, rows: int) -> tuple[Buffer, ...]:
    """Every buffer that the program of a geometry binds beside batch fields and state pools, for M = rows."""
    m = rows
    return (
        Buffer("prefix", (m, g.hidden), "bf16"),
        Buffer("delta", (m, g.hidden), "bf16"),
        Buffer("blocks", (m, g.attn_res_blocks, g.hidden), "bf16"),
        Buffer("x", (m, g.hidden), "bf16"),
        Buffer("kda_proj", (m, g.kda_proj_rows), "bf16"),
        Buffer("kda_out", (m, g.kda_width), "bf16"),
        Buffer("mla_proj", (m, g.mla_proj_rows), "bf16"),
        Buffer("query", (m, g.heads, g.mla_row), "bf16"),
        Buffer("partial", (1, m, g.heads, g.kv_lora), "bf16"),
        Buffer("lse", (1, m, g.heads), "f32"),
        Buffer("mla_out", (m, g.mla_width), "bf16"),
        Buffer("topk_ids", (m, g.top_k), "i32"),
        Buffer("topk_weights", (m, g.top_k), "f32"),
        Buffer("latent", (m, g.latent), "bf16"),
        Buffer("hidden", (m, g.hidden), "bf16"),
    )


def allocate_buffers(g: Geometry, rows: int) -> dict[str, Tensor]:
    """Step buffers as zeroed tensors."""
    return {b.name: torch.zeros(b.shape, dtype=DTYPES[b.dtype]) for b in step_buffers(g, rows)}


@lru_cache(maxsize=64)
def decode_program(g: Geometry, tokens: int = 1, expert_format: str = "bf16") -> tuple[Site, ...]:
    """The sites of one decode step in execution order.

    Args:
        g: the model's dimensions.
        tokens: T, query tokens per request; 1 is plain decode.
        expert_format: `bf16` or `mxfp4`, the format of the routed experts.
    """
    sites: list[Site] = []
    for layer in range(g.layers):
        sites += _attention(g, layer, tokens)
        sites += _mlp(g, layer, expert_format)
    sites.append(_attn_res(g, None, "attn_res.final", "hidden", add_delta=1, sources=g.attn_res_blocks, round_mix=1))
    return tuple(sites)


HALF_LAYERS: Mapping[str, LayerKind] = {"kda_half_layer": "kda", "mla_half_layer": "mla"}
"""Scope -> kind of attention."""


def half_layer_program(g: Geometry, kind: LayerKind, count: int, tokens: int = 1) -> tuple[Site, ...]:
    """`count` attention half-layers of one kind, one after another: AttnRes, input projection and token mixing.

    Each is that of the kind's last layer, on inputs, weights and state of its own; `Site.layer` numbers them. They end
    at what the output projection reads. Contents between the sites of a half-layer share their buffers, as in a step.
    Bindings `prefix.3`, `delta.3`, `blocks.3`, `kda_out.3` (`mla_out.3`) and the pools `state.3`, `conv_state.3`,
    `kv_cache.3` belong to half-layer 3.

    Args:
        g: the model's dimensions.
        kind: `kda` or `mla`.
        count: half-layers, at least 1.
        tokens: T, query tokens per request.
    """
    layer = (g.kda_layers if kind == "kda" else g.mla_layers)[-1]
    sites = [site for site in _attention(g, layer, tokens) if site.op != "oproj_allreduce"]
    return tuple(_copy_of(site, at, _OWN) for at in range(count) for site in sites)


def chain_program(scope: str, g: Geometry, count: int, tokens: int = 1) -> tuple[Site, ...]:
    """What a timed chain runs: `half_layer_program` of a scope of `HALF_LAYERS`, or `count` calls of a single op.

    Every call of a single op has all its tensors for itself, metadata aside (`x.3`, `kda_proj.3`, ...). An op of both
    kinds of half-layer has the shapes of the KDA one.

    Raises:
        KeyError: no such scope.
    """
    if scope in HALF_LAYERS:
        return half_layer_program(g, HALF_LAYERS[scope], count, tokens)
    for kind in HALF_LAYERS.values():
        for site in half_layer_program(g, kind, 1, tokens):
            if site.op == scope:
                bare = replace(site, bindings={name: bound.partition(".")[0] for name, bound in site.bindings.items()})
                return tuple(_copy_of(bare, at, frozenset(bare.bindings.values())) for at in range(count))
    raise KeyError(f"no half-layer runs op {scope!r}; scopes: {', '.join(HALF_LAYERS)} and their ops")


def program_buffers(g: Geometry, program: Sequence[Site], rows: int) -> tuple[Buffer, ...]:
    """Every step buffer that a program binds, for M = rows; batch fields and state pools are not among them."""
    known = {buffer.name: buffer for buffer in step_buffers(g, rows)}
    bound = dict.fromkeys(name for site in program for name in site.bindings.values())
    return tuple(replace(known[base], name=name) for name in bound if (base := name.partition(".")[0]) in known)


_OWN = frozenset({"prefix", "delta", "blocks", "kda_out", "mla_out", "conv_state", "state", "kv_cache"})
"""Bindings that every half-layer of a chain has for itself."""


def _copy_of(site: Site, at: int, own: Collection[str]) -> Site:
    """The site as number `at` of a chain; bindings in `own` are those of this number."""
    bindings = {}
    for name, bound in site.bindings.items():
        base = bound.partition(".")[0]
        bindings[name] = f"{base}.{at}" if base in own and base not in BATCH_FIELDS else bound
    return replace(site, layer=at, bindings=bindings)


def _attn_res(
    g: Geometry,
    layer: int | None,
    name: str,
    out: str,
    *,
    sources: int,
    add_delta: int = 0,
    write_block: int = -1,
    round_mix: int = 0,
) -> Site:
    bindings = {"prefix": "prefix", "blocks": "blocks", "out": out}
    if add_delta:
        bindings["delta"] = "delta"
    attrs: dict[str, int | float] = {
        "add_delta": add_delta,
        "write_block": write_block,
        "sources": sources,
        "round_mix": round_mix,
        "eps": g.eps,
    }
    return Site(layer, "attn_res", name, attrs, bindings)


def _attention(g: Geometry, layer: int, tokens: int) -> list[Site]:
    block = layer // g.attn_res_block if g.writes_block(layer) else -1
    kind = g.kind(layer)
    head = [
        _attn_res(
            g, layer, "attn_res.attention", "x", add_delta=int(layer > 0), write_block=block,
            sources=g.attn_sources(layer),
        ),
        Site(layer, "input_projection", "input_projection", {}, {"x": "x", "out": f"{kind}_proj"}),
    ]  # fmt: skip
    mixer = _kda(g, layer) if kind == "kda" else _mla(g, layer, tokens)
    restart: dict[str, int | float] = {"restart": int(g.writes_block(layer))}
    tail = Site(layer, "oproj_allreduce", "oproj_allreduce", restart, {"x": f"{kind}_out", "prefix": "prefix"})
    return [*head, *mixer, tail]


def _kda(g: Geometry, layer: int) -> list[Site]:
    attrs: dict[str, int | float] = {"gate_lower_bound": g.gate_lower_bound, "eps": g.eps, "l2_eps": g.l2_eps}
    bindings = {
        "proj": "kda_proj",
        "slots": "slots",
        "accepted": "accepted",
        "conv_state": f"conv_state.{layer}",
        "state": f"state.{layer}",
        "out": "kda_out",
    }
    return [Site(layer, "kda_decode", "kda_decode", attrs, bindings)]


def _mla(g: Geometry, layer: int, tokens: int) -> list[Site]:
    cache = f"kv_cache.{layer}"
    cached: dict[str, int | float] = {"cache_format": 0, "k_scale": 1.0}
    core: dict[str, int | float] = {
        "tokens": tokens,
        "scale": float((g.nope + g.pe) ** -0.5),
        "dcp_rank": 0,
        "dcp_size": 1,
        "interleave": 1,
        "kv_lora": g.kv_lora,
        **cached,
    }
    return [
        Site(
            layer, "mla_query", "mla_query", {"eps": g.eps, **cached},
            {"proj": "mla_proj", "slot_mapping": "slot_mapping", "query": "query", "kv_cache": cache},
        ),
        Site(
            layer, "mla_decode", "mla_decode", core,
            {"query": "query", "kv_cache": cache, "block_table": "block_table", "seq_lens": "seq_lens",
             "out": "partial", "lse": "lse"},
        ),
        Site(
            layer, "mla_value", "mla_value", {"gate_offset": g.q_lora + g.mla_row},
            {"partial": "partial", "lse": "lse", "proj": "mla_proj", "out": "mla_out"},
        ),
    ]  # fmt: skip


def _mlp(g: Geometry, layer: int, expert_format: str) -> list[Site]:
    mix = _attn_res(g, layer, "attn_res.mlp", "x", sources=g.mlp_sources(layer))
    situ: dict[str, int | float] = {"beta": g.situ_beta, "linear_beta": g.situ_linear_beta}
    if layer == 0:
        return [mix, Site(layer, "dense_mlp", "dense_mlp", situ, {"x": "x", "out": "delta"})]
    routing = {"topk_ids": "topk_ids", "topk_weights": "topk_weights", "latent": "latent"}
    experts = {"expert_format": int(expert_format == "mxfp4"), "eps": g.eps, **situ}
    return [
        mix,
        Site(layer, "moe_front", "moe_front", {"scale": g.routed_scale, "top_k": g.top_k}, {"x": "x", **routing}),
        Site(layer, "moe_experts", "moe_experts", experts, {"x": "x", **routing, "out": "delta"}),
    ]


def bind(
    site: Site,
    buffers: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    shapes: Mapping[str, Shape] | None = None,
) -> dict[str, Tensor | None]:
    """Arguments of one site by tensor name, in the order of the op's interface.

    Args:
        site: the call.
        buffers: step buffers, batch fields and state pools by binding name. A missing output is left out.
        constants: the site's weights.
        shapes: concrete interface shapes; an argument whose buffer has another shape is viewed in it. Without them
            only the leading dimension of 1 (`ranks`, `shards`) is added or removed.

    Returns:
        One entry per tensor of the interface; None for an absent optional one. Outputs that `buffers` lacks are absent.
    """
    arguments: dict[str, Tensor | None] = {}
    for spec in OPS[site.op].tensors:
        if spec.role == "constant":
            arguments[spec.name] = constants.get(spec.name) if spec.optional else constants[spec.name]
            continue
        bound = site.bindings.get(spec.name)
        if bound is None:
            arguments[spec.name] = None
        elif bound in buffers:
            tensor = buffers[bound]
            arguments[spec.name] = tensor.view(shapes[spec.name]) if shapes else _with_rank(tensor, len(spec.dims))
        elif spec.role != "output":
            raise KeyError(f"{site.key}: argument {spec.name} is bound to {bound!r}, which no earlier site produced")
    return arguments


OpFunction = Callable[[Mapping[str, Tensor | None], Mapping[str, int | float]], Mapping[str, Tensor]]


def execute(
    program: tuple[Site, ...],
    op: Callable[[Site], OpFunction],
    constants: Callable[[int | None, str], Mapping[str, Tensor]],
    buffers: dict[str, Tensor],
) -> Tensor:
    """Run a program with functional ops (reference or standard) and return `hidden` [M, D].

    Args:
        program: sites in order.
        op: implementation of each site.
        constants: weights of a site.
        buffers: `prefix` (embeddings), `blocks`, batch fields and state pools; results are entered under their
            binding, new values of state tensors included if the implementation returns them.
    """
    execute_sites(program, op, constants, buffers)
    return buffers["hidden"]


def execute_sites(
    program: tuple[Site, ...],
    op: Callable[[Site], OpFunction],
    constants: Callable[[int | None, str], Mapping[str, Tensor]],
    buffers: dict[str, Tensor],
) -> None:
    """`execute` for any part of a step: what it computes is left in `buffers`."""
    for site in program:
        arguments: dict[str, Tensor | None] = dict(constants(site.layer, site.name))
        for name, bound, rank in site.reads:
            arguments[name] = _with_rank(buffers[bound], rank)
        for name, value in op(site)(arguments, site.attrs).items():
            buffers[site.bindings[name]] = value


def _with_rank(tensor: Tensor, rank: int) -> Tensor:
    """The tensor with a leading dimension of 1 (`ranks`, `shards`) added or removed as the interface has it."""
    difference = tensor.dim() - rank
    if difference == 0:
        return tensor
    return tensor.unsqueeze(0) if difference < 0 else tensor.squeeze(0)


def batch_fields(batch: Batch) -> dict[str, Tensor]:
    """The batch's tensors under the names that bindings use."""
    return {name: getattr(batch, name) for name in BATCH_FIELDS}
