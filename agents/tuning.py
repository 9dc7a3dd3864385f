"""The tuner's eyes: advisory timings of a kernel's schedule points in a sandboxed worker, remembered per run.

Timings are journalled in the run's folder, so that a resumed run sees the numbers on which it acted before and proposes
the same again. They steer the search and are never evidence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agents.proposers.tuner import Point, Tuner
from agents.task import Task
from harness.canonical import line as canonical_line
from harness.errors import FasttrackError
from harness.evidence import JsonLines
from harness.git import Repository
from harness.progress import Progress
from harness.settings import Settings, Target
from k3_backend.aot.build import build, build_runtime
from k3_backend.aot.cpu.host import best_arch
from k3_backend.aot.manifest import Artifact
from k3_backend.aot.schedule import Tunable, load_tunables
from k3_backend.geometry import geometry
from verify.building import KERNELS, SCHEDULES, SandboxRunner, artifact_cache
from verify.evaluator.inputs import Call, Case, make
from verify.evaluator.worker import ArmSpec, SharedBuffer, Worker
from verify.snapshots import JUDGING_PATHS, export_tree

__all__ = ["KernelTimer", "schedule_path", "tuner_for"]

THREADS = 2
TURNS = 4
BUFFER_BYTES = 1 << 30
TIMEOUT_S = 120.0
INPUT_SETS = 6
"""Input sets that a timing rotates through: k3-nano has six KDA layers, each with its own states."""


def schedule_path(target: Target, op: str) -> str:
    """Repository path of an op's schedule on a target."""
    return f"{SCHEDULES.as_posix()}/{target.device}/{target.geometry}/{op}.toml"


def tuner_for(
    task: Task,
    settings: Settings,
    repo: Repository,
    commit: str,
    cache: Path,
    run_dir: Path,
    progress: Progress,
) -> Tuner:
    """The tuner of a task's op, timing the kernels of a commit.

    Raises:
        FasttrackError: the task names several ops, or this machine cannot run the target's kernels.
    """
    target = settings.target(task.target)
    if len(task.ops) != 1:
        raise FasttrackError(
            f"{len(task.ops)} ops",
            where=f"task {task.id}: ops",
            expected="one op for the tuner",
            next="fasttrack tasks lint",
        )
    op = task.ops[0]
    timer = KernelTimer(op, settings, target, repo, commit, cache, run_dir, progress)
    return Tuner(
        op,
        geometry=target.geometry,
        path=schedule_path(target, op),
        space=timer.space,
        cells=[cell for cell in task.all_cells() if cell.scope == op],
        timer=timer,
    )


class KernelTimer:
    """Times points of one op's kernel as it stands in a commit. Callable as `agents.proposers.tuner.Timer`."""

    def __init__(
        self,
        op: str,
        settings: Settings,
        target: Target,
        repo: Repository,
        commit: str,
        cache: Path,
        run_dir: Path,
        progress: Progress,
    ) -> None:
        arch = best_arch(target.archs)
        if target.device != "cpu" or arch is None:
            raise FasttrackError(
                f"this machine runs none of {', '.join(target.archs)}",
                where=f"target {target.name}",
                expected="a machine of the target's kind",
                next="fasttrack doctor",
            )
        self.op = op
        self.arch = arch
        self.target = target
        self.commit = commit
        self.run_dir = run_dir
        self.progress = progress
        self._settings = settings
        self._artifacts = artifact_cache(repo.root)
        self._tree = export_tree(repo, commit, JUDGING_PATHS, cache / "trees")
        self._journal = JsonLines(run_dir / "tuner.jsonl")
        self._known: dict[bytes, list[float]] = {
            self._key(line["rows"], line["points"]): line["seconds"] for line in self._journal.read()
        }

    @property
    def space(self) -> tuple[Tunable, ...]:
        """Tunables that the kernel declares."""
        return load_tunables(self._tree / KERNELS / self.op / f"{self.target.device}.toml")

    def __call__(self, rows: int, points: Sequence[Point]) -> Sequence[float]:
        """Seconds per call of each point at `rows` rows."""
        key = self._key(rows, points)
        if key not in self._known:
            self.progress(f"tuner: timing {len(points)} points of {self.op} at {rows} rows")
            self._known[key] = self._measure(rows, points)
            line = {"rows": rows, "points": [dict(p) for p in points], "seconds": list(self._known[key])}
            self._journal.append([{"op": self.op, "arch": self.arch, "commit": self.commit, **line}])
        return self._known[key]

    @staticmethod
    def _key(rows: int, points: Sequence[Mapping[str, int]]) -> bytes:
        return canonical_line({"rows": rows, "points": [dict(p) for p in points]})

    def _measure(self, rows: int, points: Sequence[Point]) -> list[float]:
        seed = os.urandom(16).hex()
        calls = [
            make(Case(self.op, "gaussian", rows, 1, THREADS, f"{seed}{i:02x}", self.target.geometry))
            for i in range(INPUT_SETS)
        ]
        with self._worker() as worker:
            answer = worker.call(
                "tune.points",
                timeout_s=TIMEOUT_S,
                op=self.op,
                rows=rows,
                sets=[_place(worker.buffer, call) for call in calls],
                attrs=dict(calls[0].attrs),
                tunables=[dict(p) for p in points],
                turns=TURNS,
            )
        return [float(s) for s in answer["seconds"]]

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        kernels = self._tree / KERNELS
        runner = SandboxRunner(kernels, self._settings.build)
        artifact: Artifact = build(
            self.op, self.arch, geometry(self.target.geometry), kernels, self._artifacts, run=runner
        )
        arm = ArmSpec(
            "specialized",
            {self.op: artifact.path, "runtime": build_runtime(self._artifacts).path},
            self._tree / SCHEDULES,
        )
        with Worker.start(
            arm, base_tree=self._tree, run_dir=self.run_dir / "logs", threads=THREADS, buffer_bytes=BUFFER_BYTES
        ) as worker:
            yield worker


def _place(buffer: SharedBuffer, call: Call) -> dict[str, Any]:
    """Put a call's tensors into the shared buffer; views by name."""
    views: dict[str, Any] = {}
    for name, tensor in call.tensors.items():
        if tensor is None:
            views[name] = None
            continue
        spec = call.spec.tensor(name)
        view = buffer.view(spec.dtype, tuple(tensor.shape))
        content = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        buffer.bytes[view.offset : view.offset + view.nbytes] = content
        views[name] = view.to_json()
    for name, (dtype, shape) in call.outputs.items():
        views[name] = buffer.view(dtype, shape).to_json()
    return views
