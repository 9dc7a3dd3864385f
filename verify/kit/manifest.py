"""What a kit is, as data: `manifest.json`, written where the kit is built, read on both machines.

It names the commits, the arms with the digests of their artifacts, the plan of each gate, and every file with its
digest. The manifest's own digest is the kit's identity: results carry it, and so does everything derived from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from harness import canonical
from harness.errors import FasttrackError

__all__ = [
    "BEST", "CANDIDATE", "CODE", "MANIFEST", "KitManifest", "Unit", "artifact_folder", "read_kit", "read_manifest",
    "schedules_folder",
]  # fmt: skip

VERSION = 1
MANIFEST = "manifest.json"
CODE = "code"
"""Folder of the trusted Python."""
CANDIDATE, BEST = "candidate", "best"
"""The arm that is judged, and the current best, which only some gates need."""
_ARMS = "arms"


@dataclass(frozen=True, order=True)
class Unit:
    """One artifact of an arm: an op for one architecture and geometry."""

    geometry: str
    op: str
    arch: str

    @property
    def key(self) -> str:
        """`<op>/<arch>/<geometry>`, as candidates name their artifacts."""
        return f"{self.op}/{self.arch}/{self.geometry}"

    @classmethod
    def parse(cls, key: str) -> Unit:
        """Inverse of `key`; ValueError if it has not three parts."""
        op, arch, geometry = key.split("/")
        return cls(geometry, op, arch)


def artifact_folder(arm: str, unit: Unit) -> str:
    """Where an arm's artifact lies in the kit."""
    return f"{_ARMS}/{arm}/artifacts/{unit.geometry}/{unit.op}"


def schedules_folder(arm: str) -> str:
    """Where an arm's schedules lie in the kit."""
    return f"{_ARMS}/{arm}/schedules"


@dataclass(frozen=True, kw_only=True)
class KitManifest:
    """The content of `manifest.json`."""

    target: str
    tier: str
    arch: str
    compute_capability: tuple[int, int]
    base: str
    head: str
    trees: Mapping[str, str]
    """`base` and `head` to git tree ids."""
    gates: tuple[str, ...]
    protocols: Mapping[str, str]
    """Gate to the protocol that its lines are decided by."""
    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    """T values in scope, 1 + drafts."""
    contexts: tuple[int, ...]
    """Cached tokens per request that the tier asks for."""
    draws: int
    """Secret draws per op and input class."""
    command: str
    """The command that judges this candidate again."""
    arms: Mapping[str, Mapping[str, str]]
    """Arm to unit key to artifact digest; `candidate` is what is judged."""
    mutants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Arms that must be rejected: name to unit key to artifact digest. They prove that the gate looks."""
    plans: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Gate to the part of its raw header that is fixed where the kit is built; of gates that have a plan of cells."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Path in the kit to `sha256` and `size`."""

    @property
    def digest(self) -> str:
        """sha256 of the canonical manifest without this digest: the kit's identity."""
        return hashlib.sha256(canonical.line(self._content())).hexdigest()

    def document(self) -> bytes:
        """Bytes of `manifest.json`."""
        return canonical.document({**self._content(), "digest": self.digest})

    def units(self, arm: str) -> tuple[Unit, ...]:
        """Artifacts of an arm or mutant, in a fixed order."""
        return tuple(sorted(map(Unit.parse, {**self.arms, **self.mutants}[arm])))

    def holder(self, arm: str, unit: Unit) -> str:
        """The arm below which an arm's artifact lies: the candidate's, if it has the same one."""
        arms = {**self.arms, **self.mutants}
        candidate = self.arms.get(CANDIDATE, {})
        return CANDIDATE if arms[arm][unit.key] == candidate.get(unit.key) else arm

    def _content(self) -> dict[str, Any]:
        content = asdict(self)
        for name in ("gates", "batches", "tokens", "contexts", "compute_capability"):
            content[name] = list(content[name])
        return {"version": VERSION, "kind": "fasttrack-kit", **content}


def read_manifest(data: bytes, where: str) -> KitManifest:
    """Parse a manifest and check its own digest.

    Raises:
        FasttrackError: not a canonical manifest of this version, or its digest does not follow from its content.
    """
    try:
        raw = canonical.parse(data)
        version, kind, digest = raw.pop("version"), raw.pop("kind"), raw.pop("digest")
        if (version, kind) != (VERSION, "fasttrack-kit"):
            raise ValueError(f"{kind} version {version}")
        for name in ("gates", "batches", "tokens", "contexts", "compute_capability"):
            raw[name] = tuple(raw[name])
        manifest = KitManifest(**raw)
        _check_names(manifest)
        if manifest.digest != digest:
            raise ValueError("its digest does not follow from its content")
    except (canonical.NotCanonicalError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FasttrackError(
            f"not a kit's manifest ({str(error)[:200]})", where=where, expected=f"a manifest of kit version {VERSION}",
            next="fasttrack kit build --help",
        ) from error  # fmt: skip
    return manifest


def _check_names(manifest: KitManifest) -> None:
    """Every name that becomes a path is plain; ValueError names the first that is not."""
    for name in manifest.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or not name.isascii() or "\\" in name:
            raise ValueError(f"file name {name!r}")
    for arms in (manifest.arms, manifest.mutants):
        for arm, units in arms.items():
            for part in (arm, *(part for key in units for part in key.split("/"))):
                if not part or not all(c.isalnum() or c in "-_." for c in part) or part.startswith("."):
                    raise ValueError(f"name {part!r}")
            for key in units:
                Unit.parse(key)


def read_kit(folder: Path) -> KitManifest:
    """The manifest of a kit folder; FasttrackError as `read_manifest`."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FasttrackError(
            f"no manifest ({error.strerror})", where=str(path), expected="the folder of a kit",
            next="fasttrack kit build --help",
        ) from error  # fmt: skip
    return read_manifest(data, str(path))
