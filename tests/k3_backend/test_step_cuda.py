"""Programs of sites for a GPU, as far as none is needed: decisions, what is copied between paths, the ledger's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3_backend.aot.cuda.choices import Declined
from k3_backend.geometry import geometry
from k3_backend.model.program import (
    DTYPES,
    HALF_LAYERS,
    Site,
    bind,
    chain_program,
    half_layer_program,
    program_buffers,
)
from k3_backend.ops import OPS
from k3_backend.ops.registry import standard
from k3_backend.step import cuda
from k3_backend.step.cuda import DeviceLedger

NANO = geometry("k3-nano")
ROWS, PAGES, PAGE = 3, 4, 8


@dataclass
class FakeCall:
    """A kernel that writes a mark into the outputs it was bound to."""

    outputs: Mapping[str, Tensor]

    @property
    def variant(self) -> Any:
        return SimpleNamespace(launches=(SimpleNamespace(entry="kernel"),))

    def launch(self) -> None:
        for tensor in self.outputs.values():
            tensor.fill_(7)


class FakeArm:
    """Has kernels for some ops."""

    def __init__(self, ops: Sequence[str]) -> None:
        self.ops = ops

    def choose(self, site: Site, arguments: Mapping[str, Tensor | None]) -> Any:
        if site.op not in self.ops:
            return Declined("op.missing", f"no specialised kernel for {site.op}")
        written = [spec.name for spec in OPS[site.op].tensors if spec.role == "output"]
        return FakeCall({name: arguments[name] for name in written if arguments[name] is not None}), {"tile": 4}


@pytest.fixture(autouse=True)
def host_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager standard path in place of the GPU's."""
    monkeypatch.setattr(cuda, "standard", lambda op, _device: standard(op))


def memory(program: Sequence[Site]) -> dict[str, Tensor]:
    """Buffers, batch fields and pools on the host."""
    torch.manual_seed(1)
    tensors = {
        buffer.name: torch.randn(buffer.shape).to(DTYPES[buffer.dtype])
        for buffer in program_buffers(NANO, program, ROWS)
    }
    tensors["slots"] = torch.arange(1, ROWS + 1, dtype=torch.int32).unsqueeze(1)
    tensors["accepted"] = torch.ones(ROWS, dtype=torch.int32)
    tensors["block_table"] = torch.arange(1, ROWS + 1, dtype=torch.int32).unsqueeze(1)
    tensors["seq_lens"] = torch.full((ROWS,), 5, dtype=torch.int32)
    tensors["slot_mapping"] = torch.arange(1, ROWS + 1) * PAGE + 4
    for name in {name for site in program for name in site.bindings.values()}:
        base = name.partition(".")[0]
        if base == "state":
            tensors[name] = torch.randn(ROWS + 1, NANO.heads, NANO.kda_head_dim, NANO.kda_head_dim)
        elif base == "conv_state":
            tensors[name] = torch.randn(ROWS + 1, 3, 3 * NANO.kda_width).to(torch.bfloat16)
        elif base == "kv_cache":
            tensors[name] = torch.randn(PAGES, PAGE, NANO.mla_row).to(torch.bfloat16)
    return tensors


def weights(site: Site) -> dict[str, Tensor]:
    spec = OPS[site.op]
    rows = NANO.kda_proj_rows if "kda_proj" in site.bindings["out" if "out" in site.bindings else "proj"] else 0
    sizes = {**spec.sizes(NANO), "N": rows or NANO.mla_proj_rows}
    return {
        one.name: torch.full([d if isinstance(d, int) else sizes[d] for d in one.dims], 0.01, dtype=DTYPES[one.dtype])
        for one in spec.tensors
        if one.role == "constant"
    }


def planned(ops: Sequence[str], scope: str = "mla_half_layer") -> tuple[list[Any], dict[str, Tensor]]:
    program = chain_program(scope, NANO, 2)
    buffers = memory(program)
    return cuda._plan(FakeArm(ops), program, buffers, weights), buffers  # type: ignore[arg-type]


def test_every_site_says_which_path_it_takes_and_why() -> None:
    """A fallback has no reason, or a specialised site no kernel."""
    sites, _ = planned(["mla_decode"])
    assert [site.choice.path == "specialized" for site in sites] == [site.site.op == "mla_decode" for site in sites]
    for site in sites:
        own = site.choice
        assert (own.code, own.kernels, own.tunables) == (
            (None, ("kernel",), {"tile": 4}) if own.path == "specialized" else ("op.missing", (), {})
        )


