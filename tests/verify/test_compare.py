"""The checker mutation set: wrong results that must be refused for every op, and honest ones that must pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from k3_backend.model.program import DTYPES
from k3_backend.ops import OPS
from k3_backend.ops.registry import reference, standard
from verify.evaluator.compare import compare_choice, compare_values, reference_choice, spread
from verify.evaluator.execute import Expected, expect, measure
from verify.evaluator.inputs import Call, Case, kinds, make
from verify.protocol.kernels import MEASURES, exceeds, tolerance

Results = dict[str, Tensor]


def call_of(op: str, kind: str = "gaussian", batch: int = 5, tokens: int = 2, seed: str = "5eed") -> Call:
    return make(Case(op, kind, batch, tokens, 1, seed, "k3-pico"))


def refused(call: Call, expected: Expected, got: Mapping[str, Tensor]) -> set[str]:
    """Tensors that the protocol refuses."""
    values, choices = measure(call, expected, got, "test")
    wrong = {row["tensor"] for row in values if exceeds(row["candidate"], row["tolerance"])}
    return wrong | {row["tensor"] for row in choices if row["violations"]}


def in_formats(call: Call, results: Mapping[str, Tensor]) -> Results:
    """Results in the interface's dtypes."""
    return {name: value.to(DTYPES[call.spec.tensor(name).dtype]) for name, value in results.items()}


def restricted(call: Call, results: Mapping[str, Tensor]) -> Results:
    """As `execute` reads them: outputs whole, states on their written rows."""
    kept = {name: results[name] for name in call.outputs}
    return in_formats(call, kept | {n: results[n][rows] for n, rows in call.masks.written.items() if rows.any()})


def honest(call: Call) -> Results:
    """The reference in fp32, rounded to the output formats: what a good kernel computes."""
    return restricted(call, reference(call.case.op)(call.tensors, call.attrs, dtype=torch.float32))


ALL_CASES = [(op, kind) for op in OPS for kind in kinds(op)]


@pytest.mark.parametrize(("op", "kind"), ALL_CASES)
def test_honest_results_pass(op: str, kind: str) -> None:
    """A tolerance that refuses good arithmetic: fp32 with the op's roundings, without them, or the standard path."""
    call = call_of(op, kind)
    expected = expect(call)
    assert refused(call, expected, honest(call)) == set()
    assert refused(call, expected, expected.standard) == set()
    more_precise = reference(op)(call.tensors, call.attrs, dtype=torch.float32, rounding=False)
    assert refused(call, expected, restricted(call, more_precise)) == set()


def zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(value)


def constant(value: Tensor) -> Tensor:
    return torch.full_like(value, value.float().mean().item()) if value.is_floating_point() else torch.zeros_like(value)


def shuffled_rows(value: Tensor) -> Tensor:
    return value.roll(1, 0)


def shuffled_columns(value: Tensor) -> Tensor:
    return value.roll(1, -1)


