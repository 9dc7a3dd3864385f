"""Which object files a worker has really mapped, read from the host's kernel and not from the worker.

A receipt ties what was judged to what was built: the mapped file is the artifact's file (same device and inode), and
its bytes have the artifact's digest. It cannot show that the code ran; the watermark does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3_backend.aot.manifest import Artifact, file_digest

__all__ = ["receipts"]


def receipts(tasks: Iterable[int], artifacts: Mapping[str, Artifact]) -> dict[str, dict[str, Any]]:
    """One receipt per op.

    Args:
        tasks: process (or thread) ids of the worker, from `Worker.tasks`.
        artifacts: what must be mapped, by op.

    Returns:
        Per op: `object` (sha256 of the artifact's object as the manifest says), `mapped` (sha256 of the mapped file,
        null if it is not mapped with execute permission), `digest` (of the artifact).
    """
    mapped = _executable_files(tasks)
    found: dict[str, dict[str, Any]] = {}
    for op, artifact in artifacts.items():
        status = artifact.object_path.stat()
        path = mapped.get((status.st_dev, status.st_ino))
        found[op] = {
            "digest": artifact.digest,
            "object": artifact.files[artifact.object_path.name],
            "mapped": None if path is None else file_digest(artifact.object_path),
        }
    return found


def _executable_files(tasks: Iterable[int]) -> dict[tuple[int, int], Path]:
    """(device, inode) of every file that some task has mapped executable."""
    files: dict[tuple[int, int], Path] = {}
    for task in tasks:
        try:
            lines = Path(f"/proc/{task}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for line in lines:
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and "x" in parts[1]:
                major, minor = (int(n, 16) for n in parts[3].split(":"))
                files[os.makedev(major, minor), int(parts[4])] = Path(parts[5])
    return files
