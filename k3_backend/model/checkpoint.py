"""Published checkpoint names and shapes, and how they pack into the constants of the ops.

This module knows both sides and converts between them, layer by layer; it reads no files and draws no numbers. A
name that is missing, unexpected or has another shape or dtype is refused: nothing is narrowed or padded silently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3_backend.geometry import ExpertFormat, Geometry

__all__ = [
    "ALogReading",
    "CheckpointError",
    "Constants",
    "Kind",
    "Spec",
    "layer_specs",
    "model_specs",
    "normalise_a_log",
    "pack_layer",
    "pack_model",
    "unpack_layer",
]

log = logging.getLogger(__name__)

ALogReading = Literal["per_head", "first_heads"]
"""`per_head`: A_log holds one value per head. `first_heads`: head_dim values, of which the first `heads` count."""
Constants = dict[str, dict[str, Tensor]]
"""Site name -> argument name -> tensor."""
Kind = Literal[
    "linear",
    "branch_output",
    "embedding",
    "norm",
    "res_proj",
    "conv",
    "a_log",
    "dt_bias",
    "router_bias",
    "packed",
    "scale",
]
"""What a tensor is; `branch_output` is a linear map whose result is added to the residual stream."""


class CheckpointError(ValueError):
    """A checkpoint that does not fit the geometry; the message names the tensor, what it is and what was expected."""


@dataclass(frozen=True)
class Spec:
    """Shape, dtype and kind of one checkpoint tensor; the kind selects how a seeded model draws it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind


def _bf16(kind: Kind, *shape: int) -> Spec:
    return Spec(shape, torch.bfloat16, kind)


def model_specs(g: Geometry) -> dict[str, Spec]:
    """Tensors outside the layers."""
    return {
        "model.embed_tokens.weight": _bf16("embedding", g.vocab, g.hidden),
        "model.norm.weight": _bf16("norm", g.hidden),
        "model.output_attn_res_norm.weight": _bf16("norm", g.hidden),
        "model.output_attn_res_proj.weight": _bf16("res_proj", 1, g.hidden),
        "lm_head.weight": _bf16("linear", g.vocab, g.hidden),
    }


def layer_specs(g: Geometry, layer: int, expert_format: ExpertFormat) -> dict[str, Spec]:
    """Tensors of one layer, without the `model.layers.N.` prefix."""
    specs = {
        "input_layernorm.weight": _bf16("norm", g.hidden),
        "post_attention_layernorm.weight": _bf16("norm", g.hidden),
    }
    for site in ("self_attention_res", "mlp_res"):
        specs[f"{site}_norm.weight"] = _bf16("norm", g.hidden)
        specs[f"{site}_proj.weight"] = _bf16("res_proj", 1, g.hidden)
    specs |= _kda_specs(g) if g.kind(layer) == "kda" else _mla_specs(g)
    return specs | (_dense_specs(g) if layer == 0 else _moe_specs(g, expert_format))


def _kda_specs(g: Geometry) -> dict[str, Spec]:
    at = "self_attn"
    specs = {f"{at}.{name}_proj.weight": _bf16("linear", g.kda_width, g.hidden) for name in ("q", "k", "v", "g")}
    for name in ("q", "k", "v"):
        specs[f"{at}.{name}_conv1d.weight"] = Spec((g.kda_width, 1, g.conv_width), torch.float32, "conv")
    return specs | {
        f"{at}.f_a_proj.weight": _bf16("linear", g.kda_gate_rank, g.hidden),
        f"{at}.f_b_proj.weight": _bf16("linear", g.kda_width, g.kda_gate_rank),
        f"{at}.b_proj.weight": _bf16("linear", g.heads, g.hidden),
        f"{at}.A_log": Spec((1, 1, g.heads, 1), torch.float32, "a_log"),
        f"{at}.dt_bias": Spec((g.kda_width,), torch.float32, "dt_bias"),
        f"{at}.o_norm.weight": _bf16("norm", g.kda_head_dim),
        f"{at}.o_proj.weight": _bf16("branch_output", g.hidden, g.kda_width),
    }


def _mla_specs(g: Geometry) -> dict[str, Spec]:
    at = "self_attn"
    return {
        f"{at}.q_a_proj.weight": _bf16("linear", g.q_lora, g.hidden),
        f"{at}.q_a_layernorm.weight": _bf16("norm", g.q_lora),
        f"{at}.q_b_proj.weight": _bf16("linear", g.heads * (g.nope + g.pe), g.q_lora),
        f"{at}.kv_a_proj_with_mqa.weight": _bf16("linear", g.mla_row, g.hidden),
        f"{at}.kv_a_layernorm.weight": _bf16("norm", g.kv_lora),
        f"{at}.kv_b_proj.weight": _bf16("linear", g.heads * (g.nope + g.v_dim), g.kv_lora),
        f"{at}.g_proj.weight": _bf16("linear", g.mla_width, g.hidden),
        f"{at}.o_proj.weight": _bf16("branch_output", g.hidden, g.mla_width),
    }


