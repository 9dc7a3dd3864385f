"""Distinct inputs of a cell's calls, made on the GPU: enough sets that no cache holds what a call reads.

Values are random and of the size that the model has (weights scaled by their fan-in). Outputs belong to the arms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_backend.aot.arguments import TENSOR_ALIGNMENT
from k3_backend.geometry import Geometry, geometry
from verify.bench.gpu.arm import Inputs, Tensors
from verify.bench.gpu.cells import PAGE, PeerCell, moved_bytes

__all__ = ["MIN_SETS", "ROTATED_BYTES", "make_inputs", "sets_for"]

ROTATED_BYTES = 420_000_000
"""What the calls of one graph touch together: seven times the 60 MB of an H200's L2."""
MIN_SETS = 8
MAX_SETS = 2048
_BF16, _F32, _I32, _I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def sets_for(cell: PeerCell) -> int:
    """Sets that a cell needs. A call that alone overflows every cache needs no eight of them: two alternate."""
    touched = sum(moved_bytes(cell))
    if touched > ROTATED_BYTES:
        return 2
    return max(MIN_SETS, min(MAX_SETS, -(-ROTATED_BYTES // touched)))


def make_inputs(cell: PeerCell, sets: int, seed: int) -> Inputs:
    """Random inputs.

    Args:
        cell: which call.
        sets: how many, all distinct.
        seed: of torch's generator.
    """
    maker = _Maker(cell, geometry(cell.geometry), sets, seed)
    tensors, attrs = getattr(maker, cell.op)()
    return Inputs(cell, maker.g, tensors, attrs)


def _aligned(stacked: Tensor) -> list[Tensor]:
    """The sets of [sets, ...], moved apart where one would not begin at a multiple of the launcher's alignment."""
    count, step = stacked[0].numel(), TENSOR_ALIGNMENT // stacked.element_size()
    room = -(-count // step) * step
    if room == count:
        return list(stacked.unbind())
    apart = stacked.new_empty(len(stacked), room)
    apart[:, :count] = stacked.flatten(1)
    return [row[:count].view(stacked.shape[1:]) for row in apart]


class _Maker:
    """One method per op; each tensor of all sets is one allocation."""

    def __init__(self, cell: PeerCell, g: Geometry, sets: int, seed: int) -> None:
        self.cell, self.g, self.sets = cell, g, sets
        self.random = torch.Generator(device="cuda").manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = _BF16, scale: float = 1.0) -> Tensor:
        """[sets, *shape] normal values of deviation `scale`."""
        drawn = torch.empty(self.sets, *shape, dtype=dtype, device="cuda")
        return drawn.normal_(std=scale, generator=self.random)

    def split(self, **stacked: Tensor) -> list[Tensors]:
        """Set after set, each tensor at an address that a launch accepts."""
        parts = {name: _aligned(tensor) for name, tensor in stacked.items()}
        return [{name: tensors[i] for name, tensors in parts.items()} for i in range(self.sets)]

    def input_projection(self) -> tuple[list[Tensors], dict[str, int | float]]:
        g, cell = self.g, self.cell
        n = g.mla_proj_rows if cell.site == "mla" else g.kda_proj_rows
        x = self.normal(cell.rows, g.hidden)
        return self.split(x=x, w=self.normal(n, g.hidden, scale=g.hidden**-0.5)), {}

    def kda_decode(self) -> tuple[list[Tensors], dict[str, int | float]]:
        """Slots are a random order of the pool's; slot 0 is the null slot."""
        g, cell = self.g, self.cell
        pool, channels = cell.rows + 1, 3 * g.kda_width
        order = torch.rand(self.sets, cell.rows, device="cuda", generator=self.random).argsort(1) + 1
        uniform = torch.rand(self.sets, g.heads, device="cuda", generator=self.random)
        sets = self.split(
            proj=self.normal(cell.rows, g.kda_proj_rows),
            conv_w=self.normal(channels, g.conv_width, dtype=_F32, scale=0.5),
            f_b=self.normal(g.kda_width, g.kda_gate_rank, scale=g.kda_gate_rank**-0.5),
            a_log=torch.log(1.0 + 15.0 * uniform),
            dt_bias=self.normal(g.heads, g.kda_head_dim, dtype=_F32),
            o_norm=self.normal(g.kda_head_dim, scale=0.1) + 1,
            slots=order.to(_I32).view(self.sets, cell.batch, cell.tokens),
            accepted=torch.ones(self.sets, cell.batch, dtype=_I32, device="cuda"),
            conv_state=self.normal(pool, cell.tokens + 2, channels),
            state=self.normal(pool, g.heads, g.kda_head_dim, g.kda_head_dim, dtype=_F32, scale=0.5),
        )
        return sets, {"gate_lower_bound": g.gate_lower_bound, "eps": g.eps, "l2_eps": g.l2_eps}

    def attn_res(self) -> tuple[list[Tensors], dict[str, int | float]]:
        """A site that adds its delta and saves no row."""
        g, cell = self.g, self.cell
        assert cell.sources is not None
        sets = self.split(
            prefix=self.normal(cell.rows, g.hidden),
            delta=self.normal(cell.rows, g.hidden, scale=0.01),
            blocks=self.normal(cell.rows, g.attn_res_blocks, g.hidden),
            res_norm=self.normal(g.hidden, scale=0.1) + 1,
            res_proj=self.normal(g.hidden, scale=g.hidden**-0.5),
            out_norm=self.normal(g.hidden, scale=0.1) + 1,
        )
        attrs = {"add_delta": 1, "write_block": -1, "sources": cell.sources, "round_mix": 0, "eps": g.eps}
        return sets, attrs

    def mla_query(self) -> tuple[list[Tensors], dict[str, int | float]]:
        g, cell = self.g, self.cell
        pages = -(-cell.rows // PAGE)
        order = torch.rand(self.sets, pages * PAGE, device="cuda", generator=self.random).argsort(1)
        sets = self.split(
            proj=self.normal(cell.rows, g.mla_proj_rows),
            q_norm=self.normal(g.q_lora, scale=0.1) + 1,
            kv_norm=self.normal(g.kv_lora, scale=0.1) + 1,
            w_qb=self.normal(g.heads * (g.nope + g.pe), g.q_lora, scale=g.q_lora**-0.5),
            w_uk_t=self.normal(g.heads, g.nope, g.kv_lora, scale=g.nope**-0.5),
            slot_mapping=order[:, : cell.rows].to(_I64).contiguous(),
            kv_cache=self.normal(pages, PAGE, g.mla_row),
        )
        return sets, {"eps": g.eps}

    def mla_value(self) -> tuple[list[Tensors], dict[str, int | float]]:
        """One shard: no DCP."""
        g, cell = self.g, self.cell
        sets = self.split(
            partial=self.normal(1, cell.rows, g.heads, g.kv_lora),
            lse=self.normal(1, cell.rows, g.heads, dtype=_F32),
            proj=self.normal(cell.rows, g.mla_proj_rows),
            w_uv=self.normal(g.heads, g.v_dim, g.kv_lora, scale=g.kv_lora**-0.5),
        )
        return sets, {"gate_offset": g.q_lora + g.mla_row}

    def mla_decode(self) -> tuple[list[Tensors], dict[str, int | float]]:
        """One pool of pages in random order; each set has pages of its own."""
        g, cell = self.g, self.cell
        assert cell.context is not None
        per_request = -(-cell.context // PAGE)
        pages = self.sets * cell.batch * per_request
        cache = torch.empty(pages, PAGE, g.mla_row, dtype=_BF16, device="cuda").normal_(generator=self.random)
        order = torch.randperm(pages, device="cuda", generator=self.random).to(_I32)
        tables = order.view(self.sets, cell.batch, per_request)
        parts = self.split(query=self.normal(cell.rows, g.heads, g.mla_row), block_table=tables)
        lengths = torch.full((cell.batch,), cell.context, dtype=_I32, device="cuda")
        sets: list[Tensors] = [{**part, "kv_cache": cache, "seq_lens": lengths} for part in parts]
        attrs = {
            "tokens": cell.tokens, "scale": (g.nope + g.pe) ** -0.5, "dcp_rank": 0, "dcp_size": 1, "interleave": 1,
            "kv_lora": g.kv_lora,
        }  # fmt: skip
        return sets, attrs
