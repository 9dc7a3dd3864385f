"""Reading the results of a kit as a stranger's: within limits, canonical, unbroken, and about the kit they name.

Nothing here believes a number. What is checked: plain files with known names and bounded sizes; canonical JSON; every
raw line follows from those before it, from the kit and from this run's nonce; headers say what the kit's manifest says.
Whether the kit itself is ours is for `verify.kit.importing`, which builds it again.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import canonical
from harness.errors import FasttrackError
from verify.kit.manifest import MANIFEST, KitManifest, read_manifest
from verify.protocol import chain

__all__ = ["Received", "read_results"]

_LIMITS = {"run.json": 1 << 16, MANIFEST: 8 << 20, "result.json": 1 << 20, "sessions.jsonl": 16 << 20}
_RAW_BYTES = 256 << 20
_IGNORED = frozenset({"lock"})
_HEADER_KEYS = ("target", "tier", "base", "head")
_WITH_CONTEXTS = frozenset({"path"})
"""Gates whose plan depends on the declared contexts."""


@dataclass(frozen=True)
class Received:
    """Results that are intact."""

    manifest: KitManifest
    nonce: str
    lines: Mapping[str, list[dict[str, Any]]]
    """Gate to its raw lines; gates that never began are absent."""
    machine: Mapping[str, Any]
    """What the GPU machine said about itself when the last session began."""
    ended: bool
    """Whether the last session ended by itself."""


def read_results(folder: Path) -> Received:
    """Read a folder of results.

    Raises:
        FasttrackError: one clear message about the first thing that is wrong. The folder stays as it is.
    """
    files = _files(folder)
    run = _document(files, "run.json")
    manifest = read_manifest(_bytes(files, MANIFEST), f"{folder}/{MANIFEST}")
    if run.get("version") != 1 or run.get("kit") != manifest.digest or not isinstance(run.get("nonce"), str):
        raise _refused("is not about the kit whose manifest lies beside it", "run.json", f"kit {manifest.digest[:12]}")
    nonce = str(run["nonce"])
    lines = {}
    for name in sorted(files):
        gate = name.removeprefix("raw/").removesuffix(".jsonl")
        if name.startswith("raw/"):
            lines[gate] = _raw(files, name, gate, manifest, nonce)
    sessions = _lines(files, "sessions.jsonl") if "sessions.jsonl" in files else []
    ended = _check_result(files, manifest, nonce, lines) if "result.json" in files else False
    begun = [
        line["machine"] for line in sessions if line.get("kind") == "begin" and isinstance(line.get("machine"), dict)
    ]
    return Received(manifest, nonce, lines, begun[-1] if begun else {}, ended)


def _files(folder: Path) -> dict[str, Path]:
    """The folder's files by relative name; everything in it has to have a meaning."""
    if not folder.is_dir() or folder.is_symlink():
        raise FasttrackError(
            "no such folder", where=str(folder), expected="the folder that kit.py wrote with --out",
            next="copy it from the GPU machine",
        )  # fmt: skip
    found: dict[str, Path] = {}
    for path in sorted(
        [*folder.iterdir(), *(folder / "raw").glob("*")] if (folder / "raw").is_dir() else folder.iterdir()
    ):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if (name == "raw" and stat.S_ISDIR(mode)) or (name in _IGNORED and stat.S_ISREG(mode)):
            continue
        known = name in _LIMITS or (name.startswith("raw/") and name.endswith(".jsonl") and name[4:-6].isidentifier())
        if not known or not stat.S_ISREG(mode) or not name.isascii():
            raise _refused("is nothing that a kit writes", ascii(name)[1:-1][:100], "plain files of a kit's results")
        limit = _LIMITS.get(name, _RAW_BYTES)
        if path.lstat().st_size > limit:
            raise _refused(f"has {path.lstat().st_size} bytes", name, f"at most {limit}")
        found[name] = path
    return found


def _raw(files: Mapping[str, Path], name: str, gate: str, manifest: KitManifest, nonce: str) -> list[dict[str, Any]]:
    lines = _lines(files, name)
    if gate not in manifest.gates:
        raise _refused("is of a gate that is not in the kit", name, f"some of {', '.join(manifest.gates)}")
    number = chain.broken(chain.start(manifest.digest, nonce, gate), lines)
    if number is not None:
        raise _refused("does not follow from the lines before it", f"{name}:{number}", "the lines as they were written")
    wanted = {key: getattr(manifest, key) for key in _HEADER_KEYS}
    wanted |= {"gate": gate, "protocol": manifest.protocols[gate], "kit": manifest.digest, "nonce": nonce}
    wanted |= {"artifacts": dict(manifest.arms["candidate"]), "batches": list(manifest.batches)}
    wanted |= {"mutants": {name: dict(units) for name, units in manifest.mutants.items()}}
    wanted |= {"tokens": list(manifest.tokens), "draws": manifest.draws}
    if gate in _WITH_CONTEXTS:
        wanted["contexts"] = list(manifest.contexts)
    wanted |= manifest.plans.get(gate, {})
    if not lines:
        raise _refused("has no line", name, "a header")
    for key, value in wanted.items():
        if lines[0].get(key) != value:
            raise _refused(f"its header names another {key}", f"{name}:1", f"{key} of kit {manifest.digest[:12]}")
    return lines


def _check_result(
    files: Mapping[str, Path], manifest: KitManifest, nonce: str, lines: Mapping[str, list[dict[str, Any]]]
) -> bool:
    """Whether the last session ended with exactly these lines; later ones are of a session that was killed."""
    result = _document(files, "result.json")
    if (result.get("kit"), result.get("nonce")) != (manifest.digest, nonce) or not isinstance(
        result.get("files"), dict
    ):
        raise _refused("is of another run", "result.json", "the kit and nonce of run.json")
    for gate, stated in result["files"].items():
        own = lines.get(gate, [])
        count = stated.get("lines") if isinstance(stated, dict) else None
        if not isinstance(count, int) or not 0 < count <= len(own) or own[count - 1][chain.KEY] != stated.get("chain"):
            raise _refused("does not hold the lines that result.json counts", f"raw/{gate}.jsonl", "all lines")
    return all(gate in result["files"] and result["files"][gate]["lines"] == len(own) for gate, own in lines.items())


def _document(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    try:
        value = canonical.parse(_bytes(files, name))
    except canonical.NotCanonicalError as error:
        raise _refused(str(error)[:200], name, "canonical JSON as kit.py writes it") from error
    if not isinstance(value, dict):
        raise _refused("is no object", name, "a JSON object")
    return value


def _lines(files: Mapping[str, Path], name: str) -> list[dict[str, Any]]:
    data = _bytes(files, name)
    try:
        return canonical.parse_lines(data[: data.rfind(b"\n") + 1])  # a killed session can leave one torn line
    except canonical.NotCanonicalError as error:
        raise _refused(str(error)[:200], name, "canonical JSON lines as kit.py writes them") from error


def _bytes(files: Mapping[str, Path], name: str) -> bytes:
    if name not in files:
        raise _refused("is missing", name, "every file of a kit's results")
    try:
        return files[name].read_bytes()
    except OSError as error:
        raise _refused(f"cannot be read ({error.strerror})", name, "a readable file") from error


def _refused(what: str, where: str, expected: str) -> FasttrackError:
    return FasttrackError(
        what, where=where, expected=expected,
        next="copy the folder again from the GPU machine, or run the kit again: python3 kit.py run --out R2",
    )  # fmt: skip
