"""Every op of the decode step in fp64 numpy, by name: exact maths, written from the model's formulas alone.

Not a port of `k3_backend.ops`: it exists to disagree with it. Loops run over tokens, requests, heads and positions.
Inputs are arrays by argument name, outputs and new states come back by name, in fp64 or integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from numpy_maths.common import Attributes, Inputs, Outputs
from numpy_maths.kda import kda_decode
from numpy_maths.mla import mla_decode, mla_query, mla_value
from numpy_maths.moe import moe_experts, moe_front
from numpy_maths.residual import attn_res, dense_mlp, input_projection, oproj_allreduce

__all__ = ["NUMPY_OPS", "as_numpy"]

NUMPY_OPS: dict[str, Callable[[Inputs, Attributes], Outputs]] = {
    "attn_res": attn_res,
    "input_projection": input_projection,
    "kda_decode": kda_decode,
    "mla_query": mla_query,
    "mla_decode": mla_decode,
    "mla_value": mla_value,
    "oproj_allreduce": oproj_allreduce,
    "dense_mlp": dense_mlp,
    "moe_front": moe_front,
    "moe_experts": moe_experts,
}


def as_numpy(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, NDArray[Any] | None]:
    """Floating tensors as fp64 arrays (exact for bf16 and f32), integer tensors as they are."""
    return {
        name: None if x is None else (x.double() if x.is_floating_point() else x).numpy() for name, x in tensors.items()
    }
