"""The Kimi K3 text model in plain maths, for reading: one sequence, checkpoint names, no rounding, no tricks.

`ReferenceModel.forward` is the definition that everything else is compared with: prefill, decode and speculative
verify are the same function over different numbers of tokens. It deliberately shares no packing, no absorbed weights,
no paging and no batching with the decode path. `decode` runs the decode path itself (program, pools, batch) with the
reference maths of every op, with or without the bf16 roundings that the ops define.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3_backend.geometry import Geometry
from k3_backend.model.batch import Batch, BatchError
from k3_backend.model.program import OpFunction, Site, batch_fields, decode_program, execute
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.ops.maths import rms_norm, situ
from k3_backend.ops.mxfp import dequantise_mxfp4
from k3_backend.ops.registry import reference

__all__ = ["Cache", "ReferenceModel", "decode"]


@dataclass(frozen=True)
class Cache:
    """Everything the model remembers of one sequence. Immutable: rejecting drafts is keeping an earlier cache."""

    length: int
    """Tokens seen."""
    conv: dict[int, Tensor]
    """KDA layer -> [3, 3W], inputs of the convolution before the next token, oldest first."""
    state: dict[int, Tensor]
    """KDA layer -> [H, V, K] recurrent state."""
    latent: dict[int, Tensor]
    """MLA layer -> [length, KL + PE] normalised latent and unrotated position part of every token."""

    @classmethod
    def empty(cls, g: Geometry, dtype: torch.dtype = torch.float64) -> Cache:
        """The cache of a sequence without tokens."""
        head = g.kda_head_dim
        return cls(
            length=0,
            conv={layer: torch.zeros(g.conv_width - 1, 3 * g.kda_width, dtype=dtype) for layer in g.kda_layers},
            state={layer: torch.zeros(g.heads, head, head, dtype=dtype) for layer in g.kda_layers},
            latent={layer: torch.zeros(0, g.mla_row, dtype=dtype) for layer in g.mla_layers},
        )


class ReferenceModel:
    """The text model of one set of weights.

    Args:
        weights: the model.
        dtype: type of every computation, float64 or float32.
    """

    def __init__(self, weights: ModelWeights, dtype: torch.dtype = torch.float64) -> None:
        self.g = weights.geometry
        self.dtype = dtype
        self._weights = _as_values(weights.state_dict(), dtype)

    def forward(
        self, tokens: Sequence[int], cache: Cache, *, every_cache: bool = False
    ) -> tuple[Tensor, tuple[Cache, ...]]:
        """Hidden rows of new tokens of one sequence.

        Args:
            tokens: n >= 1 new token ids; a prompt, one sampled token, or one token and its drafts.
            cache: what the sequence holds before them.
            every_cache: also return the cache after each token, for choosing how many drafts to keep.

        Returns:
            hidden [n, D], model.norm applied; the cache after each token, or only after the last one.
        """
        g = self.g
        prefix = self._weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        blocks: list[Tensor] = []
        conv: dict[int, list[Tensor]] = {}
        state: dict[int, list[Tensor]] = {}
        latent: dict[int, Tensor] = {}

        for layer in range(g.layers):
            starts_block = layer % g.attn_res_block == 0
            x = self._mix(layer, "self_attention_res", "input_layernorm", blocks, prefix)
            if starts_block:
                # Saved after the mix: at this site the prefix stands for the row that it has just become.
                blocks.append(prefix)
            if layer in g.mla_layers:
                y, latent[layer] = self._mla(layer, x, cache.latent[layer])
            else:
                y, conv[layer], state[layer] = self._kda(layer, x, cache.conv[layer], cache.state[layer])
            prefix = y if starts_block else prefix + y

            x = self._mix(layer, "mlp_res", "post_attention_layernorm", blocks, prefix)
            prefix = prefix + (self._dense(layer, x) if layer == 0 else self._moe(layer, x))

        mixed = self._depth_softmax("model.output_attn_res", blocks, prefix)
        hidden = rms_norm(mixed, self._weights["model.norm.weight"], g.eps)

        counts = range(1, len(tokens) + 1) if every_cache else [len(tokens)]
        caches = tuple(
            Cache(
                length=cache.length + n,
                conv={layer: windows[n - 1] for layer, windows in conv.items()},
                state={layer: states[n - 1] for layer, states in state.items()},
                latent={layer: rows[: cache.length + n] for layer, rows in latent.items()},
            )
            for n in counts
        )
        return hidden, caches

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores [n, vocab] of hidden rows [n, D]."""
        return hidden @ self._weights["lm_head.weight"].T

    def _w(self, layer: int, name: str) -> Tensor:
        return self._weights[f"model.layers.{layer}.{name}"]

    def _depth_softmax(self, site: str, blocks: list[Tensor], prefix: Tensor) -> Tensor:
        """Mix of the saved rows and the prefix, weighted per token by a softmax over depth."""
        sources = torch.stack([*blocks, prefix])
        key = self._weights[f"{site}_norm.weight"] * self._weights[f"{site}_proj.weight"][0]
        score = (sources * key).sum(-1) * torch.rsqrt(sources.square().mean(-1) + self.g.eps)
        return (torch.softmax(score, 0).unsqueeze(-1) * sources).sum(0)

    def _mix(self, layer: int, site: str, norm: str, blocks: list[Tensor], prefix: Tensor) -> Tensor:
        mixed = self._depth_softmax(f"model.layers.{layer}.{site}", blocks, prefix)
        return rms_norm(mixed, self._w(layer, f"{norm}.weight"), self.g.eps)

    def _kda(self, layer: int, x: Tensor, conv: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Output [n, D], and conv window and state after each token."""
        g, w = self.g, partial(self._w, layer)
        heads = (g.heads, g.kda_head_dim)
        q_k_v = torch.cat([x @ w(f"self_attn.{name}_proj.weight").T for name in ("q", "k", "v")], -1)
        taps = torch.cat([w(f"self_attn.{name}_conv1d.weight")[:, 0] for name in ("q", "k", "v")])
        forget = (x @ w("self_attn.f_a_proj.weight").T) @ w("self_attn.f_b_proj.weight").T
        rate = w("self_attn.A_log").exp().view(-1, 1)
        log_decay = g.gate_lower_bound * torch.sigmoid(rate * (forget + w("self_attn.dt_bias")).view(-1, *heads))
        beta = torch.sigmoid(x @ w("self_attn.b_proj.weight").T)
        gate = torch.sigmoid(x @ w("self_attn.g_proj.weight").T)

        out, windows, states = [], [], []
        for i in range(x.shape[0]):
            window = torch.cat([conv, q_k_v[i : i + 1]])
            conv = window[1:]
            q, k, v = silu((window.T * taps).sum(-1)).view(3, *heads)
            q = q / (q.square().sum(-1, keepdim=True) + g.l2_eps).sqrt() / g.kda_head_dim**0.5
            k = k / (k.square().sum(-1, keepdim=True) + g.l2_eps).sqrt()

            state = state * log_decay[i].exp().unsqueeze(1)
            error = v - (state @ k.unsqueeze(-1)).squeeze(-1)
            state = state + (beta[i].unsqueeze(-1) * error).unsqueeze(-1) * k.unsqueeze(1)
            o = (state @ q.unsqueeze(-1)).squeeze(-1)

            out.append(rms_norm(o, w("self_attn.o_norm.weight"), g.eps).flatten() * gate[i])
            windows.append(conv)
            states.append(state)
        return torch.stack(out) @ w("self_attn.o_proj.weight").T, windows, states

    def _mla(self, layer: int, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Output [n, D], and the latent rows of the whole sequence."""
        g, w = self.g, partial(self._w, layer)
        new, seen = x.shape[0], latent.shape[0]
        c = rms_norm(x @ w("self_attn.q_a_proj.weight").T, w("self_attn.q_a_layernorm.weight"), g.eps)
        q = (c @ w("self_attn.q_b_proj.weight").T).view(new, g.heads, g.nope + g.pe)
        kv, pe = (x @ w("self_attn.kv_a_proj_with_mqa.weight").T).tensor_split([g.kv_lora], -1)
        kv = rms_norm(kv, w("self_attn.kv_a_layernorm.weight"), g.eps)
        latent = torch.cat([latent, torch.cat([kv, pe], -1)])

        up = w("self_attn.kv_b_proj.weight").view(g.heads, g.nope + g.v_dim, g.kv_lora)
        k_v = torch.einsum("xl,hnl->xhn", latent[:, : g.kv_lora], up)
        k_nope, v = k_v.tensor_split([g.nope], -1)
        k = torch.cat([k_nope, latent[:, None, g.kv_lora :].expand(-1, g.heads, -1)], -1)

        score = torch.einsum("nhd,xhd->hnx", q, k) * (g.nope + g.pe) ** -0.5
        future = torch.arange(seen + new) > seen + torch.arange(new).unsqueeze(1)
        p = torch.softmax(score.masked_fill(future, -torch.inf), -1)
        attended = torch.einsum("hnx,xhv->nhv", p, v).flatten(1)
        gate = torch.sigmoid(x @ w("self_attn.g_proj.weight").T)
        return (attended * gate) @ w("self_attn.o_proj.weight").T, latent

    def _mlp(self, layer: int, at: str, x: Tensor, names: tuple[str, str, str]) -> Tensor:
        """SiTU MLP with weights named gate, up, down."""
        gate, up, down = (self._w(layer, f"{at}.{name}.weight") for name in names)
        return situ(x @ gate.T, x @ up.T, self.g.situ_beta, self.g.situ_linear_beta) @ down.T

    def _dense(self, layer: int, x: Tensor) -> Tensor:
        return self._mlp(layer, "mlp", x, ("gate_proj", "up_proj", "down_proj"))

    def _moe(self, layer: int, x: Tensor) -> Tensor:
        g, w, at = self.g, partial(self._w, layer), "block_sparse_moe"
        score = torch.sigmoid(x @ w(f"{at}.gate.weight").T)
        preference = score + w(f"{at}.gate.e_score_correction_bias")
        chosen = preference.sort(descending=True, stable=True).indices[:, : g.top_k]
        z = x @ w(f"{at}.routed_expert_down_proj.weight").T

        routed = torch.zeros_like(z)
        for i, experts in enumerate(chosen.tolist()):
            total = score[i, experts].sum() + 1e-20
            for e in experts:
                y = self._mlp(layer, f"{at}.experts.{e}", z[i], ("w1", "w3", "w2"))
                routed[i] += g.routed_scale * score[i, e] / total * y
        normed = rms_norm(routed, w(f"{at}.routed_expert_norm.weight"), g.eps)
        shared = self._mlp(layer, f"{at}.shared_experts", x, ("gate_proj", "up_proj", "down_proj"))
        return normed @ w(f"{at}.routed_expert_up_proj.weight").T + shared


def _as_values(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Checkpoint tensors in `dtype`; MXFP4 pairs become one `.weight`."""
    values: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            scale = tensors[name.removesuffix("_packed") + "_scale"]
            values[name.removesuffix("_packed")] = dequantise_mxfp4(tensor, scale, dtype)
        elif tensor.is_floating_point():
            values[name] = tensor.to(dtype)
    return values


def decode(
    weights: ModelWeights,
    state: DecodeState,
    batch: Batch,
    dtype: torch.dtype = torch.float64,
    rounding: bool = True,
) -> tuple[Tensor, DecodeState]:
    """One step of the decode path with the reference maths of every op.

    Args:
        weights: the model.
        state: pools before the step, of any type; not changed.
        batch: pure, uniform decode or verify batch.
        dtype: type of the computation.
        rounding: apply the roundings that the ops define.

    Returns:
        hidden [N, D] and the pools after the step, both in `dtype`.

    Raises:
        BatchError: the batch is not a pure, uniform decode batch.
    """
    if batch.uniform_tokens is None or not batch.pure_decode:
        raise BatchError(
            f"reference decode: query lengths {sorted(set(batch.query_lens_list))} over {batch.slots.shape[1]} slot "
            "columns; expected a pure decode batch of one query length; next: use ReferenceModel for other batches"
        )
    g = weights.geometry
    pools = state.tensors()
    buffers = {
        "prefix": weights.embed[batch.token_ids],
        "blocks": torch.zeros(batch.rows, g.attn_res_blocks, g.hidden, dtype=dtype),
        **batch_fields(batch),
        **pools,
    }

    def op(site: Site) -> OpFunction:
        return partial(reference(site.op), dtype=dtype, rounding=rounding)

    hidden = execute(decode_program(g, batch.uniform_tokens, weights.expert_format), op, weights.constants, buffers)
    return hidden, DecodeState.of(g, {name: buffers[name].to(dtype) for name in pools})
