"""AttnRes in plain maths: what `interface.py` states, one line per step."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need, rms_norm, rounding_to_bf16

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """Prefix update, block write, softmax mix over depth, output norm.

    Args:
        t: prefix [M, D], delta [M, D] or None, blocks [M, NB, D], res_norm, res_proj, out_norm [D].
        a: add_delta, write_block, sources, round_mix, eps.
        dtype: type of the computation and of the results.
        rounding: apply the bf16 roundings of the definition.

    Returns:
        prefix [M, D], blocks [M, NB, D] (new values) and out [M, D].
    """
    bf16 = rounding_to_bf16(rounding)
    prefix = need(t, "prefix").to(dtype)
    blocks = need(t, "blocks").to(dtype, copy=True)
    if a["add_delta"]:
        prefix = bf16(prefix + need(t, "delta").to(dtype))
    if a["write_block"] >= 0:
        blocks[:, int(a["write_block"])] = prefix

    sources = torch.cat([blocks[:, : int(a["sources"])], prefix.unsqueeze(1)], 1)
    key = need(t, "res_norm").to(dtype) * need(t, "res_proj").to(dtype)
    score = (sources * key).sum(-1) * torch.rsqrt(sources.square().mean(-1) + a["eps"])
    mix = (torch.softmax(score, -1).unsqueeze(-1) * sources).sum(1)
    if a["round_mix"]:
        mix = bf16(mix)
    out = bf16(rms_norm(mix, need(t, "out_norm").to(dtype), a["eps"]))
    return {"prefix": prefix, "blocks": blocks, "out": out}
