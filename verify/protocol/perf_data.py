"""Raw performance lines as arrays, and everything that is wrong with them before any statistics.

A `begin` line commits to a block's seed; the `block` line that follows reveals it, with every slice of every cell. A
block counts only if it is complete, its slices came in the order that its seed dictates, and they were as many and as
long as the protocol demands. Nothing is dropped for being slow, fast or noisy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from verify.protocol.bounds import Floats
from verify.protocol.decision import Line
from verify.protocol.perf_plan import (
    MIN_ROUNDS,
    MIN_SLICE_NS,
    Plan,
    Stage,
    cell_order,
    seed_digest,
    slice_order,
)

__all__ = [
    "BlockError", "StageData", "Visit", "blocks_of", "interrupted", "midmean", "order_code", "stage_data",
    "visit_value",
]  # fmt: skip

Slices = Mapping[str, Floats]
"""Arm -> [slices] f64, in time order."""


class BlockError(ValueError):
    """A block line that no gate of this protocol writes; the message says which block and why."""


@dataclass(frozen=True)
class Visit:
    """The slices of one cell in one block, in nanoseconds per call."""

    evaluator: Slices
    worker: Slices
    """The same on the worker's own clock."""
    calls: Mapping[str, int]
    """Arm -> calls per slice."""


@dataclass(frozen=True)
class StageData:
    """The blocks of one stage, in order."""

    stage: Stage
    keys: tuple[str, ...]
    visits: Sequence[Sequence[Visit]]
    """[blocks][cells]."""

    @property
    def blocks(self) -> int:
        """Blocks present."""
        return len(self.visits)

    def values(self, baseline: str, arm: str) -> Floats:
        """log(baseline / arm) per cell and block, [cells, blocks]: see `visit_value`."""
        rows = [[visit_value(visit.evaluator, baseline, arm) for visit in block] for block in self.visits]
        return np.array(rows, dtype=np.float64).reshape(self.blocks, len(self.keys)).T

    def typical_ns(self, arm: str) -> Floats:
        """Median nanoseconds per call of an arm's slices, [blocks, cells]."""
        rows = [[float(np.median(visit.evaluator[arm])) for visit in block] for block in self.visits]
        return np.array(rows, dtype=np.float64).reshape(self.blocks, len(self.keys))

    def clocks_ns(self, arm: str) -> tuple[Floats, Floats]:
        """Durations of all slices of an arm, (evaluator's, worker's)."""
        all_visits = [visit for block in self.visits for visit in block]
        evaluator = np.concatenate([visit.evaluator[arm] * visit.calls[arm] for visit in all_visits])
        return evaluator, np.concatenate([visit.worker[arm] * visit.calls[arm] for visit in all_visits])


def midmean(values: Floats) -> float:
    """Mean of the middle half: a quarter of the values is dropped on each side."""
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def visit_value(slices: Slices, baseline: str, arm: str) -> float:
    """log(baseline / arm) of one visit: the midmean of the log ratios of slices of the same round.

    A disturbance that lasts longer than a round hits both slices of a pair and cancels; a shorter one makes an outlier
    that the midmean drops. The standard arm has no part in the rounds: of it, midmeans are compared.
    """
    ours, others = np.log(slices[arm]), np.log(slices[baseline])
    return midmean(others) - midmean(ours) if baseline == "standard" else midmean(others - ours)


def blocks_of(lines: Iterable[Line], stage: Stage) -> list[Line]:
    """Block lines of a stage, in order of appearance."""
    return [line for line in lines if line.get("kind") == "block" and line.get("stage") == stage.name]


def interrupted(lines: Sequence[Line]) -> int:
    """Blocks that were begun and not finished: kills and resumes, visible and never counted."""
    begun = sum(1 for line in lines if line.get("kind") == "begin")
    return begun - sum(1 for line in lines if line.get("kind") == "block")


def stage_data(plan: Plan, lines: Sequence[Line], stage: Stage) -> StageData:
    """Check and read the blocks of a stage.

    Raises:
        BlockError: a block is out of turn, or its slices, order, seed or cells are not those of the plan.
    """
    committed = _commitments(lines, stage)
    visits = []
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
        if line.get("order") != list(cell_order(seed, plan.keys)):
            raise BlockError(f"{where}: cells were not visited in the order of the seed")
        visits.append([_visit(cells[key], seed, stage, where) for key in plan.keys])
    return StageData(stage, plan.keys, visits)


@lru_cache(maxsize=1 << 14)
def order_code(seed: str, key: str, rounds: int, arms: tuple[str, ...]) -> str:
    """The order of a visit's slices as the raw line holds it: one digit per slice, the arm's place in the stage."""
    return "".join(str(arms.index(arm)) for arm in slice_order(seed, key, rounds, arms))


@lru_cache(maxsize=1 << 14)
def _places(order: str, arms: tuple[str, ...]) -> Mapping[str, np.ndarray[Any, Any]]:
    """Arm -> positions of its slices."""
    digits = np.frombuffer(order.encode(), dtype=np.uint8) - ord("0")
    return {arm: np.flatnonzero(digits == at) for at, arm in enumerate(arms)}


def _visit(cell: Mapping[str, Any], seed: str, stage: Stage, where: str) -> Visit:
    key, rounds = cell["key"], cell["rounds"]
    calls = {arm: cell["standard_calls" if arm == "standard" else "calls"] for arm in stage.arms}
    if not all(isinstance(count, int) and count >= 1 for count in calls.values()):
        raise BlockError(f"{where}, {key}: {calls} calls per slice")
    if not isinstance(rounds, int) or rounds < MIN_ROUNDS:
        raise BlockError(f"{where}, {key}: {rounds!r} rounds; expected {MIN_ROUNDS} or more")
    if cell["order"] != order_code(seed, key, rounds, stage.arms):
        raise BlockError(f"{where}, {key}: slices are not in the order of the seed")
    evaluator, worker = (np.asarray(cell[name], dtype=np.float64) for name in ("ns", "worker_ns"))
    if evaluator.shape != (len(cell["order"]),) or worker.shape != evaluator.shape:
        raise BlockError(f"{where}, {key}: {evaluator.shape} and {worker.shape} times of {len(cell['order'])} slices")
    if not (np.isfinite(evaluator) & (evaluator > 0) & np.isfinite(worker) & (worker > 0)).all():
        raise BlockError(f"{where}, {key}: a slice that took no time")
    places = _places(cell["order"], stage.arms)
    for arm, at in places.items():
        if not float(np.median(evaluator[at])) >= MIN_SLICE_NS:
            raise BlockError(
                f"{where}, {key}: slices of arm {arm} take {np.median(evaluator[at]):.0f} ns; expected {MIN_SLICE_NS} "
                "or more"
            )
    return Visit(
        {arm: evaluator[at] / calls[arm] for arm, at in places.items()},
        {arm: worker[at] / calls[arm] for arm, at in places.items()},
        calls,
    )


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
