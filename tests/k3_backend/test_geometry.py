"""Geometries: the published constants of Kimi K3 and the reduced models that keep its mechanisms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_engine import NANO, PICO, weights_of

from k3_backend.geometry import GEOMETRIES, Geometry, geometry

K3 = geometry("k3")


def test_k3_layer_pattern_is_69_kda_and_24_mla_layers_ending_in_two_mla() -> None:
    """A shifted (1-based) layer list would swap attention kinds in every layer."""
    assert [layer + 1 for layer in K3.mla_layers] == [*range(4, 93, 4), 93]
    assert (len(K3.kda_layers), len(K3.mla_layers)) == (69, 24)
    assert K3.mla_layers[-2:] == (91, 92)
    assert [layer for layer in range(K3.layers) if K3.writes_block(layer)] == list(range(0, 85, 12))
    assert all(K3.kind(layer) == "kda" for layer in range(0, 85, 12))


@pytest.mark.parametrize(
    ("layers", "attention", "mlp"),
    [
        ([0], 0, 1),
        (range(1, 12), 1, 1),
        ([12], 1, 2),
        (range(13, 24), 2, 2),
        ([84], 7, 8),
        (range(85, 93), 8, 8),
    ],
)
def test_k3_attn_res_sources_match_the_published_check_values(
    layers: range | list[int], attention: int, mlp: int
) -> None:
    """An off-by-one in the number of mixed rows keeps shapes and changes every later layer."""
    assert {K3.attn_sources(layer) for layer in layers} == {attention}
    assert {K3.mlp_sources(layer) for layer in layers} == {mlp}
    assert K3.attn_res_blocks == 8


def test_k3_mean_attn_res_sources_match_the_traffic_estimate() -> None:
    """The mean number of sources (prefix included) is what the AttnRes bandwidth floor is computed from."""
    mean_attention = sum(K3.attn_sources(layer) + 1 for layer in range(93)) / 93
    mean_mlp = sum(K3.mlp_sources(layer) + 1 for layer in range(93)) / 93
    assert (round(mean_attention, 2), round(mean_mlp, 2)) == (5.30, 5.39)


@pytest.mark.parametrize(
    ("name", "heads", "kda_rows", "mla_rows"),
    [
        ("k3", 96, 49_376, 14_400),
        ("k3", 48, 24_752, 8_256),
        ("k3", 12, 6_288, 3_648),
        ("k3", 6, 3_216, 2_880),
        ("k3-slice-tp8", 12, 6_288, 3_648),
        ("k3-slice-tp16", 6, 3_216, 2_880),
        ("k3-nano", 2, 1_168, 960),
        ("k3-pico", 6, 816, 400),
    ],
)
def test_packed_projection_rows_include_the_padding(name: str, heads: int, kda_rows: int, mla_rows: int) -> None:
    """Kernels and weights disagree about the row stride if padding is forgotten on one side."""
    g = replace(geometry(name), heads=heads)
    assert (g.kda_proj_rows, g.mla_proj_rows) == (kda_rows, mla_rows)


@pytest.mark.parametrize(("g", "millions"), [(NANO, 7.32), (PICO, 5.35)])
def test_parameter_counts_of_the_reduced_models(g: Geometry, millions: float) -> None:
    """A forgotten or doubled weight changes the count."""
    assert round(weights_of(g).parameters / 1e6, 2) == millions


def test_k3_parameter_count_is_2_78_trillion() -> None:
    """Checkpoint shapes of the published model add up to the published size."""
    from math import prod

    from k3_backend.model.checkpoint import layer_specs, model_specs

    total = sum(prod(spec.shape) for spec in model_specs(K3).values())
    by_kind = {layer: sum(prod(s.shape) for s in layer_specs(K3, layer, "bf16").values()) for layer in (0, 1, 3)}
    total += by_kind[0] + 68 * by_kind[1] + 24 * by_kind[3]
    assert round(total / 1e12, 2) == 2.78


def test_reduced_models_keep_the_mechanisms() -> None:
    """A reduced model without a partial last block or a padded projection would not test them."""
    for g in (NANO, PICO):
        assert g.mla_layers[-2:] == (g.layers - 2, g.layers - 1)
        assert g.layers % g.attn_res_block != 0
        assert g.attn_res_blocks == 2
        assert g.kda_proj_rows > 4 * g.kda_width + g.kda_gate_rank + g.heads


def test_geometries_refuse_a_last_kda_layer_and_block_writes_on_mla() -> None:
    """Both would need code paths that no kernel has."""
    with pytest.raises(ValueError, match="last layer"):
        replace(NANO, mla_layers=(3, 7))
    with pytest.raises(ValueError, match="block writes"):
        replace(NANO, attn_res_block=7)
    with pytest.raises(KeyError, match="k3-nano"):
        geometry("k3-micro")


def test_every_geometry_has_its_special_tokens_inside_the_vocabulary() -> None:
    """An id outside the vocabulary fails only when a sequence ends."""
    for g in GEOMETRIES.values():
        assert len({g.bos, g.eos, g.pad, g.media}) == 4
        assert max(g.bos, g.eos, g.pad, g.media) < g.vocab
