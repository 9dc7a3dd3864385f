"""KDA over many tokens at once: the delta rule in chunks, for prefill.

The recurrence is the one of `kda_decode`; only the order of the arithmetic differs. Within a chunk of C tokens, with
inclusive cumulative log decays G_i (per key channel), unrolling S_i = S_{i-1} diag(a_i) + u_i k_i^T gives

    S_i = S_0 diag(e^{G_i}) + sum_{j <= i} u_j (k_j e^{G_i - G_j})^T
    u_i = beta_i (v_i - S_0 (k_i e^{G_i}) - sum_{j < i} u_j <k_i e^{G_i - G_j}, k_j>).

So U solves the unit lower triangular system (I + A) U = beta (V - K~ S_0^T) with A_ij = beta_i <k_i e^{G_i - G_j}, k_j>
and K~_i = k_i e^{G_i}. The solution is linear in S_0: both parts are solved for all chunks in parallel, and only the
chain of chunk states is sequential. A and its counterpart for q factor into products of rows scaled by e^{G - m} and
e^{m - G}; with m at the middle of a chunk of 16 and log decays above -5 no exponent exceeds 40 in magnitude.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CHUNK", "delta_rule"]

CHUNK = 16
"""Tokens per chunk; bounds the exponents (see above)."""


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and final state of L tokens.

    Args:
        q: [R, L, H, K] f32, scaled.
        k: [R, L, H, K] f32, unit rows.
        v: [R, L, H, V] f32.
        log_decay: [R, L, H, K] f32 in [-5, 0].
        beta: [R, L, H, 1] f32; a token with beta 0 and log decay 0 leaves the state alone (padding).
        state: [R, H, V, K] f32 before the first token.

    Returns:
        o [R, L, H, V] f32 and the state after the last token.

    Raises:
        ValueError: L is not a multiple of CHUNK.
    """
    length = q.shape[1]
    if length % CHUNK:
        raise ValueError(
            f"delta_rule: {length} tokens; expected a multiple of {CHUNK}; next: pad with beta 0 and log decay 0"
        )
    q, k, v, log_decay, beta = (_chunks(x) for x in (q, k, v, log_decay, beta))
    decayed = log_decay.cumsum(-2)
    last = decayed[..., -1:, :]
    middle = decayed[..., CHUNK // 2 - 1 : CHUNK // 2, :]

    towards, back = (decayed - middle).exp(), k * (middle - decayed).exp()
    back = back.transpose(-1, -2)
    from_start = decayed.exp()
    system = torch.tril((k * towards) @ back, -1) * beta
    right_side = torch.cat([v, k * from_start], -1) * beta
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    u_free, u_state = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)

    kept = last.exp()
    to_end = k * (last - decayed).exp()
    starts, updates = [], []
    for n in range(length // CHUNK):
        starts.append(state)
        u = u_free[:, :, n] - u_state[:, :, n] @ state.transpose(-1, -2)
        updates.append(u)
        state = state * kept[:, :, n] + u.transpose(-1, -2) @ to_end[:, :, n]

    read = (q * from_start) @ torch.stack(starts, 2).transpose(-1, -2)
    o = read + torch.tril((q * towards) @ back) @ torch.stack(updates, 2)
    return o.flatten(2, 3).transpose(1, 2), state


def _chunks(x: Tensor) -> Tensor:
    """[R, L, H, X] -> [R, H, L / C, C, X]."""
    requests, length, heads, width = x.shape
    return x.transpose(1, 2).reshape(requests, heads, length // CHUNK, CHUNK, width)
