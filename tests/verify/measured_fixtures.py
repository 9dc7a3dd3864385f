"""A worker on hostile kernels without git or gates: objects from the plain kernels, faults by number of rows."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_fixtures import Bench, commit_all

from harness.git import Repository
from k3_backend.aot.build import build, build_runtime
from k3_backend.aot.cpu.host import best_arch, runnable_archs
from k3_backend.aot.manifest import Artifact
from k3_backend.geometry import geometry
from tests.hostile.kernels import faults
from verify.context import Arms, GateContext
from verify.evaluator.execute import run_case
from verify.evaluator.inputs import Case
from verify.evaluator.worker import ArmSpec, Worker

ROOT = Path(__file__).resolve().parents[2]
PICO = geometry("k3-pico")
ARCH = best_arch(runnable_archs()) or "x86-64-v3"
FIRST_ROWS = 8
"""Rows 8 + 2n select fault n; fewer rows and rows 8, 9 none."""


def fault_batch(number: int) -> int:
    """Requests of two tokens whose rows select a fault."""
    return (FIRST_ROWS + 2 * number) // 2


def build_faults(folder: Path) -> tuple[dict[str, Artifact], Path]:
    """The kernel with all faults, the runtime, and a schedule folder; readable by the sandbox's user."""
    kernels = folder / "kernels" / "kda_decode"
    kernels.mkdir(parents=True)
    (kernels / "cpu.cc").write_text(faults.with_all())
    (kernels / "cpu.toml").write_text(faults.all_declarations())
    buckets = [f"[[bucket]]\nmax_rows = {FIRST_ROWS + 2 * n + 1}\nfault = {n}\n" for n in range(len(faults.FAULTS) + 1)]
    schedules = folder / "schedules"
    (schedules / "cpu" / PICO.name).mkdir(parents=True)
    (schedules / "cpu" / PICO.name / "kda_decode.toml").write_text("version = 1\n\n" + "\n".join(buckets))
    out = folder / "artifacts"
    artifacts = {
        "kda_decode": build("kda_decode", ARCH, PICO, folder / "kernels", out),
        "runtime": build_runtime(out),
    }
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return artifacts, schedules


@contextlib.contextmanager
def started(artifacts: dict[str, Artifact], schedules: Path, run_dir: Path) -> Iterator[Worker]:
    """A worker that has loaded the objects."""
    arm = ArmSpec("specialized", {op: artifact.path for op, artifact in artifacts.items()}, schedules)
    with Worker.start(arm, base_tree=ROOT, run_dir=run_dir, threads=2, buffer_bytes=1 << 28) as worker:
        worker.call("op.load", timeout_s=120)
        yield worker


def line_of(worker: Worker, case: Case) -> dict[str, Any]:
    """The raw line of one case."""
    line: dict[str, Any] = {"kind": "case", "id": case.id, "op": case.op, "class": case.kind, "seed": case.seed}
    line |= {"failure": None, "skipped": None, "refused": None}
    run_case(worker, case, np.random.default_rng(5), line)
    return line


def codes(line: dict[str, Any]) -> set[str]:
    """Reason codes that one case line gives."""
    from verify.protocol.kernels import _case_findings

    return {code for code, _, _ in _case_findings(line)}


def checkout_bench(factory: pytest.TempPathFactory, name: str, *, plain: bool) -> Bench:
    """A repository with this checkout's protected code: gates in it run real workers.

    Args:
        factory: pytest's.
        name: of its folder.
        plain: its only kernel is the plain KDA one; else it has the checkout's kernels, whose artifacts are shared with
            the checkout's own cache.
    """
    root = factory.mktemp(name)
    repo = root / "repo"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", *(["kernels", "schedules"] if plain else []))
    for folder in ("k3_backend", "verify", "harness"):
        shutil.copytree(ROOT / folder, repo / folder, ignore=ignored)
    shutil.copy(ROOT / "harness.toml", repo)
    (repo / ".gitignore").write_text("build\n")
    if plain:
        files = {
            "kernels/kda_decode/cpu.cc": faults.PLAIN + "\n// base\n",
            "kernels/kda_decode/cpu.toml": faults.DECLARATIONS,
            "schedules/cpu/k3-nano/kda_decode.toml": "version = 1\n\n[[bucket]]\nmax_rows = 512\nfault = 0\n",
        }
        for path, content in files.items():
            (repo / "k3_backend" / path).parent.mkdir(parents=True, exist_ok=True)
            (repo / "k3_backend" / path).write_text(content)
    else:
        (ROOT / "build").mkdir(exist_ok=True)
        (repo / "build").symlink_to(ROOT / "build")
    commit_all(repo)
    return Bench(Repository(repo), root / "scratch")


def plain_context(bench: Bench, folder: Path, *, max_rows: int = 512, batches: tuple[int, ...] = (1,)) -> GateContext:
    """A context past the build gate whose candidate is the plain kernel for k3-nano, in the smallest possible tier."""
    nano = geometry("k3-nano")
    kernels = folder / "kernels" / "kda_decode"
    kernels.mkdir(parents=True)
    (kernels / "cpu.cc").write_text(faults.PLAIN)
    (kernels / "cpu.toml").write_text(faults.DECLARATIONS)
    schedules = folder / "schedules"
    (schedules / "cpu" / nano.name).mkdir(parents=True)
    (schedules / "cpu" / nano.name / "kda_decode.toml").write_text(
        f"version = 1\n\n[[bucket]]\nmax_rows = {max_rows}\nfault = 0\n"
    )
    artifacts = {"kda_decode": build("kda_decode", ARCH, nano, folder / "kernels", folder / "artifacts")}
    runtime = build_runtime(folder / "artifacts")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    context = bench.context(bench.commit({"k3_backend/kernels/kda_decode/cpu.cc": faults.PLAIN}), export=False)
    context.base_tree = ROOT
    context.target = context.target.model_copy(update={"batches": (1, 2)})
    context.tier = context.tier.model_copy(update={"batches": batches, "kernel_cases": 1})
    context.arms = Arms(artifacts, schedules, artifacts, schedules, runtime)
    return context
