"""Methods that run whole decode steps through the decode backend, on pools that the evaluator owns.

They answer which way each step went and what the ledger counted. The step's result and all state lie in the shared
buffer, where the evaluator compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from k3_backend.model.batch import Batch
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.step.plan import Mode, Refusal
from k3_backend.step.run import DecodeBackend
from verify.workers import arm
from verify.workers.main import Method, Session
from verify.workers.op_methods import as_tensor
from verify.workers.path_model import path_model

__all__ = ["METHODS"]

_DTYPES = {"token_ids": torch.int64, "slot_mapping": torch.int64}
"""Batch fields that are not i32."""


@dataclass
class _Area:
    weights: ModelWeights
    backend: DecodeBackend | None = None
    spoiled: tuple[str, ...] = ()


def open_model(session: Session, *, geometry_name: str, seed: int) -> dict[str, Any]:
    """Load the arm's objects and make the seeded model that all steps run."""
    arm.kernels(session)
    session.areas["path"] = _Area(path_model(geometry_name, seed))
    return {}


def bind(
    session: Session, *, mode: Mode, pools: Mapping[str, Any], threads: int, spoil: Sequence[str] = ()
) -> dict[str, Any]:
    """Make a backend with an empty ledger over pools in the shared buffer; the previous one ends.

    Args:
        session: the worker's.
        mode: the switch.
        pools: views by pool name (`state.0`), as `DecodeState.tensors` names them.
        threads: workers of the specialised path.
        spoil: ops whose results are deliberately wrong in this backend's steps.
    """
    area = _area(session)
    if area.backend is not None:
        area.backend.close()
    for op in area.spoiled:
        arm.unspoil(session, op)
    for op in spoil:
        arm.spoil(session, op)
    area.spoiled = tuple(spoil)
    kinds: dict[str, dict[int, torch.Tensor]] = {"kv_cache": {}, "conv_state": {}, "state": {}}
    for name, view in pools.items():
        kind, layer = name.split(".")
        kinds[kind][int(layer)] = as_tensor(session, view)
    state = DecodeState(geometry=area.weights.geometry, **kinds)
    area.backend = DecodeBackend(area.weights, arm.kernels(session), mode, threads, state)
    return {}


def step(session: Session, *, batch: Mapping[str, Any], hidden: Mapping[str, Any]) -> dict[str, Any]:
    """Run one step the way an engine does.

    Args:
        session: the worker's.
        batch: fields of `Batch` as nested lists.
        hidden: view that receives the result, bf16 [N, D].

    Returns:
        `refusal`: null, or every reason as (code, message, where, expected).
    """
    area = _area(session)
    assert area.backend is not None, "path.bind comes first"
    fields = {
        name: torch.tensor(values, dtype=_DTYPES.get(name, torch.int32))
        for name, values in batch.items()
        if name != "decode"
    }
    made = Batch(**fields, decode=tuple(batch["decode"]))
    planned = area.backend.plan(made)
    result = area.backend.forward(made)
    as_tensor(session, hidden).copy_(result)
    if not isinstance(planned, Refusal):
        return {"refusal": None}
    return {"refusal": [[r.code, r.message, r.where, r.expected] for r in planned.reasons]}


def ledger(session: Session) -> dict[str, Any]:
    """Counts since `path.bind`, as `Ledger.snapshot` gives them."""
    area = _area(session)
    assert area.backend is not None, "path.bind comes first"
    return area.backend.ledger.snapshot()


def _area(session: Session) -> _Area:
    area = session.areas["path"]
    assert isinstance(area, _Area)
    return area


METHODS: dict[str, Method] = {
    "path.open": open_model,
    "path.bind": bind,
    "path.step": step,
    "path.ledger": ledger,
}
