"""The references: against published implementations where there is one, and against what their definitions imply."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import NANO, PICO, weights_of
from op_cases import Arguments, bits, copied, step_of
from torch.nn.functional import conv1d, rms_norm, scaled_dot_product_attention, silu

from k3_backend.ops import OPS
from k3_backend.ops.maths import round_bf16
from k3_backend.ops.mxfp import dequantise_mxfp4
from k3_backend.ops.registry import reference


def test_round_bf16_rounds_once() -> None:
    """A cast of fp64 through fp32 rounds twice and breaks ties that are none."""
    just_above_tie = torch.tensor([1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40], dtype=torch.float64)
    assert round_bf16(just_above_tie).tolist() == [1 + 2**-7, 1 + 2**-7]
    assert just_above_tie.bfloat16().tolist() == [1.0, 1 + 2**-6]


@settings(max_examples=100, deadline=None, print_blob=True)
@given(st.floats(width=32, allow_nan=False))
def test_round_bf16_equals_the_cast_of_fp32_values(value: float) -> None:
    """Subnormals, overflow and signs round as the hardware does."""
    x = torch.tensor([value], dtype=torch.float64)
    assert torch.equal(bits(round_bf16(x)), bits(x.float().bfloat16().double()))


def test_round_bf16_keeps_nan_and_infinity() -> None:
    """Poison must stay visible."""
    x = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38], dtype=torch.float64)
    assert torch.isnan(round_bf16(x)[0])
    assert round_bf16(x)[1:].tolist() == [math.inf, -math.inf, math.inf]


@pytest.mark.parametrize("op", OPS)
def test_references_are_pure_and_return_every_output_and_state(op: str) -> None:
    """A reference that wrote its inputs would agree with a kernel that reads them afterwards."""
    step = step_of(PICO, 3, 2, null=(1,))
    site, arguments = step.first(op)
    before = copied(arguments)
    for dtype in (torch.float64, torch.float32):
        result = reference(op)(arguments, site.attrs, dtype)
        for name, tensor in before.items():
            assert tensor is None or torch.equal(bits(tensor), bits(arguments[name])), name
        states = {t.name for t in OPS[op].tensors if t.role == "state" and arguments[t.name] is not None}
        assert set(result) == states | {t.name for t in OPS[op].tensors if t.role == "output"}
        assert all(value.dtype in (dtype, torch.int32) for value in result.values())


@pytest.mark.parametrize("op", OPS)
def test_rounding_changes_results_by_bf16_steps_only(op: str) -> None:
    """With and without the defined roundings a reference computes the same thing."""
    step = step_of(PICO, 2, 1)
    site, arguments = step.first(op)
    rounded, exact = (reference(op)(arguments, site.attrs, rounding=rounding) for rounding in (True, False))
    for name, value in exact.items():
        if name == "topk_ids":
            continue
        known = torch.isfinite(value)
        difference = (rounded[name][known] - value[known]).norm() / value[known].norm()
        assert difference < 1e-2, name
        if OPS[op].tensor(name).dtype == "bf16":
            assert torch.equal(rounded[name][known], rounded[name][known].bfloat16().double())


@pytest.mark.parametrize("tokens", [1, 3])
def test_mla_core_equals_scaled_dot_product_attention(tokens: int) -> None:
    """Published attention in fp64: masks, scale, page lookup and value width."""
    step = step_of(NANO, 3, tokens)
    site, t = step.first("mla_decode")
    result = reference("mla_decode")(t, site.attrs, rounding=False)
    for b, length in enumerate(t["seq_lens"].tolist()):
        rows = t["kv_cache"][t["block_table"][b].long()].flatten(0, 1)[:length].double()
        query = t["query"][b * tokens : (b + 1) * tokens].double().transpose(0, 1)
        causal = torch.arange(length) <= length - tokens + torch.arange(tokens).unsqueeze(1)
        expected = scaled_dot_product_attention(
            query, rows.expand(NANO.heads, -1, -1), rows[:, : NANO.kv_lora].expand(NANO.heads, -1, -1),
            attn_mask=causal, scale=192**-0.5,
        )  # fmt: skip
        got = result["out"][b * tokens : (b + 1) * tokens]
        assert torch.allclose(got, expected.transpose(0, 1), rtol=1e-12, atol=1e-13)


def test_mla_lse_is_the_base_2_log_of_the_score_sum() -> None:
    """Shards merge in the log2 domain; a natural logarithm would weigh them wrongly."""
    step = step_of(PICO, 2, 1)
    site, t = step.first("mla_decode")
    lse = reference("mla_decode")(t, site.attrs)["lse"]
    rows = t["kv_cache"][t["block_table"][0].long()].flatten(0, 1)[: int(t["seq_lens"][0])].double()
    score = (t["query"][0].double() @ rows.T) * (PICO.nope + PICO.pe) ** -0.5
    assert torch.allclose(torch.exp2(lse[0]), score.exp().sum(-1), rtol=1e-12)


def test_kda_conv_equals_a_published_depthwise_convolution() -> None:
    """Tap order: the last column of the weights belongs to the current token."""
    step = step_of(PICO, 1, 4)
    site, t = step.first("kda_decode")
    t["accepted"].fill_(2)
    width = 3 * PICO.kda_width
    slot = int(t["slots"][0, 0])
    x = torch.cat([t["conv_state"][slot, 1:4], t["proj"][:, :width]]).double()
    y = silu(conv1d(x.T.unsqueeze(0), t["conv_w"].double().unsqueeze(1), groups=width))[0].T
    k = y[:, PICO.kda_width : 2 * PICO.kda_width].view(4, 6, 32)
    v = y[:, 2 * PICO.kda_width :].view(4, 6, 32)
    # With full write strength and no decay from an empty state the first token stores v k^T.
    t["state"].zero_()
    t["proj"][:, 4 * PICO.kda_width + PICO.kda_gate_rank :] = 1e4
    new = reference("kda_decode")(t, {**site.attrs, "l2_eps": 0.0}, rounding=False)
    stored = new["state"][int(t["slots"][0, 0])]
    expected = v[0].unsqueeze(-1) * (k[0] / k[0].norm(dim=-1, keepdim=True)).unsqueeze(-2)
    assert torch.allclose(stored, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(new["conv_state"][slot], x[1:])


def test_kda_decay_is_bounded_and_acts_per_key_column() -> None:
    """A decay applied per value row, or without its bound, changes only long contexts."""
    step = step_of(PICO, 1, 1)
    site, t = step.first("kda_decode")
    slot = int(t["slots"][0, 0])
    t["proj"][:, 4 * PICO.kda_width + PICO.kda_gate_rank :] = -1e4  # write strength 0: the state only decays
    bias = torch.full((6, 32), -1e4)
    bias[2, 5] = 1e4
    result = reference("kda_decode")({**t, "dt_bias": bias, "a_log": torch.zeros(6)}, site.attrs, rounding=False)
    factor = result["state"][slot] / t["state"][slot].double()
    expected = torch.ones(6, 32, 32, dtype=torch.float64)
    expected[2, :, 5] = math.exp(-5)
    assert torch.allclose(factor, expected, rtol=1e-9)


def test_kda_gated_norm_normalises_before_gating() -> None:
    """With the gate open the output is the published rms_norm of o; the gate only scales it."""
    step = step_of(PICO, 1, 1)
    site, t = step.first("kda_decode")
    attrs = {**site.attrs, "eps": 0.0}
    gate_columns = slice(3 * PICO.kda_width, 4 * PICO.kda_width)
    open_proj = t["proj"].clone()
    open_proj[:, gate_columns] = 1e4
    gated, ungated = (
        reference("kda_decode")({**t, "proj": proj}, attrs, rounding=False)["out"].view(6, 32)
        for proj in (t["proj"], open_proj)
    )
    gate = torch.sigmoid(t["proj"][0, gate_columns].double()).view(6, 32)
    o_norm = t["o_norm"].double()
    assert torch.allclose(gated, ungated * gate, rtol=1e-12)
    assert torch.allclose(ungated, rms_norm(ungated / o_norm, (32,), o_norm, 0.0), rtol=1e-10)


@settings(max_examples=20, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**16), tokens=st.integers(2, 5), data=st.data())
def test_kda_verify_of_q_tokens_equals_q_single_steps_with_rejections(
    seed: int, tokens: int, data: st.DataObject
) -> None:
    """After k of T drafts are kept, the next step must go on exactly from token k: state column and conv window."""
    kept = data.draw(st.integers(1, tokens), label="kept")
    step = step_of(PICO, 2, tokens, seed=seed)
    site, t = step.first("kda_decode")
    t["accepted"].fill_(1)
    first = reference("kda_decode")(t, site.attrs)
    follow = torch.randn(t["proj"].shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    second = reference("kda_decode")(
        {**t, **_pools(first), "proj": follow, "accepted": torch.full((2,), kept, dtype=torch.int32)}, site.attrs
    )

    kept_rows = t["proj"].view(2, tokens, -1)[:, :kept]
    rows = torch.cat([kept_rows, follow.view(2, tokens, -1)], 1)
    single: Arguments = {**t, "slots": t["slots"][:, :1], "accepted": torch.ones(2, dtype=torch.int32)}
    outputs = []
    for i in range(rows.shape[1]):
        result = reference("kda_decode")({**single, "proj": rows[:, i]}, site.attrs)
        single.update(_pools(result))
        outputs.append(result["out"])
    by_one = torch.stack(outputs, 1)
    assert torch.equal(first["out"].view(2, tokens, -1)[:, :kept], by_one[:, :kept])
    assert torch.equal(second["out"].view(2, tokens, -1), by_one[:, kept:])
    for b in range(2):
        last, only = int(t["slots"][b, -1]), int(t["slots"][b, 0])
        assert torch.equal(second["state"][last], single["state"][only])


def _pools(result: dict[str, torch.Tensor]) -> Arguments:
    return {name: result[name] for name in ("state", "conv_state")}


def test_mla_query_copies_the_position_part_unrotated_and_skips_negative_rows() -> None:
    """K3 has no rotary embedding: any rotation of the 64 values would be wrong."""
    step = step_of(NANO, 3, 1, null=(1,))
    site, t = step.first("mla_query")
    result = reference("mla_query")(t, site.attrs)
    flat = result["kv_cache"].view(-1, NANO.mla_row)
    at = t["slot_mapping"]
    pe = t["proj"][:, NANO.q_lora + NANO.kv_lora : NANO.q_lora + NANO.mla_row].double()
    assert torch.equal(flat[at[0], NANO.kv_lora :], pe[0])
    assert at[1] == -1
    others = torch.ones(flat.shape[0], dtype=torch.bool)
    others[at[at >= 0]] = False
    before = t["kv_cache"].view(-1, NANO.mla_row).double()
    assert torch.equal(bits(flat)[others], bits(before)[others])


def test_absorbed_query_scores_like_the_unabsorbed_key() -> None:
    """<W_UK^T q, latent> = <q, W_UK latent>: a transposed W_UK keeps shapes when widths agree."""
    step = step_of(PICO, 2, 1)
    site, t = step.first("mla_query")
    query = reference("mla_query")(t, site.attrs, rounding=False)["query"]
    latent = torch.randn(PICO.kv_lora, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    checkpoint = weights_of(PICO).state_dict()
    at = f"model.layers.{site.layer}.self_attn"
    up = checkpoint[f"{at}.kv_b_proj.weight"].double().view(6, 64, 128)[:, :32]
    c = rms_norm(t["proj"][:, :64].double(), (64,), checkpoint[f"{at}.q_a_layernorm.weight"].double(), 1e-5)
    q = (c @ checkpoint[f"{at}.q_b_proj.weight"].double().T).view(2, 6, 48)
    expected = torch.einsum("mhn,hnl,l->mh", q[..., :32], up, latent)
    assert torch.allclose(query[..., :128] @ latent, expected, rtol=1e-10)
    assert torch.allclose(query[..., 128:], q[..., 32:], rtol=1e-12)


def test_attn_res_with_equal_scores_is_a_mean_and_without_sources_the_prefix() -> None:
    """The mix is over raw rows; only the scores see the key norm."""
    step = step_of(PICO, 3, 1)
    site, t = step.first("attn_res")
    t = {**t, "res_proj": torch.zeros_like(t["res_proj"]), "out_norm": torch.ones_like(t["out_norm"])}
    for sources in (0, 1, 2):
        attrs = {**site.attrs, "sources": sources, "write_block": -1, "add_delta": 0}
        rows = torch.cat([t["blocks"][:, :sources], t["prefix"].unsqueeze(1)], 1).double()
        expected = rms_norm(rows.mean(1), (PICO.hidden,), None, 1e-5)
        assert torch.allclose(reference("attn_res")(t, attrs, rounding=False)["out"], expected, rtol=1e-12)


def test_attn_res_excludes_the_row_that_it_has_just_written() -> None:
    """On a block-write layer the prefix stands for the saved row; counting both would double it."""
    step = step_of(PICO, 2, 1)
    site = next(s for s in step.sites() if s.op == "attn_res" and s.attrs["write_block"] == 1)
    t = step.arguments(site)
    assert site.attrs["sources"] == 1
    changed = {**t, "blocks": t["blocks"].clone()}
    changed["blocks"][:, 1] = 100.0
    one, two = (reference("attn_res")(x, site.attrs) for x in (t, changed))
    assert torch.equal(one["out"], two["out"])
    assert torch.equal(one["blocks"][:, 1], one["prefix"])


def test_only_the_final_site_rounds_its_mix() -> None:
    """The inner sites keep the mix in fp32 before the norm."""
    step = step_of(PICO, 4, 1)
    sites = [site for site in step.sites() if site.op == "attn_res"]
    assert [site.attrs["round_mix"] for site in sites] == [0] * (len(sites) - 1) + [1]
    t, attrs = step.arguments(sites[-1]), sites[-1].attrs
    mixed = reference("attn_res")(t, attrs)["out"]
    unrounded = reference("attn_res")(t, {**attrs, "round_mix": 0})["out"]
    assert not torch.equal(mixed, unrounded)


def test_mxfp4_experts_equal_bf16_experts_of_the_dequantised_values() -> None:
    """The packed form is only another storage of the same numbers."""
    site, t = step_of(PICO, 3, 1, expert_format="mxfp4").first("moe_experts")
    dense = {
        **t,
        "w13": dequantise_mxfp4(t["w13_packed"], t["w13_scale"], torch.bfloat16),
        "w2": dequantise_mxfp4(t["w2_packed"], t["w2_scale"], torch.bfloat16),
    }
    packed = reference("moe_experts")(t, site.attrs)["out"]
    assert torch.equal(packed, reference("moe_experts")(dense, {**site.attrs, "expert_format": 0})["out"])


def test_shared_expert_reads_the_hidden_row_and_routed_experts_the_latent() -> None:
    """Feeding either the other's input keeps working when the widths agree."""
    site, t = step_of(PICO, 2, 1).first("moe_experts")
    no_routed = {**t, "topk_weights": torch.zeros_like(t["topk_weights"])}
    base = reference("moe_experts")(no_routed, site.attrs)["out"]
    other_latent = {**no_routed, "latent": torch.randn_like(t["latent"])}
    other_x = {**no_routed, "x": torch.randn_like(t["x"])}
    assert torch.equal(reference("moe_experts")(other_latent, site.attrs)["out"], base)
    assert not torch.equal(reference("moe_experts")(other_x, site.attrs)["out"], base)


def test_missing_arguments_are_named() -> None:
    """An absent optional tensor must not surface as a NoneType error."""
    site, t = step_of(PICO, 1, 1).first("attn_res")
    with pytest.raises(ValueError, match="'delta'"):
        reference("attn_res")({**t, "delta": None}, {**site.attrs, "add_delta": 1})
