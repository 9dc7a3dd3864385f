"""Weights: seeded reproducibly and sanely scaled, saved and loaded without loss, refused when they do not fit."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from model_engine import NANO, PICO, Engine, Work, tokens_of, weights_of

from k3_backend.geometry import ExpertFormat, Geometry
from k3_backend.model.checkpoint import CheckpointError
from k3_backend.model.program import batch_fields, decode_program, execute
from k3_backend.model.weights import ModelWeights
from k3_backend.ops.mxfp import dequantise_mxfp4
from k3_backend.ops.registry import reference

SMALL = replace(PICO, name="k3-pico-small", layers=5, mla_layers=(3, 4), experts=4, top_k=2, vocab=264)


def _same(a: ModelWeights, b: ModelWeights) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return set(ours) == set(theirs) and all(
        torch.equal(tensor, theirs[name]) and tensor.dtype == theirs[name].dtype for name, tensor in ours.items()
    )


@pytest.mark.parametrize("expert_format", ["bf16", "mxfp4"])
def test_saved_weights_load_bit_for_bit_with_their_geometry(tmp_path: Path, expert_format: ExpertFormat) -> None:
    """Packing and unpacking must be inverse for every section, or a saved model is another model."""
    weights = weights_of(SMALL, 5, expert_format)
    weights.save(tmp_path / "model.safetensors")
    loaded = ModelWeights.load(tmp_path / "model.safetensors")
    assert loaded.geometry == SMALL
    assert loaded.expert_format == expert_format
    assert _same(weights, loaded)
    for layer, sites in weights.sites.items():
        for site, constants in sites.items():
            for name, tensor in constants.items():
                assert torch.equal(loaded.constants(layer, site)[name], tensor)


def test_seeding_is_reproducible_and_depends_on_the_seed() -> None:
    """Two processes of one run rebuild the same model from its seed."""
    assert _same(ModelWeights.seeded(SMALL, 5), weights_of(SMALL, 5))
    assert not _same(weights_of(SMALL, 6), weights_of(SMALL, 5))


def test_mxfp4_model_is_the_quantised_bf16_model() -> None:
    """Arms that differ in format must differ by quantisation only."""
    plain, packed = weights_of(SMALL, 5), weights_of(SMALL, 5, "mxfp4")
    ours, theirs = plain.constants(2, "moe_experts"), packed.constants(2, "moe_experts")
    values = dequantise_mxfp4(theirs["w13_packed"], theirs["w13_scale"], torch.bfloat16)
    assert (values - ours["w13"]).norm() / ours["w13"].norm() < 0.15
    assert torch.equal(plain.constants(2, "moe_front")["w_gate"], packed.constants(2, "moe_front")["w_gate"])
    assert "w13" not in theirs


def test_seeded_values_are_where_bugs_show() -> None:
    """Zeros and ones would hide a forgotten bias, norm or decay."""
    weights = weights_of(PICO)
    moe, kda = weights.constants(1, "moe_front"), weights.constants(1, "kda_decode")
    assert 0.05 < moe["bias"].std() < 0.2
    assert kda["a_log"].min() >= 0.0
    assert kda["a_log"].max() <= torch.log(torch.tensor(16.0))
    assert 0.8 < kda["dt_bias"].std() < 1.2
    site = weights.constants(1, "attn_res.attention")
    assert 0.07 < site["out_norm"].float().std() < 0.13
    assert 0.03 < site["res_proj"].float().std() < 0.07
    assert not weights.constants(1, "input_projection")["w"][806:].any()


@pytest.mark.parametrize("g", [PICO, NANO], ids=lambda g: g.name)
def test_activations_keep_their_range_through_all_layers(g: Geometry) -> None:
    """Exploding or vanishing activations would make every later tolerance meaningless."""
    bounds = {"prefix": (0.1, 3.0), "delta": (0.1, 1.5), "x": (0.8, 1.25), "hidden": (0.8, 1.25)}
    bounds |= {"kda_out": (0.2, 1.0), "mla_out": (0.1, 1.0), "kda_proj": (0.7, 1.4), "mla_proj": (0.7, 1.4)}
    weights, engine = weights_of(g), Engine(g, columns=24)
    engine.add("a", zeroed=True)
    batch = engine.batch([Work("a", tokens_of(g, 24, 0), True)])
    buffers = {
        "prefix": weights.embed[batch.token_ids],
        "blocks": torch.zeros(24, g.attn_res_blocks, g.hidden),
        **batch_fields(batch),
        **engine.state.tensors(),
    }
    checked = set()

    def op(site):  # type: ignore[no-untyped-def]
        def run(t, a):  # type: ignore[no-untyped-def]
            results = partial(reference(site.op), dtype=torch.float32)(t, a)
            for name, value in results.items():
                if (buffer := site.bindings[name]) in bounds:
                    rms = float(value.square().mean().sqrt())
                    assert bounds[buffer][0] < rms < bounds[buffer][1], f"{site.key}.{name}: {rms}"
                    checked.add(buffer)
            return results

        return run

    execute(decode_program(g, 24), op, weights.constants, buffers)
    assert checked == set(bounds)


@pytest.mark.parametrize("shape", [(6,), (1, 1, 6, 1)])
def test_a_log_is_accepted_per_head(shape: tuple[int, ...]) -> None:
    """Both published layouts hold one value per head."""
    tensors = weights_of(SMALL, 5).state_dict()
    name = "model.layers.0.self_attn.A_log"
    expected = tensors[name].reshape(-1)
    loaded = ModelWeights.from_state_dict(SMALL, {**tensors, name: expected.reshape(shape)}, "bf16")
    assert torch.equal(loaded.constants(0, "kda_decode")["a_log"], expected)


def test_a_log_of_head_dim_length_needs_an_explicit_reading(caplog: pytest.LogCaptureFixture) -> None:
    """Narrowing 128 values to 96 heads silently is exactly the open question of the checkpoint."""
    tensors = weights_of(SMALL, 5).state_dict()
    for layer in SMALL.kda_layers:
        tensors[f"model.layers.{layer}.self_attn.A_log"] = torch.arange(32.0)
    with pytest.raises(CheckpointError, match=r"A_log: shape \[32\]; expected \[6\] or \[1, 1, 6, 1\]"):
        ModelWeights.from_state_dict(SMALL, tensors, "bf16")
    with caplog.at_level(logging.WARNING):
        loaded = ModelWeights.from_state_dict(SMALL, tensors, "bf16", a_log_reading="first_heads")
    assert loaded.constants(0, "kda_decode")["a_log"].tolist() == [0, 1, 2, 3, 4, 5]
    assert "32 values read as head_dim; the first 6" in caplog.text


@pytest.mark.parametrize("reading", ["per_head", "first_heads"])
@pytest.mark.parametrize("shape", [(5,), (7,), (1, 6), (6, 32)])
def test_a_log_of_any_other_shape_is_refused(shape: tuple[int, ...], reading: str) -> None:
    """No reading may slice or broadcast what it does not know."""
    tensors = {**weights_of(SMALL, 5).state_dict(), "model.layers.1.self_attn.A_log": torch.zeros(shape)}
    if reading == "first_heads":
        tensors["model.layers.0.self_attn.A_log"] = torch.zeros(32)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.A_log"):
        ModelWeights.from_state_dict(SMALL, tensors, "bf16", a_log_reading=reading)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.0.self_attn.q_proj.weight", lambda t: t[:-1], "q_proj.weight"),
        ("model.layers.3.self_attn.kv_b_proj.weight", lambda t: t.float(), "kv_b_proj.weight"),
        ("lm_head.weight", lambda t: t[:, :-1], "lm_head.weight"),
        ("model.norm.weight", None, "model.norm.weight: missing"),
        ("model.layers.1.block_sparse_moe.experts.3.w2.weight", None, "w2.weight: missing"),
    ],
)
def test_misfitting_checkpoints_are_refused_by_tensor_name(name, change, message) -> None:  # type: ignore[no-untyped-def]
    """A truncated or renamed tensor must not be padded, cast or skipped."""
    tensors = weights_of(SMALL, 5).state_dict()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    with pytest.raises(CheckpointError, match=message):
        ModelWeights.from_state_dict(SMALL, tensors, "bf16")


def test_unexpected_tensors_and_foreign_files_are_refused(tmp_path: Path) -> None:
    """A tensor that nobody reads means that the model is not the one described."""
    from safetensors.torch import save_file

    tensors = weights_of(SMALL, 5).state_dict()
    with pytest.raises(CheckpointError, match="rotary"):
        ModelWeights.from_state_dict(SMALL, {**tensors, "model.layers.3.rotary": torch.zeros(1)}, "bf16")
    with pytest.raises(CheckpointError, match="no such tensor"):
        ModelWeights.from_state_dict(replace(SMALL, layers=4, mla_layers=(3,)), tensors, "bf16")

    path = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(1)}, str(path))
    with pytest.raises(CheckpointError, match="metadata"):
        ModelWeights.load(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="safetensors"):
        ModelWeights.load(path)
    with pytest.raises(OSError, match="absent"):
        ModelWeights.load(tmp_path / "absent.safetensors")


def test_unknown_sites_are_refused_by_name() -> None:
    """A misspelt site must not get another site's weights; the attention core has none at all."""
    weights = weights_of(SMALL, 5)
    assert weights.constants(3, "mla_decode") == {}
    with pytest.raises(KeyError, match="'mla_query'"):
        weights.constants(0, "mla_query")
