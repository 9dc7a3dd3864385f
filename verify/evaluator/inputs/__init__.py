"""Evaluator-made inputs of single ops: secret seeds in, tensors, attributes and ownership masks out.

Each op has a table of input classes; every class aims at one way in which a kernel goes wrong (see the docstrings of
the op modules). `captured` cases come from a forward pass of the seeded model instead (`captured.py`). Expected values
are not made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from k3_backend.geometry import Geometry, geometry
from k3_backend.model.program import DTYPES
from k3_backend.ops import ALL_OPS, SIDE_OPS
from k3_backend.ops.interface import OpSpec, Shape
from verify.evaluator.inputs import attention, dense, moe, recurrent, side
from verify.evaluator.inputs.captured import captured
from verify.evaluator.inputs.draw import ACTIVATION_KINDS, Case, Draw, Source
from verify.evaluator.inputs.masks import Attrs, Inputs, Masks, Tensors

__all__ = ["CAPTURED", "Call", "Case", "Masks", "kinds", "make", "nudge", "smallest_batch"]

CAPTURED = "captured"
"""The input class that every op of a step has: activations and states of a seeded model in mid-decode."""


@dataclass(frozen=True)
class _Source:
    kinds: tuple[str, ...]
    draw: Callable[[Draw], Inputs]
    masks: Callable[[Tensors, Attrs], Masks]


def _nothing(tensors: Tensors, attrs: Attrs) -> Masks:
    """Ops without states whose inputs all matter."""
    del tensors, attrs
    return Masks()


_SOURCES: dict[str, _Source] = {
    "attn_res": _Source(dense.ATTN_RES_KINDS, dense.attn_res, dense.attn_res_masks),
    "input_projection": _Source(ACTIVATION_KINDS, dense.input_projection, _nothing),
    "kda_decode": _Source(recurrent.KDA_DECODE_KINDS, recurrent.kda_decode, recurrent.kda_decode_masks),
    "mla_query": _Source(attention.MLA_QUERY_KINDS, attention.mla_query, attention.mla_query_masks),
    "mla_decode": _Source(attention.MLA_DECODE_KINDS, attention.mla_decode, attention.mla_decode_masks),
    "mla_value": _Source(attention.MLA_VALUE_KINDS, attention.mla_value, attention.mla_value_masks),
    "oproj_allreduce": _Source(dense.OPROJ_KINDS, dense.oproj_allreduce, dense.oproj_allreduce_masks),
    "dense_mlp": _Source(dense.DENSE_MLP_KINDS, dense.dense_mlp, _nothing),
    "moe_front": _Source(moe.MOE_FRONT_KINDS, moe.moe_front, _nothing),
    "l2_prefetch": _Source(side.L2_PREFETCH_KINDS, side.l2_prefetch, _nothing),
    "moe_experts": _Source(moe.MOE_EXPERTS_KINDS, moe.moe_experts, _nothing),
}


@dataclass(frozen=True)
class Call:
    """Everything the evaluator knows about one op call before it runs."""

    case: Case
    spec: OpSpec
    tensors: Mapping[str, Tensor | None]
    """Activations, constants, metadata and initial states; clean values, poison is added when they are placed."""
    attrs: Mapping[str, int | float]
    masks: Masks
    outputs: Mapping[str, tuple[str, Shape]]
    """Output tensor -> (dtype, shape)."""


def kinds(op: str) -> tuple[str, ...]:
    """Input classes of an op, `captured` last where a step has the op; KeyError for an unknown op."""
    return _SOURCES[op].kinds if op in SIDE_OPS else (*_SOURCES[op].kinds, CAPTURED)


_SMALLEST_BATCH = {"padding": 2, "empty": 2, "sharded": 2, "ragged": 4, "e4m3": 2}


def smallest_batch(kind: str) -> int:
    """Requests from which an input class shows what it is for, such as null requests beside others."""
    return _SMALLEST_BATCH.get(kind, 1)


def make(case: Case, salt: str = "") -> Call:
    """Draw the inputs of a case.

    Args:
        case: what to draw; the same case and salt give the same values.
        salt: another salt gives other values of the same shapes and attributes' kind.

    Raises:
        KeyError: unknown op, class or geometry.
        ValueError: the drawn tensors do not fit the op's interface (a mistake in this package).
    """
    source, spec, g = _SOURCES[case.op], ALL_OPS[case.op], geometry(case.geometry)
    if case.kind not in kinds(case.op):
        raise KeyError(f"op {case.op} has no input class {case.kind!r}; known: {', '.join(kinds(case.op))}")
    draw = Draw(case, g, salt)
    tensors, attrs = captured(draw) if case.kind == CAPTURED else source.draw(draw)
    outputs = _check(spec, g, case, tensors, attrs)
    return Call(case, spec, tensors, attrs, source.masks(tensors, attrs), outputs)


def nudge(call: Call) -> Call | None:
    """The same call with one element of one activation changed, somewhere that matters; None if it has none.

    A result that is remembered under a fingerprint of a part of the inputs is the same for both.
    """
    source = Source("nudge", call.case.id, call.case.seed)
    floating = [
        spec.name
        for spec in call.spec.tensors
        if spec.role == "activation" and spec.dtype == "bf16" and call.tensors[spec.name] is not None
    ]
    for name in (floating[int(at)] for at in source.permutation(len(floating))):
        tensor = call.tensors[name]
        assert tensor is not None
        usable = tensor.isfinite()
        free = call.masks.free.get(name)
        if free is not None:
            usable &= ~free.reshape(free.shape + (1,) * (tensor.dim() - free.dim()))
        places = usable.flatten().nonzero().flatten()
        if len(places):
            changed = tensor.clone()
            at = int(places[source.integer(0, len(places) - 1)])
            changed.view(-1)[at] = -2.0 * changed.view(-1)[at] - 16.0 * max(
                1.0, float(tensor[usable].float().square().mean().sqrt())
            )
            return replace(call, tensors={**call.tensors, name: changed})
    return None


def _check(spec: OpSpec, g: Geometry, case: Case, tensors: Tensors, attrs: Attrs) -> dict[str, tuple[str, Shape]]:
    """Check the drawn tensors against the interface; returns the outputs' dtypes and shapes."""
    sizes = {**spec.sizes(g), "M": case.rows}
    outputs: dict[str, tuple[str, Shape]] = {}
    for t in spec.tensors:
        if t.role == "output":
            continue
        tensor = tensors[t.name]
        if tensor is None:
            if not t.optional:
                raise ValueError(f"{case.id}: tensor {t.name} is missing")
            continue
        expected = tuple(
            d if isinstance(d, int) else sizes.setdefault(d, n) for d, n in zip(t.dims, tensor.shape, strict=True)
        )
        if tuple(tensor.shape) != expected or tensor.dtype != DTYPES[t.dtype]:
            raise ValueError(
                f"{case.id}: tensor {t.name} is {tensor.dtype}{list(tensor.shape)}; expected {t.dtype}{list(expected)}"
            )
    for t in spec.tensors:
        if t.role == "output":
            outputs[t.name] = (t.dtype, tuple(d if isinstance(d, int) else sizes[d] for d in t.dims))
    if set(attrs) != {a.name for a in spec.attrs}:
        raise ValueError(f"{case.id}: attributes {sorted(attrs)}; expected {sorted(a.name for a in spec.attrs)}")
    return outputs
