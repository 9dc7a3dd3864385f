"""The least that an op or a decode step must move and compute, from its interface and the geometry.

A lower bound, for floors: every distinct byte of weights, cache, state and results once, whatever kernel runs;
intermediate results between ops of a step stay in caches and count nothing; routed experts count as if all tokens of
the batch had chosen the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from harness.records import Cell
from k3_backend.geometry import Geometry
from k3_backend.model.program import HALF_LAYERS, Site, decode_program, half_layer_program
from k3_backend.ops import OPS
from k3_backend.ops.interface import OpSpec, TensorSpec
from verify.protocol.floors import Traffic

__all__ = ["cell_traffic", "half_layer_traffic", "op_traffic", "step_traffic"]

_ITEM_BYTES = {"bf16": 2, "f32": 4, "i32": 4, "i64": 8, "u8": 1, "e4m3": 1}
_EXPERT_TENSORS = ("w13", "w2")


def cell_traffic(cell: Cell, g: Geometry) -> Traffic:
    """Traffic of a cell; of an op that occurs with two shapes, the smaller one."""
    if cell.scope in HALF_LAYERS:
        return half_layer_traffic(g, cell.scope, batch=cell.batch, tokens=cell.tokens, context=cell.context or 0)
    if cell.scope == "step":
        return step_traffic(g, batch=cell.batch, tokens=cell.tokens, context=cell.context or 0)
    shapes = (
        op_traffic(cell.scope, g, batch=cell.batch, tokens=cell.tokens, context=cell.context, site=site)
        for site in ("kda", "mla")
    )
    return min(shapes, key=lambda traffic: traffic.read_bytes + traffic.write_bytes)


def op_traffic(op: str, g: Geometry, *, batch: int, tokens: int, context: int | None, site: str = "") -> Traffic:
    """Traffic of one call of an op, on its own: inputs are read and outputs written.

    Args:
        op: op name.
        g: geometry.
        batch: B.
        tokens: T.
        context: cached tokens per request; only `mla_decode` depends on it (0 if null).
        site: `mla` for the MLA projection or output projection; KDA's otherwise.
    """
    spec = OPS[op]
    sizes = _sizes(spec, g, batch=batch, tokens=tokens, mla=site == "mla")
    read = write = 0.0
    for tensor in spec.tensors:
        moved = _bytes(tensor, sizes, g)
        if tensor.role in ("activation", "constant", "metadata"):
            read += moved
        elif tensor.role == "output":
            write += moved
        else:
            state_read, state_write = _state(op, tensor, sizes, batch, tokens)
            read, write = read + state_read, write + state_write
    if op == "mla_decode":
        read += batch * ((context or 0) + tokens) * g.mla_row * 2.0
    return Traffic(read, write, op_flops(op, g, rows=batch * tokens, batch=batch, context=context or 0, sizes=sizes))


def step_traffic(g: Geometry, *, batch: int, tokens: int, context: int) -> Traffic:
    """Traffic of one decode step: weights, cache and states once; activations between ops stay in caches."""
    sites = [
        (site, site.layer is not None and g.kind(site.layer) == "mla") for site in decode_program(g, tokens, "bf16")
    ]
    moved = _program_traffic(g, sites, batch=batch, tokens=tokens, context=context)
    embedding = hidden = batch * tokens * g.hidden * 2.0
    return Traffic(moved.read_bytes + embedding, moved.write_bytes + hidden, moved.flops)


def half_layer_traffic(g: Geometry, scope: str, *, batch: int, tokens: int, context: int) -> Traffic:
    """Traffic of one attention half-layer: weights, cache and states once; all activations stay in caches.

    Args:
        g: geometry.
        scope: key of `HALF_LAYERS`.
        batch: B.
        tokens: T.
        context: cached tokens per request.
    """
    kind = HALF_LAYERS[scope]
    sites = [(site, kind == "mla") for site in half_layer_program(g, kind, 1, tokens)]
    return _program_traffic(g, sites, batch=batch, tokens=tokens, context=context)


def _program_traffic(
    g: Geometry, sites: Iterable[tuple[Site, bool]], *, batch: int, tokens: int, context: int
) -> Traffic:
    """Weights, cache and states of sites; each with whether it belongs to an MLA layer."""
    read = write = flops = 0.0
    rows = batch * tokens
    for site, mla in sites:
        spec = OPS[site.op]
        sizes = _sizes(spec, g, batch=batch, tokens=tokens, mla=mla)
        read += sum(_bytes(t, sizes, g) for t in spec.tensors if t.role == "constant")
        for tensor in spec.tensors:
            if tensor.role == "state" and tensor.name in ("conv_state", "state", "kv_cache"):
                state_read, state_write = _state(site.op, tensor, sizes, batch, tokens)
                read, write = read + state_read, write + state_write
        if site.op == "mla_decode":
            read += batch * (context + tokens) * g.mla_row * 2.0
        flops += op_flops(site.op, g, rows=rows, batch=batch, context=context, sizes=sizes)
    return Traffic(read, write, flops)


def op_flops(op: str, g: Geometry, *, rows: int, batch: int, context: int, sizes: Mapping[str, int]) -> float:
    """Multiplications and additions of the matrix products; what is linear in the activations is left out.

    Args:
        op: op name.
        g: geometry.
        rows: M.
        batch: B.
        context: cached tokens per request before the step.
        sizes: symbol -> size, from the op's interface and the call.
    """
    del batch
    match op:
        case "input_projection":
            macs = rows * sizes["N"] * g.hidden
        case "oproj_allreduce":
            macs = rows * g.hidden * sizes["KL"]
        case "dense_mlp":
            macs = 3 * rows * g.hidden * g.dense_width
        case "moe_front":
            macs = rows * g.hidden * (g.experts + g.latent)
        case "moe_experts":
            routed = g.top_k * 3 * g.latent * g.expert_width
            macs = rows * (routed + g.latent * g.hidden + 3 * g.hidden * g.shared_width)
        case "kda_decode":
            macs = rows * (g.kda_width * g.kda_gate_rank + 3 * g.heads * g.kda_head_dim**2)
        case "mla_query":
            macs = rows * g.heads * ((g.nope + g.pe) * g.q_lora + g.nope * g.kv_lora)
        case "mla_decode":
            macs = rows * g.heads * (context + 1) * (g.mla_row + g.kv_lora)
        case "mla_value":
            macs = rows * g.heads * g.v_dim * g.kv_lora
        case "attn_res":
            macs = rows * g.hidden
        case _:
            raise KeyError(f"no arithmetic is written down for op {op!r}")
    return 2.0 * macs


def _sizes(spec: OpSpec, g: Geometry, *, batch: int, tokens: int, mla: bool) -> dict[str, int]:
    """Every symbol of an op's interface; pools have the size that the batch itself needs."""
    call = {
        "M": batch * tokens,
        "B": batch,
        "T": tokens,
        "N": g.mla_proj_rows if mla else g.kda_proj_rows,
        "KL": g.mla_width if mla else g.kda_width,
        "ranks": 1,
        "shards": 1,
        "S": 0,
        "taps": tokens + 2,
        "pages": 0,
        "page": 0,
        "max_pages": 0,
    }
    return {**call, **spec.sizes(g)}


