"""Raw performance lines as arrays, and everything that is wrong with them before any statistics.

A `begin` line commits to a block's seed; the `block` line that follows reveals it, with every leg of every cell. A
block counts only if it is complete, its legs came in the order that its seed dictates, and none was shorter than the
protocol allows. Nothing is dropped for being slow, fast or noisy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verify.protocol.bounds import Floats
from verify.protocol.decision import Line
from verify.protocol.perf_plan import ARMS, MIN_LEG_NS, SWEEPS, Plan, Stage, block_order, leg_order, seed_digest

__all__ = ["BlockError", "StageData", "block_values", "blocks_of", "interrupted", "stage_data"]


class BlockError(ValueError):
    """A block line that no gate of this protocol writes; the message says which block and why."""


@dataclass(frozen=True)
class StageData:
    """The blocks of one stage, in order."""

    stage: Stage
    keys: tuple[str, ...]
    legs: Mapping[str, Floats]
    """Arm -> [blocks, cells, sweeps, 2] f64: evaluator's nanoseconds per call of the legs before and after the middle
    of each palindrome. The standard arm has one sweep, and its one leg counts as both."""
    worker_legs: Mapping[str, Floats]
    """The same on the worker's own clock."""

    @property
    def blocks(self) -> int:
        """Blocks present."""
        return int(next(iter(self.legs.values())).shape[0])

    def values(self, baseline: str, arm: str) -> Floats:
        """log(baseline / arm) per cell and block, [cells, blocks]: see `block_values`."""
        return block_values(self.legs[baseline], self.legs[arm]).T

    def first(self, blocks: int) -> StageData:
        """Only the first blocks."""
        cut = {arm: times[:blocks] for arm, times in self.legs.items()}
        return StageData(self.stage, self.keys, cut, {arm: t[:blocks] for arm, t in self.worker_legs.items()})


def block_values(baseline: Floats, arm: Floats) -> Floats:
    """One log ratio per block and cell, [blocks, cells].

    Each half of a palindrome gives one log ratio of neighbouring legs; the block's value is the median of these, so
    that one disturbed leg does not make it. Two halves of one sweep give their mean.

    Args:
        baseline: [blocks, cells, sweeps, 2] nanoseconds per call.
        arm: the same with as many sweeps or more; only the common ones count.
    """
    sweeps = min(baseline.shape[2], arm.shape[2])
    ratios = np.log(baseline[:, :, :sweeps]) - np.log(arm[:, :, :sweeps])
    halves = ratios.reshape(*ratios.shape[:2], 2 * sweeps)
    middle: Floats = np.median(halves, axis=2)
    return middle


def blocks_of(lines: Iterable[Line], stage: Stage) -> list[Line]:
    """Block lines of a stage, in order of appearance."""
    return [line for line in lines if line.get("kind") == "block" and line.get("stage") == stage.name]


def interrupted(lines: Sequence[Line]) -> int:
    """Blocks that were begun and not finished: kills and resumes, visible and never counted."""
    begun = sum(1 for line in lines if line.get("kind") == "begin")
    return begun - sum(1 for line in lines if line.get("kind") == "block")


def stage_data(plan: Plan, lines: Sequence[Line], stage: Stage) -> StageData:
    """Check and stack the blocks of a stage.

    Raises:
        BlockError: a block is out of turn, or its legs, order, seed or cells are not those of the plan.
    """
    committed = _commitments(lines, stage)
    evaluator: dict[str, list[Any]] = {arm: [] for arm in stage.arms}
    worker: dict[str, list[Any]] = {arm: [] for arm in stage.arms}
    for number, line in enumerate(blocks_of(lines, stage)):
        where = f"block {stage.name}/{number}"
        if line.get("block") != number or number >= stage.blocks:
            raise BlockError(f"{where}: the line is for block {line.get('block')!r} of {stage.blocks}")
        seed = line["seed"]
        if committed.get(number) != seed_digest(seed):
            raise BlockError(f"{where}: its seed is not the one that was committed to before it ran")
        cells = {cell["key"]: cell for cell in line["cells"]}
        if set(cells) != set(plan.keys) or len(line["cells"]) != len(plan.keys):
            raise BlockError(f"{where}: cells differ from the plan's")
        if line.get("order") != [list(block_order(seed, plan.keys, sweep)) for sweep in range(SWEEPS)]:
            raise BlockError(f"{where}: cells were not visited in the order of the seed")
        rows = [_legs(cells[key], seed, stage, where) for key in plan.keys]
        for arm in stage.arms:
            evaluator[arm].append([row[arm][0] for row in rows])
            worker[arm].append([row[arm][1] for row in rows])
    return StageData(stage, plan.keys, _stack(evaluator, plan), _stack(worker, plan))


def _stack(times: Mapping[str, list[Any]], plan: Plan) -> dict[str, Floats]:
    shape = {arm: (0, len(plan.cells), 1 if arm == "standard" else SWEEPS, 2) for arm in times}
    return {arm: np.asarray(rows, dtype=np.float64) if rows else np.empty(shape[arm]) for arm, rows in times.items()}


def _commitments(lines: Sequence[Line], stage: Stage) -> dict[int, str]:
    """Block number -> digest of the seed of its last begin line before the block line."""
    found: dict[int, str] = {}
    done: set[int] = set()
    for line in lines:
        if line.get("stage") != stage.name:
            continue
        if line.get("kind") == "begin" and line["block"] not in done:
            found[line["block"]] = line["seed_sha256"]
        elif line.get("kind") == "block":
            done.add(line["block"])
    return found


def _legs(
    cell: Mapping[str, Any], seed: str, stage: Stage, where: str
) -> dict[str, tuple[list[list[float]], list[list[float]]]]:
    """Arm -> per sweep the two (evaluator, worker) times per call of one cell."""
    key, legs = cell["key"], cell["legs"]
    calls = {"standard": cell["standard_calls"]}
    calls |= dict.fromkeys((arm for arm in stage.arms if arm != "standard"), cell["calls"])
    if not all(isinstance(count, int) and count >= 1 for count in calls.values()):
        raise BlockError(f"{where}, {key}: {calls} calls per leg")
    orders = [leg_order(seed, key, sweep, stage.arms) for sweep in range(SWEEPS)]
    if [leg[0] for leg in legs] != [arm for order in orders for arm in order]:
        raise BlockError(f"{where}, {key}: legs are not in the order of the seed")
    short = [leg for leg in legs if not leg[1] >= MIN_LEG_NS]
    if short or not all(leg[2] > 0 for leg in legs):
        raise BlockError(f"{where}, {key}: a leg of {short[0][1] if short else 0} ns; expected {MIN_LEG_NS} or more")
    found: dict[str, tuple[list[list[float]], list[list[float]]]] = {arm: ([], []) for arm in stage.arms}
    start = 0
    for order in orders:
        for arm in set(order):
            first = start + order.index(arm)
            last = start + len(order) - 1 - order[::-1].index(arm)
            for clock in (0, 1):
                found[arm][clock].append([legs[at][1 + clock] / calls[arm] for at in (first, last)])
        start += len(order)
    return found


assert ARMS[0] == "standard"  # `_stack` and `leg_order` treat the standard arm apart
