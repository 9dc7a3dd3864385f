"""Kernels whose races, or freedom from them, are known beforehand: what racecheck's word is worth on this machine.

`racy` has a race in shared memory. The others have none by PTX's memory model, and use the ways in which decode kernels
order shared memory: a warp barrier, then one elected lane that speaks to an mbarrier for its warp (both are morally
strong and causality order is transitive), and an mbarrier that one thread initialises and arms before its cluster
joins. Each result is compared with the only one that a race-free kernel can give.

Run as a process of its own under the tool: `main(name)`. PTX that the driver assembles: no compiler, no torch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

__all__ = ["main"]

WARP = 32
SOURCE_WORDS, RESULT_WORDS = 128, 64
"""u32 words of the buffer that every control gets: what it may read (word i holds i), then what it writes."""

_HEAD = """\
.version 8.1
.target sm_90
.address_size 64
"""

_SETUP = """
    .reg .pred %elected, %other, %done;
    .reg .b32 %thread, %lane, %base, %cell, %value, %first, %peer, %rank;
    .reg .b64 %memory, %from, %to;
    .shared .align 16 .b8 shared[576];  // mbarriers at 0 and 8, cells from 64
    ld.param.u64 %memory, [memory];
    cvta.to.global.u64 %memory, %memory;
    mov.u32 %thread, %tid.x;
    and.b32 %lane, %thread, 31;
    mov.u32 %base, shared;
    mad.lo.u32 %cell, %lane, 4, %base;
    add.u32 %cell, %cell, 64;
    mad.wide.u32 %to, %lane, 4, %memory;
    setp.eq.u32 %elected, %lane, 0;
    setp.ge.u32 %other, %thread, 32;
"""
"""What all controls begin with. Two warps; `%other` is true in the second, `%elected` in lane 0 of each."""

_FULL_AND_EMPTY = """\
    setp.eq.u32 %done, %thread, 0;
    @%done mbarrier.init.shared.b64 [%base], 1;
    @%done mbarrier.init.shared.b64 [%base+8], 1;
    bar.sync 0;
    @%other bra READ;
"""
"""Mbarriers of one slot, full and empty; the second warp is its reader."""

_READ_TWICE = """\
READ:
    mbarrier.try_wait.parity.shared.b64 %done, [%base], 0;
    @!%done bra READ;
    ld.shared.u32 %first, [%cell];
    bar.warp.sync 0xffffffff;
    @%elected mbarrier.arrive.shared.b64 _, [%base+8];
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %done, [%base], 1;
    @!%done bra AGAIN;
    ld.shared.u32 %value, [%cell];
    add.u32 %value, %value, %first;
    st.global.u32 [%to+512], %value;
    ret;
"""
"""Reader: wait until the slot is full, read, let one lane say for the warp that it is empty, and read once more."""

RACY = """
.visible .entry racy(.param .u64 memory)
{%SETUP%
    @%other bra READ;
    st.shared.u32 [%cell], %lane;
    ret;
READ:  // nothing has waited for the first warp
    ld.shared.u32 %value, [%cell];
    st.global.u32 [%to+512], %value;
    ret;
}
"""

ELECTED_ARRIVAL = """
.visible .entry elected_arrival(.param .u64 memory)
{%SETUP%
%FULL_AND_EMPTY%    st.shared.u32 [%cell], %lane;
    bar.warp.sync 0xffffffff;
    @%elected mbarrier.arrive.shared.b64 _, [%base];
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %done, [%base+8], 0;
    @!%done bra EMPTY;
    add.u32 %value, %lane, 1000;  // the same cells again, after the reader has let them go
    st.shared.u32 [%cell], %value;
    bar.warp.sync 0xffffffff;
    @%elected mbarrier.arrive.shared.b64 _, [%base];
    ret;
%READ_TWICE%}
"""

ELECTED_ANNOUNCEMENT = """
.visible .entry elected_announcement(.param .u64 memory)
{%SETUP%
    setp.eq.u32 %done, %thread, 0;
    @%done mbarrier.init.shared.b64 [%base], 1;
    bar.sync 0;
    @%other bra READ;
    @%elected mbarrier.arrive.expect_tx.shared.b64 _, [%base], 512;
    bar.warp.sync 0xffffffff;
    mad.wide.u32 %from, %lane, 16, %memory;
    mad.lo.u32 %cell, %lane, 16, %base;
    add.u32 %cell, %cell, 64;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%cell], [%from], 16, [%base];
    ret;