def test_only_what_a_kernel_reads_is_copied_from_the_standard_path() -> None:
    """The standard path pays for copies that stock serving does not make, or a kernel reads a stale buffer."""
    sites, _ = planned(["mla_decode"])
    assert {(site.site.op, name) for site in sites for name in site.copied} == {("mla_query", "query")}
    sites, _ = planned([])
    assert not any(site.copied for site in sites)
    sites, _ = planned(["mla_value"])
    copied = {(site.site.op, name) for site in sites for name in site.copied}
    assert copied == {("mla_decode", "out"), ("mla_decode", "lse"), ("input_projection", "out")}


def test_a_kernel_sees_the_standard_results_and_later_sites_see_the_kernels() -> None:
    """Bindings of a mixed program point at the wrong tensor."""
    sites, buffers = planned(["mla_decode"])
    buffers["query"].fill_(torch.nan)
    tensors = cuda._enqueue(sites, buffers, weights, None)
    assert torch.isfinite(buffers["query"].float()).all()
    assert torch.equal(tensors["partial"], torch.full_like(tensors["partial"], 7))
    assert tensors["partial"] is buffers["partial"]
    assert tensors["mla_out.1"] is not buffers["mla_out.1"]
    assert torch.isfinite(tensors["mla_out.1"].float()).all()


def test_standard_half_layers_equal_the_ops_one_by_one() -> None:
    """The chain computes something else than its sites."""
    sites, buffers = planned([], "kda_half_layer")
    own = {name: tensor.clone() for name, tensor in buffers.items()}
    tensors = cuda._enqueue(sites, buffers, weights, None)
    for site in half_layer_program(NANO, "kda", 2):
        for name, value in standard(site.op)(bind(site, own, weights(site)), site.attrs).items():
            own[site.bindings[name]] = value
    for name in ("kda_out.0", "kda_out.1", "prefix.1", "state.0", "conv_state.1"):
        assert torch.equal(tensors[name], own[name]), name


def test_after_is_called_once_per_site_with_its_outputs() -> None:
    """A watermark reaches no output, or the wrong one."""
    sites, buffers = planned(["mla_decode"])
    seen: list[str] = []

    def after(site: Site, tensors: Mapping[str, Tensor | None]) -> None:
        seen.append(site.key)
        if site.op == "mla_value":
            out = tensors["out"]
            assert out is not None
            out.zero_()

    tensors = cuda._enqueue(sites, buffers, weights, after)
    assert seen == [site.site.key for site in sites]
    assert not tensors["mla_out.0"].any()


def test_the_ledger_counts_what_a_graph_holds() -> None:
    """Replays are counted at the wrong site or on the wrong path."""
    sites, _ = planned(["mla_decode", "attn_res"])
    ledger = DeviceLedger([site.site.key for site in sites], "cpu")
    step = ledger.vector([site.choice for site in sites])
    for _ in range(3):
        ledger.counts.add_(step)
    for site in sites:
        expected = [3, 0] if site.site.op in ("mla_decode", "attn_res") else [0, 3]
        assert ledger.snapshot()[site.site.key] == expected
    ledger.reset()
    assert not ledger.counts.any()


@pytest.mark.parametrize("scope", [*HALF_LAYERS, "attn_res", "input_projection", "kda_decode", "mla_value"])
def test_copies_of_a_chain_share_no_state_and_no_result(scope: str) -> None:
    """Two half-layers of a chain work on one state, so that the second reads it from a cache."""
    program = chain_program(scope, NANO, 3)
    assert len({site.key for site in program}) == len(program)
    users: dict[str, set[int | None]] = {}
    for site in program:
        for spec in OPS[site.op].tensors:
            if spec.name in site.bindings and (spec.role == "state" or (site.op == scope and spec.role == "output")):
                users.setdefault(site.bindings[spec.name], set()).add(site.layer)
    assert all(len(layers) == 1 for layers in users.values())
    assert {layer for layers in users.values() for layer in layers} == {0, 1, 2}


def test_an_unknown_scope_names_the_known_ones() -> None:
    """A mistyped scope times something else."""
    with pytest.raises(KeyError, match="kda_half_layer, mla_half_layer"):
        chain_program("moe_front", NANO, 1)
