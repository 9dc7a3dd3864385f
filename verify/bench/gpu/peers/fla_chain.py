"""fla: the recurrence alone, and the chain of kernels that its own KDA layer runs around it.

What a serving engine would have to add is given for free: inputs lie in the layout that each kernel wants, states are
contiguous instead of in slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verify.bench.gpu.arm import Arm, Inputs, Missing

__all__ = ["chain", "recurrence"]


def _modules() -> tuple[Any, Any, Any]:
    try:
        from fla.modules.causal_conv1d.ops import causal_conv1d_update
        from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ImportError as error:
        raise Missing(f"fla cannot be imported ({error}); kit.py run --peers DIR with its wheels") from error
    return causal_conv1d_update, layer_norm_gated_fwd, fused_recurrent_kda_fwd


def _gate_options(inputs: Inputs, t: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "A_log": t["a_log"], "dt_bias": t["dt_bias"].view(-1), "inplace_final_state": True, "state_v_first": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "lower_bound": float(inputs.attrs["gate_lower_bound"]),
    }  # fmt: skip


def _require_plain(inputs: Inputs) -> None:
    if inputs.cell.tokens > 1:
        raise Missing("fla keeps one state per sequence, a verify step T")


def _ordered(t: Mapping[str, Any], name: str) -> Tensor:
    """The batch's states or conv windows in the order of its requests; a copy."""
    picked: Tensor = t[name][t["slots"][:, 0].long()]
    return picked


def recurrence(inputs: Inputs) -> Arm:
    """fused_recurrent_kda alone, with its gate and l2 norms in the kernel; q, k, v come straight from the projection.

    Raises:
        Missing: no fla, or a verify step.
    """
    _require_plain(inputs)
    run = _modules()[2]
    g, batch = inputs.geometry, inputs.cell.batch
    width, shape = g.kda_width, (batch, 1, g.heads, g.kda_head_dim)
    jobs = []
    for t in inputs.sets:
        q, k, v, gate = (t["proj"][:, i * width : (i + 1) * width].reshape(shape).contiguous() for i in range(4))
        beta = t["proj"][:, 4 * width : 4 * width + g.heads].reshape(batch, 1, g.heads).contiguous()
        state = t["state"][1 : 1 + batch]
        options = _gate_options(inputs, t) | {"initial_state": state, "out": torch.empty_like(v)}
        jobs.append(((q, k, v, gate, beta), options))
    expected = _recurrence_in_f64(*jobs[0])
    calls = [lambda job=job: run(*job[0], **job[1]) for job in jobs]

    def results() -> Mapping[str, Tensor]:
        return {"out": jobs[0][1]["out"], "state": jobs[0][1]["initial_state"]}

    note = "the recurrence alone: no conv, no gate product, no gated norm, no slots"
    return Arm(calls, results, pdl=False, note=note, expected=expected)


def chain(inputs: Inputs) -> Arm:
    """Three conv updates, the gate's product, the recurrence and the gated norm, as in fla's KDA layer.

    Raises:
        Missing: no fla, or a verify step.
    """
    _require_plain(inputs)
    conv, norm, run = _modules()
    g, batch = inputs.geometry, inputs.cell.batch
    width, shape = g.kda_width, (batch, 1, g.heads, g.kda_head_dim)
    jobs = []
    for t in inputs.sets:
        proj, window = t["proj"], _ordered(t, "conv_state")
        # fla's window has a column for the token that the update adds; the oldest one is shifted out.
        caches = torch.zeros(3, batch, width, g.conv_width, dtype=torch.bfloat16, device="cuda")
        for i in range(3):
            caches[i, :, :, 1:] = window[:, :, i * width : (i + 1) * width].transpose(1, 2)
        job = {
            "x": [proj[:, i * width : (i + 1) * width].contiguous() for i in range(3)],
            "caches": list(caches.unbind()),
            "weights": [t["conv_w"][i * width : (i + 1) * width].contiguous() for i in range(3)],
            "gate": proj[:, 3 * width : 4 * width].reshape(batch * g.heads, g.kda_head_dim).contiguous(),
            "f_a": proj[:, 4 * width : 4 * width + g.kda_gate_rank].contiguous(),
            "f_b": t["f_b"].T,
            "beta": proj[:, 4 * width + g.kda_gate_rank :][:, : g.heads].reshape(batch, 1, g.heads).contiguous(),
            "decay": torch.empty(batch, width, dtype=torch.bfloat16, device="cuda"),
            "out": torch.empty(shape, dtype=torch.bfloat16, device="cuda"),
            "options": _gate_options(inputs, t) | {"initial_state": _ordered(t, "state")},
            "norm": t["o_norm"],
        }
        jobs.append(job)
    kept: dict[int, Tensor] = {}

    def launch(i: int) -> None:
        job = jobs[i]
        q, k, v = (
            conv(x, cache, weight=weight, activation="silu")[0].view(shape)
            for x, cache, weight in zip(job["x"], job["caches"], job["weights"], strict=True)
        )
        torch.mm(job["f_a"], job["f_b"], out=job["decay"])
        run(q, k, v, job["decay"].view(shape), job["beta"], out=job["out"], **job["options"])
        flat = job["out"].view(batch * g.heads, g.kda_head_dim)
        options = {"activation": "sigmoid", "eps": float(inputs.attrs["eps"]), "is_rms_norm": True}
        kept[i] = norm(flat, job["gate"], job["norm"], None, **options)[0]

    def results() -> Mapping[str, Tensor]:
        return {"out": kept[0].view(batch, width), "ordered_state": jobs[0]["options"]["initial_state"]}

    calls = [lambda i=i: launch(i) for i in range(len(jobs))]
    note = "conv update x3, gate product, recurrence, gated norm; contiguous states and inputs"
    return Arm(calls, results, pdl=False, note=note)


def _recurrence_in_f64(tensors: tuple[Tensor, ...], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The recurrence's definition (`k3_backend/ops/kda_decode/interface.py`) without its surroundings, in f64."""
    q, k, v, gate, beta = (x[:, 0].double() for x in tensors)
    a_log, bias = options["A_log"].double(), options["dt_bias"].double().view(q.shape[1:])
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = torch.exp(options["lower_bound"] * torch.sigmoid(torch.exp(a_log).unsqueeze(-1) * (gate + bias)))
    state = options["initial_state"].double() * decay.unsqueeze(2)
    update = torch.sigmoid(beta).unsqueeze(-1) * (v - torch.einsum("bhvk,bhk->bhv", state, k))
    state = state + update.unsqueeze(-1) * k.unsqueeze(2)
    return {"out": torch.einsum("bhvk,bhk->bhv", state, q).unsqueeze(1), "state": state}
