"""Run one secret case of one op on a device and measure everything that the kernels protocol decides on.

Sequence of a case, all at the same addresses: first call among NaN poison; second call with the same inputs among
finite poison; replay with one changed element and replay with all contents changed (outputs keep the previous results,
so a call that returns remembered ones shows); then the first inputs again, as often as the device has ways of
disturbing or repeating a call. Reference and standard path run here, on clean copies that the worker never sees.
Deciding is `verify.protocol.kernels`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3_backend.ops.registry import reference, standard
from verify.evaluator.buffers import Arena, Poison
from verify.evaluator.client import Client
from verify.evaluator.compare import Errors, compare_choice, compare_values, spread, weights_of_choice
from verify.evaluator.device import Device, HostDevice, Layout, Refused
from verify.evaluator.inputs import Call, Case, make, nudge
from verify.protocol.kernels import tolerance

__all__ = ["Expected", "as_tensor", "bits", "expect", "measure", "run_case", "run_on"]

NUDGED_ROWS = 32
"""Cases up to this many rows also run with a single changed element (each run needs the reference once more)."""

_ROW_DIMS = {"state": 2}
"""Tensors whose rows are matrices."""
_KINDS = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
"""dtype -> row of the protocol's floors; f32 for all others."""
_SCORE_ULPS = 2.0**-22
"""Part of the near-tie slack that is due to the sigmoid and the addition of the bias, in f32 (four roundings at 1)."""


@dataclass(frozen=True)
class Expected:
    """What the evaluator holds against a call's results. Never leaves this process."""

    reference: Mapping[str, Tensor]
    """Output or written state rows -> fp64 values."""
    exact: Mapping[str, Tensor]
    """The same without the definition's bf16 roundings."""
    standard: Mapping[str, Tensor]
    """The same from the standard path, in the tensors' own formats."""


_HOST = torch.device("cpu")


def expect(call: Call, reference_at: torch.device = _HOST, standard_at: torch.device = _HOST) -> Expected:
    """Reference and standard results of a call, reduced to what the call writes.

    Args:
        call: clean inputs, on the host.
        reference_at: where the reference is computed; all results come back there.
        standard_at: where the standard path runs.
    """
    maths, path = reference(call.case.op), standard(call.case.op)
    with _factories(reference_at):
        tensors = _moved(call.tensors, reference_at)
        want, exact = maths(tensors, call.attrs), maths(tensors, call.attrs, rounding=False)
    with _factories(standard_at):
        copies = {name: None if t is None else t.clone() for name, t in _moved(call.tensors, standard_at).items()}
        usual = dict(path(copies, call.attrs))
    for name in call.masks.written:
        state = copies[name]
        assert state is not None
        usual[name] = state
    usual = {name: value.to(reference_at) for name, value in usual.items()}
    return Expected(_written(call, want), _written(call, exact), _written(call, usual))


