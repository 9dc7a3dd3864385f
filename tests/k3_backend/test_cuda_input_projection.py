"""The input projection's CUDA forms: which choices they take, and what their machine code holds. No GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import k3_backend
from k3_backend.aot.cuda.build import build
from k3_backend.aot.cuda.cubin import read as read_cubin
from k3_backend.aot.cuda.descriptor import Descriptor
from k3_backend.geometry import geometry
from k3_backend.ops import OPS

ROOT = Path(k3_backend.__file__).resolve().parent
FEW = {"form": 0, "rows": 16, "token_tiles": 1, "split": 2, "stages": 6, "ctas": 1}
ONE = {"form": 1, "rows": 56, "token_tiles": 8, "split": 2, "stages": 6, "ctas": 1}
MANY = {"form": 2, "rows": 24, "token_tiles": 8, "split": 8, "stages": 6, "ctas": 1}


def choice(n: int = 6288, **changes: int) -> dict[str, Any]:
    base = (FEW, ONE, MANY)[changes.get("form", 0)]
    return {"tunables": {**base, **changes}, "specialised": {"N": n}}


def refusals(tmp_path: Path, arch: str, choices: list[dict[str, Any]]) -> list[str | None]:
    request = {"op": "input_projection", "arch": arch, "geometry": "k3-slice-tp8", "choices": choices}
    (tmp_path / "request.json").write_text(json.dumps(request))
    argv = [sys.executable, "-m", "k3_backend.aot.probe", str(tmp_path / "request.json"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent), "CUTE_DSL_ARCH": arch}
    subprocess.run(argv, cwd=ROOT, env=environment, check=True, timeout=120)
    answer: list[str | None] = json.loads((tmp_path / "probe.json").read_text())
    return answer


def test_impossible_choices_are_refused_with_a_reason_and_the_others_are_taken(tmp_path: Path) -> None:
    asked = [
        choice(),
        choice(form=1),
        choice(form=2),
        choice(form=2, split=4),
        choice(stages=8),
        choice(ctas=2),
        choice(form=2, stages=5),
        choice(form=1, rows=60),
        choice(form=1, rows=40, token_tiles=2),
        choice(form=1, ctas=2),
    ]
    taken, warp_group, warps, split, ring, pair, odd, uneven, short, two = refusals(tmp_path, "sm_90a", asked)
    assert (taken, warp_group, warps) == (None, None, None)
    assert split is not None
    assert "split = 8" in split
    assert ring is not None
    assert "bytes of shared memory, of 232448" in ring
    assert odd is not None
    assert "multiple of 2" in odd
    assert uneven is not None
    assert "60 rows" in uneven
    assert short is not None
    assert "at least 64 of both" in short
    assert two is not None
    assert "ctas = 1" in two
    assert pair is not None
    assert "2 x 177648 bytes" in pair


def test_warp_group_products_are_refused_where_the_machine_has_none(tmp_path: Path) -> None:
    first, second = refusals(tmp_path, "sm_103a", [choice(form=1), choice(form=2)])
    assert first is not None
    assert "wgmma, which only sm_90a has" in first
    assert second is None


@pytest.mark.parametrize(
    ("arch", "chosen", "registers"),
    [
        ("sm_90a", choice(form=1), 168),
        ("sm_90a", choice(form=1, token_tiles=3, stages=10), 112),
        ("sm_90a", choice(form=1, rows=96, stages=5), 112),
        ("sm_90a", choice(form=2), 168),
        ("sm_103a", choice(form=2, n=3648), 168),
        ("sm_90a", choice(n=3648, rows=14, stages=3, ctas=2), 128),
    ],
)
def test_machine_code_keeps_activations_in_registers_without_a_stack(
    tmp_path: Path, arch: str, chosen: dict[str, Any], registers: int
) -> None:
    artifact = build(
        "input_projection", arch, geometry("k3-slice-tp8"), ROOT / "kernels", ROOT / "schedules", tmp_path,
        only=[chosen],
    )  # fmt: skip
    descriptor = Descriptor.read(artifact.path, OPS["input_projection"])
    (launch,) = descriptor.variants[0].launches
    (kernel,) = read_cubin((artifact.path / launch.image).read_bytes()).kernels.values()
    assert kernel.frame_bytes == 0
    assert kernel.registers is not None
    assert kernel.registers <= registers
    ptx = (artifact.path / launch.image).with_suffix(".ptx").read_text()
    assert ("wgmma.mma_async" in ptx) == (chosen["tunables"]["form"] == 1)
    assert "cp.async.bulk.tensor" in ptx
    assert "griddepcontrol.wait" in ptx
