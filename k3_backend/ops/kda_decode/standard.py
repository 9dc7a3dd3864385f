"""KDA decode as stock serving runs it, in eager torch: conv step, gates, recurrence over gathered states, gated norm.

Roundings differ from the reference where stock kernels round: the conv output and the recurrence output go through
bf16. Heads and requests are batched; only the T tokens of a verify step are sequential, as the recurrence demands.
The parts that do not touch state also serve prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from k3_backend.ops.eager import holds_for_all, linear
from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["causal_conv", "gated_norm", "gates", "normalised_qkv", "standard"]

INDEXING_FROM = 16
"""Requests from which `pool[slots]` beats index_select, which copies in one thread."""


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Updates conv_state and state in place, returns out [B*T, W] bf16.

    Args:
        t: tensors of the op's interface. `slots` may have more than T columns; T is rows / requests.
        a: gate_lower_bound, eps, l2_eps.
    """
    proj, slots, state = need(t, "proj"), need(t, "slots").long(), need(t, "state")
    requests = slots.shape[0]
    tokens = proj.shape[0] // requests
    rows = proj.view(requests, tokens, -1)

    column = (need(t, "accepted") - 1).unsqueeze(1).long()
    read = slots.gather(1, column).squeeze(1) if slots.shape[1] > 1 else slots[:, 0]
    # None: every id is a slot. Otherwise ids are masked, and the null slot 0 stands in for what must not be touched.
    live = None
    if not holds_for_all(slots > 0):
        live = (read > 0) & (slots[:, 0] > 0)
        read = torch.where(live, read, 0)
        slots = torch.where(live.unsqueeze(1), slots.clamp(min=0), 0)

    window = _shift_conv_state(need(t, "conv_state"), slots[:, 0], column, rows, tokens, live)
    q, k, v = normalised_qkv(causal_conv(window, need(t, "conv_w")), need(t, "dt_bias").shape, a["l2_eps"])
    log_decay, write_strength = gates(t, a, rows)
    decay = log_decay.exp_()

    # One request that reads and writes the same slot is updated where it lies.
    in_place = live is None and requests == 1 and slots.shape[1] == 1
    S = state.narrow(0, int(read), 1) if in_place else _gather(state, read)
    outputs = []
    for i in range(tokens):
        outputs.append(_delta_step(S, q[:, i], k[:, i], v[:, i], decay[:, i], write_strength[:, i]))
        if not in_place:
            _scatter(state, slots[:, i], S, masked=live is not None)
    out = gated_norm(t, a, torch.stack(outputs, 1), rows)
    if live is not None:
        out = torch.where(live.view(-1, 1, 1), out, 0.0)
    return {"out": out.view(proj.shape[0], -1)}


def causal_conv(window: Tensor, conv_w: Tensor) -> Tensor:
    """bf16(silu(depthwise conv)).

    Args:
        window: [B, T + 3, 3W] bf16, three earlier inputs before the T of the step.
        conv_w: [3W, 4] f32.

    Returns:
        [B, T, 3W] bf16.
    """
    width = conv_w.shape[1]
    tokens = window.shape[1] - width + 1
    taps = conv_w.T
    if tokens == 1:
        y = (window * taps).sum(1, keepdim=True)
    else:
        x = window.float()
        y = x[:, :tokens] * taps[0]
        for j in range(1, width):
            y.addcmul_(x[:, j : j + tokens], taps[j])
    return functional.silu(y).to(torch.bfloat16)


