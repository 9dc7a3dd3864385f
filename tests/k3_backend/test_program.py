"""The program of a decode step: every site bound, every buffer produced before it is read, attributes per layer."""

from __future__ import annotations

import pytest
import torch
from model_engine import NANO, PICO, Engine, Work, weights_of

from k3_backend.geometry import ExpertFormat, Geometry, geometry
from k3_backend.model.program import (
    BATCH_FIELDS,
    DTYPES,
    allocate_buffers,
    batch_fields,
    bind,
    decode_program,
    execute,
    step_buffers,
)
from k3_backend.model.state import DecodeState
from k3_backend.ops import OPS

K3 = geometry("k3")


def test_sites_run_in_the_documented_order() -> None:
    """Both arms execute this list; a missing site is a missing part of the model."""
    names = [site.name for site in decode_program(PICO)]
    kda = ["attn_res.attention", "input_projection", "kda_decode", "oproj_allreduce", "attn_res.mlp"]
    mla = [*kda[:2], "mla_query", "mla_decode", "mla_value", *kda[3:]]
    expected = [*kda, "dense_mlp"]
    for layer in range(1, 9):
        expected += [*(mla if layer in (3, 7, 8) else kda), "moe_front", "moe_experts"]
    assert names == [*expected, "attn_res.final"]


@pytest.mark.parametrize("g", [K3, NANO, PICO], ids=lambda g: g.name)
def test_every_argument_is_bound_and_produced_before_it_is_read(g: Geometry) -> None:
    """An unbound or stale buffer would be read as whatever the last layer left in it."""
    pools = {f"{kind}.{layer}" for layer in g.mla_layers for kind in ["kv_cache"]}
    pools |= {f"{kind}.{layer}" for layer in g.kda_layers for kind in ["conv_state", "state"]}
    known = {"prefix", "blocks", *BATCH_FIELDS, *pools}
    buffers = {buffer.name for buffer in step_buffers(g, 1)}
    used = set()
    keys = set()
    for site in decode_program(g):
        spec = OPS[site.op]
        assert set(site.attrs) == {attr.name for attr in spec.attrs}
        assert site.key not in keys
        keys.add(site.key)
        for tensor in spec.tensors:
            if tensor.role == "constant":
                assert tensor.name not in site.bindings
                continue
            bound = site.bindings.get(tensor.name)
            if bound is None:
                assert tensor.optional
                continue
            if tensor.role != "output":
                assert bound in known, f"{site.key}: {tensor.name}"
            known.add(bound)
            used.add(bound)
    assert used - pools - set(BATCH_FIELDS) == buffers


@pytest.mark.parametrize("expert_format", ["bf16", "mxfp4"])
def test_every_argument_has_the_shape_and_type_of_the_interface(expert_format: ExpertFormat) -> None:
    """One allocation per name serves all sites only if element counts agree; kernels trust shapes and strides."""
    requests, tokens, page_size = 2, 3, 4
    state = DecodeState.allocate(PICO, slots=7, pages=5, page_size=page_size, taps=tokens + 2)
    engine = Engine(PICO, columns=tokens, page_size=page_size)
    engine.add("a")
    engine.add("b")
    batch = engine.batch([Work(name, [1] * tokens, True) for name in "ab"])
    buffers = {**allocate_buffers(PICO, batch.rows), **batch_fields(batch), **state.tensors()}
    call = {
        "M": batch.rows, "B": requests, "T": tokens, "ranks": 1, "shards": 1, "S": 7, "taps": tokens + 2,
        "pages": 5, "page": page_size, "max_pages": batch.block_table.shape[1],
    }  # fmt: skip
    weights = weights_of(PICO, 0, expert_format)
    for site in decode_program(PICO, tokens, expert_format):
        call["N"] = PICO.kda_proj_rows if "kda_proj" in site.bindings.values() else PICO.mla_proj_rows
        if site.op == "oproj_allreduce":
            call["KL"] = PICO.kda_width if "kda_out" in site.bindings.values() else PICO.mla_width
        # Geometry sizes win over call sizes of the same letter ("S" is the shared width in moe_experts).
        shapes = OPS[site.op].shapes(PICO, {**call, **OPS[site.op].sizes(PICO)})
        constants = weights.constants(site.layer, site.name)
        arguments = bind(site, buffers, constants, shapes)
        assert list(arguments) == [tensor.name for tensor in OPS[site.op].tensors]
        for tensor in OPS[site.op].tensors:
            value = arguments[tensor.name]
            if value is None:
                assert tensor.optional
                continue
            assert tuple(value.shape) == shapes[tensor.name], f"{site.key}: {tensor.name}"
            assert value.dtype == DTYPES[tensor.dtype]
            assert value.is_contiguous()
        assert set(constants) <= {t.name for t in OPS[site.op].tensors if t.role == "constant"}


def test_block_writes_and_restarts_follow_the_layer_pattern() -> None:
    """Layer i mod block = 0 saves its prefix, restarts it, and leaves the saved row out of its own mix."""
    by_key = {site.key: site.attrs for site in decode_program(K3)}
    assert by_key["0.attn_res.attention"]["add_delta"] == 0
    for layer in range(K3.layers):
        attention, mlp = by_key[f"{layer}.attn_res.attention"], by_key[f"{layer}.attn_res.mlp"]
        writes = layer % 12 == 0
        assert attention["write_block"] == (layer // 12 if writes else -1)
        assert attention["sources"] == -(-layer // 12)
        assert (mlp["write_block"], mlp["add_delta"], mlp["sources"]) == (-1, 0, layer // 12 + 1)
        assert by_key[f"{layer}.oproj_allreduce"]["restart"] == int(writes)
    assert by_key["final.attn_res.final"]["sources"] == 8
    assert by_key["final.attn_res.final"]["round_mix"] == 1


def test_binding_a_buffer_that_no_site_produced_is_refused_by_name() -> None:
    """The message must lead to the site, not to an op's arithmetic."""
    site = decode_program(PICO)[1]
    with pytest.raises(KeyError, match="x is bound to 'x'"):
        bind(site, {}, weights_of(PICO).constants(0, "input_projection"))


def test_execute_hands_outputs_and_new_states_to_later_sites() -> None:
    """Functional ops return new states; dropping them would freeze the prefix."""
    program = decode_program(PICO)[:2]
    seen = []

    def op(site):  # type: ignore[no-untyped-def]
        def run(t, a):  # type: ignore[no-untyped-def]
            seen.append((site.key, sorted(t)))
            return {"out": torch.ones(1, 4)} | ({"prefix": torch.zeros(1, 4)} if site.op == "attn_res" else {})

        return run

    buffers = {"prefix": torch.ones(1, 4), "blocks": torch.ones(1, 2, 4), "hidden": torch.ones(1)}
    constants = {"attn_res.attention": {}, "input_projection": {"w": torch.ones(4, 4)}}
    execute(program, op, lambda _, name: constants[name], buffers)
    assert seen == [("0.attn_res.attention", ["blocks", "prefix"]), ("0.input_projection", ["w", "x"])]
    assert not buffers["prefix"].any()
    assert buffers["kda_proj"].shape == (1, 4)
