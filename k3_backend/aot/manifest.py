"""The manifest of a built artifact: what it is, from which bytes and tools it was made, and its digests.

An artifact is a folder with one compiled object, the declarations its launcher needs, and `manifest.json`. This module
reads, writes and verifies manifests; it builds nothing (`aot/build.py`) and loads no code (`aot/cpu/launch.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_backend.errors import BackendError

__all__ = ["MANIFEST_NAME", "Artifact", "ArtifactError", "canonical_json", "file_digest"]

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


class ArtifactError(BackendError):
    """An artifact folder is incomplete, altered, or of another kind than the caller asked for."""


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no free choice of spacing, the form that is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def file_digest(path: Path) -> str:
    """Lower-case hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One built op (or the launcher's runtime) for one architecture and geometry."""

    op: str
    """Op name, or `runtime`."""
    arch: str
    """Architecture id, e.g. `x86-64-v4-bf16`."""
    geometry: str
    """Geometry name; `any` for the runtime."""
    device: str
    """`cpu` or `cuda`."""
    abi: int
    """Version of the calling convention the object was compiled against."""
    files: Mapping[str, str]
    """File name inside the folder to sha256, manifest excluded."""
    toolchain: Mapping[str, str]
    """Tool to version line."""
    inputs_digest: str
    """sha256 over sources, headers, flags, macros and tool versions: the cache key."""
    path: Path
    """The folder. Not part of the manifest."""

    @property
    def digest(self) -> str:
        """sha256 that names what is judged and shipped: identity and file contents, not where or when it was built."""
        identity = {
            "op": self.op,
            "arch": self.arch,
            "geometry": self.geometry,
            "device": self.device,
            "abi": self.abi,
            "files": dict(self.files),
        }
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()

    @property
    def name(self) -> str:
        """What a candidate calls it: `<op>/<arch>`; on devices whose targets have several geometries, `/<geometry>`."""
        return f"{self.op}/{self.arch}" + (f"/{self.geometry}" if self.device == "cuda" else "")

    @property
    def object_path(self) -> Path:
        """The compiled object."""
        return self.path / f"{self.op}.so"

    def to_json(self) -> dict[str, Any]:
        """The manifest's content."""
        return {
            "version": MANIFEST_VERSION,
            "op": self.op,
            "arch": self.arch,
            "geometry": self.geometry,
            "device": self.device,
            "abi": self.abi,
            "files": dict(self.files),
            "toolchain": dict(self.toolchain),
            "inputs_digest": self.inputs_digest,
            "digest": self.digest,
        }

    def write(self) -> None:
        """Write `manifest.json` into the folder."""
        text = json.dumps(self.to_json(), sort_keys=True, indent=2) + "\n"
        (self.path / MANIFEST_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Artifact:
        """Read a folder's manifest and verify every file against it.

        Raises:
            ArtifactError: no or malformed manifest, missing or altered file, digest that does not follow
                from the files.
        """
        manifest = path / MANIFEST_NAME
        try:
            raw = json.loads(manifest.read_text(encoding="utf-8"))
            version = raw.pop("version")
            digest = raw.pop("digest")
            artifact = cls(path=path, **raw)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"unreadable manifest ({error})",
                where=str(manifest),
                expected="the manifest.json that the builder writes",
                next="build the artifact again",
            ) from error
        if version != MANIFEST_VERSION or artifact.digest != digest:
            raise ArtifactError(
                f"manifest version {version} or its digest does not fit its content",
                where=str(manifest),
                expected=f"version {MANIFEST_VERSION} and digest {artifact.digest}",
                next="build the artifact again",
            )
        artifact.verify()
        return artifact

    def verify(self) -> None:
        """Compare every file with its recorded digest.

        Raises:
            ArtifactError: a file is missing or has other bytes.
        """
        for name, expected in self.files.items():
            file = self.path / name
            found = file_digest(file) if file.is_file() else "no such file"
            if found != expected:
                raise ArtifactError(
                    f"artifact file changed after the build: {found}",
                    where=str(file),
                    expected=f"sha256 {expected}",
                    next="build the artifact again",
                )
