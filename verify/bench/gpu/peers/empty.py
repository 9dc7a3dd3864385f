"""An empty kernel that is launched dependently: how closely launches of a graph can follow each other.

One PTX text for every architecture; the driver assembles it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from cuda.bindings import driver

from k3_backend.aot.cuda.launch import check

__all__ = ["launch"]

_ENTRY = "fasttrack_empty"
_PTX = f"""\
.version 7.8
.target sm_90
.address_size 64
.visible .entry {_ENTRY}()
{{
    griddepcontrol.launch_dependents;
    griddepcontrol.wait;
    ret;
}}
"""
THREADS = 128


@cache
def _function() -> tuple[Any, Any]:
    library = check(
        driver.cuLibraryLoadData(_PTX.encode() + b"\0", [], [], 0, [], [], 0), "cuLibraryLoadData empty kernel"
    )
    kernel = check(driver.cuLibraryGetKernel(library, _ENTRY.encode()), "cuLibraryGetKernel")
    return library, driver.CUfunction(int(kernel))


def launch(blocks: int) -> None:
    """Enqueue it on torch's current stream.

    Raises:
        CudaError: the driver refuses the text or the launch.
    """
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    dependent = driver.CUlaunchAttribute()
    dependent.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.value.programmaticStreamSerializationAllowed = 1
    config.attrs = [dependent]
    config.numAttrs = 1
    check(driver.cuLaunchKernelEx(config, _function()[1], 0, 0), "launch of the empty kernel")
