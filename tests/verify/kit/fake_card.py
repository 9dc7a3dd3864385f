"""A card without a GPU, with planted faults: runs the op's standard path over an arena in host memory.

Imported inside workers by the bootstrap of `kit_fixtures.FakeMachine`. A fault is chosen by the number of rows of a
call, as a kernel that behaves only where it is not looked at would do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3_backend.aot.arguments import TORCH_DTYPES, check_tensors
from k3_backend.geometry import Geometry
from k3_backend.ops.interface import OpSpec
from k3_backend.ops.registry import standard
from verify.workers import card_methods
from verify.workers.card import Plan
from verify.workers.main import Session
from verify.workers.shared import View
from verify.workers.spoil import disturb

EARLY_BYTE = 0xFF
REFUSED = b"not an image"
"""Content of an image that this card does not load."""
FIRST_ROWS = 70
"""Rows from which faults apply, one per number of rows; fewer rows are honest."""
FAULTS: dict[str, str] = {
    "wrong_scale": "mismatch",
    "overrun": "out_of_bounds_write",
    "writes_input": "input_changed",
    "foreign_state": "unowned_state_changed",
    "half_output": "output_not_written",
    "random_bits": "nondeterministic",
    "early_load": "nondeterministic",
    "hurried": "nondeterministic",
    "drifting": "nondeterministic",
    "remembers": "stale_output",
    "dirty_workspace": "workspace_not_zeroed",
    "illegal_address": "crash",
    "exits": "crash",
    "hangs": "timeout",
}
"""Fault -> code of the finding that it must lead to."""


def rows_of(fault: str) -> int:
    """Rows of the calls that show a fault."""
    return FIRST_ROWS + list(FAULTS).index(fault)


SEPARATE_BYTES = 1 << 28


def install() -> None:
    """Make this the card of every session of this process."""
    real = card_methods.load

    def load(session: Session, **params: Any) -> dict[str, Any]:
        card_methods.install(session, FakeCard())
        if params.get("separate"):  # there are no allocations beside the arena
            params["nbytes"] = SEPARATE_BYTES
        return real(session, **params)

    card_methods.METHODS["card.load"] = load


class FakeCard:
    """Device memory is a tensor of its own: nothing reaches the image but what is copied back."""

    def load(self, folder: Path, spec: OpSpec, geometry: Geometry, nbytes: int) -> dict[str, Any]:
        if any(path.read_bytes() == REFUSED for path in folder.glob("*.cubin")):
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        self.spec, self.geometry = spec, geometry
        self.spoiled = False
        whole = np.zeros(nbytes + 256, dtype=np.uint8)
        self.arena = whole[-whole.ctypes.data % 256 :][:nbytes]
        self.calls: list[tuple[Plan, dict[str, View], dict[str, View]]] = []
        self.memory: dict[tuple[int, ...], dict[str, Tensor]] = {}
        return {"name": "fake", "multiprocessors": 1, "late_copy": True, "late_copy_obstacle": None}

    def scratch(self, plan: Plan, layout: Mapping[str, View]) -> Sequence[tuple[str, str, int, bool]]:  # noqa: ARG002
        return [("partial", "f32", 100, False), ("counter", "i32", 7, True)]

    def bind(self, plan: Plan, views: Mapping[str, View], scratch: Mapping[str, View]) -> int:
        tensors = {name: self._tensor(view) for name, view in views.items()}
        check_tensors(plan.spec, plan.geometry, tensors, plan.attrs, self._rows(tensors))
        self.calls = [(plan, dict(views), dict(scratch))]
        self.memory.clear()
        return 0

    def spoil(self) -> None:
        self.spoiled = os.environ.get("FASTTRACK_TEST_FAULT") != "unspoilt_case"

    def run(self, handle: int, mode: str, image: npt.NDArray[np.uint8], delay_ns: int) -> None:
        plan, views, scratch = self.calls[handle]
        early: dict[str, Tensor] = {}
        if mode == "late":
            roles = {tensor.name: tensor.role for tensor in plan.spec.tensors}
            self.arena[: image.size] = image
            for name, view in views.items():
                if roles[name] != "constant":
                    self.arena[view.offset : view.offset + view.nbytes] = EARLY_BYTE
            early = {name: self._tensor(view).clone() for name, view in views.items()}
            time.sleep(delay_ns * 1e-9)
        self.arena[: image.size] = image
        self._launch(plan, views, scratch, mode, early)
        image[:] = self.arena[: image.size]

    def repeat(
        self, handle: int, image: npt.NDArray[np.uint8], views: Sequence[View], out: npt.NDArray[np.uint8], count: int
    ) -> None:
        plan, placed, scratch = self.calls[handle]
        at = 0
        for index in range(count):
            self.arena[: image.size] = image
            self._launch(plan, placed, scratch, "repeated" if index else "graph", {})
            for view in views:
                out[at : at + view.nbytes] = self.arena[view.offset : view.offset + view.nbytes]
                at += view.nbytes

    def _launch(
        self, plan: Plan, views: dict[str, View], scratch: dict[str, View], mode: str, early: dict[str, Tensor]
    ) -> None:
        tensors = {name: self._tensor(view) for name, view in views.items()}
        rows = self._rows(tensors)
        at = rows - FIRST_ROWS
        fault = list(FAULTS)[at] if 0 <= at < len(FAULTS) else ""
        outputs = [tensor.name for tensor in plan.spec.tensors if tensor.role == "output"]
        states = [tensor.name for tensor in plan.spec.tensors if tensor.role == "state"]
        inputs = [tensor.name for tensor in plan.spec.tensors if tensor.role == "activation"]
        inputs = inputs or [tensor.name for tensor in plan.spec.tensors if tensor.role == "constant"]
        if fault == "illegal_address":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if fault == "exits":
            os._exit(0)
        if fault == "hangs":
            time.sleep(3600)
        read = dict(tensors)
        if fault == "early_load" and early:
            read[inputs[0]] = early[inputs[0]]
        found = standard(plan.spec.name)(read, plan.attrs)
        key = (rows,)
        for name in outputs:
            value = found[name]
            if fault == "wrong_scale":
                value = (value.float() * 1.05).to(value.dtype)
            if fault == "random_bits" or (fault, mode) in (("hurried", "contended"), ("drifting", "repeated")):
                value = value.clone()
                value.view(-1).view(torch.int16)[0] ^= int(torch.randint(1, 3, ())) if fault == "random_bits" else 1
            if fault == "remembers":
                value = self.memory.setdefault(key, {}).setdefault(name, value.clone())
            target = tensors[name]
            if fault == "half_output":
                target.view(-1)[: target.numel() // 2] = value.reshape(-1)[: target.numel() // 2]
            else:
                target.copy_(value)
        if self.spoiled:
            disturb(plan.spec, tensors)
        if fault == "overrun":
            place = views[[*outputs, *inputs][0]]
            self.arena[place.offset + place.nbytes] ^= 1
        if fault == "writes_input":
            tensors[inputs[0]].view(-1).view(torch.uint8)[-1] ^= 1
        if fault == "foreign_state":
            tensors[states[0]].view(-1).view(torch.int16)[0] ^= 1
        if fault == "dirty_workspace":
            self._tensor(scratch["counter"])[3] = 1

    def _rows(self, tensors: Mapping[str, Tensor]) -> int:
        spec = next(spec for spec in self.spec.tensors if "M" in spec.dims and spec.name in tensors)
        return int(tensors[spec.name].shape[spec.dims.index("M")])

    def _tensor(self, view: View) -> Tensor:
        data = torch.from_numpy(self.arena[view.offset : view.offset + view.nbytes])
        return data.view(TORCH_DTYPES[view.dtype]).view(view.shape)  # type: ignore[index]