def normalised_qkv(y: Tensor, head_shape: torch.Size, l2_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled unit q, unit k and v, f32 [B, T, H, K] each.

    Args:
        y: [B, T, 3W] bf16, q | k | v after conv and SiLU.
        head_shape: (H, K).
        l2_eps: epsilon under the root.
    """
    parts = y.float().view(*y.shape[:2], 3, *head_shape)
    qk, v = parts[:, :, :2], parts[:, :, 2]
    qk = qk / (qk.square().sum(-1, keepdim=True) + l2_eps).sqrt_()
    return qk[:, :, 0] * head_shape[1] ** -0.5, qk[:, :, 1], v


def gates(t: Tensors, a: Attributes, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay [B, T, H, K] and write strength [B, T, H, 1], f32, of projection rows [B, T, P]."""
    f_b, dt_bias, a_log = need(t, "f_b"), need(t, "dt_bias"), need(t, "a_log")
    width, rank = f_b.shape
    f_a = rows[..., 4 * width : 4 * width + rank].reshape(-1, rank)
    g = linear(f_a, f_b).view(*rows.shape[:2], *dt_bias.shape)
    log_decay = (g + dt_bias).mul_(a_log.exp().unsqueeze(-1)).sigmoid_().mul_(a["gate_lower_bound"])
    beta = rows[..., 4 * width + rank : 4 * width + rank + dt_bias.shape[0]]
    return log_decay, beta.float().sigmoid_().unsqueeze(-1)


def gated_norm(t: Tensors, a: Attributes, o: Tensor, rows: Tensor) -> Tensor:
    """bf16(rms(bf16(o); o_norm) * sigmoid(g)) as [B, T, W].

    Args:
        t: o_norm [K].
        a: eps.
        o: [B, T, H, K] f32.
        rows: [B, T, P] bf16 projection rows.
    """
    head_dim = o.shape[-1]
    width = o.shape[-2] * head_dim
    normed = functional.rms_norm(o.to(torch.bfloat16).float(), (head_dim,), need(t, "o_norm").float(), a["eps"])
    gate = rows[..., 3 * width : 4 * width].float().sigmoid_()
    return normed.view_as(gate).mul_(gate).to(torch.bfloat16)


def _shift_conv_state(
    conv_state: Tensor, slot: Tensor, column: Tensor, rows: Tensor, tokens: int, live: Tensor | None
) -> Tensor:
    """The step's conv window [B, T + 3, 3W]; writes its last T + 2 rows back as the new conv state."""
    requests, (_, taps, width) = slot.shape[0], conv_state.shape
    flat = conv_state.view(-1, width)
    first = slot.unsqueeze(1) * taps
    if taps == 3:  # a pool for plain decode: the window is all there is
        old = conv_state.index_select(0, slot)
    else:
        at = first + column + torch.arange(3, device=slot.device)
        old = flat.index_select(0, at.view(-1)).view(requests, 3, width)
    window = torch.cat([old, rows[..., :width]], 1)

    new = window[:, 1:]
    if live is not None:
        new = torch.where(live.view(-1, 1, 1), new, conv_state[0, : tokens + 2])
    if taps == tokens + 2:
        conv_state.index_copy_(0, slot, new)
    else:
        to = first + torch.arange(tokens + 2, device=slot.device)
        flat.index_copy_(0, to.view(-1), new.reshape(-1, width))
    return window


def _delta_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One token of the delta rule; updates S [B, H, V, K] in place and returns o [B, H, V].

    The decayed state is never stored before it is read: (S a) k = S (a k), and with u = beta (v - S (a k)) the new
    state's read-out is S_new q = S (a q) + u (k . q). So one pass over S serves both products.
    """
    both = torch.matmul(torch.stack([k, q], 2) * decay.unsqueeze(2), S.transpose(2, 3))
    u = beta * (v - both[:, :, 0])
    o = both[:, :, 1] + u * (k * q).sum(-1, keepdim=True)
    S.mul_(decay.unsqueeze(2)).addcmul_(u.unsqueeze(3), k.unsqueeze(2))
    return o


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    return pool[slots] if slots.shape[0] >= INDEXING_FROM else pool.index_select(0, slots)


def _scatter(pool: Tensor, slots: Tensor, values: Tensor, masked: bool) -> None:
    if masked:
        values = torch.where((slots > 0).view(-1, 1, 1, 1), values, pool[0])
    pool.index_copy_(0, slots, values)
