"""The project's reference of every op against a second implementation, in numpy, written without sight of it.

Both compute exact maths in fp64. They may differ by the order of summation only: TOLERANCE bounds the difference of
every element, relative to the largest element of its row (last dimension). NaN and infinities are in the same places.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from independent_cases import (
    BF16_CACHE,
    NAN,
    Case,
    Draw,
    attn_res,
    dense_mlp,
    exact_logits,
    input_projection,
    kda_decode,
    mla_decode,
    mla_query,
    mla_value,
    moe_experts,
    moe_front,
    oproj_allreduce,
    shard_positions,
    tensor,
    with_e4m3_cache,
)
from numpy.typing import NDArray
from numpy_maths.kda import conv_silu_sequence, kda_prefill
from numpy_maths.mla import expanded, mla_attention, nearest_e4m3
from numpy_maths.moe import mxfp4_decode
from numpy_reference import NUMPY_OPS, as_numpy
from torch import Tensor

from k3_backend.geometry import GEOMETRIES, Geometry
from k3_backend.ops import OPS
from k3_backend.ops.mxfp import dequantise_mxfp4
from k3_backend.ops.registry import reference

TOLERANCE = 1e-12
PAGE = 4
PICO, NANO = GEOMETRIES["k3-pico"], GEOMETRIES["k3-nano"]

both = pytest.mark.parametrize("g", [PICO, NANO], ids=lambda g: g.name)
batches = pytest.mark.parametrize("requests", [1, 3, 5])
steps = pytest.mark.parametrize("tokens", [1, 2, 4])


def project(case: Case) -> dict[str, NDArray[Any]]:
    """Outputs and new states of the project's reference, exact maths."""
    result = reference(case.op)(case.tensors, case.attrs, dtype=torch.float64, rounding=False)
    return {name: value.numpy() for name, value in result.items()}


def assert_close(actual: NDArray[Any], expected: NDArray[Any], name: str, tolerance: float = TOLERANCE) -> None:
    """Equal shapes, equal special values, and every element within `tolerance` of its row's scale."""
    assert actual.shape == expected.shape, name
    if not np.issubdtype(expected.dtype, np.floating):
        np.testing.assert_array_equal(actual, expected, err_msg=name)
        return
    assert actual.dtype == np.float64, name
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.where(finite, 0.0, actual), np.where(finite, 0.0, expected), err_msg=name)
    scale = np.abs(np.where(finite, expected, 0.0)).max(-1, keepdims=True)
    error = np.abs(np.where(finite, actual, 0.0) - np.where(finite, expected, 0.0))
    assert (error <= tolerance * scale).all(), f"{name}: {(error / np.maximum(scale, 1e-300)).max():.2e} of the row"


def assert_agree(case: Case) -> dict[str, NDArray[Any]]:
    """Both implementations return every output and state, and the same values; returns the numpy results."""
    expected = NUMPY_OPS[case.op](as_numpy(case.tensors), case.attrs)
    actual = project(case)
    given = {name for name, value in case.tensors.items() if value is not None}
    written = {s.name for s in OPS[case.op].tensors if s.role == "output" or (s.role == "state" and s.name in given)}
    assert set(actual) == set(expected) == written
    for name, value in expected.items():
        assert_close(actual[name], value, f"{case.op} {name}")
    return expected


def draw(g: Geometry, *key: int) -> Draw:
    """Draws that depend on the test's parameters and on nothing else."""
    return Draw(g, int(np.random.SeedSequence(key).generate_state(1)[0]))


def test_every_op_has_a_second_implementation() -> None:
    """An op added without an independent check."""
    assert set(NUMPY_OPS) == set(OPS)


@both
@batches
def test_attn_res_at_every_site_of_the_model(g: Geometry, requests: int) -> None:
    """Wrong source counts, wrong block row, a mix that reads rows nobody wrote."""
    d = draw(g, requests)
    for layer in range(g.layers):
        block = layer // g.attn_res_block if layer % g.attn_res_block == 0 else -1
        before = math.ceil(layer / g.attn_res_block)
        assert_agree(attn_res(d, requests, write_block=block, sources=before, add_delta=int(layer > 0)))
    every = math.ceil(g.layers / g.attn_res_block)
    for sources in range(1, every + 1):
        assert_agree(attn_res(d, requests, write_block=-1, sources=sources, add_delta=0))
    result = assert_agree(attn_res(d, requests, write_block=-1, sources=every, add_delta=1, round_mix=1))
    assert np.isfinite(result["out"]).all()


