"""Calls of the attention-side ops for kernel tests: seeded arguments with poison, run inside guarded memory.

Whatever an op must not read is NaN: outputs before the call, state slots and cache rows that no request of the call
owns, and the launcher's scratch. Every argument lies between canaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_backend.aot.cpu.launch import LoadedOp, Pool
from k3_backend.geometry import Geometry
from k3_backend.ops.registry import reference

BF16 = torch.bfloat16
NAN = float("nan")
_GUARD_BYTES = 256
_CANARY = 0xA5


@dataclass(frozen=True)
class Case:
    """Arguments of one call: tensors by name, attributes, and rows M."""

    op: str
    tensors: dict[str, Tensor | None]
    attrs: dict[str, int | float]
    rows: int


class _Draw:
    """Seeded random tensors."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype = BF16) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale + mean).to(dtype)

    def integers(self, low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=self._generator).int()

    def chosen(self, count: int, of: int) -> Tensor:
        """`count` different ids in [1, of): 0 is the null slot or page."""
        return (torch.randperm(of - 1, generator=self._generator)[:count] + 1).int()


def kda_case(
    g: Geometry, batch: int, tokens: int, seed: int = 0, null: Sequence[int] = (), extra_taps: int = 0
) -> Case:
    """KDA decode; requests in `null` have no slots, and of live ones every second lacks a slot for its last token."""
    draw = _Draw(seed)
    pool = batch * tokens + 2
    taps, width = tokens + 2 + extra_taps, g.kda_width
    slots = draw.chosen(batch * tokens, pool).view(batch, tokens)
    accepted = draw.integers(1, tokens + 1, batch)
    for b in range(batch):
        if b in null:
            slots[b], accepted[b] = 0, 99  # nothing may be concluded from `accepted` of a null request
        elif b % 2 and int(accepted[b]) != tokens:
            slots[b, tokens - 1] = -1
    conv_state = draw.normal(pool, taps, 3 * width)
    state = draw.normal(pool, g.heads, g.kda_head_dim, g.kda_head_dim, dtype=torch.float32)
    owned = {int(slot) for slot in slots.flatten() if slot > 0}
    for slot in set(range(pool)) - owned:
        conv_state[slot], state[slot] = NAN, NAN
    tensors: dict[str, Tensor | None] = {
        "proj": draw.normal(batch * tokens, g.kda_proj_rows),
        "conv_w": draw.normal(3 * width, g.conv_width, scale=0.5, dtype=torch.float32),
        "f_b": draw.normal(width, g.kda_gate_rank, scale=g.kda_gate_rank**-0.5),
        "a_log": draw.normal(g.heads, dtype=torch.float32),
        "dt_bias": draw.normal(g.heads, g.kda_head_dim, dtype=torch.float32),
        "o_norm": draw.normal(g.kda_head_dim, scale=0.1, mean=1.0),
        "slots": slots,
        "accepted": accepted,
        "conv_state": conv_state,
        "state": state,
        "out": torch.full((batch * tokens, width), NAN, dtype=BF16),
    }
    attrs = {"gate_lower_bound": g.gate_lower_bound, "eps": g.eps, "l2_eps": g.l2_eps}
    return Case("kda_decode", tensors, attrs, batch * tokens)


def attn_res_case(
    g: Geometry, rows: int, seed: int = 0, *, delta: bool = True, write: int = -1, sources: int = 1, final: bool = False
) -> Case:
    """AttnRes site; saved rows that neither enter the mix nor are written hold NaN."""
    draw = _Draw(seed)
    blocks = draw.normal(rows, g.attn_res_blocks, g.hidden)
    blocks[:, sources:] = NAN
    tensors: dict[str, Tensor | None] = {
        "prefix": draw.normal(rows, g.hidden),
        "delta": draw.normal(rows, g.hidden) if delta else None,
        "blocks": blocks,
        "res_norm": draw.normal(g.hidden, scale=0.1, mean=1.0),
        "res_proj": draw.normal(g.hidden, scale=0.2),
        "out_norm": draw.normal(g.hidden, scale=0.1, mean=1.0),
        "out": torch.full((rows, g.hidden), NAN, dtype=BF16),
    }
    attrs: dict[str, int | float] = {
        "add_delta": int(delta), "write_block": write, "sources": sources, "round_mix": int(final), "eps": g.eps,
    }  # fmt: skip
    return Case("attn_res", tensors, attrs, rows)


