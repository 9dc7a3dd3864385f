"""Append-only evidence files that records can refer to: `harness.durable` with digests as `EvidenceRef`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness import durable
from harness.durable import DISK_ERRNOS, DiskError, disk_error, disk_errors, fsync_folder, write_atomic
from harness.records import EvidenceRef

__all__ = ["DISK_ERRNOS", "DiskError", "JsonLines", "disk_error", "disk_errors", "fsync_folder", "write_atomic"]


class JsonLines(durable.JsonLines):
    """One append-only JSONL file of a run. One writer at a time; the run's lock sees to that."""

    def ref(self, root: Path) -> EvidenceRef:
        """Path relative to a folder, and digest of the bytes on disk."""
        return EvidenceRef(
            path=self.path.relative_to(root).as_posix(), sha256=hashlib.sha256(self.path.read_bytes()).hexdigest()
        )
