"""Half-layers of the path gate on GPUs: inputs and expected values, what spoils them, and how kernels are counted."""

from __future__ import annotations

import pytest
import torch

from k3_backend.geometry import LayerKind, geometry
from k3_backend.ops import OPS
from verify.evaluator.compare import distance
from verify.evaluator.half_layers import HalfLayer, draw, draw_constants, rows_of, run_reference, run_standard
from verify.workers.kernel_trace import counted
from verify.workers.spoil import disturb, spoiled_tensors

CPU = torch.device("cpu")
PICO = geometry("k3-pico")


def half_layer(half: LayerKind, tokens: int = 2) -> HalfLayer:
    constants = draw_constants(PICO, half, 3)
    return draw(PICO.name, half, batch=3, tokens=tokens, context=70, seed=11, constants=constants)


@pytest.mark.parametrize("half", ["kda", "mla"])
def test_the_standard_path_is_near_the_reference_over_replays(half: LayerKind) -> None:
    """Inputs on which correct half-layers drift apart, so that no tolerance can be earned."""
    drawn = half_layer(half)
    usual, exact = run_standard(drawn, 3, CPU), run_reference(drawn, 3, CPU)
    assert set(usual) == set(drawn.judged) == set(exact)
    for name in drawn.judged:
        found = distance(rows_of(drawn, name, usual[name]), rows_of(drawn, name, exact[name]))
        assert found["nonfinite"] == 0
        assert found["row_l2"] < 0.02, name


@pytest.mark.parametrize("half", ["kda", "mla"])
def test_a_replay_reads_what_the_one_before_wrote(half: LayerKind) -> None:
    """Replays that all give the same, so that a graph which ran once would pass."""
    drawn = half_layer(half)
    once, twice = run_standard(drawn, 1, CPU), run_standard(drawn, 2, CPU)
    for name in (drawn.judged[0], "prefix.0"):
        assert distance(rows_of(drawn, name, once[name]), rows_of(drawn, name, twice[name]))["median_row_l2"] > 0.1


@pytest.mark.parametrize("half", ["kda", "mla"])
def test_ownership_is_what_the_standard_path_writes(half: LayerKind) -> None:
    """State that a half-layer owns but that is watched as foreign, or the reverse; poison in inputs that matter."""
    drawn = half_layer(half)
    after = run_standard(drawn, 2, CPU)
    for name, written in drawn.masks.written.items():
        before = drawn.tensors[name]
        now = after.get(name, before)
        changed = (now != before).reshape(*written.shape, -1).any(-1)
        assert bool(changed[written].all())
        assert not bool(changed[~written].any())
    poisoned = dict(drawn.tensors)
    for name, free in drawn.masks.free.items():
        poisoned[name] = drawn.tensors[name].clone()
        poisoned[name][free] = torch.nan
    blind = HalfLayer(drawn.program, drawn.constants, poisoned, drawn.masks, drawn.produced, drawn.judged)
    for name, value in run_reference(blind, 2, CPU).items():
        assert torch.equal(rows_of(drawn, name, value), rows_of(drawn, name, run_reference(drawn, 2, CPU)[name]))


def test_a_draw_depends_on_its_seed_alone() -> None:
    """Watermarks and the honest cell beside them that run on different inputs."""
    for name, value in half_layer("mla").tensors.items():
        assert torch.equal(value, half_layer("mla").tensors[name])


@pytest.mark.parametrize("op", ["attn_res", "input_projection", "kda_decode", "mla_query", "mla_decode", "mla_value"])
def test_spoiled_results_are_far_off_and_nothing_else_changes(op: str) -> None:
    """A watermark that hardly changes a result, or that changes inputs, so that its finding proves nothing."""
    spec = OPS[op]
    tensors = {
        tensor.name: torch.randn(4, 6).to({"bf16": torch.bfloat16}.get(tensor.dtype, torch.float32))
        for tensor in spec.tensors
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    disturb(spec, dict(tensors))
    for name, tensor in tensors.items():
        if name in spoiled_tensors(spec):
            assert torch.equal(tensor.view(-1)[::2], -before[name].view(-1)[::2])
            assert torch.equal(tensor.view(-1)[1::2], before[name].view(-1)[1::2])
        else:
            assert torch.equal(tensor, before[name])


def test_kernels_of_a_trace_are_counted_by_symbol_and_resources() -> None:
    """Variants of one symbol that count as one kernel, or copies and fills that are not seen."""

    def kernel(name: str, registers: int) -> dict[str, object]:
        facts = {"block": [128, 2, 1], "registers per thread": registers, "shared memory": 2352, "grid": [224, 1, 1]}
        return {"cat": "kernel", "name": name, "args": facts}

    events = [
        {"name": "no category"}, {"cat": "cuda_runtime", "name": "cudaGraphLaunch"}, kernel("k", 51), kernel("k", 51),
        kernel("k", 40), {"cat": "gpu_memset", "name": "Memset (Device)", "args": {}},
    ]  # fmt: skip
    row = {"name": "k", "block": 256, "shared": 2352}
    bare = {"name": "gpu_memset: Memset (Device)", "block": None, "registers": None, "shared": None, "count": 1}
    assert sorted(counted(events), key=str) == sorted(
        [{**row, "registers": 40, "count": 1}, {**row, "registers": 51, "count": 2}, bare], key=str
    )