def one_row_wrong(value: Tensor) -> Tensor:
    wrong = value.clone()
    wrong[value.shape[0] // 2] = wrong[value.shape[0] // 2] * 1.25 if value.is_floating_point() else -1
    return wrong


def one_row_missing(value: Tensor) -> Tensor:
    wrong = value.clone()
    wrong[-1] = 0
    return wrong


def one_nan(value: Tensor) -> Tensor:
    wrong = value.clone()
    wrong.view(-1)[-1] = math.nan if value.is_floating_point() else 1 << 20
    return wrong


def scaled(value: Tensor) -> Tensor:
    return (value.float() * 1.03).to(value.dtype) if value.is_floating_point() else value.flip(1)


MUTATIONS: list[Callable[[Tensor], Tensor]] = [
    zeros, constant, shuffled_rows, shuffled_columns, one_row_wrong, one_row_missing, one_nan, scaled,
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("op", list(OPS))
def test_mutations_of_any_tensor_are_refused(op: str, mutation: Callable[[Tensor], Tensor]) -> None:
    """A comparison without power: wrong numbers in one output or state tensor that pass."""
    call = call_of(op)
    expected, good = expect(call), honest(call)
    for name, value in good.items():
        assert name in refused(call, expected, good | {name: mutation(value)}), name


@pytest.mark.parametrize("op", list(OPS))
def test_echo_of_an_input_is_refused(op: str) -> None:
    """An input copied into an output or kept as the new state."""
    call = call_of(op)
    expected, good = expect(call), honest(call)
    for name, value in good.items():
        for source, tensor in call.tensors.items():
            if tensor is None or (source in call.masks.written and source != name):
                continue
            flat = tensor[call.masks.written[name]] if source == name else tensor
            if flat.numel() >= value.numel() and flat.dtype == value.dtype:
                echo = flat.reshape(-1)[: value.numel()].reshape(value.shape)
                assert name in refused(call, expected, good | {name: echo}), (name, source)


@pytest.mark.parametrize("op", list(OPS))
def test_results_of_other_inputs_are_refused(op: str) -> None:
    """Last call's output, returned for new inputs."""
    call, expected = call_of(op), expect(call_of(op))
    other = honest(make(call.case, "changed"))
    for name, value in other.items():
        assert name in refused(call, expected, honest(call) | {name: value}), name


def test_kda_state_in_bf16_is_refused() -> None:
    """A recurrent state that is kept in less than its declared precision."""
    call = call_of("kda_decode", "hold")
    good = honest(call)
    wrong = good | {"state": good["state"].bfloat16().float()}
    assert refused(call, expect(call), wrong) == {"state"}


def test_kda_state_with_swapped_axes_is_refused() -> None:
    """State stored [K, V] instead of [V, K]."""
    call = call_of("kda_decode")
    good = honest(call)
    assert refused(call, expect(call), good | {"state": good["state"].transpose(-1, -2).contiguous()}) == {"state"}


def test_kda_conv_window_off_by_one_is_refused() -> None:
    """The conv window shifted by one token."""
    call = call_of("kda_decode")
    good = honest(call)
    assert refused(call, expect(call), good | {"conv_state": good["conv_state"].roll(1, 0)}) == {"conv_state"}


@pytest.mark.parametrize("accepted", [-1, 1])
def test_kda_wrong_accepted_is_refused(accepted: int) -> None:
    """State read from the slot before or after the last accepted token."""
    call = call_of("kda_decode", batch=6, tokens=4)
    count = call.tensors["accepted"]
    assert count is not None
    shifted = {**call.tensors, "accepted": (count + accepted).clamp(1, 4)}
    results = reference("kda_decode")(shifted, call.attrs, dtype=torch.float32)
    assert "out" in refused(call, expect(call), restricted(call, results))


def test_natural_log_lse_is_refused() -> None:
    """A log-sum-exp in base e, which a merge in base 2 would silently misread."""
    call = call_of("mla_decode")
    good = honest(call)
    assert refused(call, expect(call), good | {"lse": good["lse"] * math.log(2)}) == {"lse"}


def with_attrs(call: Call, **changed: float) -> Results:
    return restricted(call, reference(call.case.op)(call.tensors, {**call.attrs, **changed}, dtype=torch.float32))


@pytest.mark.parametrize("kind", ["gaussian", "late"])
def test_off_by_one_length_is_refused(kind: str) -> None:
    """A split that ends one cached row too early: the newest token is left out."""
    call = call_of("mla_decode", kind, tokens=1, seed="0ff1")
    lens = call.tensors["seq_lens"]
    assert lens is not None
    shorter = {**call.tensors, "seq_lens": (lens - 1).clamp(min=1)}
    results = restricted(call, reference("mla_decode")(shorter, call.attrs, dtype=torch.float32))
    assert refused(call, expect(call), results)


def test_ignored_causality_of_drafts_is_refused() -> None:
    """Draft rows that attend to later drafts of the same request."""
    call = call_of("mla_decode", tokens=4)
    query = call.tensors["query"]
    assert query is not None
    last = reference("mla_decode")(
        {**call.tensors, "query": query.view(5, 4, *query.shape[1:])[:, 2].contiguous()},
        {**call.attrs, "tokens": 1},
        dtype=torch.float32,
    )
    good = honest(call)
    wrong = {name: value.clone() for name, value in good.items()}
    for name in ("out", "lse"):
        wrong[name].view(5, 4, *wrong[name].shape[1:])[:, 2] = last[name].to(wrong[name].dtype)
    assert "lse" in refused(call, expect(call), wrong)


@pytest.mark.parametrize(
    ("op", "kind", "changed"),
    [
        ("mla_decode", "gaussian", {"scale": 576**-0.5}),
        ("attn_res", "all_sources", {"sources": 0}),
        ("attn_res", "all_sources", {"round_mix": 0, "sources": 1}),
        ("kda_decode", "gaussian", {"gate_lower_bound": -4.0}),
        ("moe_front", "gaussian", {"scale": 2.0}),
        ("moe_experts", "saturated", {"beta": 3.5}),
        ("dense_mlp", "saturated", {"linear_beta": 0.0}),
        ("oproj_allreduce", "cancelling", {"restart": 1}),
    ],
)
def test_a_wrong_attribute_is_refused(op: str, kind: str, changed: dict[str, float]) -> None:
    """An attribute that the kernel ignores or that was wired to another value."""
    call = call_of(op, kind)
    assert refused(call, expect(call), with_attrs(call, **changed))


def test_bias_in_the_routing_weights_is_refused() -> None:
    """The selection bias entering the weights of the chosen experts."""
    call = call_of("moe_front", "bias_decides")
    good, bias = honest(call), call.tensors["bias"]
    assert bias is not None
    shifted = good["topk_weights"] * (1.0 + 0.1 * torch.gather(bias.expand(10, -1), 1, good["topk_ids"].long()))
    assert refused(call, expect(call), good | {"topk_weights": shifted}) == {"topk_weights"}


def test_unsorted_and_repeated_choices_are_refused() -> None:
    """Experts in another order than by score, an expert chosen twice, an id out of range."""
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.1]], dtype=torch.float64)
    slack = torch.tensor([1e-6], dtype=torch.float64)
    for ids, rule in (([1, 0], "order"), ([0, 0], "repeated"), ([0, 4], "range"), ([0, 2], "not_largest")):
        assert compare_choice(torch.tensor([ids]), scores, slack).rule == rule
    assert compare_choice(torch.tensor([[0, 1]]), scores, slack).violations == 0


