"""One cell of the peer table: check every arm, then time all of them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from verify.bench.gpu.arm import Arm, Inputs, Missing
from verify.bench.gpu.cells import PeerCell, moved_bytes
from verify.bench.gpu.checks import compared, expected
from verify.bench.gpu.graphs import calls_for, capture, profiled, rounds
from verify.bench.gpu.inputs import make_inputs, sets_for
from verify.bench.gpu.ours import Ours

__all__ = ["OURS", "PEERS", "measure_cell"]

OURS = "ours"
PEERS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "input_projection": {
        "cublas": ("cublas", "projection"), "compile": ("compiled", "arm"), "triton": ("triton_gemm", "projection"),
    },
    "kda_decode": {
        "fla_chain": ("fla_chain", "chain"), "fla_recurrence": ("fla_chain", "recurrence"),
        "in_place": ("in_place", "arm"),
    },
    "attn_res": {"compile": ("compiled", "arm")},
    "mla_query": {"cublas": ("cublas", "query"), "compile": ("compiled", "arm")},
    "mla_value": {"cublas": ("cublas", "value"), "compile": ("compiled", "arm")},
    "mla_decode": {"flashinfer": ("flashinfer_mla", "arm"), "triton": ("triton_mla", "arm")},
}  # fmt: skip
"""Op -> peer -> (module of `verify.bench.gpu.peers`, function)."""

Build = Callable[[Inputs], Arm]
_ESTIMATE_BYTES_PER_US = 3_000_000.0


def measure_cell(cell: PeerCell, ours: Ours, seed: int) -> dict[str, Any]:
    """All arms of a cell: errors, samples, device time; or why one is absent.

    Raises:
        RuntimeError: the device is in an error state; the process is of no more use.
    """
    began = time.monotonic()
    builds: dict[str, Build] = {OURS: ours.arm}
    builds |= {name: _builder(*place) for name, place in PEERS[cell.op].items()}
    want = expected(make_inputs(cell, 1, seed))
    arms = {name: _checked(cell, build, seed, want) for name, build in builds.items()}
    del want
    checked = time.monotonic()

    sets = sets_for(cell)
    inputs = make_inputs(cell, sets, seed)
    touched = sum(moved_bytes(cell))
    calls = calls_for(sets, touched / _ESTIMATE_BYTES_PER_US + 2.0)
    live: dict[str, Arm] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, found in arms.items():
        if found["missing"] is None:
            try:
                arm = builds[name](inputs)
                graphs[name], live[name] = capture(arm.launches, calls), arm
            except Exception as error:  # too little memory for all sets, or a call that cannot be captured
                found["missing"] = _failed(error)
            else:
                found |= {"pdl": arm.pdl, "note": arm.note, "facts": dict(arm.facts)}
    captured = time.monotonic()
    for name, samples in (rounds(graphs, calls) if graphs else {}).items():
        arms[name]["samples_us"] = samples
    timed = time.monotonic()
    for name, arm in live.items():
        arms[name] |= profiled(arm)
    seconds = {
        "check": checked - began, "capture": captured - checked, "rounds": timed - captured,
        "profile": time.monotonic() - timed,
    }  # fmt: skip
    return {"sets": sets, "calls": calls, "rotated_bytes": sets * touched, "arms": arms, "seconds": seconds}


def _builder(module: str, function: str) -> Build:
    """A peer's builder; one whose module cannot be imported here is missing."""

    def build(inputs: Inputs) -> Arm:
        try:
            found: Build = getattr(import_module(f"verify.bench.gpu.peers.{module}"), function)
        except ImportError as error:
            raise Missing(f"cannot be imported here ({error})") from error
        return found(inputs)

    return build


def _checked(cell: PeerCell, build: Build, seed: int, want: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arm's record so far: why it is missing, or how far its results are from the reference's.

    Inputs are made anew from the seed, because an earlier arm has changed the states.
    """
    record: dict[str, Any] = {"missing": None, "errors": {}, "samples_us": None}
    try:
        errors = compared(build(make_inputs(cell, 1, seed)), want)
    except Missing as missing:
        return {**record, "missing": str(missing)[:300]}
    except Exception as error:  # a peer that breaks is no peer
        return {**record, "missing": _failed(error)}
    wrong = sorted(name for name, found in errors.items() if not found["fine"])
    return {**record, "errors": errors, "missing": f"wrong results: {', '.join(wrong)}" if wrong else None}


def _failed(error: Exception) -> str:
    """The reason that the row shows.

    Raises:
        RuntimeError: the error broke the device, which shows in the next call, whatever that is.
    """
    torch.cuda.synchronize()
    return f"failed: {type(error).__name__}: {error}"[:300]
