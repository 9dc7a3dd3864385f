"""Compiles kernels of quack (https://github.com/Dao-AILab/quack, Apache-2.0) without a GPU, to try the audit on them.

Not a test: it needs a scratch environment with quack-kernels, torch and the CUTLASS DSL, no dependency of ours.

    python quack_study.py compile ARCH FOLDER     in that environment; calls quack's own compile functions
    python quack_study.py audit FOLDER            in ours; prints the rows of the table in docs/audit.md
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


def compile_all(arch: str, folder: Path) -> None:
    """One cubin and one PTX file per kernel and configuration."""
    os.environ.update(
        CUTE_DSL_ARCH=arch,
        CUTE_DSL_KEEP="ptx,cubin",
        CUTE_DSL_DUMP_DIR=str(folder),
        CUTE_DSL_NO_CACHE="1",
        QUACK_CACHE_ENABLED="0",
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in _kernels((9, 0) if arch.startswith("sm_90") else (10, 0)).items():
        before = set(folder.iterdir())
        try:
            make()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        for file in sorted(set(folder.iterdir()) - before):
            if file.suffix in (".cubin", ".ptx"):
                file.rename(folder / f"{name}{file.suffix}")


def _kernels(capacity: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    types = importlib.import_module("cutlass")
    b, f, h, i32, i64 = types.BFloat16, types.Float32, types.Float16, types.Int32, types.Int64
    norm, gemm, softmax, loss, topk, rotary, final, hadamard, symmetric = (
        importlib.import_module(f"quack.{name}")
        for name in (
            "rmsnorm", "gemm", "softmax", "cross_entropy", "topk", "rotary", "rms_final_reduce", "transform.hadamard",
            "gemm_symmetric",
        )
    )  # fmt: skip
    split = importlib.import_module("quack.gemm_config").SplitKMode
    nearest = importlib.import_module("quack.rounding").RoundingMode.RN
    forward, backward = norm._compile_rmsnorm_fwd, norm._compile_rmsnorm_bwd

    def product(**changed: Any) -> Callable[[], Any]:
        o = {
            "tile": (128, 128), "cluster": (2, 1, 1), "pingpong": False, "persistent": True, "dynamic": False,
            "c": None, "row": None, "col": None, "col_dims": 0, "alpha": 0, "beta": 0, "add": False, "varlen_m": False,
            "varlen_k": False, "gather": False, "dtype": b, "d": b, "a_major": "k", "b_major": "k", "split": 1,
            "mode": split.SERIAL, **changed,
        }  # fmt: skip
        return lambda: gemm._compile_gemm(
            o["dtype"], o["dtype"], o["d"], o["c"], o["a_major"], o["b_major"], "n", "n" if o["c"] else None, o["tile"],
            o["cluster"], o["pingpong"], o["persistent"], o["dynamic"], o["row"], o["col"], o["col_dims"], o["alpha"],
            o["beta"], o["add"], (), o["varlen_m"], o["varlen_k"], o["gather"], False, False, capacity, nearest, 0,
            None, split_k=o["split"], split_k_mode=o["mode"],
        )  # fmt: skip

    one = (1, 1, 1)
    return {
        "rmsnorm_fwd_1024": lambda: forward(b, b, None, b, None, None, 1024, False, False, False, False),
        "rmsnorm_fwd_res_4096": lambda: forward(b, b, b, f, None, b, 4096, True, False, False, False),
        "rmsnorm_fwd_32768": lambda: forward(b, b, None, b, None, None, 32768, True, False, False, False),
        "rmsnorm_fwd_perhead_128": lambda: forward(b, b, None, b, None, None, 128, False, False, False, True),
        "layernorm_fwd_4096": lambda: forward(b, b, None, f, f, None, 4096, True, True, True, False),
        "rmsnorm_bwd_1024": lambda: backward(1024, b, b, b, b, False, None, None, True),
        "rmsnorm_bwd_8192": lambda: backward(8192, b, b, b, f, False, b, b, True),
        "layernorm_bwd_2048": lambda: backward(2048, b, b, b, f, True, None, None, True, is_layernorm=True),
        "softmax_fwd_1024": lambda: softmax.Softmax.compile(b, b, 1024),
        "softmax_fwd_65536": lambda: softmax.Softmax.compile(b, b, 65536),
        "softmax_bwd_4096": lambda: softmax.SoftmaxBackward.compile(b, b, b, 4096),
        "cross_entropy_fwd_32000": lambda: loss.CrossEntropy.compile(b, i64, None, 32000, True, False, None, None),
        "cross_entropy_fwd_dx_131072": lambda: loss.CrossEntropy.compile(b, i64, None, 131072, True, True, None, None),
        "cross_entropy_bwd_32000": lambda: loss.CrossEntropyBackward.compile(b, i64, 32000, None),
        "topk_1024_32": lambda: topk.TopK.compile(b, 1024, 32, False),
        "topk_softmax_4096_8": lambda: topk.TopK.compile(f, 4096, 8, True),
        "topk_bwd_1024_32": lambda: topk.TopKBackward.compile(b, b, b, 1024, 32, True),
        "rotary_128": lambda: _compiler(rotary)(b, f, None, None, 128, False, False),
        "rotary_varlen_128": lambda: _compiler(rotary)(b, f, i32, i32, 128, True, False),
        "rms_final_reduce_4096": lambda: final._compile_rms_final_reduce(f, 4096),
        "hadamard_4096": lambda: _compiler(hadamard)(b, 4096),
        "gemm_128x128": product(),
        "gemm_large_tile": product(tile=(128, 256) if capacity[0] == 9 else (256, 256)),
        "gemm_pingpong": product(pingpong=True, cluster=one),
        "gemm_nonpersistent": product(persistent=False),
        "gemm_dynamic": product(dynamic=True),
        "gemm_addC_alpha_beta": product(c=b, alpha=2, beta=2),
        "gemm_rowvec_colvec": product(row=b, col=f, col_dims=2),
        "gemm_add_to_output": product(add=True),
        "gemm_varlen_m": product(varlen_m=True),
        "gemm_varlen_m_gather": product(varlen_m=True, gather=True, cluster=one),
        "gemm_varlen_k": product(varlen_k=True, a_major="m", b_major="n"),
        "gemm_fp16_f32out_bn": product(dtype=h, d=f, b_major="n"),
        "gemm_splitk_serial": product(split=4, cluster=one),
        "gemm_splitk_parallel": product(split=4, cluster=one, mode=split.PARALLEL),
        "gemm_splitk_separate": product(split=4, cluster=one, mode=split.SEPARATE, d=f),
        "gemm_symmetric": lambda: symmetric._compile_gemm_symmetric(
            b, b, b, None, None, b, "k", "k", "n", "n", (128, 128), one, False, True, False, 0, 0, capacity
        ),
    }


def _compiler(module: Any) -> Callable[..., Any]:
    """The `compile` of the module's only kernel class that has one."""
    return next(
        c.compile
        for c in vars(module).values()
        if isinstance(c, type) and hasattr(c, "compile") and c.__module__ == module.__name__
    )


def audit_all(folder: Path) -> None:
    """Print one row per kernel."""
    from verify.gates.audit.cuda import inspect_cubin
    from verify.protocol.audit_cuda import judge

    for cubin in sorted(folder.glob("*.cubin")):
        ptx = cubin.with_suffix(".ptx")
        facts = inspect_cubin(cubin.read_bytes(), ptx=ptx.read_text() if ptx.exists() else None)
        counts = Counter(finding.code for finding in judge(facts, cubin.name, "-"))
        waits = len(facts[0].get("waits", []))
        found = ", ".join(f"{n} x `{code}`" for code, n in sorted(counts.items())) or "none"
        print(f"| {cubin.stem} | {facts[0].get('arch')} | {facts[0].get('instructions')} | {waits} | {found} |")


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all(sys.argv[2], Path(sys.argv[3]))
    else:
        audit_all(Path(sys.argv[2]))
