"""Reading a folder that a stranger wrote: every byte once, nothing followed, nothing unbounded.

`read_folder` returns the bytes of all files of a bundle, or the findings that made it stop. All later checks work on
these bytes, so that what was hashed is what is judged. It decides only what a bundle may consist of (plain files with
plain names within limits); what the files say is for `reports.load` and `reports.verify`.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from harness.records import Reason
from reports.text import visible_line

__all__ = ["CODES", "Limits", "plain_name", "read_folder", "refusal"]

CODES = {
    "bundle.unreadable": "a file or folder cannot be read",
    "bundle.odd_name": "a name that no bundle has",
    "bundle.not_a_file": "a link or a special file",
    "bundle.too_deep": "folders nested too deep",
    "bundle.too_many": "more files than a bundle may have",
    "bundle.too_large": "more bytes than a bundle or a record may have",
    "bundle.empty_folder": "a folder without files",
    "bundle.missing_file": "a listed or named file is absent",
    "bundle.extra_file": "a file that is not listed, or that no record names",
    "bundle.size": "a file has another size than listed",
    "bundle.digest": "a file has another content than listed",
    "bundle.manifest_digest": "manifest.sha256 does not hold the manifest's digest",
    "bundle.folder_name": "the folder's name is not that of its run, candidate and digest",
    "bundle.not_canonical": "JSON that our writer would not have written",
    "bundle.schema": "a record that does not fit its schema",
    "bundle.schema_version": "a bundle of another schema version",
    "bundle.layout": "a file at another place, or records that contradict each other",
    "bundle.evidence": "a gate result's evidence is absent or changed",
    "bundle.line_count": "a raw file has another number of lines than stated",
    "bundle.patch": "candidate.patch is not the patch that was judged",
    "bundle.cells": "the performance cells are not those of target and tier",
    "bundle.artifacts": "artifacts are not those that were built and listed, or their digests do not follow",
    "bundle.identity": "raw lines are about another candidate, target or tier, or name none",
    "bundle.plan": "the performance plan claims less than target and task ask for",
    "bundle.error_record": "an error record is not one of its gate",
    "bundle.outcome": "a gate's outcome does not follow from its raw lines",
    "bundle.reasons": "a gate's reasons do not follow from its raw lines",
    "bundle.metric": "a metric does not follow from its raw lines",
    "bundle.verdict": "the verdict does not follow from the gate results",
    "bundle.peers": "the peer table does not follow from its raw lines, or is of another candidate or run",
    "bundle.derived": "a Parquet table is not the table of its raw lines",
    "bundle.report": "a report is not what the records render to",
    "bundle.check_failed": "values that break a check",
}
"""Every reason to refuse a bundle, and what it means."""

_INTACT = "ask the author for an intact copy"
_SEGMENT = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,127}")


@dataclass(frozen=True)
class Limits:
    """What a bundle may cost to read; a real one stays far below each."""

    files: int = 1000
    depth: int = 5
    """Folders within folders."""
    file_bytes: int = 64 << 20
    total_bytes: int = 256 << 20


def plain_name(path: str) -> bool:
    """Whether a relative POSIX path has plain segments only: no `..`, no leading dot or slash, no odd character."""
    return all(_SEGMENT.fullmatch(segment) for segment in path.split("/"))


def refusal(code: str, message: str, where: str, expected: str, then: str = _INTACT) -> Reason:
    """A reason to refuse a bundle; what it quotes from the bundle is made harmless to show.

    Raises:
        KeyError: the code is not in `CODES`.
    """
    name = f"bundle.{code}"
    CODES[name]
    return Reason(
        code=name,
        message=visible_line(message, 500),
        where=visible_line(where, 300),
        expected=visible_line(expected, 300),
        next=then,
    )


def read_folder(root: Path, limits: Limits = Limits()) -> tuple[dict[str, bytes], list[Reason]]:
    """Read every file below `root` without following links.

    Args:
        root: the bundle's folder.
        limits: counts and sizes beyond which reading stops.

    Returns:
        Relative path to bytes, sorted by path, and findings. With findings the files are incomplete.
    """
    found: list[Reason] = []
    files: dict[str, bytes] = {}
    try:
        entries = _walk(root, "", limits, found)
    except OSError as error:
        return {}, [refusal("unreadable", f"cannot be listed: {error.strerror}", _name(root.name), "a readable folder")]
    total = 0
    for relative, size in entries:
        total += size
        if size > limits.file_bytes or total > limits.total_bytes:
            expected = f"at most {limits.file_bytes} bytes per file and {limits.total_bytes} in total"
            found.append(refusal("too_large", f"{size} bytes", relative, expected))
            break
        try:
            files[relative] = _read(root / relative, size)
        except OSError as error:
            found.append(
                refusal("unreadable", f"cannot be read: {error.strerror or error}", relative, "a readable plain file")
            )
    return dict(sorted(files.items())), found


def _walk(root: Path, prefix: str, limits: Limits, found: list[Reason]) -> list[tuple[str, int]]:
    """Depth-first list of (relative path, size) of the plain files; stops listing at the limits."""
    entries: list[tuple[str, int]] = []
    pending = [(root, prefix)]
    while pending:
        folder, prefix = pending.pop()
        empty = True
        with os.scandir(folder) as listing:
            for entry in listing:
                empty = False
                relative = prefix + entry.name
                mode = entry.stat(follow_symlinks=False).st_mode
                if not plain_name(relative):
                    found.append(
                        refusal(
                            "odd_name",
                            "name with characters or parts that no bundle has",
                            _name(relative),
                            "plain names",
                        )
                    )
                elif stat.S_ISDIR(mode):
                    if relative.count("/") >= limits.depth:
                        found.append(
                            refusal("too_deep", "folders nested too deep", relative, f"at most {limits.depth} levels")
                        )
                    else:
                        pending.append((Path(entry.path), relative + "/"))
                elif stat.S_ISREG(mode):
                    entries.append((relative, entry.stat(follow_symlinks=False).st_size))
                else:
                    kind = "symbolic link" if stat.S_ISLNK(mode) else "special file"
                    found.append(refusal("not_a_file", kind, relative, "plain files and folders only"))
                if len(entries) + len(found) > limits.files:
                    found.append(
                        refusal("too_many", "too many entries", prefix or ".", f"at most {limits.files} files")
                    )
                    return entries
        if empty and prefix:
            found.append(refusal("empty_folder", "empty folder", prefix, "folders that hold files of the manifest"))
    return entries


def _read(path: Path, size: int) -> bytes:
    """Read exactly `size` bytes of a plain file, without following a link that appeared meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("is no longer a plain file")
        data = file.read(size + 1)
    if len(data) != size:
        raise OSError("changed while it was read")
    return data


def _name(text: str) -> str:
    """A name that is safe to print."""
    return ascii(text)[1:-1][:200]
