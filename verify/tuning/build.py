"""Making a tuning archive: every point that the kernel takes, compiled in the sandbox, with trusted code to time it.

A commit gives the kernels, the schedules and the code that measures. Points that the kernel refuses, and points whose
machine code keeps registers on the stack, are listed with the reason and are not timed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import k3_backend
from harness import canonical, sandbox
from harness.errors import FasttrackError
from harness.git import Repository
from harness.progress import Progress
from harness.settings import Settings
from k3_backend.aot.cuda.arch import ARCHS
from k3_backend.aot.cuda.build import build, specialised_values
from k3_backend.aot.cuda.cubin import read as read_cubin
from k3_backend.aot.cuda.descriptor import Descriptor
from k3_backend.aot.manifest import MANIFEST_NAME, Artifact
from k3_backend.aot.schedule import Declarations, Schedule, load_declarations
from k3_backend.geometry import geometry
from k3_backend.ops import OPS
from verify.building import KERNELS, SCHEDULES, SandboxRunner, builder_paths
from verify.kit.sources import closure
from verify.snapshots import JUDGING_PATHS, export_tree
from verify.tuning.manifest import Timed, TuningManifest
from verify.tuning.space import Point, parse_vary, points

__all__ = ["ENTRY_POINTS", "OPS_BY_ROWS", "Asked", "archive"]

OPS_BY_ROWS = ("attn_res", "input_projection", "kda_decode", "mla_query", "mla_value")
"""Ops whose time follows from the rows; a core over a cache would need contexts as well."""
ENTRY_POINTS = ("verify.tuning.run",)
MOST_POINTS = 2000
CHUNK = 24
"""Choices that one sandboxed compiler run builds: well below its time limit."""
JOBS = 2

_Choice = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Asked:
    """What to tune."""

    op: str
    target: str
    commit: str
    rows: tuple[int, ...]
    vary: tuple[str, ...] = ()
    geometries: tuple[str, ...] | None = None
    """Null: those that have a schedule."""


def archive(
    asked: Asked, settings: Settings, repo: Repository, cache: Path, progress: Progress
) -> tuple[TuningManifest, dict[str, bytes]]:
    """Build all points; the manifest and every other file of the archive.

    Raises:
        FasttrackError: the op or target cannot be tuned so, or there are too many points.
        BuildError: a point that the kernel takes does not compile.
    """
    arch = _arch(asked, settings)
    sandbox.require()
    tree = export_tree(repo, asked.commit, JUDGING_PATHS, cache / "trees")
    kernels, schedules = tree / KERNELS, tree / SCHEDULES
    runner = SandboxRunner(kernels, settings.build, readable=builder_paths(kernels))
    declared = load_declarations(kernels / asked.op / "cute.toml")
    found = sorted(p.parent.name for p in (schedules / ARCHS[arch].schedules).glob(f"*/{asked.op}.toml"))
    calls: list[Timed] = []
    left_out: list[Mapping[str, Any]] = []
    files: dict[str, bytes] = {}
    for name in asked.geometries or found:
        wanted = _wanted(asked, name, declared, schedules / ARCHS[arch].schedules / name / f"{asked.op}.toml")
        choices = _distinct(choice for _, _, _, around in wanted for choice in around)
        if len(choices) > MOST_POINTS:
            raise FasttrackError(
                f"{len(choices)} points for {name}", where="--vary", expected=f"at most {MOST_POINTS}",
                next="vary fewer values: --vary name=1,2",
            )  # fmt: skip
        reasons = _probe(asked.op, arch, name, choices, kernels, runner)
        taken = [choice for choice, reason in zip(choices, reasons, strict=True) if reason is None]
        progress(f"{name}: {len(taken)} of {len(choices)} points are taken by the kernel; compiling")

        def compile_chunk(chunk: Sequence[_Choice], name: str = name) -> Artifact:
            shapes = geometry(name)
            return build(asked.op, arch, shapes, kernels, schedules, cache / "artifacts", run=runner, only=chunk)

        chunks = [taken[at : at + CHUNK] for at in range(0, len(taken), CHUNK)]
        with ThreadPoolExecutor(max_workers=JOBS) as pool:
            built = list(pool.map(compile_chunk, chunks))
        places: dict[bytes, str] = {}
        refused = {canonical.line(c): r for c, r in zip(choices, reasons, strict=True) if r is not None}
        for number, (chunk, artifact) in enumerate(zip(chunks, built, strict=True)):
            folder = f"arms/points/{name}/{number}"
            stacks = _stacks(artifact, OPS[asked.op])
            for choice in chunk:
                stack = stacks[canonical.line({**choice["tunables"], **choice["specialised"]})]
                key = canonical.line(choice)
                if stack:
                    refused[key] = f"{stack} bytes of stack: registers are spilled"
                else:
                    places[key] = folder
            for file in (MANIFEST_NAME, *artifact.files):
                if not file.endswith(".ptx"):
                    files[f"{folder}/{file}"] = (artifact.path / file).read_bytes()
        for sizes, rows, centre, around in wanted:
            fit = [c for c in around if canonical.line(c) in places]
            tunables = tuple(c["tunables"] for c in fit)
            calls.append(Timed(name, sizes, rows, centre, tunables, tuple(places[canonical.line(c)] for c in fit)))
        for choice in choices:
            if (why := refused.get(canonical.line(choice))) is not None:
                left_out.append({"geometry": name, "choice": choice, "reason": why})
    files |= {
        f"code/{path}": (tree / path).read_bytes()
        for path in closure(tree, frozenset(sys.stdlib_module_names), ENTRY_POINTS)
    }
    files["kit.py"] = (tree / "verify/kit/entry.py").read_bytes()
    manifest = TuningManifest(
        op=asked.op, target=asked.target, arch=arch, compute_capability=ARCHS[arch].compute_capability,
        commit=asked.commit, calls=tuple(calls), left_out=tuple(left_out),
    )  # fmt: skip
    return manifest.listing(files), files


def _arch(asked: Asked, settings: Settings) -> str:
    target = settings.target(asked.target)
    if target.device != "cuda" or len(target.archs) != 1:
        raise FasttrackError(
            f"target {target.name} runs on {target.device}, {', '.join(target.archs)}", where="--target",
            expected="a GPU target of one architecture", next="fasttrack optimize TASK --agent tuner, for the CPU",
        )  # fmt: skip
    if asked.op not in OPS_BY_ROWS:
        raise FasttrackError(
            f"the time of {asked.op} does not follow from rows alone, or it is no op", where="OP",
            expected=", ".join(OPS_BY_ROWS), next="fasttrack ops",
        )  # fmt: skip
    return target.archs[0]


_Wanted = list[tuple[dict[str, int], int, Point | None, list[_Choice]]]
"""(specialised sizes, rows, centre, choices around it) of every call."""


def _wanted(asked: Asked, name: str, declared: Declarations, schedule_file: Path) -> _Wanted:
    values = specialised_values(declared, geometry(name))
    schedule = Schedule.load(
        schedule_file, op=asked.op, geometry=name, tunables=declared.tunables, specialised=values
    )  # fmt: skip
    groups = parse_vary(asked.vary, declared.tunables)
    wanted: _Wanted = []
    for combination in product(*values.values()):
        sizes = dict(zip(values, combination, strict=True))
        for rows in asked.rows:
            centre = schedule.lookup(rows, sizes)
            around = points(centre, declared.tunables, groups)
            wanted.append((sizes, rows, centre, [{"tunables": p, "specialised": sizes} for p in around]))
    return wanted


def _distinct(choices: Any) -> list[_Choice]:
    return list({canonical.line(choice): choice for choice in choices}.values())


def _probe(
    op: str, arch: str, name: str, choices: Sequence[_Choice], kernels: Path, run: Callable[..., Any]
) -> list[str | None]:
    """Per choice: why the kernel file refuses it, or null. The file is a candidate's, so this runs in the sandbox."""
    with tempfile.TemporaryDirectory(prefix="probe-") as text:
        folder = Path(text)
        request = {"op": op, "arch": arch, "geometry": name, "choices": list(choices)}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        argv = [
            "env", "-C", str(kernels.parent), f"CUTE_DSL_ARCH={arch}", "CUTE_DSL_NO_CACHE=1",
            "PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={Path(k3_backend.__file__).parents[1]}",
            sys.executable, "-m", "k3_backend.aot.probe", str(folder / "request.json"), str(folder),
        ]  # fmt: skip
        done = run(argv, folder)
        answer = folder / "probe.json"
        reasons = json.loads(answer.read_text(encoding="utf-8")) if done.returncode == 0 and answer.is_file() else None
    if not isinstance(reasons, list) or len(reasons) != len(choices):
        raise FasttrackError(
            f"the kernel file gave no variants: {done.stderr.strip()[-400:]}", where=f"kernels/{op}/cute.py",
            expected="a variant, or a ValueError, for every choice", next="docs/kernel-authoring.md",
        )  # fmt: skip
    return [None if reason is None else str(reason)[:300] for reason in reasons]


def _stacks(artifact: Artifact, spec: Any) -> dict[bytes, int]:
    """Bytes of stack per thread, by choices."""
    descriptor = Descriptor.read(artifact.path, spec)
    frames = {image: _frame(artifact.path / image) for image in descriptor.images()}
    return {canonical.line(v.choices): max(frames[launch.image] for launch in v.launches) for v in descriptor.variants}


def _frame(image: Path) -> int:
    """Most stack per thread that a kernel of an image states, in bytes; FasttrackError if one states none."""
    most = 0
    for kernel in read_cubin(image.read_bytes()).kernels.values():
        if kernel.frame_bytes is None:
            raise FasttrackError(
                f"kernel {kernel.name} states no stack size", where=image.name, expected="EIATTR_FRAME_SIZE",
                next="fasttrack audit FILE",
            )  # fmt: skip
        most = max(most, kernel.frame_bytes)
    return most
