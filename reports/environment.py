"""The fingerprint of the measuring machine: enough to judge whether results may be compared, nothing personal.

It reads processor, memory, kernel, toolchain, package versions and signs of a container. It never reads host names,
user names, paths or variables. What cannot be read is `Missing` with the reason.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from harness.records import Missing
from reports.schema import Environment

__all__ = ["capture"]

_PACKAGES = (
    "apache-tvm-ffi", "duckdb", "fasttrack", "jinja2", "k3-backend", "numpy", "pyarrow", "pydantic", "safetensors",
    "scipy", "torch",
)  # fmt: skip
_LEVEL_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16")


def capture(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Environment:
    """Read the fingerprint of this machine now.

    Args:
        proc: mount of procfs.
        cgroup: mount of the cgroup file system.
    """
    cpu = _cpu(proc / "cpuinfo")
    flags = sorted(set(cpu.get("flags", cpu.get("Features", "")).split()))
    return Environment(
        cpu_model=cpu.get("model name") or Missing(missing="/proc/cpuinfo has no model name"),
        cpu_flags_sha256=(
            hashlib.sha256(" ".join(flags).encode()).hexdigest()
            if flags
            else Missing(missing="/proc/cpuinfo has no flags")
        ),
        cpu_features=tuple(flag for flag in _LEVEL_FLAGS if flag in flags),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory(proc / "meminfo"),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        compiler=_compiler(),
        packages=_packages(),
        container=tuple(_container(cgroup, "hypervisor" in flags)),
        load_average=os.getloadavg(),
    )


def _cpu(path: Path) -> dict[str, str]:
    """Fields of the first processor."""
    try:
        first = path.read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory(path: Path) -> int | Missing:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except OSError as error:
        return Missing(missing=f"/proc/meminfo: {error.strerror}")
    return Missing(missing="/proc/meminfo has no MemTotal")


def _compiler() -> str | Missing:
    found = shutil.which("g++")
    if found is None:
        return Missing(missing="g++ is not installed")
    try:
        run = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Missing(missing=f"g++ --version failed: {type(error).__name__}")
    return run.stdout.splitlines()[0] if run.stdout else Missing(missing="g++ --version printed nothing")


def _packages() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _container(cgroup: Path, hypervisor: bool) -> list[str]:
    signs = ["virtual machine (hypervisor flag)"] if hypervisor else []
    if Path("/.dockerenv").exists():
        signs.append("docker marker file")
    if Path("/run/.containerenv").exists():
        signs.append("podman marker file")
    for name in ("cpu.max", "memory.max"):
        try:
            value = (cgroup / name).read_text().strip()
        except OSError:
            continue
        if value and not value.startswith("max"):
            signs.append(f"cgroup {name} {value}")
    return signs
