"""Evaluator-made inputs: reproducible from the case, different between seeds, true to the interface and the masks."""

from __future__ import annotations

import pytest
import torch

from k3_backend.ops import OPS
from k3_backend.ops.registry import reference
from verify.evaluator.execute import as_tensor, expect, measure
from verify.evaluator.inputs import CAPTURED, Call, Case, kinds, make, smallest_batch
from verify.evaluator.plan import draw_plan, from_json

GEOMETRY = "k3-pico"


def case(op: str, kind: str, batch: int = 3, tokens: int = 2, seed: str = "5eed") -> Case:
    return Case(op, kind, batch, tokens, 1, seed, GEOMETRY)


def equal(a: Call, b: Call, name: str) -> bool:
    x, y = a.tensors[name], b.tensors[name]
    assert x is not None
    assert y is not None
    return torch.equal(torch.nan_to_num(x.float()), torch.nan_to_num(y.float()))


@pytest.mark.parametrize(("op", "kind"), [(op, kind) for op in OPS for kind in kinds(op)])
def test_every_class_is_reproducible_and_secret(op: str, kind: str) -> None:
    """Evidence that cannot be replayed from its seed, or inputs that do not depend on the seed."""
    one, same, other = make(case(op, kind)), make(case(op, kind)), make(case(op, kind, seed="0ther"))
    present = [name for name, tensor in one.tensors.items() if tensor is not None]
    assert all(equal(one, same, name) for name in present)
    assert one.attrs == same.attrs
    shapes = {name: t.shape for name, t in one.tensors.items() if t is not None}
    drawn = [n for n in present if OPS[op].tensor(n).role == "activation" and shapes[n] == _shape(other, n)]
    assert not drawn or not all(equal(one, other, name) for name in drawn)


def _shape(call: Call, name: str) -> torch.Size | None:
    tensor = call.tensors[name]
    return None if tensor is None else tensor.shape


@pytest.mark.parametrize(("op", "kind"), [(op, kind) for op in OPS for kind in kinds(op)])
def test_a_replay_keeps_what_is_bound(op: str, kind: str) -> None:
    """A replay with changed contents whose shapes or attributes differ from the bound call's."""
    one, changed = make(case(op, kind)), make(case(op, kind), "changed")
    assert one.attrs == changed.attrs
    assert [_shape(one, n) for n in one.tensors] == [_shape(changed, n) for n in changed.tensors]


@pytest.mark.parametrize(("op", "kind"), [(op, kind) for op in OPS for kind in kinds(op)])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (5, 2)])
def test_free_parts_do_not_matter_and_fixed_parts_stay(op: str, kind: str, batch: int, tokens: int) -> None:
    """A mask that poisons something the definition reads, or that forbids something it writes."""
    call = make(case(op, kind, batch, tokens))
    poisoned = {name: None if t is None else t.clone() for name, t in call.tensors.items()}
    for name, free in call.masks.free.items():
        tensor = poisoned[name]
        assert tensor is not None
        if tensor.dtype == torch.float8_e4m3fn:  # which torch does not index; 127 is NaN
            tensor.view(torch.uint8)[free] = 127
        else:
            tensor[free] = float("nan")
    clean, dirty = reference(op)(call.tensors, call.attrs), reference(op)(poisoned, call.attrs)
    for name in call.outputs:
        assert torch.equal(torch.nan_to_num(clean[name], nan=123.0), torch.nan_to_num(dirty[name], nan=123.0)), name
    for spec in OPS[op].tensors:
        before = poisoned.get(spec.name)
        if spec.role == "state" and before is not None:
            written = call.masks.written[spec.name]
            assert torch.equal(clean[spec.name][written], dirty[spec.name][written])
            left = dirty[spec.name][~written]
            assert torch.equal(torch.nan_to_num(left), torch.nan_to_num(before.to(left.dtype)[~written]))


def test_kda_slots_are_scattered_and_padding_is_mixed_in() -> None:
    """Contiguous slots, under which a kernel that ignores the slot table is right."""
    slots = make(case("kda_decode", "gaussian", 8, 4)).tensors["slots"]
    assert slots is not None
    assert len(slots.unique()) == slots.numel()
    assert not torch.equal(slots.flatten().sort().values, slots.flatten())
    padded = make(case("kda_decode", "padding", 8, 4)).tensors["slots"]
    assert padded is not None
    null = padded[:, 0] <= 0
    assert 0 < int(null.sum()) < 8
    assert (padded[~null][:, 0] > 0).all()


def test_mla_lengths_reach_the_borders() -> None:
    """Lengths that never are 0, nor around a page border, nor long."""
    seen: set[str] = set()
    longest = 0
    for at in range(12):
        call = make(case("mla_decode", "ragged", 7, 1, f"{at:x}"))
        cache, lens = call.tensors["kv_cache"], call.tensors["seq_lens"]
        assert cache is not None
        assert lens is not None
        page = cache.shape[1]
        longest = max(longest, int(lens.max()))
        seen |= {"empty" if n == 0 else "one" if n == 1 else f"{n % page}" for n in lens.tolist()}
    assert {"empty", "one", "0", "1"} <= seen
    assert longest > 1_000


def test_shards_can_be_empty() -> None:
    """A DCP shard without any position that is never tried."""
    dead = 0
    for at in range(20):
        call = make(case("mla_decode", "sharded", 6, 1, f"{at:x}"))
        dead += int((reference("mla_decode")(call.tensors, call.attrs)["lse"] == -torch.inf).any())
    assert dead > 0


