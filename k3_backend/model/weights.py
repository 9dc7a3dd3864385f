"""Weights of one model: seeded or loaded, handed to the ops packed, saved under the published checkpoint names.

Seeded weights are not trained. Their scales are chosen so that activations keep a sane range through the depth and
so that bugs show: router bias, decay rates, norms and AttnRes projections all differ from the values at which a
mistake would cancel (see `docs/geometries.md`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from k3_backend.geometry import ExpertFormat, Geometry
from k3_backend.model.checkpoint import (
    ALogReading,
    CheckpointError,
    Constants,
    Spec,
    layer_specs,
    model_specs,
    pack_layer,
    pack_model,
    unpack_layer,
)
from k3_backend.ops.mxfp import quantise_mxfp4

__all__ = ["ModelWeights"]

FINAL_SITE = "attn_res.final"


@dataclass(frozen=True)
class ModelWeights:
    """Packed weights. Constants never change after construction.

    Args:
        embed: [vocab, D] bf16.
        lm_head: [vocab, D] bf16.
        sites: per layer (None = after the last one): site name -> argument name -> tensor.
    """

    geometry: Geometry
    expert_format: ExpertFormat
    embed: Tensor
    lm_head: Tensor
    sites: dict[int | None, Constants]

    def constants(self, layer: int | None, site: str) -> dict[str, Tensor]:
        """Weights of one site by `TensorSpec` name; the absent expert format's tensors are not in it.

        Raises:
            KeyError: the layer has no such site.
        """
        return self.sites[layer].get(site) or self._missing(layer, site)

    def _missing(self, layer: int | None, site: str) -> dict[str, Tensor]:
        if site == "mla_decode":
            return {}
        raise KeyError(f"layer {layer} has no site {site!r}; it has {', '.join(self.sites[layer])}")

    @property
    def parameters(self) -> int:
        """Number of model parameters: checkpoint tensors without padding rows; MXFP4 counted as elements."""
        g = self.geometry
        specs = [*model_specs(g).values()]
        for layer in range(g.layers):
            specs += layer_specs(g, layer, "bf16").values()
        return sum(math.prod(spec.shape) for spec in specs)

    @classmethod
    def seeded(cls, geometry: Geometry, seed: int, expert_format: ExpertFormat = "bf16") -> ModelWeights:
        """Random weights that depend only on geometry, seed and tensor name, not on the order of drawing.

        With `mxfp4` the routed experts are the quantised values of the bf16 model of the same seed.
        """
        model = {name: _draw(name, spec, seed) for name, spec in model_specs(geometry).items()}
        sites: dict[int | None, Constants] = {None: {FINAL_SITE: pack_model(model)}}
        for layer in range(geometry.layers):
            tensors = {
                name: _draw(f"model.layers.{layer}.{name}", spec, seed)
                for name, spec in layer_specs(geometry, layer, "bf16").items()
            }
            if expert_format == "mxfp4":
                tensors = _quantise_experts(tensors)
            sites[layer] = pack_layer(geometry, layer, tensors, expert_format, "per_head")
        return cls(geometry, expert_format, model["model.embed_tokens.weight"], model["lm_head.weight"], sites)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors under the published checkpoint names, each with memory of its own."""
        final = self.sites[None][FINAL_SITE]
        tensors = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": final["out_norm"],
            "model.output_attn_res_norm.weight": final["res_norm"],
            "model.output_attn_res_proj.weight": final["res_proj"].unsqueeze(0).clone(),
            "lm_head.weight": self.lm_head,
        }
        for layer in range(self.geometry.layers):
            for name, tensor in unpack_layer(self.geometry, layer, self.sites[layer], self.expert_format).items():
                tensors[f"model.layers.{layer}.{name}"] = tensor
        return tensors

    @classmethod
    def from_state_dict(
        cls,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        expert_format: ExpertFormat,
        a_log_reading: ALogReading = "per_head",
    ) -> ModelWeights:
        """Pack checkpoint tensors.

        Args:
            geometry: the model's dimensions.
            tensors: every tensor of the text model under its published name.
            expert_format: format of the routed experts.
            a_log_reading: which of the two readings of `A_log` the checkpoint follows.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or has another shape or dtype.
        """
        top = model_specs(geometry)
        for name, spec in top.items():
            if name not in tensors or tuple(tensors[name].shape) != spec.shape or tensors[name].dtype != spec.dtype:
                found = "missing" if name not in tensors else f"{list(tensors[name].shape)} {tensors[name].dtype}"
                raise CheckpointError(
                    f"{name}: {found}; expected {list(spec.shape)} {spec.dtype}; "
                    f"next: use a checkpoint of {geometry.name}"
                )
        used = set(top)
        sites: dict[int | None, Constants] = {None: {FINAL_SITE: pack_model(tensors)}}
        for layer in range(geometry.layers):
            prefix = f"model.layers.{layer}."
            names = {name: f"{prefix}{name}" for name in layer_specs(geometry, layer, expert_format)}
            own = {name: tensors[full] for name, full in names.items() if full in tensors}
            sites[layer] = pack_layer(geometry, layer, own, expert_format, a_log_reading)
            used.update(names.values())
        if unexpected := sorted(set(tensors) - used):
            raise CheckpointError(
                f"{unexpected[0]} (and {len(unexpected) - 1} more): no such tensor in {geometry.name} with "
                f"{expert_format} experts; expected {len(used)} tensors; next: check geometry and expert format"
            )
        return cls(geometry, expert_format, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"], sites)

    def save(self, path: Path) -> None:
        """Write one safetensors file; its metadata names geometry and expert format."""
        from safetensors.torch import save_file

        metadata = {"geometry": json.dumps(asdict(self.geometry)), "expert_format": self.expert_format}
        save_file(self.state_dict(), str(path), metadata=metadata)

    @classmethod
    def load(cls, path: Path, a_log_reading: ALogReading = "per_head") -> ModelWeights:
        """Read a file that `save` wrote (or any file with the same names and metadata).

        Raises:
            CheckpointError: the metadata or a tensor does not fit.
            OSError: the file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: {error}; expected a complete safetensors file; next: write it again with ModelWeights.save"
            ) from error
        expert_format = metadata.get("expert_format")
        if expert_format not in ("bf16", "mxfp4") or "geometry" not in metadata:
            raise CheckpointError(
                f"{path}: metadata {sorted(metadata)}; expected geometry and expert_format (bf16 or mxfp4); "
                "next: write the file with ModelWeights.save"
            )
        geometry = _geometry_from_json(metadata["geometry"], path)
        return cls.from_state_dict(geometry, tensors, expert_format, a_log_reading)


def _geometry_from_json(text: str, path: Path) -> Geometry:
    values = json.loads(text)
    known = {field.name for field in fields(Geometry)}
    if set(values) != known:
        raise CheckpointError(
            f"{path}: geometry fields {sorted(set(values) ^ known)} missing or unknown; expected {sorted(known)}; "
            "next: write the file with this version's ModelWeights.save"
        )
    return Geometry(**{**values, "mla_layers": tuple(values["mla_layers"])})


def _draw(name: str, spec: Spec, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def normal(std: float, mean: float = 0.0) -> Tensor:
        return torch.randn(spec.shape, generator=generator).mul_(std).add_(mean)

    match spec.kind:
        case "embedding":
            value = normal(1.0)
        case "linear":
            value = normal(spec.shape[-1] ** -0.5)
        case "branch_output":
            # Half gain: what a layer adds stays below what it adds to, so that rounding noise does not grow with depth.
            value = normal(0.5 * spec.shape[-1] ** -0.5)
        case "conv":
            # One dominant tap (the current token) beside three that matter.
            value = normal(0.3)
            value[..., -1] += 1.0
        case "norm":
            value = normal(0.1, mean=1.0)
        case "res_proj":
            value = normal(0.05)
        case "router_bias":
            value = normal(0.1)
        case "dt_bias":
            value = normal(1.0)
        case "a_log":
            value = torch.empty(spec.shape).uniform_(1.0, 16.0, generator=generator).log_()
        case "packed" | "scale":
            raise AssertionError(f"{name}: quantised tensors are derived, not drawn")
    return value.to(spec.dtype)


def _quantise_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    quantised: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            quantised[f"{name}_packed"], quantised[f"{name}_scale"] = quantise_mxfp4(tensor)
        else:
            quantised[name] = tensor
    return quantised
