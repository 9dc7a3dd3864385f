"""Read-only exports of commits for one verification: what workers import and compilers read.

Exports come from git objects, never from a working tree, and are shared between verifications of one run by tree id.
"""

from __future__ import annotations

import compileall
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from harness.evidence import disk_errors
from harness.git import Repository

__all__ = ["JUDGING_PATHS", "export_tree"]

JUDGING_PATHS = ("k3_backend", "verify", "harness")
"""What sandboxed workers and builds need of the base commit."""


def export_tree(repo: Repository, commit: str, prefixes: tuple[str, ...], cache: Path) -> Path:
    """Export paths of a commit once and return the folder.

    Complete or absent: the export is renamed into place, so a killed run leaves no half tree behind that a later one
    would trust.

    Raises:
        FasttrackError: the tree holds symlinks, submodules or unsafe names, or the disk is full.
    """
    with disk_errors(cache):
        name = f"{repo.tree(commit)[:20]}-{'+'.join(p.replace('/', '.') for p in prefixes) or 'all'}"
        final = cache / name
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{final}.lock"):
            if final.is_dir():
                return final
            for stale in cache.glob(f".{name}.*"):
                shutil.rmtree(stale)
            partial = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=cache))
            repo.export(commit, partial, prefixes)
            if prefixes == JUDGING_PATHS:  # a worker may not write, so each would compile all that it imports
                compileall.compile_dir(partial, quiet=2)
            os.rename(partial, final)
        return final