def test_exact_ties_are_exact_in_f32_in_any_order() -> None:
    """Tied router scores that differ by rounding, where no rule can be demanded."""
    call = make(case("moe_front", "exact_ties", 16, 1))
    x, gate = call.tensors["x"], call.tensors["w_gate"]
    assert x is not None
    assert gate is not None
    exact = x.double() @ gate.double().T
    for order in (torch.arange(x.shape[1]), torch.randperm(x.shape[1])):
        logits = x.float()[:, order] @ gate.float()[:, order].T
        assert torch.equal(logits.double(), exact)
    assert any(len(row.unique()) < len(row) for row in exact)


def test_captured_inputs_come_from_mid_decode() -> None:
    """Captured states that are still zero."""
    call = make(case("kda_decode", CAPTURED, 3, 2))
    state, slots, accepted = call.tensors["state"], call.tensors["slots"], call.tensors["accepted"]
    assert state is not None
    assert slots is not None
    assert accepted is not None
    for ids, kept in zip(slots.tolist(), accepted.tolist(), strict=True):
        assert state[ids[kept - 1]].abs().max() > 0


def test_the_plan_covers_classes_batches_tokens_edges_and_secret_batches() -> None:
    """A batch, class or schedule bucket that the gate never runs."""
    plan = draw_plan(
        ["kda_decode"],
        geometry=GEOMETRY,
        batches=(1, 8, 64),
        tokens=(1, 2, 4, 8),
        draws=4,
        edges={"kda_decode": [2, 96]},
    )
    cases = [planned.case for planned in plan]
    assert all(sum(c.kind == kind for c in cases) >= 4 for kind in kinds("kda_decode"))
    assert {(1, 1), (8, 1), (64, 1)} <= {(c.batch, c.tokens) for c in cases}
    assert {1, 2, 4, 8} <= {c.tokens for c in cases}
    assert {2, 3, 96} <= {c.rows for c in cases}
    assert {1, 2} == {c.threads for c in cases}
    assert len({c.id for c in cases}) == len(cases)
    assert [from_json(planned.to_json()) for planned in plan] == plan
    again = draw_plan(["kda_decode"], geometry=GEOMETRY, batches=(1,), tokens=(1,), draws=1, edges={})
    assert {c.seed for c in cases}.isdisjoint(planned.case.seed for planned in again)


def test_classes_are_drawn_at_batches_that_show_them() -> None:
    """Padding without a null request, or with nothing but null requests: the class is there in name only."""
    for _ in range(40):
        for op in ("kda_decode", "mla_query", "mla_decode", "mla_value"):
            plan = draw_plan([op], geometry=GEOMETRY, batches=(1, 2), tokens=(1, 8), draws=1, edges={op: [2]})
            assert all(p.case.batch >= smallest_batch(p.case.kind) for p in plan)
    for seed in range(60):
        call = make(case("kda_decode", "padding", 2 + seed % 2, 1 + seed % 3, seed=str(seed)))
        slots = call.tensors["slots"]
        assert slots is not None
        null = (slots <= 0).all(1)
        assert null.any()
        assert not null.all()
        assert slots.shape[1] == 1 or (slots[~null] <= 0).any(), "a token whose state nobody wants"
        mapping = make(case("mla_query", "padding", 2, 1, seed=str(seed))).tensors["slot_mapping"]
        assert mapping is not None
        assert sorted((mapping < 0).tolist()) == [False, True]


def test_every_batch_can_be_drawn() -> None:
    """Batches between the declared ones that are out of reach of the secret draw."""
    drawn = {
        planned.case.batch
        for _ in range(60)
        for planned in draw_plan(["input_projection"], geometry=GEOMETRY, batches=(1,), tokens=(1,), draws=1, edges={})
    }
    assert len(drawn) > 45
    assert max(drawn) <= 64


@pytest.mark.parametrize("op", ["mla_query", "mla_decode"])
def test_e4m3_caches_saturate_and_go_subnormal(op: str) -> None:
    """Scales under which no byte reaches either end of the format, where conversions go wrong."""
    ends: set[str] = set()
    for at in range(40):
        call = make(case(op, "e4m3", 3, 1, f"{at:x}"))
        assert call.tensors["kv_cache"] is None
        assert call.attrs["cache_format"] == 1
        written = reference(op)(call.tensors, call.attrs) if op == "mla_query" else call.tensors
        cache = written["kv_cache_e4m3"]
        assert cache is not None
        size = cache.double().abs()
        ends |= {"largest"} if bool((size == 448).any()) else set()
        ends |= {"subnormal"} if bool(((size > 0) & (size < 2.0**-6)).any()) else set()
    assert ends == {"largest", "subnormal"}


def test_e4m3_results_are_measured_by_value_with_the_format_s_own_floor() -> None:
    """Bytes compared as integers, or held to the floor of fp32."""
    call = make(case("mla_query", "e4m3", 3, 1))
    expected = expect(call)
    got = dict(expected.standard)
    got["kv_cache_e4m3"] = as_tensor(got["kv_cache_e4m3"].view(torch.uint8).numpy(), "e4m3")
    rows = {row["tensor"]: row for row in measure(call, expected, got, "first")[0]}
    row = rows["kv_cache_e4m3"]
    assert row["dtype"] == "e4m3"
    assert row["candidate"] == row["standard"]
    assert row["tolerance"]["element"] >= 2.0**-3
    assert row["tolerance"]["mean"] < 0.05
