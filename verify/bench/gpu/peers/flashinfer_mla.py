"""FlashInfer's paged MLA decode for Hopper, from a shared object that was compiled ahead of time.

`--peers DIR` brings `flashinfer_mla_sm90.so`: the sources of its `batch_mla` module (bf16, 512 + 64, int32 indices)
compiled for sm_90a, whose `plan` and `run` are called through tvm-ffi. Planning is done once, outside the timed calls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify.bench.gpu.arm import Arm, Inputs, Missing
from verify.bench.gpu.cells import PAGE

__all__ = ["FOLDER_VARIABLE", "LIBRARY", "arm"]

FOLDER_VARIABLE = "FASTTRACK_PEERS"
"""Environment variable with the folder that `--peers` names."""
LIBRARY = "flashinfer_mla_sm90.so"
WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's own examples reserve."""
INT_WORKSPACE_BYTES = 8 << 20
NO_MASK = 0
"""MaskMode::kNone: one query token sees all of its request's cache."""


@cache
def _module() -> tuple[Any, Any]:
    """The library's functions, and tvm-ffi."""
    folder = os.environ.get(FOLDER_VARIABLE)
    path = Path(folder or ".") / LIBRARY
    if folder is None or not path.is_file():
        raise Missing(f"no {LIBRARY}: kit.py run --peers DIR with it (docs/peers.md says how it is compiled)")
    try:
        import tvm_ffi
    except ImportError as error:
        raise Missing(f"tvm-ffi cannot be imported ({error})") from error
    return tvm_ffi.load_module(str(path)), tvm_ffi


@cache
def _workspaces() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True),
    )


def arm(inputs: Inputs) -> Arm:
    """Plan once, run per set.

    Raises:
        Missing: the library or tvm-ffi is not there, or a verify step.
    """
    if inputs.cell.tokens > 1:
        raise Missing("only one query token per request is compared")
    (module, ffi), (floats, ints, staging) = _module(), _workspaces()
    cell, g = inputs.cell, inputs.geometry
    assert cell.context is not None
    pages = -(-cell.context // PAGE)
    starts = torch.arange(cell.batch + 1, dtype=torch.int32)
    lengths = torch.full((cell.batch,), cell.context, dtype=torch.int32)
    plan, used = module.plan(floats, ints, staging, starts, starts * pages, lengths, g.heads, g.kv_lora, False)
    ints[: int(used)].copy_(staging[: int(used)])
    outs = [torch.empty(cell.batch, g.heads, g.kv_lora, dtype=torch.bfloat16, device="cuda") for _ in inputs.sets]
    sums = [torch.empty(cell.batch, g.heads, dtype=torch.float32, device="cuda") for _ in inputs.sets]
    latent, rope = slice(g.kv_lora), slice(g.kv_lora, None)
    jobs = []
    for t, out, lse in zip(inputs.sets, outs, sums, strict=True):
        query, cache_rows = t["query"], t["kv_cache"]
        parts = [x[..., columns] for x in (query, cache_rows) for columns in (latent, rope)]
        tensors = (floats, ints, *parts, t["block_table"].flatten(), out, lse)
        jobs.append([ffi.from_dlpack(tensor) for tensor in tensors])
    device, scale = ffi.device("cuda", torch.cuda.current_device()), float(inputs.attrs["scale"])

    def launch(job: list[Any]) -> None:
        floats, ints, *tensors = job
        with ffi.use_raw_stream(device, torch.cuda.current_stream().cuda_stream):
            module.run(floats, ints, plan, *tensors, NO_MASK, g.heads, PAGE, scale, False, 1.0, 1.0, None)

    def results() -> Mapping[str, Tensor]:
        return {"out": outs[0], "lse": sums[0]}

    calls = [lambda job=job: launch(job) for job in jobs]
    return Arm(calls, results, pdl=False, note="FlashInfer batch MLA (Hopper), planned outside the timed calls")
