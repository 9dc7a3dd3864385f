"""The fixture kernels of tests/hostile/cuda, compiled once per architecture and session, and their facts."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness import sandbox
from verify.gates.audit.cuda import Claims, Param, inspect_cubin, inspect_file
from verify.gates.audit.cuda.nvdisasm import find

HOSTILE = Path(__file__).parents[3] / "hostile" / "cuda"
ARCHS = ("sm_90a", "sm_103a")
PARAMS = (
    Param("flag", 0, 8, "workspace"),
    Param("x", 8, 8, "activation"),
    Param("w", 16, 8, "constant"),
    Param("out", 24, 8, "output"),
    Param("n", 32, 4, "scalar"),
)


def _table(name: str) -> Any:
    """A literal of kernels.py, read without importing it: that needs the DSL."""
    for node in ast.parse((HOSTILE / "kernels.py").read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise KeyError(name)


CASES: dict[str, tuple[dict[str, Any], str | None]] = _table("CASES")
ALONE: tuple[str, ...] = _table("ALONE")


def missing() -> str | None:
    """Why kernels cannot be compiled or disassembled here."""
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed: no compiler for the fixture kernels"
    return missing_disassembler()


def missing_disassembler() -> str | None:
    """Why machine code cannot be read here."""
    if find() is None:
        return "nvdisasm not found: pip install nvidia-cuda-nvdisasm"
    reason = sandbox.unavailable()
    return reason.message if reason else None


def claims(name: str, **changed: Any) -> Claims:
    """The claims of one fixture kernel."""
    return Claims(**{"block": 128, "dynamic_smem": 0, "min_ctas_per_sm": 1, "pdl": True, **CASES[name][0], **changed})


class Built:
    """The fixture kernels of one architecture."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.arch = arch
        self.folder = folder

    def cubin(self, name: str) -> bytes:
        """The file that holds a kernel."""
        return (self.folder / f"{name if name in ALONE else 'kernels'}.cubin").read_bytes()

    def ptx(self, name: str) -> str:
        """The PTX that holds a kernel."""
        return (self.folder / f"{name if name in ALONE else 'kernels'}.ptx").read_text()

    @cache  # noqa: B019 - one object per session
    def file_facts(self, file: str, constants: tuple[int, ...]) -> list[dict[str, Any]]:
        """Facts of a stand-alone file in the folder."""
        return inspect_file(self.folder / file, constants)

    @cache  # noqa: B019 - one object per session
    def all_facts(self, file: str) -> list[dict[str, Any]]:
        """Facts of every kernel in a file, without claims."""
        return inspect_cubin((self.folder / f"{file}.cubin").read_bytes(), params=PARAMS, ptx=self.ptx(file))

    def facts(self, name: str, **changed: Any) -> dict[str, Any]:
        """Facts of one kernel with its claims."""
        file = name if name in ALONE else "kernels"
        found = [f for f in self.all_facts(file) if f["kernel"].startswith(f"kernel_cutlass_{name}_ptr")]
        assert len(found) == 1, f"{len(found)} kernels named {name}"
        made = claims(name, **changed)
        return {**found[0], "claims": {**made.__dict__, "expects": list(made.expects)}}


@pytest.fixture(scope="session", params=ARCHS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Compile for one architecture, or skip with the reason."""
    why = missing()
    if why is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp(request.param)
    done = subprocess.run(
        [sys.executable, str(HOSTILE / "build.py"), request.param, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Built(request.param, folder)
