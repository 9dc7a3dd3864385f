"""The CUDA kernels of this repository: every op builds for every architecture, and its machine code has no finding."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k3_backend.aot.build import KERNELS_DIR, SCHEDULES_DIR
from k3_backend.aot.cuda.build import build_all, scheduled
from k3_backend.aot.manifest import Artifact
from verify.gates.audit.device import inspect_artifact
from verify.protocol.audit_cuda import judge

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
AUDITED = ("sm_90a", "sm_103a")
OPS = {"attn_res", "input_projection", "kda_decode", "l2_prefetch", "mla_decode", "mla_query", "mla_value"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


def build_arch(arch: str, cache: Path) -> list[Artifact]:
    units = scheduled(arch, KERNELS_DIR, SCHEDULES_DIR)
    assert {op for op, _ in units} == OPS
    assert {name for _, name in units} >= {"k3-slice-tp8", "k3-slice-tp16"}
    return list(build_all(units, arch, KERNELS_DIR, SCHEDULES_DIR, cache).values())


@pytest.mark.parametrize("arch", ARCHS)
def test_every_op_builds_and_a_second_build_changes_nothing(arch: str, cache: Path) -> None:
    first = build_arch(arch, cache)
    started = time.monotonic()
    second = build_arch(arch, cache)
    assert time.monotonic() - started < 20.0
    assert [a.digest for a in second] == [a.digest for a in first]


@pytest.mark.parametrize("arch", AUDITED)
def test_the_audit_finds_nothing(arch: str, cache: Path) -> None:
    built = build_arch(arch, cache)
    with ThreadPoolExecutor(max_workers=2) as pool:
        kernels = [kernel for found in pool.map(inspect_artifact, built) for kernel in found]
    assert len(kernels) > 40
    findings = [str(f) for kernel in kernels for f in judge(kernel.facts, kernel.where, "")]
    assert findings == []
