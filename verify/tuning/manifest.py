"""What a tuning archive is, as data: `manifest.json`, in the form that `kit.py` checks before anything is imported."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import canonical
from harness.errors import FasttrackError

__all__ = ["KIND", "RAW", "Timed", "TuningManifest", "read_manifest"]

VERSION = 1
KIND = "fasttrack-tuning"
RAW = "tuning"
"""Name of the file of raw lines, without suffix."""


@dataclass(frozen=True)
class Timed:
    """One call of the op and the points to time for it."""

    geometry: str
    sizes: Mapping[str, int]
    """Specialised sizes and attributes of the call."""
    rows: int
    """M; the call has M requests of one token."""
    current: Mapping[str, int] | None
    """The schedule's point when the archive was built; null if it had none."""
    points: tuple[Mapping[str, int], ...]
    folders: tuple[str, ...]
    """Per point: folder in the archive of the artifact that holds it."""

    @property
    def key(self) -> str:
        """Unique name of the call."""
        sizes = "".join(f" {name}={value}" for name, value in sorted(self.sizes.items()))
        return f"{self.geometry}{sizes} M={self.rows}"


@dataclass(frozen=True, kw_only=True)
class TuningManifest:
    """The content of `manifest.json`."""

    op: str
    target: str
    arch: str
    compute_capability: tuple[int, int]
    commit: str
    """Whose kernels, schedules and trusted code are in the archive."""
    calls: tuple[Timed, ...]
    left_out: tuple[Mapping[str, Any], ...]
    """Points that were not built or may not be used: geometry, sizes, tunables, reason."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Path in the archive to `sha256` and `size`."""

    @property
    def digest(self) -> str:
        """sha256 of the canonical manifest without this digest."""
        return hashlib.sha256(canonical.line(self._content())).hexdigest()

    def document(self) -> bytes:
        """Bytes of `manifest.json`."""
        return canonical.document({**self._content(), "digest": self.digest})

    def listing(self, files: Mapping[str, bytes]) -> TuningManifest:
        """This manifest with the digests of an archive's files."""
        listed = {n: {"sha256": hashlib.sha256(d).hexdigest(), "size": len(d)} for n, d in sorted(files.items())}
        return replace(self, files=listed)

    def _content(self) -> dict[str, Any]:
        content = asdict(self) | {"compute_capability": list(self.compute_capability)}
        content["calls"] = [{**asdict(c), "points": list(c.points), "folders": list(c.folders)} for c in self.calls]
        content["left_out"] = list(self.left_out)
        return {"version": VERSION, "kind": KIND, **content}


def read_manifest(path: Path) -> TuningManifest:
    """Read and check a manifest.

    Raises:
        FasttrackError: not a canonical manifest of this version, or its digest does not follow from its content.
    """
    try:
        raw = canonical.parse(path.read_bytes())
        version, kind, digest = raw.pop("version"), raw.pop("kind"), raw.pop("digest")
        if (version, kind) != (VERSION, KIND):
            raise ValueError(f"{kind} version {version}")
        lists = ("points", "folders")
        calls = tuple(Timed(**{**call, **{name: tuple(call[name]) for name in lists}}) for call in raw["calls"])
        shaped = {"calls": calls, "left_out": tuple(raw["left_out"])}
        shaped["compute_capability"] = tuple(raw["compute_capability"])
        manifest = TuningManifest(**{**raw, **shaped})
        if manifest.digest != digest:
            raise ValueError("its digest does not follow from its content")
    except (OSError, canonical.NotCanonicalError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FasttrackError(
            f"not the manifest of a tuning archive ({str(error)[:200]})", where=str(path),
            expected=f"version {VERSION}", next="fasttrack tune build --help",
        ) from error  # fmt: skip
    return manifest
