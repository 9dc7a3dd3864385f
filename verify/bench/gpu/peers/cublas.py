"""cuBLAS through torch: the matrix products of an op, without whatever else the op does."""

from __future__ import annotations

import torch
from torch import Tensor

from verify.bench.gpu.arm import Arm, Inputs, Tensors

__all__ = ["projection", "query", "value"]


def projection(inputs: Inputs) -> Arm:
    """torch.mm over the packed weights: the whole op."""
    outs = [torch.empty(t["x"].shape[0], t["w"].shape[0], dtype=torch.bfloat16, device="cuda") for t in inputs.sets]

    def launch(t: Tensors, out: Tensor) -> None:
        torch.mm(t["x"], t["w"].T, out=out)

    calls = [lambda t=t, o=o: launch(t, o) for t, o in zip(inputs.sets, outs, strict=True)]
    return Arm(calls, lambda: {"out": outs[0]}, pdl=False, note="torch.mm, the whole op")


def query(inputs: Inputs) -> Arm:
    """q_b by torch.mm and W_UK by torch.bmm, on a q_a that is normed already."""
    g = inputs.geometry
    jobs = []
    for t in inputs.sets:
        normed = _rms(t["proj"][:, : g.q_lora], t["q_norm"], g.eps)
        q = torch.empty(normed.shape[0], t["w_qb"].shape[0], dtype=torch.bfloat16, device="cuda")
        latent = torch.empty(g.heads, normed.shape[0], g.kv_lora, dtype=torch.bfloat16, device="cuda")
        jobs.append((normed, t["w_qb"].T, q, q.view(-1, g.heads, g.nope + g.pe), t["w_uk_t"], latent))

    def launch(normed: Tensor, w_qb: Tensor, q: Tensor, heads: Tensor, w_uk: Tensor, latent: Tensor) -> None:
        torch.mm(normed, w_qb, out=q)
        torch.bmm(heads[..., : g.nope].transpose(0, 1), w_uk, out=latent)

    def results() -> dict[str, Tensor]:
        return {"query": torch.cat([jobs[0][5].transpose(0, 1), jobs[0][3][..., g.nope :]], -1)}

    calls = [lambda job=job: launch(*job) for job in jobs]
    return Arm(calls, results, pdl=False, note="the two products alone: no norms, no cache insert")


def value(inputs: Inputs) -> Arm:
    """W_UV by torch.bmm, without gate."""
    g = inputs.geometry
    jobs = []
    for t in inputs.sets:
        out = torch.empty(g.heads, inputs.cell.rows, g.v_dim, dtype=torch.bfloat16, device="cuda")
        jobs.append((t["partial"][0].transpose(0, 1), t["w_uv"].transpose(1, 2), out))

    def launch(latent: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.bmm(latent, weight, out=out)

    exact = torch.bmm(jobs[0][0].double(), jobs[0][1].double())
    calls = [lambda job=job: launch(*job) for job in jobs]
    return Arm(
        calls, lambda: {"product": jobs[0][2]}, pdl=False, note="the product alone: no shard merge, no gate",
        expected={"product": exact},
    )  # fmt: skip


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(torch.bfloat16)
