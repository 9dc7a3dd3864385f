"""KDA decode in plain maths, one request and one token at a time (heads are a tensor dimension)."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.ops.maths import Attributes, Tensors, need, rms_norm, rounding_to_bf16

__all__ = ["reference"]


def reference(
    t: Tensors, a: Attributes, dtype: torch.dtype = torch.float64, rounding: bool = True
) -> dict[str, Tensor]:
    """Conv + SiLU, l2 norm, forget gate, delta-rule recurrence, gated RMSNorm.

    Args:
        t: proj [B*T, P] (q | k | v | g | f_a | beta | padding), conv_w [3W, C], f_b [W, R], a_log [H],
            dt_bias [H, K], o_norm [K], slots [B, T], accepted [B], conv_state [S, taps, 3W], state [S, H, V, K].
        a: gate_lower_bound, eps, l2_eps.
        dtype: type of the computation and of the results.
        rounding: apply the bf16 roundings of the definition (forget-gate input, output).

    Returns:
        out [B*T, W]; conv_state and state, the new values of the whole pools.
    """
    bf16 = rounding_to_bf16(rounding)
    proj, conv_w, f_b = (need(t, name).to(dtype) for name in ("proj", "conv_w", "f_b"))
    a_log, dt_bias, o_norm = (need(t, name).to(dtype) for name in ("a_log", "dt_bias", "o_norm"))
    heads, head_dim = dt_bias.shape
    width, rank = f_b.shape
    old_conv, old_state = need(t, "conv_state").to(dtype), need(t, "state").to(dtype)
    new_conv, new_state = old_conv.clone(), old_state.clone()
    out = torch.zeros(proj.shape[0], width, dtype=dtype)

    slots = need(t, "slots").tolist()
    tokens = need(t, "slots").shape[1]
    for b, accepted in enumerate(need(t, "accepted").tolist()):
        conv_slot, read_slot = slots[b][0], slots[b][accepted - 1]
        if conv_slot <= 0 or read_slot <= 0:
            continue
        rows = proj[b * tokens : (b + 1) * tokens]
        x = rows[:, : 3 * width]
        window = torch.cat([old_conv[conv_slot, accepted - 1 : accepted + 2], x])
        new_conv[conv_slot, : tokens + 2] = window[1:]

        S = old_state[read_slot]
        for i in range(tokens):
            y = torch.nn.functional.silu((window[i : i + 4] * conv_w.T).sum(0))
            y_q, y_k, v = y.view(3, heads, head_dim)
            q = y_q * torch.rsqrt(y_q.square().sum(-1, keepdim=True) + a["l2_eps"]) * head_dim**-0.5
            k = y_k * torch.rsqrt(y_k.square().sum(-1, keepdim=True) + a["l2_eps"])

            g_out, f_a, b_h = torch.split(rows[i, 3 * width :], [width, rank, rows.shape[1] - 4 * width - rank])
            g = bf16(f_b @ f_a).view(heads, head_dim)
            log_decay = a["gate_lower_bound"] * torch.sigmoid(torch.exp(a_log).unsqueeze(-1) * (g + dt_bias))
            beta = torch.sigmoid(b_h[:heads]).unsqueeze(-1)

            S = S * torch.exp(log_decay).unsqueeze(1)
            u = beta * (v - torch.einsum("hvk,hk->hv", S, k))
            S = S + torch.einsum("hv,hk->hvk", u, k)
            o = torch.einsum("hvk,hk->hv", S, q)

            gate = torch.sigmoid(g_out).view(heads, head_dim)
            out[b * tokens + i] = bf16(rms_norm(o, o_norm, a["eps"]) * gate).flatten()
            if slots[b][i] > 0:
                new_state[slots[b][i]] = S
    return {"out": out, "conv_state": new_conv, "state": new_state}