READ:
    mbarrier.try_wait.parity.shared.b64 %done, [%base], 0;
    @!%done bra READ;
    mad.lo.u32 %cell, %lane, 16, %base;
    ld.shared.u32 %value, [%cell+64];
    st.global.u32 [%to+512], %value;
    ret;
}
"""

ELECTED_RELEASE = """
.visible .entry elected_release(.param .u64 memory)
{%SETUP%
%FULL_AND_EMPTY%    add.u32 %cell, %base, 64;
    @%elected mbarrier.arrive.expect_tx.shared.b64 _, [%base], 128;
    @%elected cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%cell], [%memory], 128, [%base];
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %done, [%base+8], 0;
    @!%done bra EMPTY;
    add.u64 %from, %memory, 128;
    @%elected mbarrier.arrive.expect_tx.shared.b64 _, [%base], 128;
    @%elected cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%cell], [%from], 128, [%base];
    ret;
%READ_TWICE%}
"""

INIT_THEN_ANNOUNCE = """
.visible .entry init_then_announce(.param .u64 memory) .explicitcluster .reqnctapercluster 2
{%SETUP%
    @%elected mbarrier.init.shared.b64 [%base], 1;
    @%elected mbarrier.arrive.expect_tx.shared.b64 _, [%base], 128;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %rank, %cluster_ctarank;
    mad.wide.u32 %to, %rank, 128, %to;
    mad.lo.u32 %value, %rank, 1000, %lane;
    xor.b32 %peer, %rank, 1;
    mapa.shared::cluster.u32 %cell, %cell, %peer;
    mapa.shared::cluster.u32 %first, %base, %peer;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%cell], %value, [%first];
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [%base], 0;
    @!%done bra WAIT;
    mad.lo.u32 %cell, %lane, 4, %base;
    ld.shared.u32 %value, [%cell+64];
    st.global.u32 [%to+512], %value;
    ret;
}
"""

_PARTS = {"%SETUP%": _SETUP, "%FULL_AND_EMPTY%": _FULL_AND_EMPTY, "%READ_TWICE%": _READ_TWICE}


@dataclass(frozen=True)
class Control:
    """One kernel and what it must compute."""

    text: str
    ctas: int
    threads: int
    result: Callable[[int], int] | None
    """Word i of the results; None if that depends on the race."""
    words: int = WARP


CONTROLS = {
    "racy": Control(RACY, 1, 2 * WARP, None),
    "elected_arrival": Control(ELECTED_ARRIVAL, 1, 2 * WARP, lambda i: 2 * i + 1000),
    "elected_announcement": Control(ELECTED_ANNOUNCEMENT, 1, 2 * WARP, lambda i: 4 * i),
    "elected_release": Control(ELECTED_RELEASE, 1, 2 * WARP, lambda i: 2 * i + WARP),
    "init_then_announce": Control(
        INIT_THEN_ANNOUNCE, 2, WARP, lambda i: i % WARP + 1000 * (1 - i // WARP), words=2 * WARP
    ),
}


def ptx(name: str) -> str:
    """The whole text of a control."""
    text = CONTROLS[name].text
    for mark, part in _PARTS.items():
        text = text.replace(mark, part)
    return _HEAD + text


def main(name: str) -> None:
    """Launch a control once on the first GPU.

    Raises:
        RuntimeError: a driver call failed, or a race-free kernel gave another result than the only possible one.
    """
    control = CONTROLS[name]
    _checked(driver.cuInit(0), "cuInit")
    device = _checked(driver.cuDeviceGet(0), "cuDeviceGet")
    _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device), "context")), "cuCtxSetCurrent")
    module = _checked(driver.cuModuleLoadData(ptx(name).encode() + b"\0"), f"assembling {name}")
    function = _checked(driver.cuModuleGetFunction(module, name.encode()), "cuModuleGetFunction")
    count = SOURCE_WORDS + RESULT_WORDS
    host = bytearray(struct.pack(f"<{count}I", *range(SOURCE_WORDS), *[0] * RESULT_WORDS))
    memory = _checked(driver.cuMemAlloc(len(host)), "cuMemAlloc")
    _checked(driver.cuMemcpyHtoD(memory, bytes(host), len(host)), "cuMemcpyHtoD")
    address = ctypes.c_uint64(int(memory))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    _checked(
        driver.cuLaunchKernel(
            function, control.ctas, 1, 1, control.threads, 1, 1, 0, 0, ctypes.addressof(pointers), 0
        ),
        f"launch of {name}",
    )  # fmt: skip
    _checked(driver.cuCtxSynchronize(), f"run of {name}")
    _checked(driver.cuMemcpyDtoH(host, memory, len(host)), "cuMemcpyDtoH")
    if control.result is not None:
        found = struct.unpack_from(f"<{control.words}I", host, 4 * SOURCE_WORDS)
        expected = tuple(map(control.result, range(control.words)))
        if found != expected:
            raise RuntimeError(f"{name} computed {found}; expected {expected}; next: this machine's driver")


def _checked(answer: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call."""
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{what}: {answer[0].name}")
    return answer[1] if len(answer) > 1 else None