@both
@batches
@steps
def test_projections_and_dense_mlp(g: Geometry, requests: int, tokens: int) -> None:
    """A transposed weight, gate and up swapped, a rank left out of the sum, a prefix kept on restart."""
    d = draw(g, requests, tokens)
    rows = requests * tokens
    for width in (g.kda_proj_rows, g.mla_proj_rows):
        assert_agree(input_projection(d, rows, width))
    for ranks in (1, 2):
        for restart in (0, 1):
            assert_agree(oproj_allreduce(d, rows, ranks, g.kda_width // ranks, restart))
    for linear_beta in (g.situ_linear_beta, 0.0):
        assert_agree(dense_mlp(d, rows, linear_beta))


@both
@batches
@steps
@pytest.mark.parametrize("spare", [0, 2])
def test_kda_decode_with_null_slots(g: Geometry, requests: int, tokens: int, spare: int) -> None:
    """A wrong window after a rejection, a state in a wrong slot, a null slot read or written, spare taps touched."""
    case = kda_decode(draw(g, requests, tokens), requests, tokens, tokens + spare)
    result = assert_agree(case)
    assert np.isfinite(result["out"]).all()
    assert np.isnan(result["state"][0]).all()
    assert np.isnan(result["conv_state"][0]).all()
    if spare and requests != 2:
        kept = as_numpy(case.tensors)["conv_state"]
        assert kept is not None
        np.testing.assert_array_equal(result["conv_state"][:, tokens + 2 :], kept[:, tokens + 2 :])


@pytest.mark.parametrize("bound", [-5.0, -0.5])
@pytest.mark.parametrize("scale", [30.0, 1e-3])
def test_kda_decode_at_the_ends_of_its_gates(bound: float, scale: float) -> None:
    """A gate that overflows, a decay that leaves its bound, a norm without its epsilon."""
    case = kda_decode(draw(PICO, 7), 1, 2, 2)
    tensor(case.tensors, "proj").mul_(scale)
    case.attrs["gate_lower_bound"] = bound
    assert np.isfinite(assert_agree(case)["out"]).all()


@both
@settings(max_examples=4, deadline=None, print_blob=True)
@given(data=st.data())
def test_kda_steps_with_rejections_equal_plain_prefill(g: Geometry, data: st.DataObject) -> None:
    """State or window after any accept/reject history differs from the recurrence over the accepted tokens alone."""
    seed = data.draw(st.integers(0, 2**16))
    histories = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
    d = Draw(g, seed)
    case = kda_decode(d, 1, 3, 3)
    t = case.tensors
    t["slots"] = torch.tensor([[2, 3, 1]], dtype=torch.int32)
    t["state"], t["conv_state"] = (torch.zeros_like(tensor(t, name)) for name in ("state", "conv_state"))
    accepted, rows, outputs = 1, [], []
    for accept in histories:
        t["accepted"] = torch.tensor([accepted], dtype=torch.int32)
        proj = d.normal(3, g.kda_proj_rows).bfloat16()
        t["proj"] = proj
        result = reference("kda_decode")(t, case.attrs, rounding=False)
        t["state"], t["conv_state"] = result["state"], result["conv_state"].bfloat16()
        rows.append(proj[:accept])
        outputs.append(result["out"][:accept])
        accepted = accept
    expected = kda_prefill(as_numpy({**t, "proj": torch.cat(rows)}), case.attrs)
    assert_close(torch.cat(outputs).numpy(), expected["out"], "out", 1e-11)
    last = tensor(t, "state")[int(tensor(t, "slots")[0, accepted - 1])]
    assert_close(last.transpose(1, 2).contiguous().numpy(), expected["state"], "state", 1e-11)


def test_short_conv_equals_a_published_depthwise_convolution() -> None:
    """Taps in reversed order, or a window off by one."""
    d = Draw(PICO, 3)
    x, w = d.normal(9, 12), d.normal(12, 4)
    published = torch.nn.functional.conv1d(x.T.unsqueeze(0), w.unsqueeze(1), padding=3, groups=12)[0, :, :9].T
    expected = torch.nn.functional.silu(published).numpy()
    assert_close(conv_silu_sequence(x.numpy(), w.numpy()), expected, "conv")


@both
@batches
@steps
def test_mla_query_and_cache_insert(g: Geometry, requests: int, tokens: int) -> None:
    """A rotated or misplaced position part, W_UK applied transposed, a negative mapping that writes."""
    case = mla_query(draw(g, requests, tokens), requests * tokens, PAGE)
    result = assert_agree(case)
    assert np.isfinite(result["query"]).all()


@both
@pytest.mark.parametrize("k_scale", [1.0, 2.0**-8, 0.37, 64.0])
def test_mla_cache_insert_in_e4m3(g: Geometry, k_scale: float) -> None:
    """A scale applied the wrong way round, elements that overflow or round through bf16, subnormals flushed."""
    case = with_e4m3_cache(mla_query(draw(g, 3, 2), 6, PAGE), k_scale)
    result = reference("mla_query")(case.tensors, case.attrs, torch.float64)
    bf16 = reference("mla_query")(mla_query(draw(g, 3, 2), 6, PAGE).tensors, {"eps": g.eps, **BF16_CACHE})
    mapping = tensor(case.tensors, "slot_mapping")
    rows = mapping[mapping >= 0]
    got, row = (cache.flatten(0, 1)[rows].numpy() for cache in (result["kv_cache_e4m3"], bf16["kv_cache"]))
    np.testing.assert_array_equal(got, nearest_e4m3(row / k_scale))
    torch.testing.assert_close(result["query"], bf16["query"], rtol=0, atol=0)


@both
@pytest.mark.parametrize("k_scale", [0.37, 64.0])
def test_mla_decode_from_e4m3(g: Geometry, k_scale: float) -> None:
    """A scale left out of the scores or of the values, bytes read as bf16, NaN bytes of unowned rows."""
    d = draw(g, 3, 2)
    rows, query = _requests(d, 3, 2)
    for rank in range(2):
        case = with_e4m3_cache(mla_decode(d, rows, query, 2, PAGE, (rank, 2, 1)), k_scale)
        assert np.isfinite(assert_agree(case)["out"]).all()


def test_mla_norms_equal_the_published_one() -> None:
    """An RMSNorm that forgets its epsilon or divides by the wrong count, at magnitudes where epsilon counts."""
    case = mla_query(Draw(PICO, 4), 3, PAGE)
    tensor(case.tensors, "proj").mul_(2.0**-8)
    t = case.tensors
    t["slot_mapping"] = torch.arange(3) + PAGE
    latent = tensor(t, "proj")[:, PICO.q_lora : PICO.q_lora + PICO.kv_lora].double()
    weight = tensor(t, "kv_norm").double()
    expected = torch.nn.functional.rms_norm(latent, (PICO.kv_lora,), weight, PICO.eps).numpy()
    assert_close(assert_agree(case)["kv_cache"][1, :3, : PICO.kv_lora], expected, "cache row")


def _requests(d: Draw, requests: int, tokens: int) -> tuple[list[Tensor], Tensor]:
    """Ragged requests: lengths 0 (with a NaN query) and 1 among them, the others beyond a page."""
    lengths = [tokens + 8, 0, 1, tokens, tokens + 2 * PAGE + 1][:requests]
    rows = [d.normal(length, d.g.mla_row).bfloat16() for length in lengths]
    query = d.normal(requests * tokens, d.g.heads, d.g.mla_row, std=2.0).bfloat16()
    for b, length in enumerate(lengths):
        if length == 0:
            query[b * tokens : (b + 1) * tokens] = NAN
    return rows, query


@both
@batches
@steps
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("interleave", [1, 4])
def test_mla_decode_on_every_shard(g: Geometry, requests: int, tokens: int, ranks: int, interleave: int) -> None:
    """Wrong shard arithmetic, a causal limit in local positions, an empty shard or row, a row nobody owns."""
    d = draw(g, requests, tokens, ranks, interleave)
    rows, query = _requests(d, requests, tokens)
    for rank in range(ranks):
        result = assert_agree(mla_decode(d, rows, query, tokens, PAGE, (rank, ranks, interleave)))
        visible = [
            len(shard_positions(max(0, len(r) - tokens + i + 1), rank, ranks, interleave))
            for r in rows
            for i in range(tokens)
        ]
        assert np.isfinite(result["out"]).all()
        np.testing.assert_array_equal(np.isneginf(result["lse"]), np.tile(np.equal(visible, 0), (g.heads, 1)).T)


@both
@pytest.mark.parametrize("requests", [2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mla_value_with_sources_of_weight_zero(g: Geometry, requests: int, ranks: int) -> None:
    """A NaN that comes through a source of weight 0 or through a padding row's gate; weights to base e."""
    result = assert_agree(mla_value(draw(g, requests, ranks), requests, ranks))
    assert np.isfinite(result["out"]).all()
    assert (result["out"][0] == 0).all()


@both
@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (2, 4), (4, 1), (4, 4)])
def test_absorbed_sharded_mla_equals_causal_attention(g: Geometry, ranks: int, interleave: int) -> None:
    """Absorption, sharding or merging changes what is computed: query, cache, core and value ops end to end."""
    length, tokens = 11, 4
    d = draw(g, ranks, interleave)
    project_query = mla_query(d, length, PAGE)
    t = project_query.tensors
    t["proj"] = d.normal(length, g.mla_proj_rows).bfloat16()
    t["slot_mapping"] = torch.arange(length) + PAGE
    t["kv_cache"] = torch.zeros(2 + length // PAGE, PAGE, g.mla_row, dtype=torch.bfloat16)
    t["w_uv"] = d.normal(g.heads, g.v_dim, g.kv_lora, std=g.kv_lora**-0.5).bfloat16()
    queried = reference("mla_query")(t, project_query.attrs, rounding=False)
    cached = queried["kv_cache"].flatten(0, 1)[PAGE : PAGE + length]
    partial, lse = [], []
    for rank in range(ranks):
        own = cached[shard_positions(length, rank, ranks, interleave)]
        core = mla_decode(d, [torch.zeros(length, g.mla_row).bfloat16()], queried["query"][-tokens:], tokens, PAGE,
                          (rank, ranks, interleave))  # fmt: skip
        cache = torch.full(tensor(core.tensors, "kv_cache").shape, NAN, dtype=torch.float64)
        for local, row in enumerate(own):
            cache[tensor(core.tensors, "block_table")[0, local // PAGE], local % PAGE] = row
        core.tensors["kv_cache"] = cache
        result = reference("mla_decode")(core.tensors, core.attrs, rounding=False)
        partial.append(result["out"])
        lse.append(result["lse"])
    merge = {"partial": torch.stack(partial), "lse": torch.stack(lse), "proj": tensor(t, "proj")[-tokens:],
             "w_uv": t["w_uv"]}  # fmt: skip
    out = reference("mla_value")(merge, {"gate_offset": g.q_lora + g.mla_row}, rounding=False)["out"]
    expected = mla_attention(as_numpy(t), {"eps": g.eps})
    assert_close(out.numpy(), expected[-tokens:], "attention", 1e-11)


@both
def test_numpy_attention_equals_the_published_one(g: Geometry) -> None:
    """The textbook form used above is itself wrong."""
    d = Draw(g, 5)
    t = mla_query(d, 7, PAGE).tensors
    t["proj"] = d.normal(7, g.mla_proj_rows).bfloat16()
    t["w_uv"] = d.normal(g.heads, g.v_dim, g.kv_lora, std=g.kv_lora**-0.5).bfloat16()
    q, k, v, gate = (torch.from_numpy(x) for x in expanded(as_numpy(t), {"eps": g.eps}))
    published = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) * torch.sigmoid(gate)
    expected = published.transpose(0, 1).reshape(7, -1).numpy()
    assert_close(mla_attention(as_numpy(t), {"eps": g.eps}), expected, "attention")


@both
@batches
@steps
def test_moe_front(g: Geometry, requests: int, tokens: int) -> None:
    """A bias that enters the weights, a scale left out, an order other than falling score."""
    assert_agree(moe_front(draw(g, requests, tokens), requests * tokens))


_LOGITS = st.sampled_from([-1.0, 0.0, 0.5, 3.0, 60.0, 64.0, -60.0, NAN])
_BIASES = st.sampled_from([0.0, -0.0, 0.25, -0.25, math.inf, -math.inf, NAN])


@settings(max_examples=60, deadline=None, print_blob=True)
@given(logits=st.lists(_LOGITS, min_size=16, max_size=16), biases=st.lists(_BIASES, min_size=16, max_size=16))
def test_moe_front_with_ties_nan_and_infinities(logits: list[float], biases: list[float]) -> None:
    """Ties to a higher id, NaN ahead of a number, saturated scores told apart."""
    assert_agree(exact_logits(Draw(PICO, 0), torch.tensor(logits).bfloat16(), torch.tensor(biases)))


@both
@batches
@steps
@pytest.mark.parametrize("expert_format", [0, 1], ids=["bf16", "mxfp4"])
def test_moe_experts(g: Geometry, requests: int, tokens: int, expert_format: int) -> None:
    """Gate and up swapped, an expert nobody chose that counts, the norm before the sum, a wrong nibble order."""
    linear_beta = g.situ_linear_beta if tokens > 1 else -1.0
    case = moe_experts(draw(g, requests, tokens), requests * tokens, expert_format, linear_beta)
    assert np.isfinite(assert_agree(case)["out"]).all()


def test_mxfp4_decodes_every_byte_under_every_scale() -> None:
    """A wrong element, nibble order or scale, at any of 256 x 256 combinations, NaN scale included."""
    packed = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1).view(256, 256)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)
    expected = mxfp4_decode(packed.numpy(), scale.numpy())
    np.testing.assert_array_equal(dequantise_mxfp4(packed, scale, torch.float64).numpy(), expected)
    assert np.isnan(expected[255]).all()
    assert expected[127, :8].tolist() == [0.0, 0.0, 0.5, 0.0, 1.0, 0.0, 1.5, 0.0]
    assert np.unique(np.abs(expected[127])).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
