"""What a gate of the kit is given on the GPU machine."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.kit.machine import Machine
from verify.kit.manifest import CANDIDATE, CODE, KitManifest, Unit, artifact_folder, schedules_folder
from verify.kit.store import Results

__all__ = ["KitContext"]

_HOME = re.compile(r"/(?:home|Users)/[^/\s]+/|/root/")


@dataclass(frozen=True)
class KitContext:
    """One session of one kit."""

    root: Path
    """The kit's folder."""
    manifest: KitManifest
    results: Results
    machine: Machine
    description: dict[str, Any]
    """What the machine says about itself as this `kit.py run` begins."""
    evaluator: Any
    """The torch device on which expected values are computed."""
    logs: Path
    """Workers' logs: for people, not part of the results."""
    jobs: int
    deadline: float | None
    """On `time.monotonic`'s clock; no new piece of work begins after it."""
    progress: Callable[[str], None]
    no_sanitizer: str | None = None
    """Why memory checkers are not run, where that was asked."""
    peers: Path | None = None
    """Folder with the packages of peers, for the peer table; null: those that are installed."""

    @property
    def code(self) -> Path:
        """The trusted Python."""
        return self.root / CODE

    def header(self, gate: str, protocol: str, arm: str = CANDIDATE) -> dict[str, Any]:
        """What the header of every gate's raw lines says; `receive` holds it against the kit's manifest."""
        manifest = self.manifest
        return {
            "kind": "header",
            "gate": gate,
            "protocol": protocol,
            "target": manifest.target,
            "tier": manifest.tier,
            "base": manifest.base,
            "head": manifest.head,
            "kit": manifest.digest,
            "nonce": self.results.nonce,
            "artifacts": dict(manifest.arms[arm]),
            "mutants": {name: dict(units) for name, units in manifest.mutants.items()},
            "batches": list(manifest.batches),
            "tokens": list(manifest.tokens),
            "draws": manifest.draws,
            "machine": self.description,
            "command": manifest.command,
        }

    def artifact(self, arm: str, unit: Unit) -> Path:
        """Folder of an arm's artifact. One that the candidate's arm has, too, lies in the kit once."""
        return self.root / artifact_folder(self.manifest.holder(arm, unit), unit)

    def schedules(self, arm: str) -> Path:
        """Folder of an arm's schedules."""
        return self.root / schedules_folder(arm)

    def without_folders(self, value: Any) -> Any:
        """A failure's record with this machine's folders replaced by what they are: it goes into a bundle."""
        if isinstance(value, str):
            for folder, name in ((self.root, "KIT"), (sys.prefix, "PYTHON"), (sys.base_prefix, "PYTHON")):
                value = value.replace(f"{folder}/", f"{name}/")
            return _HOME.sub("HOME/", value)
        if isinstance(value, dict):
            return {key: self.without_folders(item) for key, item in value.items()}
        return value

    def over(self) -> bool:
        """Whether the time that was given is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline
