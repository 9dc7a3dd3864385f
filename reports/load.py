"""From a folder to records: everything that must hold before a bundle's claims can be looked at.

Four steps, each only after the one before: plain files within limits; a manifest that lists exactly these files with
their digests; canonical JSON that fits the records of `reports.schema`; and records that name exactly these files.
Whether the claims are true is for `reports.verify`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness import canonical
from harness.errors import FasttrackError
from harness.records import EvidenceRef, GateName, GateResult, Reason
from reports.folder import plain_name, read_folder, refusal
from reports.schema import BUNDLE_VERSION, Bundle, Environment, Manifest

__all__ = ["FIXED_FILES", "BundleRefusedError", "Loaded", "Reading", "load_bundle", "read_bundle", "references"]

FIXED_FILES = ("bundle.json", "environment.json", "candidate.patch", "report.md", "report.html")
"""Files of every bundle besides the manifest and those that bundle.json names."""

STEPS = (
    "the folder holds plain files only, within limits",
    "the manifest lists exactly these files, with their sizes and digests, and the folder's name carries its digest",
    "every record is canonical JSON of the schema",
    "the records name exactly these files",
)
_Model = TypeVar("_Model", bound=BaseModel)
_RECORD_BYTES = 8 << 20
_FOLDER_DIGEST = re.compile(r".+-([0-9a-f]{12})")


class BundleRefusedError(FasttrackError):
    """A folder that is not an intact bundle; `reasons` has every finding of the step that stopped."""

    def __init__(self, name: str, reasons: tuple[Reason, ...]) -> None:
        first = reasons[0]
        more = f" (and {len(reasons) - 1} more findings)" if len(reasons) > 1 else ""
        super().__init__(
            f"{first.message}{more}", where=f"{name}/{first.where}", expected=first.expected, next=first.next
        )
        self.reasons = reasons


@dataclass(frozen=True)
class Loaded:
    """An intact bundle: bytes and records. Nothing in it has been checked against its raw data yet."""

    name: str
    digest: str
    """sha256 of manifest.json: the bundle's identity."""
    files: dict[str, bytes]
    bundle: Bundle
    environment: Environment
    results: dict[GateName, GateResult]
    raw: dict[GateName, list[dict[str, Any]]]
    peers: list[dict[str, Any]]
    """Raw lines of the peer table; empty where there is none."""


@dataclass(frozen=True)
class Reading:
    """How far reading came: steps that held, and the findings of the step that did not."""

    name: str
    digest: str | None
    held: int
    reasons: tuple[Reason, ...]
    loaded: Loaded | None

    def findings(self) -> Iterator[Reason]:
        """The findings, one by one."""
        return iter(self.reasons)


def load_bundle(path: Path) -> Loaded:
    """Read an intact bundle.

    Raises:
        BundleRefusedError: any of the four steps found something.
    """
    reading = read_bundle(path)
    if reading.loaded is None:
        raise BundleRefusedError(reading.name, reading.reasons)
    return reading.loaded


def read_bundle(path: Path) -> Reading:
    """Read as far as the bundle is intact; never raises for anything that the folder contains."""
    name = ascii(path.resolve().name)[1:-1]
    files, reasons = read_folder(path)
    if reasons:
        return Reading(name, None, 0, tuple(reasons), None)
    digest = hashlib.sha256(files.get("manifest.json", b"")).hexdigest()
    reasons = list(_manifest_findings(name, digest, files))
    if reasons:
        return Reading(name, digest, 1, tuple(reasons), None)
    bundle = _record(Bundle, "bundle.json", files, reasons)
    environment = _record(Environment, "environment.json", files, reasons)
    if bundle is None or environment is None:
        return Reading(name, digest, 2, tuple(reasons), None)
    reasons = list(_absent(bundle, files))
    if reasons:
        return Reading(name, digest, 3, tuple(reasons), None)
    results: dict[GateName, GateResult] = {}
    raw: dict[GateName, list[dict[str, Any]]] = {}
    for entry in bundle.gates:
        result = _record(GateResult, entry.result.path, files, reasons)
        if result is not None:
            results[entry.gate] = result
        if entry.raw is not None:
            raw[entry.gate] = _lines(entry.raw.path, files, reasons)
        if entry.error is not None:
            _lines(entry.error.path, files, reasons)
    peers = [] if bundle.peers is None else _lines(bundle.peers.raw.path, files, reasons)
    if reasons:
        return Reading(name, digest, 2, tuple(reasons), None)
    reasons = list(_layout_findings(name, bundle, results, raw, peers, files))
    if reasons:
        return Reading(name, digest, 3, tuple(reasons), None)
    return Reading(name, digest, len(STEPS), (), Loaded(name, digest, files, bundle, environment, results, raw, peers))


def references(bundle: Bundle) -> Iterator[EvidenceRef]:
    """Every file that bundle.json names with its digest."""
    yield bundle.patch
    yield bundle.environment
    for entry in bundle.gates:
        yield from (ref for ref in (entry.result, entry.raw, entry.derived, entry.error) if ref is not None)
    if bundle.peers is not None:
        yield bundle.peers.raw
    for artifact in bundle.artifacts:
        yield artifact.manifest
        if artifact.included:
            folder = artifact.manifest.path.rpartition("/")[0]
            yield from (EvidenceRef(path=f"{folder}/{file}", sha256=sha) for file, sha in artifact.files.items())


def _manifest_findings(name: str, digest: str, files: dict[str, bytes]) -> Iterator[Reason]:
    for needed in ("manifest.json", "manifest.sha256"):
        if needed not in files:
            yield refusal("missing_file", "is missing", needed, "present in every bundle")
            return
    if files["manifest.sha256"] != f"{digest}  manifest.json\n".encode():
        expected = f"the line '{digest}  manifest.json'"
        yield refusal("manifest_digest", "does not hold the digest of manifest.json", "manifest.sha256", expected)
    match = _FOLDER_DIGEST.fullmatch(name)
    if match is None or match.group(1) != digest[:12]:
        then = "restore the name if you renamed the folder; else ask the author for an intact copy"
        message = "the folder's name does not end in the manifest's digest"
        yield refusal("folder_name", message, name, f"...-{digest[:12]}", then)
    reasons: list[Reason] = []
    manifest = _record(Manifest, "manifest.json", files, reasons)
    yield from reasons
    if manifest is None:
        return
    present = files.keys() - {"manifest.json", "manifest.sha256"}
    for path in sorted(present - manifest.files.keys()):
        yield refusal("extra_file", "is not in the manifest", path, "only files that manifest.json lists")
    for path, listed in sorted(manifest.files.items()):
        where = _shown(path)
        if path not in present:
            yield refusal("missing_file", "is in the manifest but not in the folder", where, "every listed file")
        elif len(files[path]) != listed.size:
            yield refusal("size", f"has {len(files[path])} bytes", where, f"{listed.size} bytes")
        elif hashlib.sha256(files[path]).hexdigest() != listed.sha256:
            yield refusal("digest", "its content changed", where, f"sha256 {listed.sha256}")


def _record(model: type[_Model], path: str, files: dict[str, bytes], reasons: list[Reason]) -> _Model | None:
    """Parse one record; on any problem append a finding and return None."""
    expected = f"canonical JSON of {model.__name__}, schema version {BUNDLE_VERSION} (docs/bundle.md)"
    data = files.get(path)
    if data is None:
        reasons.append(refusal("missing_file", "is missing", path, expected))
        return None
    if len(data) > _RECORD_BYTES:
        reasons.append(refusal("too_large", f"{len(data)} bytes", path, f"at most {_RECORD_BYTES} bytes per record"))
        return None
    try:
        value = canonical.parse(data)
        version = value.get("schema_version", BUNDLE_VERSION) if isinstance(value, dict) else BUNDLE_VERSION
        if version != BUNDLE_VERSION:
            then = "read it with the release that wrote it: commits.evaluator in bundle.json"
            reasons.append(refusal("schema_version", f"schema version is {ascii(version)[:40]}", path, expected, then))
            return None
        record = model.model_validate_json(data, strict=True)
    except canonical.NotCanonicalError as error:
        reasons.append(refusal("not_canonical", str(error), path, expected))
        return None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reasons.append(refusal("schema", f"{place}: {first['msg']}", path, expected))
        return None
    if canonical.document(record.model_dump(mode="json")) != data:
        reasons.append(refusal("not_canonical", "leaves fields out or spells values differently", path, expected))
        return None
    return record


