"""The standard path of every op: close to its reference, and careful with memory that it does not own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import NANO, PICO, relative_error
from op_cases import bits, copied, step_of

from k3_backend.geometry import ExpertFormat, Geometry
from k3_backend.model.batch import cache_rows
from k3_backend.ops import OPS
from k3_backend.ops.mla_decode import standard as mla
from k3_backend.ops.moe_experts import standard as moe
from k3_backend.ops.registry import reference, standard

# Relative L2 error against the fp64 reference. About twice what was measured over 20 seeds; the larger entries are
# where stock rounds and the reference does not: KDA's conv output and o, attention's probabilities, expert rows.
TOLERANCE = {
    ("kda_decode", "out"): 8e-3,
    ("kda_decode", "state"): 2e-3,
    ("mla_decode", "out"): 6e-3,
    ("moe_experts", "out"): 9e-3,
}
DEFAULT_TOLERANCE = 1.5e-3
Lookup = Callable[[str], Callable[..., dict[str, torch.Tensor]]]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("g", "requests", "tokens", "null", "expert_format"),
    [
        (PICO, 1, 1, (), "bf16"),
        (PICO, 3, 1, (), "mxfp4"),
        (PICO, 20, 1, (0, 7), "bf16"),
        (PICO, 5, 3, (2,), "mxfp4"),
        (NANO, 1, 1, (), "bf16"),
        (NANO, 1, 4, (), "bf16"),
        (NANO, 18, 1, (), "bf16"),
        (NANO, 3, 2, (1,), "mxfp4"),
    ],
    ids=lambda value: value.name if isinstance(value, Geometry) else str(value),
)
def test_standard_agrees_with_the_reference(
    op: str, g: Geometry, requests: int, tokens: int, null: tuple[int, ...], expert_format: ExpertFormat
) -> None:
    """Any wrong formula, layout or index of the baseline arm."""
    step = step_of(g, requests, tokens, null=null, expert_format=expert_format, seed=requests + tokens)
    for site in {site.name: site for site in step.sites() if site.op == op}.values():
        arguments = copied(step.arguments(site))
        expected = reference(op)(arguments, site.attrs)
        got = standard(op)(arguments, site.attrs)
        for name, value in expected.items():
            result = got[name] if name in got else arguments[name]
            assert result is not None
            if name == "topk_ids":
                assert torch.equal(result, value)
                continue
            known = torch.isfinite(value)
            assert torch.equal(torch.isfinite(result), known), f"{site.key}.{name}"
            error = relative_error(result[known], value[known])
            assert error <= TOLERANCE.get((op, name), DEFAULT_TOLERANCE), f"{site.key}.{name}: {error}"


@pytest.mark.parametrize("op", ["kda_decode", "mla_query"])
@pytest.mark.parametrize(("requests", "tokens", "null"), [(4, 1, (1, 3)), (3, 3, (0,)), (2, 1, (0, 1))])
def test_nothing_outside_owned_slots_and_rows_changes(
    op: str, requests: int, tokens: int, null: tuple[int, ...]
) -> None:
    """A padded request that writes its null slot corrupts what the next reader finds there."""
    step = step_of(PICO, requests, tokens, null=null)
    site, arguments = step.first(op)
    before = copied(arguments)
    standard(op)(arguments, site.attrs)
    if op == "mla_query":
        mapping = arguments["slot_mapping"]
        owned = mapping[mapping >= 0]
        pools = {"kv_cache": PICO.mla_row}
    else:
        slots = arguments["slots"]
        owned = slots[slots > 0].long()
        pools = {"conv_state": (tokens + 2) * 3 * PICO.kda_width, "state": PICO.heads * PICO.kda_head_dim**2}
    for name, width in pools.items():
        old, new = (bits(t[name]).view(-1, width) for t in (before, arguments))
        untouched = torch.ones(old.shape[0], dtype=torch.bool)
        untouched[owned] = False
        assert torch.equal(old[untouched], new[untouched])
        if op == "mla_query" and owned.numel():
            assert not torch.equal(old[owned], new[owned])


def test_kda_writes_the_conv_window_of_slot_zero_only_and_every_live_state_slot() -> None:
    """The conv window lives in column 0; a null id in a later column skips that state write only."""
    step = step_of(PICO, 2, 3)
    site, arguments = step.first("kda_decode")
    arguments["slots"][1, 1] = 0
    arguments["accepted"].fill_(1)
    before = copied(arguments)
    expected = reference("kda_decode")(before, site.attrs)
    standard("kda_decode")(arguments, site.attrs)
    for name in ("conv_state", "state"):
        known = torch.isfinite(expected[name])
        assert torch.equal(torch.isfinite(arguments[name]), known)
        assert relative_error(arguments[name][known], expected[name][known]) < 2e-3
    later = arguments["slots"][:, 1:].flatten().long()
    assert torch.equal(bits(arguments["conv_state"])[later], bits(before["conv_state"])[later])


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_kda_reads_the_accepted_column_even_when_fewer_tokens_follow(accepted: int) -> None:
    """After a verify step of 4 a request may go on with 1 token: its state still lies in an old column."""
    step = step_of(PICO, 1, 4)
    site, arguments = step.first("kda_decode")
    arguments["accepted"].fill_(accepted)
    one_token = {**copied(arguments), "proj": arguments["proj"][:1]}
    four_tokens = standard("kda_decode")(arguments, site.attrs)["out"]
    out = standard("kda_decode")(one_token, site.attrs)["out"]
    slot = int(arguments["slots"][0, 0])
    assert out.shape[0] == 1
    assert relative_error(out, four_tokens[:1]) < 4e-3
    assert torch.equal(one_token["state"][slot], arguments["state"][slot])
    assert torch.equal(one_token["conv_state"][slot, :3], arguments["conv_state"][slot, :3])


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("gathered_rows", [1, 50, 1 << 20])
def test_mla_decode_does_not_depend_on_how_many_rows_are_gathered_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tokens: int, gathered_rows: int
) -> None:
    """The last, shorter group of requests is where slices go wrong."""
    step = step_of(PICO, 5, tokens, null=(3,))
    site, arguments = step.first("mla_decode")
    monkeypatch.setattr(mla, "GATHERED_ROWS", gathered_rows)
    got, expected = (run("mla_decode")(arguments, site.attrs) for run in (standard, reference))
    assert relative_error(got["out"], expected["out"]) < 6e-3
    assert torch.allclose(got["lse"].double(), expected["lse"], atol=1e-3)


def test_mla_decode_survives_garbage_in_unused_block_table_entries() -> None:
    """Entries behind a request's last page are whatever the engine left there."""
    step = step_of(PICO, 4, 1, null=(2,))
    site, arguments = step.first("mla_decode")
    expected = standard("mla_decode")(arguments, site.attrs)
    table = arguments["block_table"].clone()
    for b, length in enumerate(arguments["seq_lens"].tolist()):
        table[b, -(-length // 8) :] = -1
    got = standard("mla_decode")({**arguments, "block_table": table}, site.attrs)
    assert torch.equal(got["out"], expected["out"])
    assert torch.equal(got["lse"], expected["lse"])


@settings(max_examples=25, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**16),
    shards=st.integers(1, 4),
    interleave=st.integers(1, 5),
    tokens=st.integers(1, 3),
    run=st.sampled_from([reference, standard]),
)
def test_shards_merged_by_lse_equal_the_unsharded_attention(
    seed: int, shards: int, interleave: int, tokens: int, run: Lookup
) -> None:
    """Wrong ownership, local positions, global causality or merge weights of decode context parallelism."""
    step = step_of(PICO, 3, tokens, seed=seed, null=(1,))
    core, arguments = step.first("mla_decode")
    value, value_arguments = step.first("mla_value")
    whole = run("mla_decode")(arguments, core.attrs)
    cache = arguments["kv_cache"].view(-1, PICO.mla_row)

    partial, lse = [], []
    for rank in range(shards):
        shard = {"rank": rank, "size": shards, "interleave": interleave}
        local = torch.full_like(cache, torch.nan)
        for b, length in enumerate(arguments["seq_lens"].tolist()):
            pages = arguments["block_table"][b].tolist()
            for row, target in zip(
                cache_rows(pages, 0, length, 8), cache_rows(pages, 0, length, 8, **shard), strict=True
            ):
                if target >= 0:
                    local[target] = cache[row]
        attrs = {**core.attrs, "dcp_rank": rank, "dcp_size": shards, "interleave": interleave}
        part = run("mla_decode")({**arguments, "kv_cache": local.view_as(arguments["kv_cache"])}, attrs)
        partial.append(part["out"])
        lse.append(part["lse"])

    def value_of(rows: torch.Tensor, lse_rows: torch.Tensor) -> torch.Tensor:
        return run("mla_value")({**value_arguments, "partial": rows, "lse": lse_rows}, value.attrs)["out"]

    got = value_of(torch.stack(partial), torch.stack(lse))
    expected = value_of(whole["out"].unsqueeze(0), whole["lse"].unsqueeze(0))
    null_rows = slice(tokens, 2 * tokens)
    assert not got[null_rows].any()
    assert relative_error(got, expected) < 8e-3


@pytest.mark.parametrize("run", [reference, standard])
def test_mla_value_ignores_sources_without_a_finite_lse(run: Lookup) -> None:
    """An empty shard, an overflow or a NaN must not leak, and a row without any source is zero despite a NaN gate."""
    step = step_of(PICO, 2, 1)
    site, arguments = step.first("mla_value")
    good = arguments["partial"]
    lse = arguments["lse"]
    bad = torch.full_like(good, torch.nan)
    proj = arguments["proj"].clone()
    proj[1] = torch.nan
    for wrong in (-math.inf, math.inf, math.nan):
        with_bad = {
            **arguments,
            "partial": torch.cat([bad, good]),
            "lse": torch.cat([torch.full_like(lse, wrong), lse]),
        }
        assert torch.equal(
            run("mla_value")(with_bad, site.attrs)["out"], run("mla_value")(arguments, site.attrs)["out"]
        )
        nothing = {**arguments, "partial": bad, "lse": torch.full_like(lse, wrong), "proj": proj}
        assert not run("mla_value")(nothing, site.attrs)["out"].any()


@pytest.mark.parametrize("run", [reference, standard])
def test_router_breaks_ties_to_the_lower_id_puts_nan_last_and_keeps_the_bias_out_of_the_weights(run: Lookup) -> None:
    """Two kernels that break ties differently read different experts."""
    site, arguments = step_of(PICO, 2, 1).first("moe_front")
    arguments = {**arguments, "w_gate": torch.zeros_like(arguments["w_gate"])}
    bias = torch.zeros(16)
    bias[9] = 1.0
    bias[0] = math.nan
    attrs = {**site.attrs, "scale": 2.5}
    result = run("moe_front")({**arguments, "bias": bias}, attrs)
    assert result["topk_ids"].tolist() == [[9, 1, 2, 3]] * 2
    assert torch.allclose(result["topk_weights"].double(), torch.full((2, 4), 2.5 / 4, dtype=torch.float64))
    all_nan = run("moe_front")({**arguments, "bias": torch.full((16,), math.nan)}, attrs)
    assert all_nan["topk_ids"].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("expert_format", ["bf16", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_every_form_of_the_experts_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, rows: int, expert_format: ExpertFormat
) -> None:
    """The form is picked by size, so a form that is wrong would hide at the other sizes."""
    site, arguments = step_of(PICO, rows, 1, expert_format=expert_format).first("moe_experts")
    expected = reference("moe_experts")(arguments, site.attrs)["out"]
    gathered, everything, grouped = (1 << 30, 64), (1 << 30, 0), (0, 0)
    for small, few in (gathered, everything, grouped):
        monkeypatch.setattr(moe, "SMALL_EXPERTS", small)
        monkeypatch.setattr(moe, "GATHER_ROWS", few)
        assert relative_error(standard("moe_experts")(arguments, site.attrs)["out"], expected) < 9e-3


@pytest.mark.parametrize("run", [reference, standard])
def test_oproj_sums_rounded_partials_of_ranks_in_fp32(run: Lookup) -> None:
    """Splitting the columns over two ranks changes only roundings."""
    site, arguments = step_of(PICO, 3, 1).first("oproj_allreduce")
    assert site.attrs == {"restart": 1}
    halves = {
        "x": torch.stack(arguments["x"][0].chunk(2, -1)).contiguous(),
        "w": torch.stack(arguments["w"][0].chunk(2, -1)).contiguous(),
    }
    for restart in (0, 1):
        one, two = (copied({**arguments, **change}) for change in ({}, halves))
        results = [run("oproj_allreduce")(t, {"restart": restart}).get("prefix", t["prefix"]) for t in (one, two)]
        assert relative_error(results[1], results[0]) < 6e-3


@pytest.mark.parametrize("linear_beta", [0.0, -1.0])
def test_situ_without_a_linear_beta_leaves_up_unbounded(linear_beta: float) -> None:
    """The bound must come from the attribute."""
    site, arguments = step_of(PICO, 3, 1).first("dense_mlp")
    arguments = {**arguments, "x": arguments["x"] * 30}
    attrs = {**site.attrs, "linear_beta": linear_beta}
    got, expected = (run("dense_mlp")(arguments, attrs)["out"] for run in (standard, reference))
    assert relative_error(got, expected) < DEFAULT_TOLERANCE
    assert relative_error(got, reference("dense_mlp")(arguments, site.attrs)["out"]) > 0.1


@pytest.mark.parametrize("block", [2, 4])
def test_attn_res_agrees_for_other_block_sizes(block: int) -> None:
    """Other block sizes exercise more saved rows than the reduced models do."""
    g = replace(PICO, name=f"k3-pico-block{block}", attn_res_block=block, layers=10, mla_layers=(3, 5, 7, 9))
    step = step_of(g, 4, 1)
    for site in step.sites():
        if site.op != "attn_res":
            continue
        arguments = copied(step.arguments(site))
        expected = reference("attn_res")(arguments, site.attrs)
        got = standard("attn_res")(arguments, site.attrs)
        assert relative_error(got["out"], expected["out"]) < DEFAULT_TOLERANCE
        assert torch.equal(arguments["blocks"].double(), expected["blocks"])
        assert torch.equal(arguments["prefix"].double(), expected["prefix"])


def test_unknown_ops_are_refused() -> None:
    """A misspelt op must not resolve to a module of that name."""
    for lookup in (reference, standard):
        with pytest.raises(KeyError, match="kda_decode"):
            lookup("interface")
