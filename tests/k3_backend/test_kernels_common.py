"""The kernels' common headers: elementary functions, bf16 rounding, tails and MXFP4, at every level this host runs."""

from __future__ import annotations

import ctypes
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from k3_backend.aot.build import KERNELS_DIR, build
from k3_backend.aot.cpu.host import runnable_archs
from k3_backend.geometry import geometry
from k3_backend.ops.maths import situ
from k3_backend.ops.mxfp import dequantise_mxfp4

F32 = NDArray[np.float32]
LEVELS = pytest.mark.parametrize("arch", runnable_archs())
LANES = 16  # of the widest level; arrays are multiples of it
TINY = float(np.finfo(np.float32).tiny)


@lru_cache
def probe(arch: str) -> ctypes.CDLL:
    """`simd_probe.cc` built as the op `probe` would be, beside a copy of the common headers."""
    with TemporaryDirectory() as folder:
        kernels = Path(folder)
        (kernels / "probe").mkdir()
        shutil.copytree(KERNELS_DIR / "common", kernels / "common")
        shutil.copy(Path(__file__).with_name("simd_probe.cc"), kernels / "probe" / "cpu.cc")
        (kernels / "probe" / "cpu.toml").write_text("", encoding="utf-8")
        return ctypes.CDLL(str(build("probe", arch, geometry("k3-pico"), kernels).object_path))


