"""Proposer `replay`: applies a recorded list of patches, one candidate each. Searches nothing."""

from __future__ import annotations

from pathlib import Path

from agents.proposal import BestView, Exhausted, History, Proposal
from harness.errors import FasttrackError

__all__ = ["Replay"]


class Replay:
    """Proposes the patches of a list in their order; each applies to the run's current best."""

    name = "replay"

    def __init__(self, patches: tuple[Path, ...]) -> None:
        """Read all patches at once, so that a missing file is known before the run starts.

        Raises:
            FasttrackError: a patch file cannot be read as UTF-8 text.
        """
        self._patches = tuple((path.name, self._read(path)) for path in patches)

    @staticmethod
    def _read(path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FasttrackError(
                f"cannot read the patch: {error}", where=str(path), expected="a git patch", next="git diff BASE > PATCH"
            ) from error

    def propose(self, history: History, best: BestView) -> Proposal:  # noqa: ARG002 - a recording looks at nothing
        """The patch after the last one tried; Exhausted after the last."""
        if len(history) >= len(self._patches):
            raise Exhausted(f"all {len(self._patches)} recorded patches were tried")
        name, patch = self._patches[len(history)]
        return Proposal(hypothesis=f"recorded patch {name}", predicted={}, patch=patch)
