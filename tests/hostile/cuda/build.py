"""Compiles the kernels of kernels.py into one cubin: `python build.py ARCH FOLDER`.

Writes kernels.cubin, kernels.ptx and the like for each kernel of kernels.ALONE. One process per architecture, because the DSL reads the architecture once.
"""

import os
import sys
from pathlib import Path


def main(arch: str, folder: Path) -> None:
    os.environ.update(
        CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP="ptx,cubin", CUTE_DSL_DUMP_DIR=str(folder), CUTE_DSL_NO_CACHE="1"
    )
    import cutlass
    import cutlass.cute as cute
    import kernels
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    def pointer(dtype):
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=16)

    # What a file holds beside its kernels counts for all of them, so the printing kernel gets a file of its own.
    for file, names in (
        ("kernels", [n for n in kernels.CASES if n not in kernels.ALONE]),
        *((n, [n]) for n in kernels.ALONE),
    ):
        every = [getattr(kernels, name) for name in names]

        @cute.jit
        def launch(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32, stream):
            for kernel in cutlass.range_constexpr(len(every)):
                every[kernel](flag, x, w, out, n).launch(
                    grid=[1, 1, 1], block=[128, 1, 1], use_pdl=True, stream=stream
                )

        done = cute.compile(
            launch, pointer(Int32), pointer(Float32), pointer(Float32), pointer(Float32), Int32(5), make_fake_stream(),
            options="--generate-line-info",
        )
        (folder / f"{file}.cubin").write_bytes(done.__cubin__)
        (folder / f"{file}.ptx").write_text(done.__ptx__)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
