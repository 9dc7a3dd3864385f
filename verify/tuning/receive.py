"""Reading the results of a tuning archive: about the archive that they name, every line following from the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import canonical
from harness.errors import FasttrackError
from verify.protocol import chain
from verify.tuning.manifest import RAW, TuningManifest, read_manifest

__all__ = ["Received", "read_results"]

_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Received:
    """Results that are whole."""

    manifest: TuningManifest
    header: Mapping[str, Any]
    """Method and machine."""
    lines: tuple[Mapping[str, Any], ...]
    """All raw lines, the header included."""


def read_results(folder: Path) -> Received:
    """Read a folder that `kit.py run --out` wrote.

    Raises:
        FasttrackError: a file is missing, too large, not canonical, edited, or about another archive.
    """
    manifest = read_manifest(folder / "manifest.json")
    run = _parse(folder / "run.json", canonical.parse)
    lines = _parse(folder / "raw" / f"{RAW}.jsonl", lambda data: canonical.parse_lines(data[: data.rfind(b"\n") + 1]))
    if not isinstance(run, dict) or run.get("kit") != manifest.digest or not isinstance(run.get("nonce"), str):
        raise _refused("is not about the archive whose manifest lies beside it", folder / "run.json")
    number = chain.broken(chain.start(manifest.digest, run["nonce"], RAW), lines)
    if number is not None:
        raise _refused("does not follow from the lines before it", f"{folder / 'raw' / RAW}.jsonl:{number}")
    if not lines or lines[0].get("kind") != "header":
        raise _refused("has no header", folder / "raw" / f"{RAW}.jsonl")
    return Received(manifest, lines[0], tuple(lines))


def _parse(path: Path, parse: Any) -> Any:
    try:
        if path.is_symlink() or path.stat().st_size > _MOST_BYTES:
            raise ValueError("no plain file of a usual size")
        return parse(path.read_bytes())
    except (OSError, ValueError, canonical.NotCanonicalError) as error:
        raise _refused(f"cannot be read ({str(error)[:200]})", path) from error


def _refused(what: str, where: object) -> FasttrackError:
    return FasttrackError(
        what, where=str(where), expected="the folder that kit.py run --out wrote, unchanged",
        next="copy it again from the GPU machine, or run the archive again",
    )  # fmt: skip
