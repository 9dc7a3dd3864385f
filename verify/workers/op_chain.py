"""Methods that time single ops: a chain of calls over windows of a bank of inputs, one native replay for all of them.

Call i of a chain reads M rows of each activation's bank, a few rows further on than call i - 1, and writes outputs of
its own, so no call repeats another's contents, and inputs are in the caches as in a real step. States evolve from call
to call. Every run of the chain starts with poisoned outputs and scratch, so none can use what an earlier one left but
the states. The evaluator fills the banks and compares outputs and states; nothing is judged here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3_backend.aot.cpu.launch import LaunchList, Pool
from k3_backend.model.program import DTYPES
from k3_backend.ops import OPS
from k3_backend.ops.interface import TensorSpec
from k3_backend.ops.registry import Standard, standard
from k3_backend.step.run import DecodeBackend
from verify.workers.arm import kernels
from verify.workers.cpus import settle, unsettle
from verify.workers.main import Method, Session
from verify.workers.op_methods import as_tensor

__all__ = ["METHODS", "poison_scratch"]

_AREA = "op_chain"


@dataclass
class _OpChain:
    standard: Standard
    pool: Pool | None
    states: dict[str, Tensor]
    start: dict[str, Tensor]
    output_banks: list[Tensor]
    outputs: dict[str, list[Tensor]]
    """Name -> one tensor per call."""
    calls: list[dict[str, Tensor | None]]
    attrs: Mapping[str, int | float]
    launches: LaunchList | None = None
    done: int = 0
    """Calls since the last reset."""
    kept: list[dict[str, Tensor]] = field(default_factory=list)


def chain(
    session: Session,
    *,
    op: str,
    tensors: Mapping[str, Any],
    outputs: Mapping[str, Any],
    attrs: Mapping[str, int | float],
    rows: int,
    count: int,
    shift: int,
    compile_mode: str | None = None,
    cache: str = "",
) -> dict[str, Any]:
    """Bind a chain.

    Args:
        session: the worker's.
        op: op name.
        tensors: view by name, null for an absent optional one. An activation with rows is a bank of
            `rows + (count - 1) * shift` rows, of which call i gets `rows` from row `i * shift` on. All others are
            shared by all calls.
        outputs: by name `view`, u8 [count, bytes] with aligned rows, and `dtype` and `shape` of what is in a row.
        attrs: attributes by name.
        rows: M.
        count: calls of the chain.
        shift: rows between the windows of neighbouring calls; keeps every window aligned.
        compile_mode: mode of torch.compile for the standard arm; eager if null.
        cache: folder that keeps what was compiled.

    Returns:
        `refused`: why no planner would launch this, else null.
    """
    torch.set_num_threads(session.threads)
    _forget(session)
    spec = OPS[op]
    bound = {name: as_tensor(session, view) for name, view in tensors.items()}
    results = {name: _results(as_tensor(session, made["view"]), made) for name, made in outputs.items()}
    states = {t.name: bound[t.name] for t in spec.tensors if t.role == "state"}
    calls = [
        {t.name: _window(t, bound[t.name], rows, at * shift) for t in spec.tensors if t.role != "output"}
        for at in range(count)
    ]
    start = {name: state.clone() for name, state in states.items()}
    banks = [as_tensor(session, made["view"]) for made in outputs.values()]
    function = standard(op)
    if compile_mode is not None:
        from verify.workers.compiled import compiled_op  # importing the compiler takes two seconds

        function = compiled_op(op, compile_mode, cache)
    made = _OpChain(function, None, states, start, banks, results, calls, dict(attrs))
    if session.kind == "specialized":
        loaded = kernels(session)[op]
        if loaded.choose(rows) is None:
            return {"refused": f"no schedule bucket for {rows} rows"}
        unsettle()
        made.pool = kernels(session).runtime.pool(session.threads)
        made.launches = LaunchList(made.pool)
        for at, arguments in enumerate(calls):
            own = {name: result[at] for name, result in results.items()}
            made.launches.add(loaded, {**arguments, **own}, attrs, rows=rows)
    session.areas[_AREA] = made
    return {"refused": None}


def reset(session: Session, *, warm: int) -> dict[str, Any]:
    """Run the chain untimed, so often; then go back to the start states."""
    made = _made(session)
    for _ in range(warm):
        _run(made, len(made.calls))
    made.done = 0
    for name, state in made.states.items():
        state.copy_(made.start[name])
    if made.pool is not None:
        settle()  # its threads exist
    return clear(session)


def clear(session: Session) -> dict[str, Any]:
    """Poison outputs and scratch: nothing that an earlier run left there may help the next one."""
    made = _made(session)
    made.kept.clear()
    for bank in made.output_banks:
        bank.numpy()[:] = 0xFF  # not by torch: its threads would spin on into the slice, where kernels have theirs
    if made.pool is not None:
        made.pool.scratch[:] = 0xFF
    return {}


def run(session: Session, *, count: int) -> dict[str, Any]:
    """Run the chain's first calls, from the states that the last run left: `ns` on this process's clock."""
    made = _made(session)
    with torch.inference_mode():
        start = time.perf_counter_ns()
        _run(made, count)
        elapsed = time.perf_counter_ns() - start
    made.done += count
    return {"ns": elapsed}


def finish(session: Session) -> dict[str, Any]:
    """Copy results that timed calls left in private memory to the shared buffer; `steps` since the reset, by path."""
    made = _made(session)
    for at, results in enumerate(made.kept):
        for name, value in results.items():
            made.outputs[name][at].copy_(value)
    path = "standard" if made.launches is None else "specialized"
    return {"steps": {"specialized": 0, "standard": 0, path: made.done}}


def release(session: Session) -> dict[str, Any]:
    """Forget the chain, so that the evaluator may place other tensors at its addresses."""
    _forget(session)
    return {}


def poison_scratch(backend: DecodeBackend) -> None:
    """Fill the launch scratch with bytes that are NaN in every float format: nothing in it may matter to a call."""
    if backend.pool is not None:
        backend.pool.scratch[:] = 0xFF


def _run(made: _OpChain, count: int) -> None:
    if made.launches is not None:
        made.launches.replay(count)
        return
    function = made.standard
    made.kept = [function(arguments, made.attrs) for arguments in made.calls[:count]]


def _window(spec: TensorSpec, tensor: Tensor | None, rows: int, at: int) -> Tensor | None:
    """Rows at .. at + rows - 1 of a bank along M; any other tensor as it is."""
    if tensor is None or spec.role != "activation" or "M" not in spec.dims:
        return tensor
    axis = spec.dims.index("M")
    window = tensor.narrow(axis, at, rows)
    if not window.is_contiguous():
        raise ValueError(f"bank {spec.name}: a window along axis {axis} of {list(tensor.shape)} is not contiguous")
    return window


def _results(bank: Tensor, made: Mapping[str, Any]) -> list[Tensor]:
    """Output tensors of all calls, over the rows of a u8 bank."""
    shape, dtype = tuple(made["shape"]), DTYPES[made["dtype"]]
    nbytes = math.prod(shape) * dtype.itemsize
    return [row[:nbytes].view(dtype).view(shape) for row in bank]


def _forget(session: Session) -> None:
    made = session.areas.pop(_AREA, None)
    if isinstance(made, _OpChain) and made.pool is not None:
        made.pool.close()


def _made(session: Session) -> _OpChain:
    made = session.areas.get(_AREA)
    if not isinstance(made, _OpChain):
        raise LookupError("step.op_chain comes first")
    return made


METHODS: dict[str, Method] = {
    "step.op_chain": chain,
    "step.op_reset": reset,
    "step.op_clear": clear,
    "step.op_run": run,
    "step.op_finish": finish,
    "step.op_release": release,
}
