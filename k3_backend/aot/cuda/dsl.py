"""The part of the compiler that touches the CuTe DSL: stand-in arguments, one generic host function, PTX and cubin out.

Host code that the DSL generates is thrown away; the trusted launcher packs and launches by itself. No `annotations`
import here: the DSL evaluates annotations in the module's globals.
"""

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_ptr

from k3_backend.aot.cuda.contract import Launch

__all__ = ["POINTER_ALIGNMENT", "compile_launch", "pointer", "scalar"]

POINTER_ALIGNMENT = 16
"""Bytes that a kernel may assume of every pointer; the launcher checks more."""

_DTYPES = {
    "bf16": cutlass.BFloat16,
    "f32": cutlass.Float32,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
    "u8": cutlass.Uint8,
    "e4m3": cutlass.Uint8,  # bytes: kernels convert by PTX instructions
}


class _Step:
    """A launch as the host function sees it. Its short repr keeps the DSL's mangled file names short."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __repr__(self) -> str:
        return self.launch.name


@cute.jit
def _host(arguments: tuple, step: cutlass.Constexpr, stream: object) -> None:  # type: ignore[type-arg, name-defined]
    launch = step.launch
    launch.kernel(*arguments, **launch.constants).launch(
        grid=[1, 1, 1],
        block=[launch.block, 1, 1],
        cluster=[launch.cluster, 1, 1],
        smem=launch.shared,
        min_blocks_per_mp=launch.min_ctas_per_sm,
        preferred_smem_carveout=100,  # else the DSL asks the driver for the device's size
        use_pdl=launch.pdl,
        stream=stream,
    )


def pointer(dtype: str) -> object:
    """A stand-in for a tensor argument."""
    return make_ptr(_DTYPES[dtype], 0, cute.AddressSpace.gmem, assumed_align=POINTER_ALIGNMENT)


def scalar(kind: str) -> object:
    """A stand-in for an i32 or f32 argument."""
    return cutlass.Int32(1) if kind == "i32" else cutlass.Float32(1.0)


def compile_launch(launch: Launch, arguments: list[object]) -> tuple[bytes, str]:
    """The launch's kernel as (cubin, PTX), with line information."""
    compiled = cute.compile(_host, tuple(arguments), _Step(launch), make_fake_stream(), options="--generate-line-info")
    return bytes(compiled.__cubin__), str(compiled.__ptx__)
