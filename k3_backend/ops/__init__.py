"""The ops of a Kimi K3 decode step, one folder each: interface, reference maths, standard path."""

from k3_backend.ops.attn_res import interface as _attn_res
from k3_backend.ops.dense_mlp import interface as _dense_mlp
from k3_backend.ops.input_projection import interface as _input_projection
from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec
from k3_backend.ops.kda_decode import interface as _kda_decode
from k3_backend.ops.l2_prefetch import interface as _l2_prefetch
from k3_backend.ops.mla_decode import interface as _mla_decode
from k3_backend.ops.mla_query import interface as _mla_query
from k3_backend.ops.mla_value import interface as _mla_value
from k3_backend.ops.moe_experts import interface as _moe_experts
from k3_backend.ops.moe_front import interface as _moe_front
from k3_backend.ops.oproj_allreduce import interface as _oproj_allreduce

__all__ = ["ALL_OPS", "OPS", "SIDE_OPS", "AttrSpec", "OpSpec", "TensorSpec"]

OPS: dict[str, OpSpec] = {
    op.SPEC.name: op.SPEC
    for op in (
        _attn_res,
        _input_projection,
        _kda_decode,
        _mla_query,
        _mla_decode,
        _mla_value,
        _oproj_allreduce,
        _dense_mlp,
        _moe_front,
        _moe_experts,
    )
}
"""Ops that a step is made of."""

SIDE_OPS: dict[str, OpSpec] = {op.SPEC.name: op.SPEC for op in (_l2_prefetch,)}
"""Ops that run beside a step and have no result: no layer needs them, and no standard path runs them."""

ALL_OPS: dict[str, OpSpec] = OPS | SIDE_OPS
