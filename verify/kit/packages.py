"""Pure Python packages that somebody brings to the GPU machine: unpacked, put on the path, named with their digests.

The standard path uses some where they are there. They are run as the operator's own code, as torch is, and never belong
to a kit: what a kit carries is what this project wrote.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path

from harness.errors import FasttrackError

__all__ = ["use_wheels"]


def use_wheels(folder: Path) -> dict[str, str]:
    """Put the wheels of a folder on this process's path and on that of the processes it starts.

    Args:
        folder: holds `*.whl` files of pure Python packages.

    Returns:
        File name -> sha256.

    Raises:
        FasttrackError: no wheels, or one that cannot be read.
    """
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not wheels:
        raise FasttrackError(
            "holds no wheels", where=str(folder), expected="a folder with *.whl files",
            next="pip download --no-deps -d DIR fla-core",
        )  # fmt: skip
    target = tempfile.mkdtemp(prefix="kit-packages-")
    digests = {}
    for wheel in wheels:
        digests[wheel.name] = hashlib.sha256(wheel.read_bytes()).hexdigest()
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
        except (OSError, zipfile.BadZipFile) as error:
            raise FasttrackError(
                f"cannot be unpacked ({error})", where=str(wheel), expected="a wheel", next="copy it again"
            ) from error
    sys.path.append(target)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), target)))
    return digests
