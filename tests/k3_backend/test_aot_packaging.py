"""The distribution: a wheel that works where only torch, numpy and the kernel ABI are installed."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import k3_backend

ROOT = Path(k3_backend.__file__).resolve().parent


def _with_dependencies(names: list[str]) -> set[str]:
    """Distributions that an installer would bring in for these, extras excluded."""
    found: set[str] = set()
    while names:
        name = re.match(r"[A-Za-z0-9._-]+", names.pop())
        assert name is not None
        key = name.group().lower().replace("_", "-")
        if key in found:
            continue
        try:
            requires = importlib.metadata.requires(key) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a platform-specific requirement that this machine's wheel does not have
        found.add(key)
        names += [r for r in requires if "extra ==" not in r]
    return found


def _environment(folder: Path, distributions: set[str]) -> Path:
    """A folder that holds links to exactly these distributions' top-level files."""
    folder.mkdir()
    for name in distributions:
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            source = Path(str(file.locate())).parents[len(file.parts) - 1] / top
            if top not in ("..", "bin", "__pycache__") and source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, work / "source", ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "-w", str(work), str(work / "source")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (file,) = work.glob("*.whl")
    return file


def test_listed_packages_are_the_packages_of_the_tree() -> None:
    """A new op folder is missing from the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(("k3_backend", *p.parent.relative_to(ROOT).parts)) for p in ROOT.rglob("__init__.py")}
    assert set(listed) == found
    assert listed == sorted(listed)


def test_wheel_holds_every_source_kernel_and_schedule(wheel: Path) -> None:
    """Kernels, headers, schedules or the licence are left out of the wheel, or junk gets in."""
    source = wheel.parent / "source"
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    relative = {p.relative_to(source) for p in source.rglob("*") if p.suffix in {".py", ".cc", ".h", ".toml", ".typed"}}
    expected = {f"k3_backend/{p}" for p in relative if p.parts[0] not in {"pyproject.toml", "build"}}
    assert len(expected) > 50
    assert names == expected
    assert any(n.endswith("/licenses/LICENSE") for n in zipfile.ZipFile(wheel).namelist())


def _run(wheel: Path, environment: Path, tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    prologue = f"import sys; sys.path[:0] = [{str(site)!r}, {str(environment)!r}]\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", prologue + code], capture_output=True, text=True, check=False, cwd=tmp_path
    )


IMPORT_ALL = """
import importlib, pkgutil, k3_backend
assert k3_backend.__file__.startswith(sys.path[0]), k3_backend.__file__
# extras cuda and cuda-build
needs_extra = {"aot.cuda.build", "aot.cuda.cubin", "aot.cuda.dsl", "aot.cuda.launch", "step.cuda"}
for module in pkgutil.walk_packages(k3_backend.__path__, "k3_backend."):
    name = module.name.removeprefix("k3_backend.")
    if name not in needs_extra and not name.endswith(".standard_cuda"):  # torch with CUDA brings triton
        importlib.import_module(module.name)
"""


def test_wheel_imports_with_torch_and_numpy_only(wheel: Path, tmp_path: Path) -> None:
    """A module of the package needs the harness, or a dependency that is not declared."""
    environment = _environment(tmp_path / "env", _with_dependencies(["torch", "numpy"]))
    done = _run(wheel, environment, tmp_path, IMPORT_ALL + 'assert "tvm_ffi" not in sys.modules\nprint("ok")')
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


BUILD_AND_RUN = """
from pathlib import Path
from k3_backend.aot.build import KERNELS_DIR, build_runtime, specialised_ops
from k3_backend.aot.cpu.launch import LaunchList, Runtime
LaunchList(Runtime(build_runtime(Path("cache"))).pool(2)).replay()
assert KERNELS_DIR.is_relative_to(sys.path[0])
print(len(specialised_ops()))
"""


def test_wheel_builds_and_starts_its_runtime(wheel: Path, tmp_path: Path) -> None:
    """The installed package cannot build kernels because a source or header is missing."""
    environment = _environment(tmp_path / "env", _with_dependencies(["torch", "numpy", "apache-tvm-ffi"]))
    done = _run(wheel, environment, tmp_path, BUILD_AND_RUN)
    assert (done.returncode, done.stdout.strip()) == (0, str(len(list(ROOT.glob("kernels/*/cpu.cc"))))), done.stderr
