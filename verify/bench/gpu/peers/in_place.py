"""A bare update in place of the states that a KDA call reads and writes: the least that any recurrence does."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verify.bench.gpu.arm import Arm, Inputs, Missing

__all__ = ["arm"]

FACTOR = 1.0 - 2.0**-10
"""Close to 1, so that replays do not shrink states to denormal numbers."""


def arm(inputs: Inputs) -> Arm:
    """Torch's mul_ over the batch's states, which lie together.

    Raises:
        Missing: a verify step, which writes T states per one that it reads.
    """
    if inputs.cell.tokens > 1:
        raise Missing("an update in place writes one state, a verify step T")
    states = [t["state"][1 : 1 + inputs.cell.batch] for t in inputs.sets]
    before = states[0].double() * FACTOR

    def results() -> Mapping[str, Tensor]:
        return {"state": states[0]}

    calls = [lambda s=s: s.mul_(FACTOR) for s in states]
    note = "torch's mul_ over the same states: no other input, no output, contiguous"
    return Arm(calls, results, pdl=False, note=note, expected={"state": before})