def _lines(path: str, files: dict[str, bytes], reasons: list[Reason]) -> list[dict[str, Any]]:
    try:
        return canonical.parse_lines(files[path])
    except canonical.NotCanonicalError as error:
        reasons.append(refusal("not_canonical", str(error), path, "canonical JSON lines"))
        return []


def _absent(bundle: Bundle, files: dict[str, bytes]) -> Iterator[Reason]:
    for ref in references(bundle):
        if ref.path not in files:
            message = "is named by bundle.json but not in the folder"
            yield refusal("missing_file", message, _shown(ref.path), "every named file")


def _shown(path: str) -> str:
    return path if plain_name(path) else ascii(path)[:200]


def _layout_findings(
    name: str,
    bundle: Bundle,
    results: dict[GateName, GateResult],
    raw: dict[GateName, list[dict[str, Any]]],
    peers: list[dict[str, Any]],
    files: dict[str, bytes],
) -> Iterator[Reason]:
    if not name.startswith(f"{bundle.run}-{bundle.name}-"):
        yield refusal("folder_name", "names another run or candidate", name, f"{bundle.run}-{bundle.name}-...")
    named = {"manifest.json", "manifest.sha256", *FIXED_FILES}
    places = {"candidate.patch": bundle.patch.path, "environment.json": bundle.environment.path}
    for entry in bundle.gates:
        places[f"gates/{entry.gate}.json"] = entry.result.path
        if entry.raw is not None and entry.derived is not None:
            places[f"raw/{entry.gate}.jsonl"] = entry.raw.path
            places[f"derived/{entry.gate}.parquet"] = entry.derived.path
            if entry.raw.lines != len(raw[entry.gate]):
                message = f"has {len(raw[entry.gate])} lines"
                yield refusal("line_count", message, entry.raw.path, f"{entry.raw.lines} lines, as bundle.json says")
        if entry.error is not None:
            places[f"raw/{entry.gate}_error.jsonl"] = entry.error.path
        result = results[entry.gate]
        if (result.gate, result.outcome, result.protocol_id) != (entry.gate, entry.outcome, entry.protocol_id):
            message = "gate, outcome or protocol id differ from bundle.json"
            yield refusal("layout", message, entry.result.path, "the same three values")
        for ref in result.evidence:
            if ref.path not in files or hashlib.sha256(files[ref.path]).hexdigest() != ref.sha256:
                message = f"its evidence {_shown(ref.path)} is absent or has another digest"
                yield refusal("evidence", message, entry.result.path, "files of this bundle")
    if bundle.peers is not None:
        places["raw/bench.jsonl"] = bundle.peers.raw.path
        if not peers or bundle.peers.raw.lines != len(peers):
            expected = f"{bundle.peers.raw.lines} lines, as bundle.json says"
            yield refusal("line_count", f"has {len(peers)} lines", bundle.peers.raw.path, expected)
    for artifact in bundle.artifacts:
        places[f"artifacts/{artifact.name}/manifest.json"] = artifact.manifest.path
    for place, path in places.items():
        if path != place:
            yield refusal("layout", f"bundle.json places it at {_shown(path)}", place, "each file at its fixed place")
    for ref in references(bundle):
        named.add(ref.path)
        if hashlib.sha256(files[ref.path]).hexdigest() != ref.sha256:
            yield refusal("digest", "differs from the digest in bundle.json", ref.path, f"sha256 {ref.sha256}")
    for path in sorted(files.keys() - named):
        yield refusal("extra_file", "is in the manifest but no record names it", path, "only files with a meaning")
