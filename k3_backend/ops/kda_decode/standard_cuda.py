"""KDA decode as stock serving runs it on a GPU: fla's recurrent kernel in place on the pool, fused kernels around it.

Around it are the f_b product by cuBLAS, and two plain Triton kernels such as serving stacks have: the conv's update
with its SiLU, and the gated norm.

`fla.ops.kda` reads and writes the states by slot id, with the gate, its lower bound, the l2 norms and the sigmoid of
the write strength inside. Without the package the recurrence is torch; `implementation` says which it is. All of it
can be captured in a CUDA graph: nothing reads a value on the host. So null requests are not masked as on the CPU: they
use null slot 0 as scratch, and their rows mean nothing.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from k3_backend.ops.kda_decode.standard import _delta_step, gates, normalised_qkv
from k3_backend.ops.maths import Attributes, Tensors, need

__all__ = ["implementation", "standard"]

CHANNELS = 256
"""Channels of the conv per program."""


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
    proj, slots = need(t, "proj"), need(t, "slots")
    heads, head_dim = need(t, "dt_bias").shape
    requests, width = slots.shape[0], heads * head_dim
    tokens = proj.shape[0] // requests
    usable = slots.long().clamp_(min=0)
    qkv = torch.empty(3, requests, tokens, heads, head_dim, dtype=torch.bfloat16, device=proj.device)
    conv_state, conv_w = need(t, "conv_state"), need(t, "conv_w")
    _conv[(requests, triton.cdiv(3 * width, CHANNELS))](
        proj, conv_w, usable, need(t, "accepted"), conv_state, qkv, proj.shape[1], usable.shape[1],
        conv_state.shape[1], proj.shape[0], WIDTH=width, TOKENS=tokens, CHANNELS=CHANNELS, num_warps=4,
    )  # fmt: skip
    recurrence = _recurrence if _fla() is None else _fla_recurrence
    o = recurrence(t, a, proj.view(requests, tokens, -1), qkv, usable)
    out = torch.empty(proj.shape[0], width, dtype=torch.bfloat16, device=proj.device)
    _gated_norm[(proj.shape[0], heads)](
        o, proj, need(t, "o_norm"), out, proj.shape[1], float(a["eps"]), WIDTH=width, K=head_dim, num_warps=1
    )
    return {"out": out}


@triton.jit  # type: ignore[untyped-decorator]
def _conv(  # type: ignore[no-untyped-def]
    proj, conv_w, slots, accepted, conv_state, qkv, proj_width, columns, taps, rows, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """SiLU of the depthwise conv into qkv [3, B*T, W]; moves the window on. A program per request and channels."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < 3 * WIDTH
    first = tl.load(accepted + request) - 1
    window = conv_state + tl.load(slots + request * columns) * taps * 3 * WIDTH + channel
    w0 = tl.load(conv_w + channel * 4, mask=real, other=0.0)
    w1 = tl.load(conv_w + channel * 4 + 1, mask=real, other=0.0)
    w2 = tl.load(conv_w + channel * 4 + 2, mask=real, other=0.0)
    w3 = tl.load(conv_w + channel * 4 + 3, mask=real, other=0.0)
    x0 = tl.load(window + first * 3 * WIDTH, mask=real, other=0.0).to(tl.float32)
    x1 = tl.load(window + (first + 1) * 3 * WIDTH, mask=real, other=0.0).to(tl.float32)
    x2 = tl.load(window + (first + 2) * 3 * WIDTH, mask=real, other=0.0).to(tl.float32)
    tl.store(window, x1.to(tl.bfloat16), mask=real)
    tl.store(window + 3 * WIDTH, x2.to(tl.bfloat16), mask=real)
    part, inside = channel // WIDTH, channel % WIDTH
    for token in tl.static_range(TOKENS):
        row = request * TOKENS + token
        x3 = tl.load(proj + row * proj_width + channel, mask=real, other=0.0).to(tl.float32)
        y = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
        tl.store(qkv + (part * rows + row) * WIDTH + inside, (y * tl.sigmoid(y)).to(tl.bfloat16), mask=real)
        tl.store(window + (2 + token) * 3 * WIDTH, x3.to(tl.bfloat16), mask=real)
        x0, x1, x2 = x1, x2, x3


@triton.jit  # type: ignore[untyped-decorator]
def _gated_norm(  # type: ignore[no-untyped-def]
    o, proj, o_norm, out, proj_width, eps, WIDTH: tl.constexpr, K: tl.constexpr
):
    """rms(o; o_norm) * sigmoid(g) of one row and head."""
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, K)
    value = tl.load(o + row * WIDTH + head * K + column).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / K + eps) * tl.load(o_norm + column).to(tl.float32)
    gate = tl.load(proj + row * proj_width + 3 * WIDTH + head * K + column).to(tl.float32)
    tl.store(out + row * WIDTH + head * K + column, (normed * tl.sigmoid(gate)).to(tl.bfloat16))


def _fla_recurrence(t: Tensors, a: Attributes, rows: Tensor, qkv: Tensor, slots: Tensor) -> Tensor:
    """Outputs [B, T, H, K] bf16; states are updated in place."""
    _, requests, tokens, heads, head_dim = qkv.shape
    width, rank = need(t, "f_b").shape
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


def _recurrence(t: Tensors, a: Attributes, rows: Tensor, qkv: Tensor, slots: Tensor) -> Tensor:
    """The same in torch, over gathered states."""
    state, tokens = need(t, "state"), qkv.shape[2]
    read = slots[:, 0] if tokens == 1 else slots.gather(1, (need(t, "accepted") - 1).unsqueeze(1).long()).squeeze(1)
    packed = qkv.permute(1, 2, 0, 3, 4).reshape(qkv.shape[1], tokens, -1)
    q, k, v = normalised_qkv(packed, need(t, "dt_bias").shape, a["l2_eps"])
    log_decay, strength = gates(t, a, rows)
    decay = log_decay.exp_()
    S = state.index_select(0, read)
    outputs = []
    for i in range(tokens):
        outputs.append(_delta_step(S, q[:, i], k[:, i], v[:, i], decay[:, i], strength[:, i]))
        state.index_copy_(0, slots[:, i], S)
    return torch.stack(outputs, 1).to(torch.bfloat16)
