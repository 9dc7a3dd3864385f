"""Writing a bundle: gather, derive, render, check, and put it in place in one rename.

The writer takes the evidence folder of one verification and a `BundleInput`, and writes a folder that `verify_bundle`
accepts: it runs the same checks on the same bytes before anything reaches the disk, so a bundle that exists is one that
verifies. It decides nothing itself: outcomes come from the gates, the verdict from `harness.records.decide`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness import canonical
from harness.errors import FasttrackError
from harness.evidence import disk_error, fsync_folder
from harness.records import GATES, EvidenceRef, GateName, GateResult, decide
from k3_backend.aot.manifest import MANIFEST_NAME
from k3_backend.aot.manifest import Artifact as BuiltArtifact
from reports import derive
from reports.load import Loaded, references
from reports.peers import RAW as PEERS
from reports.peers import conclude, parse
from reports.render import render_all
from reports.schema import (
    BUNDLE_VERSION,
    RENDER_VERSION,
    Artifact,
    Bundle,
    BundleInput,
    Environment,
    GateEntry,
    Manifest,
    ManifestEntry,
    PeersEntry,
    RawRef,
)
from reports.verify import check_loaded

__all__ = ["ARTIFACT_BYTES", "write_bundle"]

ARTIFACT_BYTES = 2 << 20
"""Object files go into the bundle while all of them together stay below this; their digests always do."""


def write_bundle(
    candidate_dir: Path,
    out_dir: Path,
    context: BundleInput,
    *,
    environment: Environment,
    artifacts: Sequence[BuiltArtifact] = (),
) -> Path:
    """Write the bundle of one finished verification.

    Args:
        candidate_dir: evidence folder with `candidate.patch`, `gates/<gate>.json` and `raw/<gate>.jsonl`.
        out_dir: where bundles go; created if absent. Nothing in it is ever overwritten.
        context: what the evidence folder does not say; its candidate carries the artifact digests.
        environment: fingerprint of the machine, captured when the measurement ran.
        artifacts: the candidate's built artifacts, one per entry of `context.candidate.artifacts`.

    Returns:
        The bundle's folder, `<run>-<candidate>-<12 digits of its digest>`.

    Raises:
        FasttrackError: evidence is missing or damaged, the bundle would not verify, the bundle exists already, or the
            disk refuses. Nothing is left behind.
    """
    files = _gather(candidate_dir, artifacts)
    files["environment.json"] = canonical.document(environment.model_dump(mode="json"))
    results, raw = _evidence(candidate_dir, files)
    for gate, lines in raw.items():
        files[f"derived/{gate}.parquet"] = derive.parquet_bytes(lines)
    peer_lines = _peers(candidate_dir / PEERS, files)
    bundle = _record(context, files, results, artifacts, candidate_dir)
    files["bundle.json"] = canonical.document(bundle.model_dump(mode="json"))
    loaded = _as_read(files, results, raw, peer_lines)
    files |= {f"report.{form}": text.encode() for form, text in render_all(loaded).items()}
    _require_sound(loaded, candidate_dir)
    entries = {path: ManifestEntry(sha256=_sha(data), size=len(data)) for path, data in sorted(files.items())}
    files["manifest.json"] = canonical.document(
        Manifest(schema_version=BUNDLE_VERSION, files=entries).model_dump(mode="json")
    )
    digest = _sha(files["manifest.json"])
    files["manifest.sha256"] = f"{digest}  manifest.json\n".encode()
    return _place(out_dir, f"{context.run}-{context.name}", digest, files)


def _record(
    context: BundleInput,
    files: dict[str, bytes],
    results: dict[GateName, GateResult],
    artifacts: Sequence[BuiltArtifact],
    candidate_dir: Path,
) -> Bundle:
    """The content of bundle.json."""
    try:
        return Bundle(
            **dict(context),
            schema_version=BUNDLE_VERSION,
            render_version=RENDER_VERSION,
            verdict=decide(context.target.name, context.tier.name, context.target.required, results),
            cells=context.target.cells(context.tier),
            gates=tuple(_entry(gate, results[gate], files) for gate in GATES if gate in results),
            peers=_peers_entry(files),
            artifacts=tuple(_artifact(artifact, files) for artifact in artifacts),
            patch=_ref("candidate.patch", files),
            environment=_ref("environment.json", files),
        )
    except ValidationError as error:
        raise _unsound(error.errors()[0]["msg"], candidate_dir) from error


def _gather(candidate_dir: Path, artifacts: Iterable[BuiltArtifact]) -> dict[str, bytes]:
    """The patch and the artifacts' files."""
    files = {"candidate.patch": _read(candidate_dir / "candidate.patch")}
    objects: dict[str, bytes] = {}
    for artifact in artifacts:
        folder = f"artifacts/{artifact.name}"
        files[f"{folder}/{MANIFEST_NAME}"] = _read(artifact.path / MANIFEST_NAME)
        objects |= {f"{folder}/{name}": _read(artifact.path / name) for name in artifact.files}
    if sum(map(len, objects.values())) < ARTIFACT_BYTES:
        files |= objects
    return files