def test_ties_go_to_the_lower_id_and_near_ties_are_free() -> None:
    """A tie broken upwards where ties are exact; a near-tie refused where rounding decides."""
    tied = torch.tensor([[0.5, 0.5, 0.4]], dtype=torch.float64)
    exact, near = torch.zeros(1, dtype=torch.float64), torch.full((1,), 1e-6, dtype=torch.float64)
    assert compare_choice(torch.tensor([[1, 0]]), tied, exact).rule == "tie"
    assert compare_choice(torch.tensor([[1, 0]]), tied, near).near_ties == 1
    assert compare_choice(torch.tensor([[2]]), tied, near).rule == "not_largest"


def test_nan_scores_are_chosen_last() -> None:
    """A NaN score that wins, or that hides a number."""
    scores = torch.tensor([[torch.nan, 0.2, -torch.inf, 0.9]], dtype=torch.float64)
    assert reference_choice(scores, 4).tolist() == [[3, 1, 2, 0]]
    slack = torch.full((1,), 1e-6, dtype=torch.float64)
    assert compare_choice(torch.tensor([[0, 3]]), scores, slack).violations == 1


def test_infinities_must_agree() -> None:
    """An empty shard's -inf that is a large negative number, or a NaN."""
    want = torch.tensor([[1.0, -torch.inf]], dtype=torch.float64)
    assert compare_values(torch.tensor([[1.0, -torch.inf]]), want).nonfinite == 0
    for other in (-1e30, torch.inf, torch.nan):
        assert compare_values(torch.tensor([[1.0, other]]), want).nonfinite == 1


def test_zero_rows_must_be_zero() -> None:
    """A padding row that is almost zero, invisible beside large rows."""
    want = torch.tensor([[1e3, 1e3], [0.0, 0.0]], dtype=torch.float64)
    errors = compare_values(torch.tensor([[1e3, 1e3], [0.0, 1e-6]]), want)
    assert (errors.nonzero, errors.worst) == (1, (1, 1))
    assert compare_values(torch.tensor([[1e3, 1e3], [0.0, -0.0]]), want).nonzero == 0


def test_spread_tells_what_a_constant_explains() -> None:
    """Power claimed for a tensor that a constant would match."""
    assert spread(torch.full((4, 4), 3.0)) == 0.0
    assert spread(torch.zeros(4)) == 0.0
    assert spread(torch.tensor([1.0, -1.0, 2.0, -2.0])) > 0.9


def test_tolerances_add_standard_rounding_and_floor() -> None:
    """A tolerance that is applied with another weight than recorded."""
    one = dict.fromkeys(MEASURES, 1.0)
    zero = dict.fromkeys(MEASURES, 0.0)
    assert tolerance("bf16", one, zero)["element"] == 4.0 + 2.0**-7
    assert tolerance("f32", zero, one)["mean"] == 1.0 + 2.0**-18


def test_standard_updates_states_in_place() -> None:
    """Standard results for states that are read before the update."""
    call = call_of("oproj_allreduce", "gaussian")
    copies = {name: None if t is None else t.clone() for name, t in call.tensors.items()}
    standard("oproj_allreduce")(copies, call.attrs)
    assert copies["prefix"] is not None
    assert torch.equal(expect(call).standard["prefix"], copies["prefix"])
