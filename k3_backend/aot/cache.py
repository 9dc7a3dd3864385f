"""The content-addressed cache of artifacts: one folder per key, complete or absent, whoever builds first.

A key is the digest of everything that went into a build; the builders (`aot/build.py`, `aot/cuda/build.py`) compute it
and stage their results in a private folder of the same disk.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from k3_backend.aot.manifest import Artifact, ArtifactError

__all__ = ["cached", "publish"]


def cached(final: Path, inputs_digest: str) -> Artifact | None:
    """The finished artifact of this key. A damaged entry (full disk, edited by hand) is removed and built again."""
    if not final.is_dir():
        return None
    try:
        artifact = Artifact.read(final)
    except ArtifactError:
        shutil.rmtree(final)
        return None
    return artifact if artifact.inputs_digest == inputs_digest else None


def publish(artifact: Artifact, final: Path) -> Artifact:
    """Move the staged folder into place; if another builder was first, its (equal) result is used."""
    try:
        artifact.path.rename(final)
    except OSError:
        winner = cached(final, artifact.inputs_digest)
        if winner is None:
            raise
        return winner
    return dataclasses.replace(artifact, path=final)
