"""The evaluator's side of a timed op cell: secret inputs as banks, placement, what came out, what was expected.

Call i of a chain sees M rows of each activation bank from row i * shift on, so every call has contents of its own.
Expected values of a sampled call are computed here with the op's reference and never leave this process.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_backend.geometry import Geometry
from k3_backend.ops import OPS
from k3_backend.ops.interface import TensorSpec
from k3_backend.ops.registry import reference
from verify.evaluator.inputs import Case, make
from verify.evaluator.worker import Worker
from verify.protocol.perf_plan import CellPlan
from verify.timing.compare import Left, against_reference
from verify.workers.contents import fill_cache, generator
from verify.workers.shared import ALIGNMENT, ITEM_BYTES, STORAGE, View

__all__ = ["OpCell"]

_OUTPUT_BYTES = 128 << 20
"""Outputs of all calls of a chain together."""
_MAX_CALLS = 1 << 13
"""Of a chain: binding a call takes longer than running a small one."""
_BANK_CALLS = 256
"""Calls whose rows are drawn at once: a case with states draws those of all its requests too."""
_BANK_TRIES = 64
_PAGE = 64


class OpCell:
    """One op cell of one block.

    Args:
        cell: what is timed; its scope is the op.
        geometry: the model's.
        seed: secret of the block.
    """

    def __init__(self, cell: CellPlan, geometry: Geometry, seed: str) -> None:
        size = cell.cell
        self._spec = OPS[str(size["scope"])]
        self._batch, self._tokens = int(size["batch"]), int(size["tokens"])
        self._rows = self._batch * self._tokens
        # Sizes and attributes stay the same in all blocks (they follow from the cell); values follow from the seed.
        case = Case(self._spec.name, "gaussian", self._batch, self._tokens, 2, cell.key, geometry.name)
        self._case, self._seed = case, seed
        self._call = make(case, seed)
        self._tensors = dict(self._call.tensors)
        if size["context"] is not None and "kv_cache" in self._tensors and "seq_lens" in self._tensors:
            self._set_context(int(size["context"]), geometry)
        self._written = self._call.masks.written
        self._shift = self._aligned_shift()
        self._banks = self._draw_banks(0)
        self._drawn = 1
        self._stateful = any(t.role == "state" for t in self._spec.tensors)
        self._views: dict[str, dict[str, View]] = {}
        self._expected: tuple[int, Mapping[str, Any]] | None = None
        """A sampled call and what the reference makes of it."""

    def place(
        self,
        arm: str,
        worker: Worker,
        calls: int,
        guard: contextlib.AbstractContextManager[None],
        options: Mapping[str, str],
    ) -> str | None:
        """Write the banks into the arm's buffer and bind a slice's chain.

        Args:
            arm: name.
            worker: its process; the buffer is empty.
            calls: of a slice; every slice runs the same ones, on states that go on.
            guard: turns a worker's failure into the arm's fault.
            options: of torch.compile, for a standard arm that uses it.

        Returns:
            Why no planner would launch it, else None.
        """
        while self._bank_rows < self._rows + (calls - 1) * self._shift:
            more = self._draw_banks(self._drawn)
            self._banks = {name: torch.cat([bank, more[name]], self._axis(name)) for name, bank in self._banks.items()}
            self._drawn += 1
        views: dict[str, View] = {}
        for spec in self._spec.tensors:
            if spec.role == "output":
                row = -(-_nbytes(*self._call.outputs[spec.name]) // ALIGNMENT) * ALIGNMENT
                views[spec.name] = worker.buffer.view("u8", (calls, row))
            elif (tensor := self._input(spec, 0, self._rows + (calls - 1) * self._shift)) is not None:
                views[spec.name] = worker.buffer.view(spec.dtype, tuple(tensor.shape))
                worker.buffer.array(views[spec.name])[...] = _bits(tensor)
        self._views[arm] = views
        with guard:
            answer = worker.call(
                "step.op_chain",
                timeout_s=60.0,
                op=self._spec.name,
                tensors={t.name: _json(views.get(t.name)) for t in self._spec.tensors if t.role != "output"},
                outputs={
                    name: {"view": _json(views[name]), "dtype": dtype, "shape": shape}
                    for name, (dtype, shape) in self._call.outputs.items()
                },
                attrs=self._call.attrs,
                rows=self._rows,
                count=calls,
                shift=self._shift,
                **options,
            )
        refused: str | None = answer["refused"]
        return refused

    @property
    def most(self) -> int:
        """Calls of the longest chain."""
        each = sum(_nbytes(dtype, shape) for dtype, shape in self._call.outputs.values())
        return max(1, min(_MAX_CALLS, _OUTPUT_BYTES // max(each, 1)))

    def left(self, arm: str, worker: Worker, calls: int, *, first: bool) -> Left:
        """Outputs and the written parts of states after a run of so many calls; `first`: no timed one went before."""
        views = self._views[arm]
        outputs = {}
        for name, (dtype, shape) in self._call.outputs.items():
            rows = worker.buffer.array(views[name])[:calls, : _nbytes(dtype, shape)]
            outputs[name] = _values(rows.copy().view(STORAGE[dtype]).reshape(len(rows), *shape), dtype)
        states = {}
        for name, mask in self._written.items():
            states[name] = _values(worker.buffer.array(views[name])[mask.numpy()], views[name].dtype)
        return Left(outputs, states, known_start=first or not self._stateful)

    def reference(self, left: Left) -> Mapping[str, float]:
        """Distance of one secret call from the reference; of the first call where the op has states.

        Empty for an op without outputs, and for one with states that ran before: no call's start is known then.
        """
        if not self._call.outputs or not left.known_start:
            return {}
        calls = len(next(iter(left.outputs.values())))
        if self._expected is None or self._expected[0] >= calls:
            at = 0 if self._stateful else secrets.randbelow(calls)
            inputs = {
                t.name: self._input(t, at * self._shift, self._rows) for t in self._spec.tensors if t.role != "output"
            }
            want = reference(self._spec.name)(inputs, self._call.attrs, dtype=torch.float32)
            self._expected = at, {name: want[name].numpy() for name in self._call.outputs}
        at, expected = self._expected
        return against_reference({name: value[at] for name, value in left.outputs.items()}, expected)

    def _aligned_shift(self) -> int:
        """Least number of rows by which every bank can be moved without leaving the alignment that ops require."""
        shift = 1
        for spec in self._spec.tensors:
            tensor = self._tensors.get(spec.name)
            if spec.role == "activation" and "M" in spec.dims and tensor is not None:
                row = tensor.nbytes // self._rows
                shift = math.lcm(shift, ALIGNMENT // math.gcd(ALIGNMENT, row))
        return shift

    @property
    def _bank_rows(self) -> int:
        """Rows of each bank; no op lacks one."""
        name, bank = next(iter(self._banks.items()))
        return bank.shape[self._axis(name)]

    def _axis(self, name: str) -> int:
        """The dimension of a bank's rows."""
        return self._spec.tensor(name).dims.index("M")

    def _draw_banks(self, part: int) -> dict[str, Tensor]:
        """One activation tensor each, with rows for `_BANK_CALLS` calls or more; other values for every part.

        They come from a larger case of the op, and sizes and attributes of a case are random: cases are drawn until one
        has the same optional tensors and the same widths.
        """
        banked = [t for t in self._spec.tensors if t.role == "activation" and "M" in t.dims]
        requests = -(-(self._rows + (_BANK_CALLS - 1) * self._shift) // self._tokens)
        wanted = {t.name: _row_shape(t, self._tensors[t.name]) for t in banked}
        for attempt in range(_BANK_TRIES):
            case = replace(self._case, batch=requests, seed=f"{self._case.seed}/{attempt}")
            drawn = make(case, f"{self._seed}/bank/{part}").tensors
            if {t.name: _row_shape(t, drawn[t.name]) for t in banked} == wanted:
                return {t.name: tensor for t in banked if (tensor := drawn[t.name]) is not None}
        raise RuntimeError(f"{self._case.id}: no larger case with rows {wanted} in {_BANK_TRIES} draws")

    def _input(self, spec: TensorSpec, at: int, rows: int) -> Tensor | None:
        """A tensor of the call; of a bank, rows at .. at + rows - 1."""
        if spec.name in self._banks:
            return self._banks[spec.name].narrow(spec.dims.index("M"), at, rows)
        return self._tensors[spec.name]

    def _set_context(self, context: int, geometry: Geometry) -> None:
        """Every request holds exactly `context` cached tokens besides its own, on scattered pages."""
        length = context + self._tokens
        pages = -(-length // _PAGE)
        rng = generator(self._seed, f"pages/{self._case.id}")
        cache = np.zeros((1 + self._batch * pages, _PAGE, geometry.mla_row), np.uint16)
        fill_cache(cache[1:], rng)
        table = (rng.permutation(self._batch * pages) + 1).reshape(self._batch, pages)
        self._tensors["kv_cache"] = torch.from_numpy(cache.view(np.int16)).view(torch.bfloat16)
        self._tensors["block_table"] = torch.from_numpy(table.astype(np.int32))
        self._tensors["seq_lens"] = torch.full((self._batch,), length, dtype=torch.int32)


def _row_shape(spec: TensorSpec, tensor: Tensor | None) -> tuple[int, ...] | None:
    """Shape without the dimension of the rows; None for an absent tensor."""
    if tensor is None:
        return None
    axis = spec.dims.index("M")
    return (*tensor.shape[:axis], *tensor.shape[axis + 1 :])


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


def _json(view: View | None) -> dict[str, Any] | None:
    return None if view is None else view.to_json()


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as the shared buffer stores it."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.contiguous().view(torch.uint8).numpy()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.contiguous().numpy()


def _values(stored: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """A copy as f32, integers as they are."""
    if dtype == "bf16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32) if dtype == "f32" else stored.copy()
