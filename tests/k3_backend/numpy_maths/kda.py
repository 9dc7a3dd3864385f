"""Kimi Delta Attention in fp64 numpy: one decode step over pooled states, and prefill as the plain recurrence.

The two are written differently on purpose. Decode keeps the state as [V, K], decays its columns and adds the outer
product of the delta and k, as the op does. Prefill keeps it transposed, [K, V], and multiplies by the transition
matrix (I - beta k k^T) Diag(a) of the Kimi Linear paper (arXiv:2510.26692). They meet only if both are right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from numpy_maths.common import Array, Attributes, Inputs, Outputs, given, rms_norm, sigmoid


@dataclass(frozen=True)
class _Projected:
    """Sections of one packed projection row q | k | v | g | f_a | beta | padding.

    qkv [3W], g [W], f_a [R], beta [H].
    """

    qkv: Array
    g: Array
    f_a: Array
    beta: Array


def _sections(row: Array, heads: int, head_dim: int, rank: int) -> _Projected:
    width = heads * head_dim
    ends = [3 * width, 4 * width, 4 * width + rank, 4 * width + rank + heads]
    return _Projected(row[: ends[0]], row[ends[0] : ends[1]], row[ends[1] : ends[2]], row[ends[2] : ends[3]])


def _conv_silu(window: list[Array], conv_w: Array) -> Array:
    """Depthwise conv over the window (oldest input first, the token itself last), then SiLU."""
    assert len(window) == conv_w.shape[1]
    y = np.zeros_like(window[0])
    for j, x in enumerate(window):
        y = y + conv_w[:, j] * x
    return y * sigmoid(y)


@dataclass(frozen=True)
class _HeadInputs:
    """What one head's recurrence takes at one token: q, k, v, decay in (0, 1), each [K]; beta scalar."""

    q: Array
    k: Array
    v: Array
    decay: Array
    beta: float


def _head_inputs(y: Array, p: _Projected, t: Inputs, a: Attributes, head: int) -> _HeadInputs:
    head_dim = given(t, "dt_bias").shape[1]
    width = y.size // 3
    own = slice(head * head_dim, (head + 1) * head_dim)
    q, k, v = y[:width][own], y[width : 2 * width][own], y[2 * width :][own]
    l2_eps = float(a["l2_eps"])
    g = given(t, "f_b")[own] @ p.f_a
    rate = np.exp(given(t, "a_log")[head])
    log_decay = float(a["gate_lower_bound"]) * sigmoid(rate * (g + given(t, "dt_bias")[head]))
    return _HeadInputs(
        q=q / np.sqrt(np.sum(q * q) + l2_eps) / np.sqrt(head_dim),
        k=k / np.sqrt(np.sum(k * k) + l2_eps),
        v=v,
        decay=np.exp(log_decay),
        beta=float(sigmoid(p.beta[head])),
    )


def _gated_norm(o: Array, p: _Projected, t: Inputs, a: Attributes, head: int) -> Array:
    own = slice(head * o.size, (head + 1) * o.size)
    return rms_norm(o, given(t, "o_norm"), float(a["eps"])) * sigmoid(p.g[own])


def kda_decode(t: Inputs, a: Attributes) -> Outputs:
    """T tokens per request from pooled states: conv window in the first slot, recurrent states in T slots."""
    proj, slots, accepted = given(t, "proj"), given(t, "slots"), given(t, "accepted")
    old_conv, old_state = given(t, "conv_state"), given(t, "state")
    conv_state, state = old_conv.copy(), old_state.copy()
    requests, tokens = slots.shape
    heads, head_dim = given(t, "dt_bias").shape
    out = np.zeros((requests * tokens, heads * head_dim))
    for b in range(requests):
        acc = int(accepted[b])
        first, source = int(slots[b, 0]), int(slots[b, acc - 1])
        if first <= 0 or source <= 0:
            continue
        rows = [_sections(proj[b * tokens + i], heads, head_dim, given(t, "f_b").shape[1]) for i in range(tokens)]
        taps = old_conv[first]
        inputs = [taps[acc - 1], taps[acc], taps[acc + 1], *(row.qkv for row in rows)]
        kept = [taps[acc], taps[acc + 1], *(row.qkv for row in rows)]
        conv_state[first, : len(kept)] = np.stack(kept)
        for head in range(heads):
            s = old_state[source, head].copy()
            for i, row in enumerate(rows):
                x = _head_inputs(_conv_silu(inputs[i : i + 4], given(t, "conv_w")), row, t, a, head)
                s = s * x.decay[np.newaxis, :]
                delta = x.beta * (x.v - s @ x.k)
                s = s + np.outer(delta, x.k)
                own = slice(head * head_dim, (head + 1) * head_dim)
                out[b * tokens + i, own] = _gated_norm(s @ x.q, row, t, a, head)
                if slots[b, i] > 0:
                    state[int(slots[b, i]), head] = s
    return {"conv_state": conv_state, "state": state, "out": out}


def kda_prefill(t: Inputs, a: Attributes) -> Outputs:
    """One sequence from nothing: `proj` [L, P] and the constants of `kda_decode`.

    Returns:
        `out` [L, W] and `state` [H, K, V], the transpose of what decode keeps.
    """
    proj = given(t, "proj")
    heads, head_dim = given(t, "dt_bias").shape
    rows = [_sections(row, heads, head_dim, given(t, "f_b").shape[1]) for row in proj]
    qkv = [np.zeros_like(rows[0].qkv)] * 3 + [row.qkv for row in rows]
    out = np.zeros((len(rows), heads * head_dim))
    final = np.zeros((heads, head_dim, head_dim))
    for head in range(heads):
        s = final[head]
        for i, row in enumerate(rows):
            x = _head_inputs(_conv_silu(qkv[i : i + 4], given(t, "conv_w")), row, t, a, head)
            transition = (np.eye(head_dim) - x.beta * np.outer(x.k, x.k)) @ np.diag(x.decay)
            s = transition @ s + x.beta * np.outer(x.k, x.v)
            out[i, head * head_dim : (head + 1) * head_dim] = _gated_norm(s.T @ x.q, row, t, a, head)
        final[head] = s
    return {"out": out, "state": final}


def conv_silu_sequence(x: Array, conv_w: Array) -> NDArray[np.float64]:
    """The short conv with SiLU over one sequence that starts from nothing; x [L, channels] -> [L, channels]."""
    padded = [np.zeros(x.shape[1])] * (conv_w.shape[1] - 1) + list(x)
    return np.stack([_conv_silu(padded[i : i + conv_w.shape[1]], conv_w) for i in range(x.shape[0])])