def mla_query_case(g: Geometry, rows: int, seed: int = 0, page: int = 16) -> Case:
    """MLA query and cache insert; every third token writes no cache row."""
    draw = _Draw(seed)
    pages = rows // page + 3
    target = (draw.chosen(rows, pages * page)).long()
    target[2::3] = -1
    q_rows = g.heads * (g.nope + g.pe)
    tensors: dict[str, Tensor | None] = {
        "proj": draw.normal(rows, g.mla_proj_rows),
        "q_norm": draw.normal(g.q_lora, scale=0.1, mean=1.0),
        "kv_norm": draw.normal(g.kv_lora, scale=0.1, mean=1.0),
        "w_qb": draw.normal(q_rows, g.q_lora, scale=g.q_lora**-0.5),
        "w_uk_t": draw.normal(g.heads, g.nope, g.kv_lora, scale=g.nope**-0.5),
        "slot_mapping": target,
        "query": torch.full((rows, g.heads, g.mla_row), NAN, dtype=BF16),
        "kv_cache": torch.full((pages, page, g.mla_row), NAN, dtype=BF16),
    }
    return Case("mla_query", tensors, {"eps": g.eps, "cache_format": 0, "k_scale": 1.0}, rows)


def local_rows(length: int, rank: int, size: int, interleave: int) -> int:
    """How many of the first `length` positions live on a shard."""
    return sum(1 for x in range(length) if (x // interleave) % size == rank)


def mla_decode_case(
    g: Geometry, lengths: Sequence[int], tokens: int = 1, page: int = 16, seed: int = 0,
    shard: tuple[int, int, int] = (0, 1, 1),
) -> Case:  # fmt: skip
    """MLA decode core; `shard` is (rank, size, interleave). Rows beyond a request's own hold NaN."""
    draw = _Draw(seed)
    batch = len(lengths)
    owned = [local_rows(length, *shard) for length in lengths]
    width = max(-(-max(owned) // page), 1) + 1
    table = draw.chosen(batch * width, batch * width + 2).view(batch, width)
    cache = torch.full((batch * width + 2, page, g.mla_row), NAN, dtype=BF16)
    for b, rows in enumerate(owned):
        flat = draw.normal(width * page, g.mla_row)
        flat[rows:] = NAN
        cache[table[b].long()] = flat.view(width, page, g.mla_row)
    tensors: dict[str, Tensor | None] = {
        "query": draw.normal(batch * tokens, g.heads, g.mla_row),
        "kv_cache": cache,
        "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "out": torch.full((batch * tokens, g.heads, g.kv_lora), NAN, dtype=BF16),
        "lse": torch.full((batch * tokens, g.heads), NAN),
    }
    attrs: dict[str, int | float] = {
        "tokens": tokens, "scale": (g.nope + g.pe) ** -0.5, "dcp_rank": shard[0], "dcp_size": shard[1],
        "interleave": shard[2], "kv_lora": g.kv_lora, "cache_format": 0, "k_scale": 1.0,
    }  # fmt: skip
    return Case("mla_decode", tensors, attrs, batch * tokens)


def mla_value_case(g: Geometry, rows: int, shards: int = 1, seed: int = 0) -> Case:
    """Merge, W_UV and gate; some sources of some rows are empty or broken and hold NaN, one row has none at all."""
    draw = _Draw(seed)
    partial = draw.normal(shards, rows, g.heads, g.kv_lora)
    lse = draw.normal(shards, rows, g.heads, scale=3.0, dtype=torch.float32)
    proj = draw.normal(rows, g.mla_proj_rows)
    if shards > 1:
        for shard, useless in enumerate((-torch.inf, torch.inf, NAN)[:shards]):
            lse[shard, shard % rows], partial[shard, shard % rows] = useless, NAN
    if rows > 4:
        lse[:, 4], partial[:, 4], proj[4] = -torch.inf, NAN, NAN
    tensors: dict[str, Tensor | None] = {
        "partial": partial,
        "lse": lse,
        "proj": proj,
        "w_uv": draw.normal(g.heads, g.v_dim, g.kv_lora, scale=g.kv_lora**-0.5),
        "out": torch.full((rows, g.mla_width), NAN, dtype=BF16),
    }
    return Case("mla_value", tensors, {"gate_offset": g.q_lora + g.mla_row}, rows)


def expected(case: Case) -> dict[str, Tensor]:
    """The fp64 reference's results. NaN there marks what nobody owns."""
    tensors = dict(case.tensors)
    slots, accepted = tensors.get("slots"), tensors.get("accepted")
    if slots is not None and accepted is not None:  # the reference indexes with `accepted` even where a request is null
        tensors["accepted"] = torch.where(slots[:, 0] > 0, accepted, 1)
    return reference(case.op)(tensors, case.attrs)


class Guarded:
    """Aligned copies of a case's tensors, each between canaries."""

    def __init__(self, case: Case) -> None:
        self._memory: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor | None] = {}
        for name, tensor in case.tensors.items():
            self.tensors[name] = None if tensor is None else self._place(name, tensor)

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        memory = torch.full((size + 2 * _GUARD_BYTES + 64,), _CANARY, dtype=torch.uint8)
        start = _GUARD_BYTES + (-(memory.data_ptr() + _GUARD_BYTES)) % 64
        memory = memory[start - _GUARD_BYTES : start + size + _GUARD_BYTES]
        self._memory[name] = memory
        placed = memory[_GUARD_BYTES : _GUARD_BYTES + size].view(tensor.dtype).view(tensor.shape)
        return placed.copy_(tensor)

    def check(self) -> None:
        for name, memory in self._memory.items():
            for guard in (memory[:_GUARD_BYTES], memory[-_GUARD_BYTES:]):
                assert bool((guard == _CANARY).all()), f"{name}: written outside its bounds"


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().view(torch.uint8)


def call(
    op: LoadedOp, pool: Pool, case: Case, tunables: Mapping[str, int] | None = None,
    before: Callable[[Guarded], object] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Run one call and return what it may write; everything else must be as it was."""
    guarded = Guarded(case)
    if before:
        before(guarded)
    pool.scratch[:] = 0xFF  # NaN in every floating type
    op(pool, guarded.tensors, case.attrs, rows=case.rows, tunables=tunables)
    guarded.check()
    written = {t.name for t in op.spec.tensors if t.role in ("output", "state")}
    for name, tensor in guarded.tensors.items():
        original = case.tensors[name]
        if tensor is not None and original is not None and name not in written:
            assert torch.equal(bits(tensor), bits(original)), f"{name} is read-only and was changed"
    return {name: tensor for name, tensor in guarded.tensors.items() if name in written and tensor is not None}


# Largest error by output, as a part of the largest expected value, and as a part of the L2 norm. Both sides round to
# bf16 where the op says so: where fp32 and fp64 sums fall on different sides of a rounding boundary, an element differs
# by one unit in the last place (2^-7 at most), which the first bound allows and the second keeps rare.
_MAX_ERROR = {"state": 2e-2, "lse": 1e-6}
_L2_ERROR = {"state": 1e-3, "lse": 1e-6}


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Every element of every result is as expected, and what nobody owns is untouched."""
    assert set(got) == set(want)
    for name, reference_value in want.items():
        value = got[name].double()
        assert torch.equal(torch.isnan(value), torch.isnan(reference_value)), f"{name}: other elements are NaN"
        finite = torch.isfinite(reference_value)
        rest = ~finite & ~torch.isnan(reference_value)
        assert torch.equal(value[rest], reference_value[rest]), f"{name}: other infinities"
        if not bool(finite.any()):
            continue
        error = value[finite] - reference_value[finite]
        largest, norm = reference_value[finite].abs().max(), reference_value[finite].norm()
        assert float(error.abs().max()) <= _MAX_ERROR.get(name, 2**-7) * float(largest), f"{name}: {error.abs().max()}"
        assert float(error.norm()) <= _L2_ERROR.get(name, 1e-3) * float(norm), f"{name}: L2 {error.norm() / norm}"
