"""AttnRes as stock serving runs it, in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.eager import rms_norm
from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["standard"]


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Updates prefix and blocks in place, returns out [M, D] bf16.

    Args:
        t: prefix [M, D], delta [M, D] or None, blocks [M, NB, D], res_norm, res_proj, out_norm [D], all bf16.
        a: add_delta, write_block, sources, round_mix, eps.
    """
    prefix, blocks, out_norm = need(t, "prefix"), need(t, "blocks"), need(t, "out_norm")
    sources = int(a["sources"])
    if a["add_delta"]:
        prefix.add_(need(t, "delta"))
    if a["write_block"] >= 0:
        blocks[:, int(a["write_block"])] = prefix
    if sources == 0:
        return {"out": rms_norm(prefix, out_norm, a["eps"])}

    rows = torch.cat([blocks[:, :sources], prefix.unsqueeze(1)], 1).float()
    key = need(t, "res_norm").float() * need(t, "res_proj")
    score = torch.matmul(rows, key) * torch.rsqrt(rows.square().mean(-1) + a["eps"])
    mix = torch.bmm(torch.softmax(score, -1).unsqueeze(1), rows).squeeze(1)
    if a["round_mix"]:
        mix = mix.to(torch.bfloat16)
    return {"out": rms_norm(mix, out_norm, a["eps"])}