def _bytes(tensor: TensorSpec, sizes: Mapping[str, int], g: Geometry) -> float:
    """Bytes of a tensor; of the routed experts only what the fewest possible choices read, of MXFP4 tensors nothing."""
    if tensor.optional and tensor.role == "constant" and tensor.name not in _EXPERT_TENSORS:
        return 0.0
    count = float(math.prod(d if isinstance(d, int) else sizes[d] for d in tensor.dims))
    if tensor.name in _EXPERT_TENSORS and "E" in tensor.dims:
        count *= g.top_k / g.experts
    return count * _ITEM_BYTES[tensor.dtype]


def _state(op: str, tensor: TensorSpec, sizes: Mapping[str, int], batch: int, tokens: int) -> tuple[float, float]:
    """(read, written) bytes of a state tensor."""
    if tensor.name == "state":
        one = math.prod(sizes[str(d)] for d in tensor.dims[1:]) * 4.0
        return batch * one, batch * tokens * one
    if tensor.name == "conv_state":
        tap = sizes["W3"] * 2.0
        return batch * 3 * tap, batch * (tokens + 2) * tap
    if tensor.name == "kv_cache":
        return 0.0, batch * tokens * sizes["ROW"] * 2.0
    moved = math.prod(sizes[str(d)] for d in tensor.dims) * 2.0
    if op == "attn_res":  # a site may read no saved row and write none, and may leave the prefix as it is
        return (moved, 0.0) if tensor.name == "prefix" else (0.0, 0.0)
    return 0.0, moved  # oproj_allreduce: a restart writes the prefix without reading it
