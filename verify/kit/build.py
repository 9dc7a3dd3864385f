"""Making a kit: trusted sources of the base commit, artifacts and schedules of the arms, and one manifest over it all.

The same inputs give the same bytes. What a candidate wrote in Python stays here: of its tree only machine code, launch
descriptors and schedule tables travel. Nothing of the CUDA toolkit or the DSL is copied.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.durable import disk_errors
from harness.errors import FasttrackError
from harness.settings import Target, Tier
from k3_backend.aot.cuda.arch import ARCHS
from k3_backend.aot.cuda.descriptor import DESCRIPTOR_NAME
from k3_backend.aot.manifest import MANIFEST_NAME, Artifact
from verify.kit.artifacts import named
from verify.kit.manifest import CANDIDATE, CODE, MANIFEST, KitManifest, Unit, artifact_folder, schedules_folder
from verify.kit.sources import closure
from verify.protocol.kernels_cuda import PROTOCOL_ID as KERNELS_PROTOCOL
from verify.protocol.path_cuda_record import PROTOCOL_ID as PATH_PROTOCOL
from verify.protocol.peers import PROTOCOL_ID as BENCH_PROTOCOL
from verify.protocol.perf_plan import CUDA_PROTOCOL_ID as PERF_PROTOCOL

__all__ = ["KIT_GATES", "KIT_SECTIONS", "MAX_BYTES", "Arm", "describe", "kit_files", "make_archive", "make_kit"]

MAX_BYTES = 40_000_000
KIT_GATES: Mapping[str, str] = {"kernels": KERNELS_PROTOCOL, "path": PATH_PROTOCOL, "perf": PERF_PROTOCOL}
"""Gates that a kit can evaluate, with their protocols."""
KIT_SECTIONS: Mapping[str, str] = {"bench": BENCH_PROTOCOL}
"""What else a kit can carry on request, recorded and brought back like a gate, but deciding nothing."""
ARCHIVE_SUFFIX = ".tar.gz"
ENTRY = "kit.py"
_ENTRY_SOURCE = "verify/kit/entry.py"
_LEFT_OUT = (".ptx",)
"""Files of an artifact that are for reading, not for running."""


@dataclass(frozen=True)
class Arm:
    """What one arm runs."""

    artifacts: Mapping[Unit, Artifact]
    schedules: Path
    """Folder of schedules: the one that holds the families."""


def describe(
    target: Target,
    tier: Tier,
    *,
    base: str,
    head: str,
    trees: Mapping[str, str],
    gates: tuple[str, ...],
    arms: Mapping[str, Arm],
    mutants: Mapping[str, Arm],
    command: str,
    plans: Mapping[str, Mapping[str, Any]] | None = None,
) -> KitManifest:
    """The manifest of a kit, without its files."""
    if len(target.archs) != 1:
        raise FasttrackError(
            f"target {target.name} has architectures {', '.join(target.archs)}", where="--target",
            expected="one architecture per kit", next="fasttrack targets",
        )  # fmt: skip
    arch = ARCHS[target.archs[0]]
    return KitManifest(
        target=target.name, tier=tier.name, arch=arch.name, compute_capability=arch.compute_capability,
        base=base, head=head, trees=dict(trees), gates=gates,
        protocols={gate: {**KIT_GATES, **KIT_SECTIONS}[gate] for gate in gates},
        batches=target.batches_of(tier), tokens=tuple(1 + drafts for drafts in target.drafts),
        contexts=target.contexts_of(tier), draws=tier.kernel_cases, command=command,
        arms={name: named(arm.artifacts) for name, arm in arms.items()},
        mutants={name: named(arm.artifacts) for name, arm in mutants.items()}, plans=plans or {},
    )  # fmt: skip


def make_kit(out: Path, manifest: KitManifest, files: Mapping[str, bytes]) -> str:
    """Write the kit as a folder, or as one archive if `out` ends in `.tar.gz`.

    Args:
        out: where; must not exist.
        manifest: names all of `files` with their digests.
        files: from `kit_files`.

    Returns:
        The command that runs it on the GPU machine, beside the copied folder or archive.

    Raises:
        FasttrackError: `out` exists, the kit would be too large, or the disk refuses. Nothing is left behind.
    """
    return make_archive(out, f"kit-{manifest.digest[:12]}", {**files, MANIFEST: manifest.document()})


def make_archive(out: Path, name: str, files: Mapping[str, bytes]) -> str:
    """Write files as a folder, or as one archive with `name` as its root if `out` ends in `.tar.gz`.

    Returns:
        The command that runs it, as `make_kit`.

    Raises:
        FasttrackError: as `make_kit`.
    """
    total = sum(map(len, files.values()))
    archive = _archive(files, name) if out.name.endswith(ARCHIVE_SUFFIX) else None
    if (total if archive is None else len(archive)) > MAX_BYTES:
        raise FasttrackError(
            f"the kit would have {total} bytes", where=str(out), expected=f"at most {MAX_BYTES}",
            next="fewer ops with --ops",
        )  # fmt: skip
    if os.path.lexists(out):
        raise FasttrackError("exists already", where=str(out), expected="a new path", next="choose another --out")
    partial = out.with_name(f".{out.name}.partial")
    with disk_errors(out):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            _remove(partial)
            if archive is None:
                for path, data in files.items():
                    (partial / path).parent.mkdir(parents=True, exist_ok=True)
                    (partial / path).write_bytes(data)
            else:
                partial.write_bytes(archive)
            partial.rename(out)
        finally:
            _remove(partial)
    if archive is None:
        return f"python3 {out.name}/{ENTRY} run --out R"
    return f"tar xzf {out.name} && python3 {name}/{ENTRY} run --out R"


def kit_files(base_tree: Path, arms: Mapping[str, Arm]) -> dict[str, bytes]:
    """Every file but the manifest."""
    sources = closure(base_tree, frozenset(sys.stdlib_module_names))
    files = {f"{CODE}/{name}": (base_tree / name).read_bytes() for name in sources}
    files[ENTRY] = (base_tree / _ENTRY_SOURCE).read_bytes()
    for name, arm in arms.items():
        for unit, artifact in arm.artifacts.items():
            path = Path(ARCHS[unit.arch].schedules) / unit.geometry / f"{unit.op}.toml"
            files[f"{schedules_folder(name)}/{path.as_posix()}"] = (arm.schedules / path).read_bytes()
            held = arms[CANDIDATE].artifacts.get(unit) if CANDIDATE in arms and name != CANDIDATE else None
            if held is not None and held.digest == artifact.digest:
                continue  # see KitManifest.holder
            artifact.verify()
            folder = artifact_folder(name, unit)
            for file in (MANIFEST_NAME, *artifact.files):
                if not file.endswith(_LEFT_OUT):
                    files[f"{folder}/{file}"] = (artifact.path / file).read_bytes()
            assert f"{folder}/{DESCRIPTOR_NAME}" in files
    return files


def _archive(files: Mapping[str, bytes], root: str) -> bytes:
    """A .tar.gz whose bytes depend on names and contents only."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), 0, 0o755 if name == ENTRY else 0o644
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), compresslevel=9, mtime=0)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
