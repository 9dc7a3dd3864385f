"""Settings checked against what this version has: geometries and architecture levels by name.

`harness.settings` validates the file on its own and knows no kernel package; here its names meet `k3_backend`.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness import settings, toml
from harness.errors import FasttrackError
from harness.settings import Settings
from k3_backend.aot.cpu.host import ARCHS
from k3_backend.geometry import GEOMETRIES

__all__ = ["load"]

_CUDA_ARCH = re.compile(r"sm_\d{2,3}[af]?")


def load(path: Path) -> Settings:
    """Read `harness.toml` and check that every name in it exists.

    Raises:
        FasttrackError: as `harness.settings.load`, or an unknown geometry or architecture (names file and line).
    """
    checked = settings.load(path)
    file = path / settings.FILE_NAME if path.is_dir() else path
    document = toml.read(file, file.name)

    def unknown(kind: str, name: str, key: tuple[str | int, ...], known: str) -> FasttrackError:
        return FasttrackError(
            f"unknown {kind} {name!r}", where=document.where(key), expected=known, next=f"edit {file.name}"
        )

    for target in checked.targets.values():
        if target.geometry not in GEOMETRIES:
            raise unknown(
                "geometry", target.geometry, ("targets", target.name, "geometry"), f"one of {', '.join(GEOMETRIES)}"
            )
        for index, arch in enumerate(target.archs):
            known = arch in ARCHS if target.device == "cpu" else _CUDA_ARCH.fullmatch(arch) is not None
            if not known:
                expected = f"one of {', '.join(ARCHS)}" if target.device == "cpu" else "a name such as sm_103a"
                raise unknown("architecture", arch, ("targets", target.name, "archs", index), expected)
    return checked