def _dense_specs(g: Geometry) -> dict[str, Spec]:
    return {
        "mlp.gate_proj.weight": _bf16("linear", g.dense_width, g.hidden),
        "mlp.up_proj.weight": _bf16("linear", g.dense_width, g.hidden),
        "mlp.down_proj.weight": _bf16("branch_output", g.hidden, g.dense_width),
    }


def _moe_specs(g: Geometry, expert_format: ExpertFormat) -> dict[str, Spec]:
    at = "block_sparse_moe"
    specs = {
        f"{at}.gate.weight": _bf16("linear", g.experts, g.hidden),
        f"{at}.gate.e_score_correction_bias": Spec((g.experts,), torch.float32, "router_bias"),
        f"{at}.routed_expert_down_proj.weight": _bf16("linear", g.latent, g.hidden),
        f"{at}.routed_expert_norm.weight": _bf16("norm", g.latent),
        f"{at}.routed_expert_up_proj.weight": _bf16("branch_output", g.hidden, g.latent),
        f"{at}.shared_experts.gate_proj.weight": _bf16("linear", g.shared_width, g.hidden),
        f"{at}.shared_experts.up_proj.weight": _bf16("linear", g.shared_width, g.hidden),
        f"{at}.shared_experts.down_proj.weight": _bf16("branch_output", g.hidden, g.shared_width),
    }
    for expert in range(g.experts):
        for name, rows, columns in (
            ("w1", g.expert_width, g.latent),
            ("w3", g.expert_width, g.latent),
            ("w2", g.latent, g.expert_width),
        ):
            key = f"{at}.experts.{expert}.{name}.weight"
            if expert_format == "bf16":
                specs[key] = _bf16("linear", rows, columns)
            else:
                specs[f"{key}_packed"] = Spec((rows, columns // 2), torch.uint8, "packed")
                specs[f"{key}_scale"] = Spec((rows, columns // 32), torch.uint8, "scale")
    return specs


def normalise_a_log(a_log: Tensor, g: Geometry, reading: ALogReading, where: str) -> Tensor:
    """A_log as [heads] f32.

    Args:
        a_log: [heads], [1, 1, heads, 1], or [head_dim] if that reading was chosen.
        g: the model's dimensions.
        reading: public sources disagree whether a checkpoint holds one value per head or head_dim values; the caller
            says which, and the choice is logged.
        where: tensor name for messages.

    Raises:
        CheckpointError: any other shape, or the shape of the other reading.
    """
    shape = tuple(a_log.shape)
    if reading == "per_head" and shape in ((g.heads,), (1, 1, g.heads, 1)):
        return a_log.reshape(g.heads).float()
    if reading == "first_heads" and shape == (g.kda_head_dim,) and g.kda_head_dim >= g.heads:
        log.warning("%s: %d values read as head_dim; the first %d are used, one per head", where, shape[0], g.heads)
        return a_log[: g.heads].float()
    expected = f"[{g.heads}] or [1, 1, {g.heads}, 1]" if reading == "per_head" else f"[{g.kda_head_dim}]"
    raise CheckpointError(
        f"{where}: shape {list(shape)}; expected {expected} for the {reading!r} reading; "
        f"next: look at the checkpoint and pass the a_log_reading that it follows"
    )


def _res(tensors: Mapping[str, Tensor], site: str, out_norm: str) -> dict[str, Tensor]:
    return {
        "res_norm": tensors[f"{site}_norm.weight"],
        "res_proj": tensors[f"{site}_proj.weight"].reshape(-1),
        "out_norm": tensors[out_norm],
    }


def pack_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Constants of the site `attn_res.final`."""
    return {
        "res_norm": tensors["model.output_attn_res_norm.weight"],
        "res_proj": tensors["model.output_attn_res_proj.weight"].reshape(-1),
        "out_norm": tensors["model.norm.weight"],
    }


def pack_layer(
    g: Geometry, layer: int, tensors: Mapping[str, Tensor], expert_format: ExpertFormat, a_log_reading: ALogReading
) -> Constants:
    """Constants of one layer's sites from its checkpoint tensors (names as in `layer_specs`).

    Raises:
        CheckpointError: a tensor is missing or has another shape or dtype.
    """
    checked: dict[str, Tensor] = {}
    for name, spec in layer_specs(g, layer, expert_format).items():
        where = f"model.layers.{layer}.{name}"
        if name not in tensors:
            raise CheckpointError(f"{where}: missing; expected {list(spec.shape)}; next: use a checkpoint of {g.name}")
        tensor = tensors[name]
        if spec.kind == "a_log":
            tensor = normalise_a_log(tensor, g, a_log_reading, where)
        elif tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise CheckpointError(
                f"{where}: {list(tensor.shape)} {tensor.dtype}; expected {list(spec.shape)} {spec.dtype}; "
                f"next: use a checkpoint of {g.name}"
            )
        checked[name] = tensor
    sites = {
        "attn_res.attention": _res(checked, "self_attention_res", "input_layernorm.weight"),
        "attn_res.mlp": _res(checked, "mlp_res", "post_attention_layernorm.weight"),
        "oproj_allreduce": {"w": checked["self_attn.o_proj.weight"].unsqueeze(0)},
    }
    sites |= _pack_kda(g, checked) if g.kind(layer) == "kda" else _pack_mla(g, checked)
    return sites | (_pack_dense(checked) if layer == 0 else _pack_moe(g, checked, expert_format))


def _padded_rows(rows: int, parts: list[Tensor]) -> Tensor:
    packed = torch.cat(parts)
    return torch.cat([packed, packed.new_zeros(rows - packed.shape[0], packed.shape[1])])


def _pack_kda(g: Geometry, t: Mapping[str, Tensor]) -> Constants:
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    conv = [t[f"self_attn.{name}_conv1d.weight"].squeeze(1) for name in ("q", "k", "v")]
    return {
        "input_projection": {"w": _padded_rows(g.kda_proj_rows, [t[f"self_attn.{name}.weight"] for name in names])},
        "kda_decode": {
            "conv_w": torch.cat(conv),
            "f_b": t["self_attn.f_b_proj.weight"],
            "a_log": t["self_attn.A_log"],
            "dt_bias": t["self_attn.dt_bias"].reshape(g.heads, g.kda_head_dim),
            "o_norm": t["self_attn.o_norm.weight"],
        },
    }


def _pack_mla(g: Geometry, t: Mapping[str, Tensor]) -> Constants:
    names = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
    kv_b = t["self_attn.kv_b_proj.weight"].view(g.heads, g.nope + g.v_dim, g.kv_lora)
    return {
        "input_projection": {"w": _padded_rows(g.mla_proj_rows, [t[f"self_attn.{name}.weight"] for name in names])},
        "mla_query": {
            "q_norm": t["self_attn.q_a_layernorm.weight"],
            "kv_norm": t["self_attn.kv_a_layernorm.weight"],
            "w_qb": t["self_attn.q_b_proj.weight"],
            "w_uk_t": kv_b[:, : g.nope].contiguous(),
        },
        "mla_value": {"w_uv": kv_b[:, g.nope :].contiguous()},
    }


def _pack_dense(t: Mapping[str, Tensor]) -> Constants:
    gate_up = torch.cat([t["mlp.gate_proj.weight"], t["mlp.up_proj.weight"]])
    return {"dense_mlp": {"w_gate_up": gate_up, "w_down": t["mlp.down_proj.weight"]}}


def _pack_moe(g: Geometry, t: Mapping[str, Tensor], expert_format: ExpertFormat) -> Constants:
    at = "block_sparse_moe"
    suffixes = {"": "weight"} if expert_format == "bf16" else {"_packed": "weight_packed", "_scale": "weight_scale"}
    experts: dict[str, Tensor] = {}
    for ours, theirs in suffixes.items():
        first = [torch.cat([t[f"{at}.experts.{e}.{name}.{theirs}"] for name in ("w1", "w3")]) for e in range(g.experts)]
        experts[f"w13{ours}"] = torch.stack(first)
        experts[f"w2{ours}"] = torch.stack([t[f"{at}.experts.{e}.w2.{theirs}"] for e in range(g.experts)])
    shared = [t[f"{at}.shared_experts.{name}_proj.weight"] for name in ("gate", "up")]
    return {
        "moe_front": {
            "w_gate": t[f"{at}.gate.weight"],
            "bias": t[f"{at}.gate.e_score_correction_bias"],
            "w_down": t[f"{at}.routed_expert_down_proj.weight"],
        },
        "moe_experts": {
            **experts,
            "latent_norm": t[f"{at}.routed_expert_norm.weight"],
            "w_up": t[f"{at}.routed_expert_up_proj.weight"],
            "shared_gate_up": torch.cat(shared),
            "shared_down": t[f"{at}.shared_experts.down_proj.weight"],
        },
    }


def unpack_layer(g: Geometry, layer: int, sites: Constants, expert_format: ExpertFormat) -> dict[str, Tensor]:
    """Checkpoint tensors of one layer from its packed constants; the inverse of `pack_layer`."""
    tensors: dict[str, Tensor] = {}
    for site, out_norm, ours in (
        ("self_attention_res", "input_layernorm.weight", "attn_res.attention"),
        ("mlp_res", "post_attention_layernorm.weight", "attn_res.mlp"),
    ):
        tensors[f"{site}_norm.weight"] = sites[ours]["res_norm"]
        tensors[f"{site}_proj.weight"] = sites[ours]["res_proj"].unsqueeze(0)
        tensors[out_norm] = sites[ours]["out_norm"]
    tensors["self_attn.o_proj.weight"] = sites["oproj_allreduce"]["w"][0]
    attention: Callable[[Geometry, Constants], dict[str, Tensor]] = (
        _unpack_kda if g.kind(layer) == "kda" else _unpack_mla
    )
    tensors |= attention(g, sites)
    tensors |= _unpack_dense(g, sites) if layer == 0 else _unpack_moe(g, sites, expert_format)
    # Slices of one packed tensor share memory, which a checkpoint file must not.
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _sections(packed: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    parts = torch.split(packed[: sum(sizes.values())], list(sizes.values()))
    return {f"self_attn.{name}.weight": part for name, part in zip(sizes, parts, strict=True)}


def _unpack_kda(g: Geometry, sites: Constants) -> dict[str, Tensor]:
    w = g.kda_width
    sizes = {"q_proj": w, "k_proj": w, "v_proj": w, "g_proj": w, "f_a_proj": g.kda_gate_rank, "b_proj": g.heads}
    kda = sites["kda_decode"]
    conv = zip(("q", "k", "v"), torch.split(kda["conv_w"], w), strict=True)
    return {
        **_sections(sites["input_projection"]["w"], sizes),
        **{f"self_attn.{name}_conv1d.weight": part.unsqueeze(1) for name, part in conv},
        "self_attn.f_b_proj.weight": kda["f_b"],
        "self_attn.A_log": kda["a_log"].view(1, 1, g.heads, 1),
        "self_attn.dt_bias": kda["dt_bias"].reshape(-1),
        "self_attn.o_norm.weight": kda["o_norm"],
    }


def _unpack_mla(g: Geometry, sites: Constants) -> dict[str, Tensor]:
    sizes = {"q_a_proj": g.q_lora, "kv_a_proj_with_mqa": g.mla_row, "g_proj": g.mla_width}
    query = sites["mla_query"]
    return {
        **_sections(sites["input_projection"]["w"], sizes),
        "self_attn.q_a_layernorm.weight": query["q_norm"],
        "self_attn.kv_a_layernorm.weight": query["kv_norm"],
        "self_attn.q_b_proj.weight": query["w_qb"],
        "self_attn.kv_b_proj.weight": torch.cat([query["w_uk_t"], sites["mla_value"]["w_uv"]], 1).flatten(0, 1),
    }


def _unpack_dense(g: Geometry, sites: Constants) -> dict[str, Tensor]:
    gate, up = torch.split(sites["dense_mlp"]["w_gate_up"], g.dense_width)
    return {
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": sites["dense_mlp"]["w_down"],
    }


def _unpack_moe(g: Geometry, sites: Constants, expert_format: ExpertFormat) -> dict[str, Tensor]:
    at = "block_sparse_moe"
    front, moe = sites["moe_front"], sites["moe_experts"]
    gate, up = torch.split(moe["shared_gate_up"], g.shared_width)
    tensors = {
        f"{at}.gate.weight": front["w_gate"],
        f"{at}.gate.e_score_correction_bias": front["bias"],
        f"{at}.routed_expert_down_proj.weight": front["w_down"],
        f"{at}.routed_expert_norm.weight": moe["latent_norm"],
        f"{at}.routed_expert_up_proj.weight": moe["w_up"],
        f"{at}.shared_experts.gate_proj.weight": gate,
        f"{at}.shared_experts.up_proj.weight": up,
        f"{at}.shared_experts.down_proj.weight": moe["shared_down"],
    }
    for suffix in [""] if expert_format == "bf16" else ["_packed", "_scale"]:
        for e in range(g.experts):
            w1, w3 = torch.split(moe[f"w13{suffix}"][e], g.expert_width)
            for name, tensor in (("w1", w1), ("w3", w3), ("w2", moe[f"w2{suffix}"][e])):
                tensors[f"{at}.experts.{e}.{name}.weight{suffix}"] = tensor
    return tensors
