"""Inputs of the ops that are matrix products or norms over the hidden stream: projections, dense MLP, AttnRes."""

from __future__ import annotations

import torch

from k3_backend.model.program import decode_program
from verify.evaluator.inputs.draw import ACTIVATION_KINDS, Draw
from verify.evaluator.inputs.masks import Attrs, Inputs, Masks, Tensors, whole

__all__ = [
    "ATTN_RES_KINDS", "DENSE_MLP_KINDS", "OPROJ_KINDS", "attn_res", "attn_res_masks", "dense_mlp", "input_projection",
    "oproj_allreduce", "oproj_allreduce_masks",
]  # fmt: skip

ATTN_RES_KINDS = (*ACTIVATION_KINDS, "peaked", "all_sources", "no_sources")
DENSE_MLP_KINDS = (*ACTIVATION_KINDS, "saturated", "unbounded")
OPROJ_KINDS = (*ACTIVATION_KINDS, "ranks", "cancelling")


def input_projection(d: Draw) -> Inputs:
    """Rows of either packed projection of the geometry."""
    g = d.geometry
    return {
        "x": d.activation((d.case.rows, g.hidden)),
        "w": d.weight(d.fixed.choose(g.kda_proj_rows, g.mla_proj_rows), g.hidden),
    }, {}


def dense_mlp(d: Draw) -> Inputs:
    """`saturated`: gate and up far outside the linear range of SiTU; `unbounded`: linear beta off."""
    g = d.geometry
    x = d.activation((d.case.rows, g.hidden), 12.0 if d.kind == "saturated" else 1.0)
    tensors: Tensors = {
        "x": x,
        "w_gate_up": d.weight(2 * g.dense_width, g.hidden),
        "w_down": d.weight(g.hidden, g.dense_width),
    }
    return tensors, {"beta": g.situ_beta, "linear_beta": 0.0 if d.kind == "unbounded" else g.situ_linear_beta}


def oproj_allreduce(d: Draw) -> Inputs:
    """`ranks`: two tensor-parallel ranks in one process; `cancelling`: the prefix nearly cancels the projection."""
    g, rows = d.geometry, d.case.rows
    ranks = 2 if d.kind == "ranks" else 1
    width = d.fixed.choose(g.kda_width, g.mla_width) // ranks
    x, w = d.activation((ranks, rows, width)), d.weight(g.hidden, width, ranks)
    prefix = d.activation((rows, g.hidden))
    if d.kind == "cancelling":
        y = torch.einsum("rmk,rdk->md", x.float(), w.float())
        prefix = (-y * d.uniform(0.9, 1.1, y.shape)).to(torch.bfloat16)
    tensors: Tensors = {"x": x, "w": w, "prefix": prefix}
    return tensors, {"restart": 0 if d.kind == "cancelling" else d.fixed.choose(0, 0, 1)}


def oproj_allreduce_masks(tensors: Tensors, attrs: Attrs) -> Masks:
    """The whole prefix is written; on a restart its old content must not matter."""
    prefix = tensors["prefix"]
    assert prefix is not None
    rows = torch.ones(prefix.shape[0], dtype=torch.bool)
    return Masks(written={"prefix": rows}, free={"prefix": rows} if attrs["restart"] else {})


def attn_res(d: Draw) -> Inputs:
    """Attributes of a random site of the geometry's decode step, or of the stated extreme. `peaked`: one source takes
    nearly all weight; `all_sources` and `no_sources`: the largest and the empty mix.
    """
    g, rows = d.geometry, d.case.rows
    sites = [site for site in decode_program(g) if site.op == "attn_res"]
    if d.kind == "no_sources":
        sites = [site for site in sites if site.attrs["sources"] == 0]
    elif d.kind == "all_sources":
        sites = [site for site in sites if site.attrs["sources"] == g.attn_res_blocks]
    attrs: Attrs = dict(sites[d.fixed.integer(0, len(sites) - 1)].attrs)
    blocks = d.activation((rows, g.attn_res_blocks, g.hidden))
    res_proj = d.normal((g.hidden,), 0.05)
    if d.kind == "peaked":
        res_proj = d.normal((g.hidden,), 1.5)
        chosen = d.integers(0, g.attn_res_blocks - 1, (rows,))
        blocks[torch.arange(rows), chosen] = (blocks[torch.arange(rows), chosen].float() + 2.0 * res_proj).to(
            torch.bfloat16
        )
    tensors: Tensors = {
        "prefix": d.activation((rows, g.hidden)),
        "delta": d.activation((rows, g.hidden)) if attrs["add_delta"] else None,
        "blocks": blocks,
        "res_norm": d.norm_weight(g.hidden),
        "res_proj": res_proj.to(torch.bfloat16),
        "out_norm": d.norm_weight(g.hidden),
    }
    return tensors, attrs


def attn_res_masks(tensors: Tensors, attrs: Attrs) -> Masks:
    """One saved row per token is written at most; saved rows outside the mix must not matter."""
    prefix, blocks = tensors["prefix"], tensors["blocks"]
    assert prefix is not None
    assert blocks is not None
    written = torch.zeros(blocks.shape[:2], dtype=torch.bool)
    free = torch.ones_like(written)
    if attrs["write_block"] >= 0:
        written[:, int(attrs["write_block"])] = True
    free[:, : int(attrs["sources"])] = False
    rows = whole(prefix[:, 0]) if attrs["add_delta"] else torch.zeros(prefix.shape[0], dtype=torch.bool)
    return Masks(written={"prefix": rows, "blocks": written}, free={"blocks": free})
