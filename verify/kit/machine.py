"""The machine that a kit runs on: whether it can, and what it says about itself.

What the driver's own tool reports is recorded as it is; a value that cannot be had is null beside the reason. The GPU's
UUID is recorded as a digest: it tells two cards apart and names none.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from harness.errors import FasttrackError
from verify.kit.child import BOOTSTRAP
from verify.protocol.floors import Ceilings

__all__ = ["Machine"]

_QUERY = {
    "name": "name",
    "uuid": "uuid",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_sm_clock_mhz": "clocks.max.sm",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "throttle_reasons": "clocks_event_reasons.active",
    "memory_mib": "memory.total",
    "persistence": "persistence_mode",
    "ecc": "ecc.mode.current",
    "mig": "mig.mode.current",
}
_PACKAGES = ("torch", "numpy", "cuda-bindings", "triton", "scipy", "fla-core")


class Machine:
    """This machine and its first GPU. Tests have one without a GPU."""

    bootstrap = BOOTSTRAP
    """How workers start."""

    def evaluator(self) -> Any:
        """The torch device on which expected values are computed."""
        import torch

        return torch.device("cuda", 0)

    def require(self, compute_capability: tuple[int, int], packages: Mapping[str, str] | None = None) -> None:
        """Refuse a machine that cannot run the kit.

        Args:
            compute_capability: of the kit's kernels.
            packages: gate -> package that it needs beside torch and cuda-bindings.

        Raises:
            FasttrackError: no torch, no GPU for it, no cuda-bindings, or a GPU of another kind.
        """
        try:
            import torch
        except ImportError as error:
            raise _lacks(f"no torch ({error})", "torch with CUDA", "python3 -c 'import torch'") from error
        if not torch.cuda.is_available():
            build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
            raise _lacks(
                f"torch {torch.__version__} ({build}) sees no GPU", "torch with CUDA and a driver", "nvidia-smi"
            )
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise _lacks(
                f"no cuda-bindings ({error})", "cuda-bindings 12 or 13", "pip install cuda-bindings"
            ) from error
        del driver
        for gate, package in (packages or {}).items():
            if importlib.util.find_spec(package) is None:
                raise _lacks(f"no {package}", f"{package}, which the {gate} gate needs", f"pip install {package}")
        found = torch.cuda.get_device_capability(0)
        if tuple(found) != tuple(compute_capability):
            what = f"{torch.cuda.get_device_name(0)} has compute capability {found[0]}.{found[1]}"
            wanted = ".".join(map(str, compute_capability))
            raise _lacks(what, f"compute capability {wanted}, for which the kit's kernels were built", "nvidia-smi")

    def ceilings(self) -> Ceilings:
        """Bandwidths and rates of this GPU, measured now."""
        from verify.kit.ceilings import measure

        return measure()

    def standard_path(self) -> dict[str, str]:
        """What the standard path runs on here, with versions."""
        from verify.workers.cuda_chain import standard_identity

        return standard_identity()

    def describe(self) -> dict[str, Any]:
        """What stays the same while a kit runs, and the clocks now."""
        import torch

        gpu, why_not = _ask_driver()
        uuid = gpu.pop("uuid", None)
        return {
            "gpu": gpu | {"uuid_sha256": None if uuid is None else hashlib.sha256(uuid.encode()).hexdigest()},
            "gpu_missing": why_not,
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in _PACKAGES},
            "system": f"{platform.system()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
        }

    def state(self) -> dict[str, Any]:
        """Clocks, power, temperature and throttle reasons now."""
        gpu, why_not = _ask_driver()
        changing = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "throttle_reasons")
        return {name: gpu.get(name) for name in changing} | {"missing": why_not}


def _ask_driver() -> tuple[dict[str, Any], dict[str, str]]:
    """(values, reasons for those that are null) from nvidia-smi, for GPU 0."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return dict.fromkeys(_QUERY), dict.fromkeys(_QUERY, "nvidia-smi is not installed")
    texts = (_query(tool, ",".join(_QUERY.values())) or "").split(", ")
    if len(texts) != len(_QUERY):  # a field that this driver does not know makes the tool refuse all of them
        texts = [_query(tool, field) or "" for field in _QUERY.values()]
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, text in zip(_QUERY, texts, strict=True):
        if not text or "N/A" in text or "not supported" in text.lower() or "not a valid" in text.lower():
            values[name], missing[name] = None, text or "nvidia-smi did not answer"
        else:
            values[name] = text
    return values, missing


def _query(tool: str, field: str) -> str | None:
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip()
    return text[:1000] or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lacks(what: str, expected: str, then: str) -> FasttrackError:
    return FasttrackError(what, where="this machine", expected=expected, next=then)
