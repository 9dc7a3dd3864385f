"""Make the folder that `kit.py run --peers DIR` takes: packages of others that the peer table runs beside our kernels.

    python tools/make_peers.py DIR [--python 3.12]

`DIR/site` gets fla, tvm-ffi and what they import, for the Python of the GPU machine. `DIR/flashinfer_mla_sm90.so` is
FlashInfer's paged MLA module for Hopper, compiled here from its wheel with the compiler of NVIDIA's wheels; no GPU is
needed, about two minutes. Nothing of it enters the repository or a kit; the record names every digest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

SITE = ("fla-core==0.6.0", "flash-linear-attention==0.6.0", "einops==0.8.2", "packaging==26.4")
TVM_FFI = "apache-tvm-ffi==0.1.15.post2"
FLASHINFER = "flashinfer-python==0.7.4"
CUDA = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime", "nvidia-nvvm")
CUDA_VERSION = "13.0.*"
"""The GPU machine's CUDA: machine code for sm_90a is final, so only the runtime library has to match."""
LIBRARY = "flashinfer_mla_sm90.so"
STEPS = ("plan", "run", "binding")
CONFIG = {
    "dtype_q": "nv_bfloat16", "dtype_kv": "nv_bfloat16", "dtype_o": "nv_bfloat16", "dtype_idx": "int32_t",
    "head_dim_ckv": "512", "head_dim_kpe": "64",
}  # fmt: skip
"""What its own just-in-time build fills in for this model: bf16, latent of 512, position part of 64."""
FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "-use_fast_math", "-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2", "--compiler-options=-fPIC",
    "--expt-relaxed-constexpr", "-static-global-template-stub=false", "-gencode=arch=compute_90a,code=sm_90a",
)  # fmt: skip
"""Those of its own build."""
HEADERS = (
    "csrc", "include", "cccl/cub", "cccl/libcudacxx/include", "cccl/thrust", "cutlass/include",
    "cutlass/tools/util/include", "spdlog/include",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="new folder")
    parser.add_argument("--python", default="3.12", help="version of Python on the GPU machine")
    options = parser.parse_args(arguments)
    site = options.folder / "site"
    site.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for requirement in (*SITE, TVM_FFI):
            _unpack(requirement, site, scratch, options.python)
        tools = scratch / "tools"
        for requirement in (FLASHINFER, *(f"{package}=={CUDA_VERSION}" for package in CUDA)):
            _unpack(requirement, tools, scratch, f"{sys.version_info.major}.{sys.version_info.minor}")
        _compile(tools, site, scratch, options.folder / LIBRARY)
    print(f"{options.folder}: {sum(1 for path in options.folder.rglob('*') if path.is_file())} files")
    return 0


def _unpack(requirement: str, target: Path, scratch: Path, python: str) -> None:
    """Download one wheel and unpack it."""
    wheels = scratch / requirement.partition("=")[0]
    _run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version",
        python, "--dest", str(wheels), requirement,
    )  # fmt: skip
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)


def _compile(tools: Path, site: Path, scratch: Path, library: Path) -> None:
    """FlashInfer's module: three sources with one configuration, linked to tvm-ffi and the CUDA runtime."""
    data, cuda, ffi = tools / "flashinfer" / "data", tools / "nvidia" / "cu13", site / "tvm_ffi"
    for program in (*(cuda / "bin").iterdir(), *(cuda / "nvvm" / "bin").iterdir()):
        if program.is_file():
            program.chmod(0o755)  # archives keep no modes
    text = (data / "csrc" / "batch_mla_config.jinja").read_text()
    for key, value in CONFIG.items():
        text = text.replace(f"{{{{ {key} }}}}", value)
    (scratch / "batch_mla_sm90_config.inc").write_text(text)
    includes = [f"-I{scratch}", *(f"-I{data / path}" for path in HEADERS), f"-I{ffi / 'include'}"]
    objects = []
    for step in STEPS:
        source = scratch / f"batch_mla_sm90_{step}.cu"
        source.write_bytes((data / "csrc" / source.name).read_bytes())
        objects.append(str(source.with_suffix(".o")))
        nvcc = str(cuda / "bin" / "nvcc")
        _run(nvcc, *FLAGS, *includes, f"-I{cuda / 'include'}", "-c", str(source), "-o", objects[-1])
    _run(
        "g++", "-shared", "-s", "-o", str(library), *objects, f"-L{ffi / 'lib'}", "-ltvm_ffi", f"-L{cuda / 'lib'}",
        "-l:libcudart.so.13", "-static-libstdc++", "-static-libgcc",
    )  # fmt: skip


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    raise SystemExit(main())
