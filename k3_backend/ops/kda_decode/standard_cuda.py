"""KDA decode as stock serving runs it on a GPU: fla's recurrent kernel in place on the pool, plain torch around it.

`fla.ops.kda` reads and writes the states by slot id, with the gate, its lower bound, the l2 norms and the sigmoid of
the write strength inside. Without the package the recurrence is torch, too; `implementation` says which it is. All of
it can be captured in a CUDA graph: nothing reads a value on the host. So null requests are not masked as on the CPU:
they use null slot 0 as scratch, and their rows mean nothing.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from k3_backend.ops.kda_decode.standard import _delta_step, gates, normalised_qkv
from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["implementation", "standard"]


@cache
def _fla() -> Any:
    """Launcher of the recurrent kernel of fla, or None where the package is not installed."""
    try:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fla":
            raise
        return None
    return fused_recurrent_kda_fwd


def implementation() -> str:
    """What the recurrence runs on: `fla-core <version>` or `torch <version>`."""
    if _fla() is None:
        return f"torch {torch.__version__}"
    try:
        return f"fla-core {version('fla-core')}"
    except PackageNotFoundError:
        import fla

        return f"fla {fla.__version__}"


def standard(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Updates conv_state and state in place, returns out [B*T, W] bf16.

    Args:
        t: tensors of the op's interface, on a GPU.
        a: gate_lower_bound, eps, l2_eps.
    """
    proj, slots, head_shape = need(t, "proj"), need(t, "slots"), need(t, "dt_bias").shape
    requests = slots.shape[0]
    tokens = proj.shape[0] // requests
    rows = proj.view(requests, tokens, -1)
    usable = slots.long().clamp_(min=0)
    y = _conv(t, rows, usable, tokens)
    recurrence = _recurrence if _fla() is None else _fla_recurrence
    o = recurrence(t, a, rows, y, usable, tokens)
    width = head_shape[0] * head_shape[1]
    normed = functional.rms_norm(o, (head_shape[1],), need(t, "o_norm"), a["eps"]).view(requests, tokens, width)
    gate = torch.sigmoid(rows[..., 3 * width : 4 * width])
    return {"out": normed.mul_(gate).view(-1, width)}


def _conv(t: Tensors, rows: Tensor, slots: Tensor, tokens: int) -> Tensor:
    """SiLU of the depthwise conv, f32 [B, T, 3W]; moves the conv windows on."""
    conv_state, conv_w = need(t, "conv_state"), need(t, "conv_w")
    width, taps = conv_w.shape
    held = conv_state.shape[1]
    slot = slots[:, 0]
    if held == taps - 1:  # a pool for plain decode: the window is all there is
        old = conv_state.index_select(0, slot)
    else:
        first = (need(t, "accepted") - 1).unsqueeze(1) + torch.arange(taps - 1, device=rows.device)
        old = conv_state[slot.unsqueeze(1), first]
    window = torch.cat([old, rows[..., :width]], 1)
    if held == tokens + taps - 2:
        conv_state.index_copy_(0, slot, window[:, 1:])
    else:
        conv_state[slot.unsqueeze(1), torch.arange(tokens + taps - 2, device=rows.device)] = window[:, 1:]
    if tokens == 1:
        return functional.silu((window * conv_w.T).sum(1, keepdim=True))
    return functional.silu((window.unfold(1, taps, 1) * conv_w).sum(-1))


def _fla_recurrence(t: Tensors, a: Attributes, rows: Tensor, y: Tensor, slots: Tensor, tokens: int) -> Tensor:
    """Outputs [B, T, H, K] bf16; states are updated in place."""
    heads, head_dim = need(t, "dt_bias").shape
    requests, width = rows.shape[0], heads * head_dim
    rank = need(t, "f_b").shape[1]
    qkv = torch.empty(3, requests, tokens, heads, head_dim, dtype=torch.bfloat16, device=rows.device)
    qkv.copy_(y.view(requests, tokens, 3, heads, head_dim).permute(2, 0, 1, 3, 4))
    g = functional.linear(rows[..., 4 * width : 4 * width + rank], need(t, "f_b"))
    out, _ = _fla()(
        q=qkv[0], k=qkv[1], v=qkv[2], g=g.view(requests, tokens, heads, head_dim),
        beta=rows[..., 4 * width + rank : 4 * width + rank + heads].contiguous(),
        A_log=need(t, "a_log"), dt_bias=need(t, "dt_bias"), initial_state=need(t, "state"),
        inplace_final_state=True, state_v_first=True, ssm_state_indices=slots,
        num_accepted_tokens=need(t, "accepted") if tokens > 1 else None,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        lower_bound=float(a["gate_lower_bound"]), out=torch.empty_like(qkv[2]),
    )  # fmt: skip
    return out  # type: ignore[no-any-return]


def _recurrence(t: Tensors, a: Attributes, rows: Tensor, y: Tensor, slots: Tensor, tokens: int) -> Tensor:
    """The same in torch, over gathered states."""
    state = need(t, "state")
    read = slots[:, 0] if tokens == 1 else slots.gather(1, (need(t, "accepted") - 1).unsqueeze(1).long()).squeeze(1)
    q, k, v = normalised_qkv(y.to(torch.bfloat16), need(t, "dt_bias").shape, a["l2_eps"])
    log_decay, strength = gates(t, a, rows)
    decay = log_decay.exp_()
    S = state.index_select(0, read)
    outputs = []
    for i in range(tokens):
        outputs.append(_delta_step(S, q[:, i], k[:, i], v[:, i], decay[:, i], strength[:, i]))
        state.index_copy_(0, slots[:, i], S)
    return torch.stack(outputs, 1).to(torch.bfloat16)