def _evidence(
    candidate_dir: Path, files: dict[str, bytes]
) -> tuple[dict[GateName, GateResult], dict[GateName, list[dict[str, Any]]]]:
    """Gate results and raw lines, added to the files in their canonical places."""
    results: dict[GateName, GateResult] = {}
    raw: dict[GateName, list[dict[str, Any]]] = {}
    for gate in GATES:
        stored = candidate_dir / "gates" / f"{gate}.json"
        if not stored.exists():
            continue
        try:
            results[gate] = GateResult.model_validate_json(_read(stored))
            files[f"gates/{gate}.json"] = canonical.document(results[gate].model_dump(mode="json"))
            for name in (gate, f"{gate}_error"):
                lines = candidate_dir / "raw" / f"{name}.jsonl"
                data = _read(lines) if lines.exists() else b""
                parsed = canonical.parse_lines(data)
                if parsed:
                    files[f"raw/{name}.jsonl"] = data
                    if name == gate:
                        raw[gate] = parsed
        except (ValidationError, canonical.NotCanonicalError) as error:
            raise FasttrackError(
                f"evidence of gate {gate} is damaged: {str(error).splitlines()[0]}",
                where=str(candidate_dir),
                expected="gate results and raw lines as the run store writes them",
                next="verify the candidate again in a new run",
            ) from error
    return results, raw


def _peers(path: Path, files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Raw lines of the peer table, added to the files; empty where none was measured."""
    data = _read(path) if path.exists() else b""
    lines = parse(data, path)
    if lines:
        files[PEERS] = data
    return lines


def _peers_entry(files: dict[str, bytes]) -> PeersEntry | None:
    if PEERS not in files:
        return None
    outcome, protocol_id = conclude(canonical.parse_lines(files[PEERS]))
    return PeersEntry(outcome=outcome, protocol_id=protocol_id, raw=_raw_ref(PEERS, files))


def _artifact(artifact: BuiltArtifact, files: dict[str, bytes]) -> Artifact:
    folder = f"artifacts/{artifact.name}"
    return Artifact(
        name=artifact.name,
        op=artifact.op,
        arch=artifact.arch,
        geometry=artifact.geometry,
        digest=artifact.digest,
        manifest=_ref(f"{folder}/{MANIFEST_NAME}", files),
        files=dict(artifact.files),
        included=all(f"{folder}/{name}" in files for name in artifact.files),
    )


def _entry(gate: GateName, result: GateResult, files: dict[str, bytes]) -> GateEntry:
    has_raw = f"raw/{gate}.jsonl" in files
    return GateEntry(
        gate=gate,
        outcome=result.outcome,
        protocol_id=result.protocol_id,
        result=_ref(f"gates/{gate}.json", files),
        raw=_raw_ref(f"raw/{gate}.jsonl", files) if has_raw else None,
        derived=_ref(f"derived/{gate}.parquet", files) if has_raw else None,
        error=_raw_ref(f"raw/{gate}_error.jsonl", files) if f"raw/{gate}_error.jsonl" in files else None,
    )


def _as_read(
    files: dict[str, bytes],
    results: dict[GateName, GateResult],
    raw: dict[GateName, list[dict[str, Any]]],
    peer_lines: list[dict[str, Any]],
) -> Loaded:
    """The records as a reader gets them: JSON sorts keys, so rendering must start from the written form."""
    return Loaded(
        name="",
        digest="",
        files=files,
        bundle=Bundle.model_validate_json(files["bundle.json"], strict=True),
        environment=Environment.model_validate_json(files["environment.json"], strict=True),
        results={gate: GateResult.model_validate_json(files[f"gates/{gate}.json"], strict=True) for gate in results},
        raw=raw,
        peers=peer_lines,
    )


def _require_sound(loaded: Loaded, candidate_dir: Path) -> None:
    """Refuse to write what a reader would refuse."""
    absent = sorted({ref.path for ref in references(loaded.bundle)} - loaded.files.keys())
    check = check_loaded(loaded)
    if absent or not check.ok:
        first = check.reasons[0].message + f" ({check.reasons[0].where})" if check.reasons else ""
        unchecked = next((f"{claim.claim}: {claim.note}" for claim in check.claims if claim.note), "")
        raise _unsound(first or unchecked or f"missing {absent[0]}", candidate_dir)


def _unsound(why: str, candidate_dir: Path) -> FasttrackError:
    return FasttrackError(
        f"the bundle would not verify: {why}",
        where=str(candidate_dir),
        expected="gate results that follow from their raw lines",
        next="keep the folder for a bug report, then verify the candidate again in a new run",
    )


def _place(out_dir: Path, stem: str, digest: str, files: dict[str, bytes]) -> Path:
    """Write all files into a hidden folder, wait for the disk, rename it into place."""
    final = out_dir / f"{stem}-{digest[:12]}"
    partial = out_dir / f".partial-{stem}"
    if os.path.lexists(final):
        raise FasttrackError(
            "this bundle exists already",
            where=str(final),
            expected="a new folder",
            next=f"fasttrack bundle verify {final}",
        )
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        # Left by a writer that was killed: the run's lock admits one writer per run at a time.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for path, data in files.items():
            _write(partial / path, data)
        for folder, _, _ in os.walk(partial, topdown=False):
            fsync_folder(Path(folder))
        partial.rename(final)
        fsync_folder(out_dir)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise disk_error(error, final) from error
    return final


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FasttrackError(
            f"cannot read evidence ({error.strerror})",
            where=str(path),
            expected="the files that a finished verification leaves",
            next="resume the run",
        ) from error


def _ref(path: str, files: dict[str, bytes]) -> EvidenceRef:
    return EvidenceRef(path=path, sha256=_sha(files[path]))


def _raw_ref(path: str, files: dict[str, bytes]) -> RawRef:
    return RawRef(path=path, sha256=_sha(files[path]), lines=files[path].count(b"\n"))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