def _factories(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Tensors that are made from nothing are made there: ops do not name the device of their inputs everywhere."""
    return contextlib.nullcontext() if device.type == "cpu" else device


def _moved(tensors: Mapping[str, Tensor | None], device: torch.device) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}


def _written(call: Call, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs whole, states restricted to their written rows; states without any are left out."""
    kept = {name: results[name] for name in call.outputs}
    for name, rows in call.masks.written.items():
        if rows.any():
            kept[name] = results[name][rows.to(results[name].device)]
    return kept


def measure(
    call: Call, expected: Expected, got: Mapping[str, Tensor], run: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare one run's results.

    Args:
        call: what was run.
        expected: reference and standard results.
        got: outputs and written state rows as the kernel left them.
        run: name of the run, for the raw line.

    Returns:
        Rows of `values` (continuous tensors) and of `choices` (top-k ids) for the raw line.
    """
    if "topk_ids" in call.outputs:
        return _measure_router(call, expected, got, run)
    return [_value_row(name, got[name], expected, run) for name in expected.reference], []


def _value_row(name: str, got: Tensor, expected: Expected, run: str) -> dict[str, Any]:
    want, dims = expected.reference[name], _ROW_DIMS.get(name, 1)
    dtype, got = got.dtype, got.to(want.device)
    ours, usual, exact = (
        compare_values(value, want, row_dims=dims) for value in (got, expected.standard[name], expected.exact[name])
    )
    return _row(name, dtype, run, spread(want), {"candidate": ours, "standard": usual, "rounding": exact})


def _row(name: str, dtype: torch.dtype, run: str, varies: float, errors: Mapping[str, Errors]) -> dict[str, Any]:
    kind = _KINDS.get(dtype, "f32")
    records = {who: measured.record() for who, measured in errors.items()}
    allowed = tolerance(kind, records["standard"], records["rounding"])
    return {"run": run, "tensor": name, "dtype": kind, "spread": varies, **records, "tolerance": allowed}


def _measure_router(
    call: Call, expected: Expected, got: Mapping[str, Tensor], run: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The choice by the near-tie rule; weights against the definition's weights for the choice that was made."""
    x, gate, bias = (call.tensors[name] for name in ("x", "w_gate", "bias"))
    assert x is not None
    assert gate is not None
    assert bias is not None
    exact = x.double() @ gate.double().T
    scores = torch.sigmoid(exact)
    keys = scores + bias.double()
    usual = x.float() @ gate.float().T
    earned = (usual.double() - exact).abs().amax(1) / 4.0  # the sigmoid's slope is at most 1/4
    slack = torch.zeros(len(exact)) if call.case.kind == "exact_ties" else 4.0 * earned + _SCORE_ULPS
    choice = compare_choice(got["topk_ids"], keys, slack)
    values = [_value_row("latent", got["latent"], expected, run)]
    ids, usual_ids = got["topk_ids"].long(), expected.standard["topk_ids"].long()
    if bool(((ids >= 0) & (ids < gate.shape[0])).all()):
        scale = float(call.attrs["scale"])
        want = weights_of_choice(ids, scores, scale)
        errors = {
            "candidate": compare_values(got["topk_weights"], want),
            "standard": compare_values(expected.standard["topk_weights"], weights_of_choice(usual_ids, scores, scale)),
            "rounding": compare_values(want, want),
        }
        values.append(_row("topk_weights", torch.float32, run, spread(want), errors))
    return values, [{"run": run, "tensor": "topk_ids", **choice.record()}]


Load = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass
class _Run:
    """The state of one case while it runs."""

    device: Device
    arena: Arena
    call: Call
    expected: Expected
    line: dict[str, Any]
    load: Load
    zeroed: Mapping[str, bool]
    """Workspace -> whether it must be zero between calls."""
    poison: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def fill(self, call: Call, kind: Poison, *, outputs: bool) -> None:
        """Place a call's contents. Without `outputs` the previous results stay where they are."""
        self.arena.paint(kind)
        for name, zeroed in self.zeroed.items():
            self.arena.put_scratch(name, None if zeroed else kind)
        for spec in call.spec.tensors:
            if spec.role == "output":
                if outputs:
                    self.poison[spec.name] = self.arena.put_output(spec.name, kind)
                continue
            tensor = call.tensors[spec.name]
            if tensor is None:
                continue
            free = _numpy(call.masks.free.get(spec.name))
            if spec.role == "state":
                written = _numpy(call.masks.written[spec.name])
                assert written is not None
                self.arena.put_state(spec.name, bits(tensor), free=free, fixed=~written, kind=kind)
            else:
                self.arena.put_input(spec.name, bits(tensor), free=free, kind=kind)

    def replay(self, run: str, handle: int, *, scratch: int | None) -> dict[str, Tensor]:
        """Run the bound call; record what it touched; return what it wrote."""
        with self.load():
            for code in self.device.run(handle, run, scratch):
                self.event(run, code, "", condition=True)
        for hit in self.arena.touched():
            self.line["events"].append({**hit.record(), "run": run})
        self.line["runs"].append(run)
        return self.results(self.call)

    def results(self, call: Call) -> dict[str, Tensor]:
        """Copies of outputs and written state rows."""
        names = [*call.outputs, *(name for name, rows in call.masks.written.items() if rows.any())]
        views = self.arena.views()
        return self.owned(call, {name: as_tensor(self.arena.array(name), views[name].dtype) for name in names})

    @staticmethod
    def owned(call: Call, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of what the call writes of these tensors: outputs whole, states in their written rows."""
        written = call.masks.written
        return {name: tensor[written[name]] if name in written else tensor.clone() for name, tensor in tensors.items()}

    def event(self, run: str, code: str, tensor: str, *, condition: bool) -> None:
        """Record what a run did; the same once, however many repetitions show it."""
        entry = {"code": code, "tensor": tensor, "run": run}
        if condition and entry not in self.line["events"]:
            self.line["events"].append(entry)

    def unwritten(self, run: str) -> None:
        """Record outputs in which poison of this run is left."""
        for name, pattern in self.poison.items():
            dtype = self.arena.array(name).dtype
            left = self.arena.array(name).reshape(-1).view(_uint(dtype)) == pattern.view(_uint(dtype))
            self.event(run, "output_not_written", name, condition=bool(left.any()))

    def compare(self, run: str, call: Call, expected: Expected, got: Mapping[str, Tensor]) -> None:
        values, choices = measure(call, expected, got, run)
        self.line["values"] += values
        self.line["choices"] += choices


def run_case(
    worker: Client, case: Case, rng: np.random.Generator, line: dict[str, Any], load: Load = contextlib.nullcontext
) -> None:
    """`run_on` a worker of this host."""
    run_on(HostDevice(worker), case, rng, line, load)


def run_on(
    device: Device, case: Case, rng: np.random.Generator, line: dict[str, Any], load: Load = contextlib.nullcontext
) -> None:
    """Run a case and fill its raw line in place, so that what was seen before a crash is kept.

    Args:
        device: with the candidate's objects loaded.
        case: what to run.
        rng: source of poison and red-zone patterns.
        line: has `kind`, `id` and the case's fields; gets `values`, `choices`, `events`, `runs` and, if the launcher
            does not take the call, `refused`.
        load: context in which the calls run, such as other processes that keep the CPUs busy.

    Raises:
        WorkerFailure: the worker crashed, hung, or the kernel returned an error; recorded by the caller.
    """
    line |= {"values": [], "choices": [], "events": [], "runs": [], "replays": 0, "refused": None}
    call, other = make(case), make(case, "changed")
    line |= {"attrs": dict(call.attrs), "inputs_sha256": _digest(call)}
    try:
        _run_calls(device, call, other, rng, line, load)
    except Refused as refusal:
        line["refused"] = str(refusal)


def _run_calls(
    device: Device, call: Call, other: Call, rng: np.random.Generator, line: dict[str, Any], load: Load
) -> None:
    def expected_of(one: Call) -> Expected:
        return expect(one, device.reference_at, device.standard_at(one.case.op))

    scratch = device.begin(call, _layout(call))
    expected = expected_of(call)
    device.buffer.reset()
    layout = [*_layout(call), *((s.name, s.dtype, (s.elements,)) for s in scratch)]
    arena = Arena(device.buffer, layout, rng, device.guard_bytes)
    run = _Run(device, arena, call, expected, line, load, {s.name: s.zeroed for s in scratch})
    bound = device.bind(call, arena.views())
    line["tunables"] = dict(bound.tunables)
    tasks = device.tasks()

    run.fill(call, "nan", outputs=True)
    first = run.replay("first", bound.handle, scratch=0xFF)
    run.unwritten("first")
    run.compare("first", call, expected, first)

    run.fill(call, "finite", outputs=True)
    again = run.replay("again", bound.handle, scratch=0x3C)
    _same_bits(run, "again", first, again)

    nudged = nudge(call) if call.case.rows <= NUDGED_ROWS else None
    if nudged is not None:
        _changed_replay(run, "nudged", nudged, expected_of(nudged), bound.handle)
    _changed_replay(run, "changed", other, expected_of(other), bound.handle)
    run.event("changed", "threads_left", "", condition=bool(device.tasks() - tasks))

    run.call = call
    for name, handle in device.disturbed(call, arena.views(), bound, int(rng.integers(1 << 31))):
        run.fill(call, "nan", outputs=True)
        _same_bits(run, name, first, run.replay(name, handle, scratch=None))
    run.fill(call, "nan", outputs=True)
    owned = {name: arena.views()[name] for name in first}
    for found in device.repeated(bound, owned):
        line["replays"] += 1
        _same_bits(run, "replayed", first, run.owned(call, found))


def _changed_replay(run: _Run, name: str, call: Call, expected: Expected, handle: int) -> None:
    """Replay with other contents at the same addresses; previous outputs are still in place."""
    before = {output: run.results(run.call)[output].clone() for output in call.outputs}
    previous = run.expected
    run.call, run.expected = call, expected
    run.fill(call, "nan", outputs=False)
    after = run.replay(name, handle, scratch=None)
    run.compare(name, call, expected, after)
    for output, value in before.items():
        stale = _differs(output, expected, previous) and torch.equal(_raw(value), _raw(after[output]))
        run.event(name, "stale_output", output, condition=stale)


def _differs(name: str, one: Expected, other: Expected) -> bool:
    """Whether a tensor's two references are so far apart that no correct kernel gives the same bits for both."""
    want = other.reference[name]
    if not want.is_floating_point() or want.dtype != torch.float64:
        return False
    error = compare_values(other.standard[name], want).element
    return compare_values(one.reference[name], want).element > 4.0 * error + 2.0**-4


def _same_bits(run: _Run, name: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    for tensor, value in before.items():
        same = torch.equal(_raw(value), _raw(after[tensor]))
        run.event(name, "nondeterministic", tensor, condition=not same)


def _layout(call: Call) -> Layout:
    layout = []
    for spec in call.spec.tensors:
        if spec.role == "output":
            layout.append((spec.name, *call.outputs[spec.name]))
        elif (tensor := call.tensors[spec.name]) is not None:
            layout.append((spec.name, spec.dtype, tuple(tensor.shape)))
    return layout


def _digest(call: Call) -> str:
    """sha256 over the clean inputs, in interface order."""
    digest = hashlib.sha256()
    for spec in call.spec.tensors:
        tensor = call.tensors.get(spec.name)
        if tensor is not None:
            digest.update(bits(tensor).tobytes())
    return digest.hexdigest()


def bits(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor as numpy; bf16 as uint16, e4m3 as uint8."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.contiguous().view(torch.uint8).numpy()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.contiguous().numpy()


def as_tensor(array: npt.NDArray[Any], dtype: str) -> Tensor:
    """An array as a tensor over the same memory; uint16 bits as bf16, uint8 bits as e4m3 if that is meant."""
    if dtype == "e4m3":
        return torch.from_numpy(array).view(torch.float8_e4m3fn)
    if dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _raw(tensor: Tensor) -> Tensor:
    """Bits, so that NaN equals itself and -0 differs from 0."""
    return tensor.contiguous().view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def _numpy(mask: Tensor | None) -> npt.NDArray[np.bool_] | None:
    return None if mask is None else mask.numpy()


def _uint(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")
