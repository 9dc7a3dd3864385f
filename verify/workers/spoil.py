"""Making an op's results deliberately wrong on a GPU, right after its kernels: the *watermark* of the path gate.

If a judged number survives that, it did not come from this op. Trusted code, capturable in a graph, and without any
knowledge of expected values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from k3_backend.ops.interface import OpSpec

__all__ = ["disturb", "spoiled_tensors"]

_SIGN = {torch.bfloat16: (torch.int16, -(1 << 15)), torch.float32: (torch.int32, -(1 << 31))}


def spoiled_tensors(spec: OpSpec) -> tuple[str, ...]:
    """Names of what is disturbed: the op's outputs, or its states if it has none."""
    outputs = tuple(tensor.name for tensor in spec.tensors if tensor.role == "output")
    return outputs or tuple(tensor.name for tensor in spec.tensors if tensor.role == "state")


def disturb(spec: OpSpec, tensors: Mapping[str, Tensor | None]) -> None:
    """Flip the sign of every second element: large, and nothing that a norm can scale away.

    Args:
        spec: the op.
        tensors: its arguments by name, contiguous, bf16 or f32 where they are disturbed; absent ones are left out.
    """
    for name in spoiled_tensors(spec):
        tensor = tensors.get(name)
        if tensor is not None:
            kind, sign = _SIGN[tensor.dtype]
            tensor.view(-1).view(kind)[::2].bitwise_xor_(sign)