def at(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def apply(arch: str, name: str, x: F32) -> F32:
    y = np.full_like(x, np.nan)
    getattr(probe(arch), f"probe_{name}")(at(x), at(y), ctypes.c_int64(x.size))
    return y


def every_magnitude() -> F32:
    """Both signs of bit patterns spread over all of fp32, and the range where the functions bend, finely."""
    patterns = np.arange(0, 2**32, 9973, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([patterns, np.linspace(-88, 90, 300_000, dtype=np.float32)])
    return np.resize(x, x.size // LANES * LANES)


def ulps(y: F32, exact: NDArray[np.longdouble]) -> NDArray[np.float64]:
    """Errors in units in the last place where the exact result is a normal fp32 number."""
    with np.errstate(over="ignore"):
        nearest = np.abs(exact).astype(np.float32)
    normal = np.isfinite(nearest) & (nearest >= TINY)
    unit = np.spacing(nearest[normal]).astype(np.float64)
    return np.abs((y[normal] - exact[normal]).astype(np.float64)) / unit


@LEVELS
@pytest.mark.parametrize(("name", "bound"), [("exp", 1.5), ("sigmoid", 3.0), ("tanh", 3.0)])
def test_elementary_functions_keep_their_stated_error(name: str, bound: float, arch: str) -> None:
    """simd.h promises errors that kernels rely on; NaN stays NaN and no finite input gives one."""
    x = every_magnitude()
    with np.errstate(all="ignore"):
        wide = x.astype(np.longdouble)
        exact = {"exp": np.exp, "tanh": np.tanh, "sigmoid": lambda v: 1 / (1 + np.exp(-v))}[name](wide)
        y = apply(arch, name, x)
    assert float(ulps(y, exact).max()) <= bound
    assert np.array_equal(np.isnan(y), np.isnan(x))
    subnormal = np.abs(exact) < TINY
    assert float(np.abs(y[subnormal] - exact[subnormal]).max()) <= 4 * TINY


@LEVELS
def test_elementary_functions_at_the_edges(arch: str) -> None:
    """Infinities have limits, zeros keep their sign where the function is odd."""
    edges = np.array([np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38, 88.72, 88.73], dtype=np.float32)
    x = np.resize(edges, LANES)
    assert apply(arch, "exp", x)[:6].tolist() == [np.inf, 0.0, 1.0, 1.0, np.inf, 0.0]
    assert np.isfinite(apply(arch, "exp", x)[6])
    assert np.isposinf(apply(arch, "exp", x)[7])
    assert apply(arch, "sigmoid", x)[:6].tolist() == [1.0, 0.0, 0.5, 0.5, 1.0, 0.0]
    y = apply(arch, "tanh", x)
    assert y[:6].tolist() == [1.0, -1.0, 0.0, 0.0, 1.0, -1.0]
    assert np.signbit(y[:6]).tolist() == [False, True, False, True, False, True]


@LEVELS
@pytest.mark.parametrize(("beta", "linear_beta"), [(4.0, 25.0), (4.0, 0.0), (1.0, 2.0)])
def test_situ_keeps_relative_accuracy(beta: float, linear_beta: float, arch: str) -> None:
    """SiTU near zero and far out, where its factors saturate: one shared division must not lose range."""
    generator = np.random.default_rng(0)
    scale = np.exp2(generator.uniform(-20, 7, 60_000))
    g = (generator.standard_normal(60_000) * scale).astype(np.float32)
    u = (generator.standard_normal(60_000) * scale[::-1]).astype(np.float32)
    g = np.clip(g, -80, None)
    y = np.full_like(g, np.nan)
    probe(arch).probe_situ(
        at(g), at(u), at(y), ctypes.c_int64(g.size), ctypes.c_float(beta), ctypes.c_float(linear_beta)
    )
    want = situ(torch.from_numpy(g).double(), torch.from_numpy(u).double(), beta, linear_beta).numpy()
    normal = np.abs(want) > TINY
    assert float((np.abs(y - want)[normal] / np.abs(want[normal])).max()) < 2**-20
    assert float(np.abs(y - want)[~normal].max(initial=0.0)) <= TINY


@LEVELS
def test_rounding_to_bf16_is_that_of_torch(arch: str) -> None:
    """Ties to even, overflow to infinity, quiet NaN; subnormals may become zero, as bf16 instructions do."""
    x = np.concatenate([every_magnitude(), np.arange(0, 2**20, dtype=np.uint32).view(np.float32) + np.float32(1)])
    x = np.resize(x, x.size // LANES * LANES)
    y, want = apply(arch, "round_bf16", x), torch.from_numpy(x).bfloat16().float().numpy()
    same = (y == want) | (np.isnan(y) & np.isnan(want))
    assert bool((same | ((np.abs(x) < TINY) & (y == 0))).all())


@LEVELS
def test_tails_touch_only_their_elements(arch: str) -> None:
    """A masked load or store that runs over would read or write a neighbour's row."""
    lanes = 8 if arch == "x86-64-v3" else 16
    x = np.linspace(-3, 3, lanes, dtype=np.float32)
    for n in range(lanes + 1):
        y, back = np.full(lanes + 1, 7, dtype=np.float32), np.full(lanes + 1, 7, dtype=np.float32)
        rounded = np.full(lanes + 1, 7, dtype=np.uint16)
        probe(arch).probe_tail(at(x), at(y), at(rounded), at(back), ctypes.c_int64(n))
        want = torch.from_numpy(x).bfloat16().float().numpy()
        assert np.array_equal(y[:n], x[:n])
        assert np.array_equal(back[:n], want[:n])
        assert (y[n:] == 7).all()
        assert (back[n:] == 7).all()
        assert (rounded[n:] == 7).all()


@LEVELS
def test_mxfp4_expands_exactly(arch: str) -> None:
    """Every code with scales over the whole range, the subnormal and the NaN scale included."""
    k, rows = 256, 16
    packed = torch.arange(rows * k // 2, dtype=torch.int32).remainder(256).to(torch.uint8).view(rows, k // 2)
    scales = torch.arange(rows * k // 32, dtype=torch.int32).mul(37).remainder(253).to(torch.uint8).view(rows, k // 32)
    scales[0, :3] = torch.tensor([0, 1, 255], dtype=torch.uint8)
    out = torch.zeros(rows, k, dtype=torch.bfloat16)
    probe(arch).probe_mxfp4(*(ctypes.c_void_p(t.data_ptr()) for t in (packed, scales, out)), ctypes.c_int64(k))
    assert torch.equal(out.isnan(), dequantise_mxfp4(packed, scales, torch.float32).isnan())
    want = dequantise_mxfp4(packed, scales, torch.float32).nan_to_num(0.0)
    assert torch.equal(out.float().nan_to_num(0.0), want)
