"""Inputs of the KDA decode op: projections, conv windows and recurrent states in scattered slots."""

from __future__ import annotations

import torch
from torch import Tensor

from verify.evaluator.inputs.draw import ACTIVATION_KINDS, Draw
from verify.evaluator.inputs.masks import Attrs, Inputs, Masks, Tensors, whole

__all__ = ["KDA_DECODE_KINDS", "kda_decode", "kda_decode_masks"]

KDA_DECODE_KINDS = (*ACTIVATION_KINDS, "padding", "saturated", "long_decay", "hold", "large_state", "wide_pool")


def kda_decode(d: Draw) -> Inputs:
    """`padding` mixes null requests and unwanted writes (null slots behind the first) in; `saturated`: write strength
    and output gates at 0 or 1, decays at their bounds; `long_decay`: decays near one on states whose columns differ by
    2^12; `hold`: the same with a write strength of zero, so that the state only passes through and a state kept in less
    than f32 shows; `large_state`: states far larger than the update; `wide_pool`: a pool made
    for more drafts than this step has.
    """
    g, batch, tokens = d.geometry, d.case.batch, d.case.tokens
    rows, width, head = d.case.rows, g.kda_width, g.kda_head_dim
    taps = tokens + 2 + (d.fixed.integer(1, 5) if d.kind == "wide_pool" else 0)
    pool = 1 + rows + d.fixed.integer(2, 4)
    slots = (d.permutation(pool - 1) + 1)[:rows].reshape(batch, tokens).to(torch.int32)
    if d.kind == "padding":
        _remove_slots(d, slots)
    proj = d.activation((rows, g.kda_proj_rows))
    dt_bias = d.normal((g.heads, head))
    state = d.normal((pool, g.heads, head, head), 0.5)
    gates = slice(3 * width, 4 * width)
    beta = slice(4 * width + g.kda_gate_rank, 4 * width + g.kda_gate_rank + g.heads)
    if d.kind == "saturated":
        for part in (gates, beta):
            count = part.stop - part.start
            proj[:, part] = torch.where(d.chance(0.5, (rows, count)), 30.0, -30.0) * d.uniform(1.0, 3.0, (rows, 1))
        dt_bias = torch.where(d.chance(0.5, dt_bias.shape), 40.0, -40.0)
    elif d.kind in ("long_decay", "hold"):
        dt_bias = -d.uniform(6.0, 12.0, dt_bias.shape)
        state *= torch.exp2(d.uniform(-6.0, 6.0, (pool, g.heads, 1, head)))
        if d.kind == "hold":
            proj[:, beta] = -d.uniform(20.0, 60.0, (rows, g.heads)).to(torch.bfloat16)
    elif d.kind == "large_state":
        state *= 64.0
    tensors: Tensors = {
        "proj": proj,
        "conv_w": d.normal((3 * width, g.conv_width), 0.5),
        "f_b": d.weight(width, g.kda_gate_rank),
        "a_log": torch.log(d.uniform(1.0, 16.0, (g.heads,))),
        "dt_bias": dt_bias,
        "o_norm": d.norm_weight(head),
        "slots": slots,
        "accepted": d.integers(1, tokens, (batch,)).to(torch.int32),
        "conv_state": d.normal((pool, taps, 3 * width)).to(torch.bfloat16),
        "state": state,
    }
    return tensors, {"gate_lower_bound": g.gate_lower_bound, "eps": g.eps, "l2_eps": g.l2_eps}


def _remove_slots(d: Draw, slots: Tensor) -> None:
    """Null out whole requests (as a padded batch has them) and single later slots, in place.

    From two requests on, at least one is null and at least one is not; with several tokens, one of the latter lacks a
    later slot.
    """
    batch, tokens = slots.shape
    null = d.chance(0.3, (batch,))
    dead, alive = [*d.permutation(batch).tolist(), None][:2]
    if alive is not None:
        null[dead], null[alive] = True, False
    if tokens > 1:
        unwanted = d.chance(0.2, (batch, tokens))
        unwanted[dead if alive is None else alive, d.integer(1, tokens - 1)] = True
        unwanted[:, 0] = False
        slots[unwanted] = 0
    slots[null] = -d.integers(0, 1, (int(null.sum()), tokens)).to(torch.int32)


def kda_decode_masks(tensors: Tensors, attrs: Attrs) -> Masks:
    """A request that is not null writes its slots' states and the first T + 2 conv rows of its first slot; it reads one
    state and three conv rows. Nothing else of the pools matters or changes.
    """
    del attrs
    proj, f_b, a_log = tensors["proj"], tensors["f_b"], tensors["a_log"]
    slots, accepted, conv, state = tensors["slots"], tensors["accepted"], tensors["conv_state"], tensors["state"]
    assert proj is not None and f_b is not None and a_log is not None  # noqa: PT018
    assert slots is not None and accepted is not None and conv is not None and state is not None  # noqa: PT018
    tokens = slots.shape[1]
    state_written = torch.zeros(state.shape[0], dtype=torch.bool)
    state_read = torch.zeros_like(state_written)
    conv_written = torch.zeros(conv.shape[:2], dtype=torch.bool)
    conv_read = torch.zeros_like(conv_written)
    dead_rows = torch.zeros(proj.shape[0], dtype=torch.bool)
    for b, (ids, kept) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
        if ids[0] <= 0 or ids[kept - 1] <= 0:
            dead_rows[b * tokens : (b + 1) * tokens] = True
            continue
        state_written[[i for i in ids if i > 0]] = True
        state_read[ids[kept - 1]] = True
        conv_written[ids[0], : tokens + 2] = True
        conv_read[ids[0], kept - 1 : kept + 2] = True
    free_proj = whole(proj)
    free_proj[~dead_rows, : 4 * f_b.shape[0] + f_b.shape[1] + a_log.shape[0]] = False
    return Masks(
        written={"state": state_written, "conv_state": conv_written},
        free={"state": ~state_read, "conv_state": ~conv_read, "proj": free_proj},
    )
