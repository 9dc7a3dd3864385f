"""A tuning archive of a small repository: real compiler, real sandbox, no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import settings
from harness.errors import FasttrackError
from harness.git import Repository
from harness.progress import silent
from verify.kit.build import make_archive
from verify.kit.sources import OUTSIDE, closure
from verify.snapshots import JUDGING_PATHS
from verify.tuning.build import ENTRY_POINTS, Asked, archive
from verify.tuning.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = settings.load(ROOT)
TOML = """
[tunables.threads]
values = [64, 96, 128]
meaning = "threads per block; the kernel refuses 96"

[specialised]
N = ["kda_proj_rows", "mla_proj_rows"]
"""
SCHEDULE = "version = 1\n\n[[bucket]]\nmax_rows = 8\nthreads = 64\n"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """This checkout's judging code with one small kernel."""
    root = tmp_path_factory.mktemp("repo")
    for name in JUDGING_PATHS:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "kernels", "schedules"))
    kernel = root / "k3_backend" / "kernels" / "input_projection"
    schedule = root / "k3_backend" / "schedules" / "h200" / "k3-slice-tp8"
    common = kernel.parent / "common"
    for folder in (kernel, schedule, common):
        folder.mkdir(parents=True)
    source = (ROOT / "tests/k3_backend/cuda_tree/scale.py.txt").read_text()
    refuse = (
        'def variant(c: Choices) -> Variant:\n    if c["threads"] == 96:\n        raise ValueError("no 96 threads")\n'
    )
    (kernel / "cute.py").write_text(source.replace("def variant(c: Choices) -> Variant:\n", refuse))
    (kernel / "cute.toml").write_text(TOML)
    (schedule / "input_projection.toml").write_text(SCHEDULE)
    (common / "index.py").write_text(
        "from cutlass import Int32, cute\n\n\n@cute.jit\ndef place(block: Int32, tid: Int32) -> Int32:\n"
        "    width, _, _ = cute.arch.block_dim()\n    return block * width + tid\n"
    )
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "small"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *command], cwd=root, check=True)
    return Repository(root)


def asked(repo: Repository, **changes: object) -> Asked:
    fields = {"op": "input_projection", "target": "h200", "commit": repo.resolve("HEAD"), "rows": (1, 8)}
    return Asked(**{**fields, **changes})  # type: ignore[arg-type]


def test_taken_points_travel_and_refused_ones_are_listed(repo: Repository, tmp_path: Path) -> None:
    manifest, files = archive(asked(repo), SETTINGS, repo, tmp_path / "cache", silent)
    make_archive(tmp_path / "K", "tuning", {**files, "manifest.json": manifest.document()})
    assert read_manifest(tmp_path / "K" / "manifest.json") == manifest
    assert [(call.rows, dict(call.sizes)["N"], len(call.points)) for call in manifest.calls] == [
        (1, 6288, 2), (8, 6288, 2), (1, 3648, 2), (8, 3648, 2),
    ]  # fmt: skip
    assert all(call.current == {"threads": 64} == call.points[0] for call in manifest.calls)
    assert {entry["reason"] for entry in manifest.left_out} == {"no 96 threads"}
    assert {Path(name).suffix for name in manifest.files} <= {".py", ".json", ".toml", ".cubin"}
    assert not [name for name in manifest.files if name.startswith("code/k3_backend/kernels")]
    command = [sys.executable, str(tmp_path / "K" / "kit.py")]
    checked = subprocess.run([*command, "check"], capture_output=True, text=True, timeout=120, check=False, cwd="/")
    assert checked.returncode == 0, checked.stderr
    image = next((tmp_path / "K").rglob("*.cubin"))
    image.write_bytes(image.read_bytes() + b"0")
    checked = subprocess.run([*command, "check"], capture_output=True, text=True, timeout=120, check=False, cwd="/")
    assert checked.returncode == 2
    assert "its content was changed" in checked.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"op": "mla_decode"}, "does not follow from rows alone"),
        ({"target": "cpu"}, "target cpu runs on cpu"),
        ({"vary": ("threads=65",)}, "names no declared tunable"),
        ({"rows": (16,)}, "no bucket to start from"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    repo: Repository, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(FasttrackError, match=said):
        archive(asked(repo, **changes), SETTINGS, repo, tmp_path / "cache", silent)


def test_the_sources_import_nothing_that_the_gpu_machine_lacks() -> None:
    names = closure(ROOT, frozenset(sys.stdlib_module_names), ENTRY_POINTS)
    assert {"verify/tuning/run.py", "verify/tuning/measure.py", "k3_backend/aot/cuda/launch.py"} <= set(names)
    assert not [name for name in names if name.startswith(("fasttrack", "agents", "reports", "verify/gates"))]
    assert "pydantic" not in OUTSIDE
