"""The ledger: which implementation ran at every site of the decode step, and why the standard path ran instead.

Specialised counts are incremented natively by the launcher, one per finished launch, so that a replay counts what it
really ran; this module only owns their memory. Standard counts and refusal codes are counted where the fallback runs.
The ledger records; it decides nothing, and nothing in the step reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3_backend.model.program import Site

__all__ = ["Ledger"]


class Ledger:
    """Counts per site of one program, keyed by `Site.key`: captures with different query tokens share counters."""

    def __init__(self, program: Sequence[Site]) -> None:
        self._sites = {site.key: (index, site) for index, site in enumerate(program)}
        self._specialized: NDArray[np.int64] = np.zeros(len(program), dtype=np.int64)
        self._standard: NDArray[np.int64] = np.zeros(len(program), dtype=np.int64)
        self._steps = {"specialized": 0, "standard": 0}
        self._fallbacks: Counter[str] = Counter()

    def counter(self, site: Site) -> NDArray[np.int64]:
        """The one-element view that the launcher increments each time the site's kernel has finished."""
        index, _ = self._sites[site.key]
        return self._specialized[index : index + 1]

    def count_specialized_step(self) -> None:
        """One step finished on the specialised path."""
        self._steps["specialized"] += 1

    def count_standard_step(self, codes: Iterable[str]) -> None:
        """One step finished on the standard path, refused for these reason codes (each counted once)."""
        self._standard += 1
        self._steps["standard"] += 1
        self._fallbacks.update(set(codes))

    def reset(self) -> None:
        """Set every count to zero; the counters keep their addresses, so captured steps stay valid."""
        self._specialized[:] = 0
        self._standard[:] = 0
        self._steps = dict.fromkeys(self._steps, 0)
        self._fallbacks.clear()

    def snapshot(self) -> dict[str, Any]:
        """Counts as JSON values.

        Returns:
            `sites`: one row per site in execution order with `layer` (null after the last layer), `op`, `site` and the
            counts `specialized` and `standard`; `steps`: finished steps by path; `fallbacks`: steps by refusal code.
        """
        return {
            "sites": [
                {
                    "layer": site.layer,
                    "op": site.op,
                    "site": site.name,
                    "specialized": int(self._specialized[index]),
                    "standard": int(self._standard[index]),
                }
                for index, site in self._sites.values()
            ],
            "steps": dict(self._steps),
            "fallbacks": dict(sorted(self._fallbacks.items())),
        }
