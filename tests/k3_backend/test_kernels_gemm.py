"""The matrix CPU kernels against the fp64 references, at every level this machine runs.

Fast tests cover both geometries, each at another level; slow ones complete the matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from attn_cases import Case, Guarded, bits, call, compare, expected
from gemm_cases import dense_mlp_case, input_projection_case, moe_experts_case, moe_front_case, oproj_case
from torch import Tensor

from k3_backend.aot.build import SCHEDULES_DIR, build, build_runtime
from k3_backend.aot.cpu.host import runnable_archs
from k3_backend.aot.cpu.launch import LaunchError, LoadedOp, Pool, Runtime
from k3_backend.geometry import Geometry, geometry

NANO, PICO = geometry("k3-nano"), geometry("k3-pico")
OPS = ("input_projection", "oproj_allreduce", "dense_mlp", "moe_front", "moe_experts")
ROWS = (1, 2, 3, 5, 8, 17, 64)
ARCHS = runnable_archs()
FAST = [("k3-pico", "x86-64-v3"), ("k3-nano", ARCHS[0])]
MATRIX = [
    pytest.param(g, a, marks=[] if (g, a) in FAST else [pytest.mark.slow])
    for g, a in itertools.product(("k3-nano", "k3-pico"), ARCHS)
]
LEVELS = pytest.mark.parametrize(("geometry_name", "arch"), MATRIX)
FORMS = pytest.mark.parametrize("form", [0, 1])
PLAIN = {"threads": 2, "in_flight": 2, "prefetch": 1}


@lru_cache
def kernel(op: str, geometry_name: str, arch: str) -> LoadedOp:
    g = geometry(geometry_name)
    return LoadedOp(build(op, arch, g), g, SCHEDULES_DIR / "cpu" / g.name / f"{op}.toml")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Runtime(build_runtime()).pool(2)
    yield pool
    pool.close()


def points(op: LoadedOp) -> list[dict[str, int]]:
    """Every combination of declared tunable values."""
    names = [t.name for t in op.tunables]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(t.values for t in op.tunables))]


def case_of(op: str, g: Geometry, rows: int, seed: int = 0) -> Case:
    """A call of `rows` rows; the seed also picks among the op's variants."""
    if op == "input_projection":
        return input_projection_case(g, rows, seed)
    if op == "oproj_allreduce":
        return oproj_case(g, rows, seed, ranks=1 + seed % 3, restart=bool(seed // 3 % 2))
    if op == "dense_mlp":
        return dense_mlp_case(g, rows, seed, linear_beta=(25.0, 0.0)[seed % 2])
    if op == "moe_front":
        return moe_front_case(g, rows, seed)
    return moe_experts_case(g, rows, seed, mxfp4=bool(seed % 2))


def check(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Floating results within their rounding, integers equal."""
    for name in [name for name in want if not want[name].is_floating_point()]:
        assert torch.equal(got[name], want[name].to(got[name].dtype)), name
        got, want = ({k: v for k, v in side.items() if k != name} for side in (got, want))
    compare(got, want)


@LEVELS
@pytest.mark.parametrize("op", OPS)
def test_every_declared_tunable_value_is_right(op: str, geometry_name: str, arch: str, pool: Pool) -> None:
    """A tuner may pick any declared point: each must be right, and only the form may change bits."""
    loaded = kernel(op, geometry_name, arch)
    for rows, seed in ((1, 0), (5, 1), (19, 2), (50, 3)):
        case = case_of(op, geometry(geometry_name), rows, seed)
        want = expected(case)
        seen: dict[int, dict[str, Tensor]] = {}
        for point in points(loaded):
            got = call(loaded, pool, case, point)
            if point["form"] not in seen:
                check(got, want)
            first = seen.setdefault(point["form"], got)
            assert all(torch.equal(bits(got[name]), bits(first[name])) for name in got), f"bits differ at {point}"


@LEVELS
@pytest.mark.parametrize("op", OPS)
def test_shapes_agree_with_the_reference(op: str, geometry_name: str, arch: str, pool: Pool) -> None:
    """Row counts that fill no panel or need several blocks of 64, under the committed schedule."""
    for seed, rows in enumerate((*ROWS, 130)):
        case = case_of(op, geometry(geometry_name), rows, seed)
        check(call(kernel(op, geometry_name, arch), pool, case), expected(case))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_row_count_agrees_with_the_reference(op: str, pool: Pool) -> None:
    """A tail of a panel, of a block or of a worker's share that only one row count reaches."""
    for rows in (*range(1, 68), 128, 129, 512):
        for form in (0, 1):
            case = case_of(op, PICO, rows, rows)
            got = call(kernel(op, PICO.name, ARCHS[0]), pool, case, {**PLAIN, "form": form})
            check(got, expected(case))


@FORMS
@pytest.mark.parametrize("op", OPS)
def test_repeated_calls_give_the_same_bits(op: str, form: int, pool: Pool) -> None:
    """A race between workers, or a read of leftover scratch, shows as bits that change from run to run."""
    loaded = kernel(op, PICO.name, ARCHS[0])
    for rows in (5, 130):
        case = case_of(op, PICO, rows, 2)
        first = call(loaded, pool, case, {**PLAIN, "form": form})
        for _ in range(20):
            again = call(loaded, pool, case, {**PLAIN, "form": form})
            assert all(torch.equal(bits(again[name]), bits(first[name])) for name in first)


def row_inputs(op: str) -> dict[str, int]:
    """Inputs with one row per token, and the dimension of their rows."""
    names = {
        "input_projection": {"x": 0}, "dense_mlp": {"x": 0}, "oproj_allreduce": {"x": 1, "prefix": 0},
        "moe_front": {"x": 0}, "moe_experts": {"x": 0, "latent": 0, "topk_ids": 0, "topk_weights": 0},
    }  # fmt: skip
    return names[op]


@LEVELS
@FORMS
@pytest.mark.parametrize("op", OPS)
def test_a_token_does_not_depend_on_its_neighbours(
    op: str, form: int, geometry_name: str, arch: str, pool: Pool
) -> None:
    """A token's bits alone equal its bits in a batch whose other rows are NaN or infinite, as padding may be."""
    g, point = geometry(geometry_name), {**PLAIN, "form": form}
    batch = case_of(op, g, 20)
    keep = 17
    alone = case_of(op, g, 1)
    for name, tensor in batch.tensors.items():
        dim = row_inputs(op).get(name)
        if tensor is None or (dim is None and name in alone.tensors and alone.tensors[name] is None):
            continue
        if dim is not None:
            alone.tensors[name] = tensor.narrow(dim, keep, 1).contiguous()
            for row, poison in enumerate(([torch.nan, torch.inf, -torch.inf, 3e38] * 5)[:20]):
                if row != keep and tensor.is_floating_point():
                    tensor.select(dim, row).fill_(poison)
        elif op != "moe_front" or not name.startswith(("topk", "latent")):
            alone.tensors[name] = tensor if name != "out" else torch.full_like(tensor[:1], torch.nan)
    together = call(kernel(op, geometry_name, arch), pool, batch, point)
    single = call(kernel(op, geometry_name, arch), pool, alone, point)
    for name, value in single.items():
        assert torch.equal(bits(value[0]), bits(together[name][keep])), name
        assert bool(torch.isfinite(value.float()).all())


@FORMS
def test_selection_breaks_ties_by_id_and_puts_nan_last(form: int, pool: Pool) -> None:
    """Equal scores, -inf and NaN keys: an unstable or NaN-blind selection picks others, or an id out of range."""
    for arch, g in ((ARCHS[0], NANO), ("x86-64-v3", PICO)):
        case = moe_front_case(g, 18)
        gate, bias, x = (case.tensors[name] for name in ("w_gate", "bias", "x"))
        assert gate is not None
        assert bias is not None
        assert x is not None
        gate[3:9] = gate[3]
        bias[3:9] = 0.25
        bias[9], bias[10], bias[11], bias[12] = torch.nan, -torch.inf, torch.inf, torch.nan
        x[5] = 0
        x[6, 0] = torch.nan
        got = call(kernel("moe_front", g.name, arch), pool, case, {**PLAIN, "form": form})
        want = expected(case)
        check(got, want)
        assert got["topk_ids"][6].tolist() == list(range(g.top_k))
        assert got["topk_ids"][5].tolist()[0] == 11


@FORMS
@pytest.mark.parametrize("arch", ["x86-64-v3", ARCHS[0]])
def test_only_selectable_ids_reach_weights(form: int, arch: str, pool: Pool) -> None:
    """Ids come from activations: one outside the experts must add nothing and must not become an address."""
    case, clean = moe_experts_case(PICO, 6), moe_experts_case(PICO, 6)
    ids, chosen, weights = case.tensors["topk_ids"], clean.tensors["topk_ids"], clean.tensors["topk_weights"]
    assert ids is not None
    assert chosen is not None
    assert weights is not None
    for token, slot, wild in ((0, 0, -1), (1, 2, PICO.experts), (2, 1, 2**31 - 1), (3, 3, -(2**31))):
        ids[token, slot] = wild
        weights[token, slot] = 0
    ids[4], weights[4] = -1, 0
    loaded, point = kernel("moe_experts", PICO.name, arch), {**PLAIN, "form": form}
    check(call(loaded, pool, case, point), expected(clean))


@FORMS
@pytest.mark.parametrize("mxfp4", [False, True])
def test_all_tokens_may_choose_one_expert(form: int, mxfp4: bool, pool: Pool) -> None:
    """An expert with more pairs than one pass takes, the same id in every slot: pairs lost at the pass's border."""
    case = moe_experts_case(NANO, 40, mxfp4=mxfp4)
    ids = case.tensors["topk_ids"]
    assert ids is not None
    ids[:] = 5
    ids[7] = torch.arange(NANO.top_k)
    got = call(kernel("moe_experts", NANO.name, ARCHS[0]), pool, case, {**PLAIN, "form": form})
    check(got, expected(case))


Break = Callable[[dict[str, Any]], None]


def _absent(tensors: dict[str, Any]) -> None:
    tensors["w13"] = None


def _narrow(tensors: dict[str, Any]) -> None:
    tensors["x"] = tensors["x"][:, :, :48].contiguous()
    tensors["w"] = tensors["w"][:, :, :48].contiguous()


def _rows_of_w(tensors: dict[str, Any]) -> None:
    tensors["w"] = tensors["w"][:-8].contiguous()
    tensors["out"] = tensors["out"][:, :-8].contiguous()


@pytest.mark.parametrize(
    ("op", "broken", "message"),
    [
        ("input_projection", _rows_of_w, "multiple of 16"),
        ("oproj_allreduce", _narrow, "multiple of 32"),
        ("moe_experts", _absent, "absent"),
    ],
)
def test_shapes_that_no_tile_fits_are_refused(op: str, broken: Break, message: str, pool: Pool) -> None:
    """A call that binds but that the kernel cannot take must fail by name and write nothing."""
    case = case_of(op, PICO, 3)
    broken(case.tensors)
    guarded = Guarded(case)
    with pytest.raises(LaunchError, match=message):
        kernel(op, PICO.name, ARCHS[0])(pool, guarded.tensors, case.attrs, rows=3)
    guarded.check()
    for name, tensor in guarded.tensors.items():
        original = case.tensors[name]
        assert tensor is None or (original is not None and torch.equal(bits(tensor), bits(original)))


def test_another_top_k_is_refused(pool: Pool) -> None:
    """top_k is compiled in: an attribute that says otherwise must not be ignored."""
    case = moe_front_case(PICO, 2)
    case.attrs["top_k"] = PICO.top_k + 1
    with pytest.raises(LaunchError, match="top_k"):
        call(kernel("moe_front", PICO.name, ARCHS[0]), pool, case)
