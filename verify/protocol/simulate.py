"""Error rates of the performance decision, simulated over the real `decide` with noise measured on a machine.

Noise is a stored A/A measurement: three processes that run the same kernels, per block, and the standard path. A
simulated block is a measured one: its log slice times, with the three equal processes dealt out to best, candidate and
control at random, plus the effects under study. Whole blocks are drawn, in runs of neighbours, so that everything that
is correlated in a block (cells, slices, moments) and between neighbours stays so.

The rate that matters, a false accept of one candidate in a run of twenty, is too small to be counted. It is composed
instead: the stages are independent given the candidate, so the simulation counts how often each stage alone lets the
equal cell pass while every other stage is given the gain (`stage_rates`), each over the whole decision, and multiplies.

`python -m verify.protocol.simulate` prints the table of docs/performance-protocol.md; `extract` makes the noise file
from a raw record.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from verify.protocol.bounds import Floats
from verify.protocol.decision import Decision
from verify.protocol.floors import Traffic
from verify.protocol.lines import last_attempt, of_kind
from verify.protocol.perf import decide
from verify.protocol.perf_data import midmean, order_code, stage_data
from verify.protocol.perf_plan import (
    MIN_SLICE_NS,
    CellPlan,
    Claim,
    Plan,
    Stage,
    cell_order,
    plan_stages,
    seed_digest,
)

__all__ = ["Noise", "Rate", "Scenario", "Simulator", "extract", "main", "run_rate", "stage_rates"]

NOISE_DIR = Path(__file__).with_name("noise")
EQUAL_ARMS = ("best", "candidate", "control")
_RUN_OF_BLOCKS = 2
"""Neighbouring measured blocks that are drawn together."""
_BASE_NS = 10.0 * MIN_SLICE_NS
"""Slice time of the best before noise; slices below the least duration would be refused."""
_UNIT = 1e-4
"""Resolution of the stored log times."""


@dataclass(frozen=True)
class Noise:
    """A measured A/A record, as log slice times relative to each cell's median."""

    source: Mapping[str, Any]
    """How, where and under which load it was measured."""
    cells: tuple[str, ...]
    equal: Sequence[Floats]
    """Per cell [blocks, 3 arms, rounds]: log times of three processes of the same kernels."""
    standard: Floats
    """[blocks, cells, STANDARD_SLICES] log times of the standard arm."""

    @property
    def blocks(self) -> int:
        """Measured blocks."""
        return int(self.standard.shape[0])

    @classmethod
    def load(cls, path: Path) -> Noise:
        """Read a noise file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        equal = [np.asarray(cell, dtype=np.float64) * _UNIT for cell in data["equal"]]
        return cls(data["source"], tuple(data["cells"]), equal, np.asarray(data["standard"]) * _UNIT)

    def dump(self) -> str:
        """As a noise file."""
        equal = [np.rint(cell / _UNIT).astype(int).tolist() for cell in self.equal]
        standard = np.rint(self.standard / _UNIT).astype(int).tolist()
        stored = {"source": dict(self.source), "cells": list(self.cells), "equal": equal, "standard": standard}
        return json.dumps(stored, separators=(",", ":")) + "\n"

    def block_spread(self) -> Floats:
        """Standard deviation over blocks of an A/A block value, per cell: what the power depends on."""
        values = [[midmean(block[0] - block[1]) for block in cell] for cell in self.equal]
        spread: Floats = np.std(values, axis=1, ddof=1)
        return spread


def extract(lines: Sequence[Mapping[str, Any]], source: Mapping[str, Any]) -> Noise:
    """Noise from the raw lines of a measurement whose arms best, candidate and control ran the same kernels.

    Raises:
        ValueError: there is no header, or a stage without control.
    """
    attempt = last_attempt(lines)
    if attempt is None:
        raise ValueError("the record has no header")
    plan = Plan.from_header(attempt[0])
    data = stage_data(plan, attempt[1], plan.stages[0])
    equal, standard = [], []
    for at in range(len(plan.cells)):
        visits = [block[at].evaluator for block in data.visits]
        rounds = min(len(visit["best"]) for visit in visits)
        logs = np.log([[visit[arm][:rounds] for arm in EQUAL_ARMS] for visit in visits])
        equal.append(logs - np.median(logs))
        slower = np.log([visit["standard"] for visit in visits])
        standard.append(slower - np.median(slower))
    loads = [line["load"]["foreign_share"] for line in of_kind(attempt[1], "block")]
    measured = {"blocks": data.blocks, "foreign_share_median": float(np.median(loads))}
    return Noise({**source, **measured}, plan.keys, equal, np.stack(standard, axis=1))


@dataclass(frozen=True)
class Scenario:
    """What is true of the candidate, and what the plan asks."""

    gains: Mapping[int, float]
    """Cell index -> true speed relative to the best, minus one; cells not named have `other`."""
    other: float
    standard_gain: float = 2.0
    """True speed of the best relative to the standard path, minus one; below what any step cell of `cpu` measures."""
    task: bool = True
    """Whether all cells must be faster than the best; else one of them must, and none slower."""

    def log_gain(self, cells: int) -> Floats:
        """[cells] log(best / candidate)."""
        return np.array([math.log1p(self.gains.get(at, self.other)) for at in range(cells)])


class Simulator:
    """Draws records of a plan and decides them.

    Args:
        noise: measured.
        cells: of the plan; more than were measured are taken from other measured blocks of the same cells.
        blocks: of the tier.
        alpha_per_run: error budget.
        candidates: of the run.
        band: of the target.
        seed: of the simulation.
    """

    def __init__(
        self,
        noise: Noise,
        *,
        blocks: int,
        alpha_per_run: float,
        candidates: int,
        band: float,
        seed: int,
        cells: int | None = None,
    ) -> None:
        self.noise = noise
        count = len(noise.cells) if cells is None else cells
        self._copies = -(-count // len(noise.cells))
        self.keys = tuple(f"{key}#{n}" for n in range(self._copies) for key in noise.cells)[:count]
        """Cells of the plan."""
        self.rng = np.random.default_rng(seed)
        self.stages = plan_stages(blocks, alpha_per_run, candidates)
        self._budget = {"alpha_per_run": alpha_per_run, "candidates": candidates, "band": band}
        self._skeletons = {stage.name: [self._skeleton(stage, n) for n in range(stage.blocks)] for stage in self.stages}

    def decide(self, scenarios: Mapping[str, Scenario]) -> Decision:
        """One simulated measurement, decided.

        Args:
            scenarios: stage name -> truth in that stage; the plan's claims follow the first stage's.
        """
        first = scenarios[self.stages[0].name]
        plan = self._plan(first.task)
        lines: list[dict[str, Any]] = [plan.header(), {"kind": "ceilings", "ceilings": _CEILINGS}]
        for stage in self.stages:
            lines += self._stage(stage, scenarios[stage.name])
        lines.append({"kind": "end", "why": "complete"})
        return decide(lines)

    def everywhere(self, scenario: Scenario) -> dict[str, Scenario]:
        """The same truth in all stages."""
        return {stage.name: scenario for stage in self.stages}

    def _plan(self, task: bool) -> Plan:
        best = Claim("best", "faster" if task else "not_slower")
        cells = tuple(
            CellPlan(
                key,
                {"scope": key.partition("/")[0]},
                (Claim("standard", "faster"), best) if key.startswith("step/") else (best,),
                Traffic(0.0, 0.0, 0.0),
            )
            for key in self.keys
        )
        return Plan(
            target="simulated",
            tier="simulated",
            arms={"standard": "s", "best": "b", "candidate": "c"},
            stages=self.stages,
            cells=cells,
            gain_cells=() if task else self.keys,
            command="python -m verify.protocol.simulate",
            **self._budget,  # type: ignore[arg-type]
        )

    def _stage(self, stage: Stage, scenario: Scenario) -> list[dict[str, Any]]:
        cells = len(self.keys)
        gain = scenario.log_gain(cells)
        lines = []
        drawn = [self._drawn(stage.blocks) for _ in range(self._copies)]
        for skeleton, *sources in zip(self._skeletons[stage.name], *drawn, strict=True):
            deal = self.rng.permutation(3)
            equal, standard = [], []
            for at in range(cells):
                source, measured = sources[at // len(self.noise.cells)], at % len(self.noise.cells)
                times = self.noise.equal[measured][source][deal]
                times[EQUAL_ARMS.index("candidate")] -= gain[at]
                equal.append(_BASE_NS * np.exp(times))
                slower = _BASE_NS * (1 + scenario.standard_gain)
                standard.append(slower * np.exp(self.noise.standard[source, measured]))
            lines += skeleton.fill(equal, standard)
        return lines

    def _drawn(self, blocks: int) -> list[int]:
        """Measured blocks in the order of the simulated ones: runs of neighbours, circular."""
        total = self.noise.blocks
        drawn: list[int] = []
        while len(drawn) < blocks:
            start = int(self.rng.integers(total))
            drawn += [(start + at) % total for at in range(_RUN_OF_BLOCKS)]
        return drawn[:blocks]

    def _skeleton(self, stage: Stage, number: int) -> _Skeleton:
        rounds = [self.noise.equal[at % len(self.noise.cells)].shape[2] for at in range(len(self.keys))]
        return _Skeleton(self.keys, rounds, stage, number, seed=self.rng.bytes(16).hex())


_CEILINGS = {
    "threads": 1,
    "read": [[1, 1.0]],
    "write": [[1, 1.0]],
    "copy": [[1, 1.0]],
    "fma_gflops": 1.0,
    "bf16_gflops": 1.0,
    "bf16_unit": "fma",
}
"""Of no matter: simulated calls move nothing."""


class _Skeleton:
    """The lines of one block without its times; the order of a seed costs more than the statistics."""

    def __init__(self, keys: tuple[str, ...], rounds: Sequence[int], stage: Stage, number: int, seed: str) -> None:
        place = {"stage": stage.name, "block": number}
        self._begin = {"kind": "begin", **place, "seed_sha256": seed_digest(seed)}
        load = {"foreign_share": 0.0, "average_1min": 0.0}
        self._block = {"kind": "block", **place, "seed": seed, "order": list(cell_order(seed, keys)), "load": load}
        self._arms = stage.arms
        checked = [arm for arm in stage.arms if arm != "standard"]
        good = {"output_broken": 0.0, "chain_broken": 0.0, "nonfinite": 0.0}
        common = {
            "calls": 1,
            "standard_calls": 1,
            "restarts": 0,
            "checks": dict.fromkeys(checked, good),
            "paths": {arm: {"specialized": 1, "standard": 0} for arm in checked},
        }
        self._cells: list[dict[str, Any]] = []
        self._places: list[dict[str, Any]] = []
        for key, count in zip(keys, rounds, strict=True):
            order = order_code(seed, key, count, stage.arms)
            digits = np.array([int(digit) for digit in order])
            self._cells.append({"key": key, "rounds": count, "order": order, **common})
            self._places.append({arm: np.flatnonzero(digits == at) for at, arm in enumerate(stage.arms)})

    def fill(self, equal: Sequence[Floats], standard: Sequence[Floats]) -> list[dict[str, Any]]:
        """The lines with times in nanoseconds: per cell equal [3, rounds] and standard [STANDARD_SLICES]."""
        cells = []
        for cell, places, three, slower in zip(self._cells, self._places, equal, standard, strict=True):
            times = np.empty(len(cell["order"]))
            for arm in self._arms:
                times[places[arm]] = slower if arm == "standard" else three[EQUAL_ARMS.index(arm)]
            nanoseconds = np.rint(np.maximum(times, MIN_SLICE_NS)).tolist()
            cells.append({**cell, "ns": nanoseconds, "worker_ns": nanoseconds})
        return [self._begin, {**self._block, "cells": cells}]


@dataclass(frozen=True)
class Rate:
    """A simulated probability with its 95 % Clopper-Pearson interval."""

    hits: int
    trials: int

    @property
    def value(self) -> float:
        """Share of hits."""
        return self.hits / self.trials

    @property
    def high(self) -> float:
        """Upper bound."""
        from scipy.special import betaincinv

        return 1.0 if self.hits == self.trials else float(betaincinv(self.hits + 1, self.trials - self.hits, 0.975))

    @property
    def low(self) -> float:
        """Lower bound."""
        from scipy.special import betaincinv

        return 0.0 if self.hits == 0 else float(betaincinv(self.hits, self.trials - self.hits + 1, 0.025))


def accept_rate(simulator: Simulator, scenarios: Mapping[str, Scenario], trials: int) -> Rate:
    """How often a candidate is accepted."""
    return Rate(sum(simulator.decide(scenarios).outcome == "passed" for _ in range(trials)), trials)


def stage_rates(simulator: Simulator, wrong: Scenario, right: Scenario, trials: int) -> dict[str, Rate]:
    """How often each stage alone lets a wrong candidate pass, the other stages being given the right one.

    Cells that are wrong rotate, since their noise differs: `wrong.gains` names one cell as index 0.
    """
    cells = len(simulator.keys)
    rates = {}
    for stage in simulator.stages:
        hits = 0
        for trial in range(trials):
            moved = replace(wrong, gains={(at + trial) % cells: gain for at, gain in wrong.gains.items()})
            truth = {**simulator.everywhere(right), stage.name: moved}
            hits += simulator.decide(truth).outcome == "passed"
        rates[stage.name] = Rate(hits, trials)
    return rates


def run_rate(rates: Mapping[str, Rate], candidates: int) -> tuple[float, float]:
    """False accepts per run of so many equally wrong candidates: (estimate, upper bound).

    The upper bound takes each stage's upper 95 % bound; that all of them are exceeded at once is far less likely.
    """
    value = math.prod(rate.value for rate in rates.values())
    high = math.prod(rate.high for rate in rates.values())
    return 1 - (1 - value) ** candidates, 1 - (1 - high) ** candidates


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: `table` (default) prints error rates and power; `extract RAW OUT` makes a noise file."""
    parser = argparse.ArgumentParser(prog="python -m verify.protocol.simulate", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    table = commands.add_parser("table", help="error rates and power by number of blocks")
    table.add_argument("--noise", type=Path, default=NOISE_DIR / "cpu.json")
    table.add_argument("--blocks", type=int, nargs="+", default=[3, 8, 20])
    table.add_argument("--cells", type=int, help="of the plan; as many as were measured by default")
    table.add_argument("--trials", type=int, default=1000)
    table.add_argument("--candidates", type=int, default=20)
    table.add_argument("--alpha", type=float, default=0.01)
    table.add_argument("--band", type=float, default=0.05)
    table.add_argument("--seed", type=int, default=1)
    cut = commands.add_parser("extract", help="noise file from the raw record of an A/A measurement")
    cut.add_argument("raw", type=Path)
    cut.add_argument("out", type=Path)
    cut.add_argument("--note", required=True, help="machine and circumstances")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments or ["table"])
    if given.command == "extract":
        lines = [json.loads(line) for line in given.raw.read_text(encoding="utf-8").splitlines()]
        given.out.write_text(extract(lines, {"note": given.note}).dump(), encoding="utf-8")
        return 0
    _print_table(given if given.command else parser.parse_args(["table"]))
    return 0


def _print_table(given: argparse.Namespace) -> None:
    noise = Noise.load(given.noise)
    spread = noise.block_spread()
    print(f"noise: {noise.source}")
    print(f"sd of an A/A block value: median {np.median(spread):.2%}, largest {spread.max():.2%}, {len(spread)} cells")
    print(f"{given.candidates} candidates per run, budget {given.alpha:g}, {given.trials} trials per rate")
    print(
        "| blocks | stages | one cell equal, others +20 %: false accepts per run | every cell +5 %: accepted | +10 % |"
    )
    print("| --- | --- | --- | --- | --- |")
    for blocks in given.blocks:
        simulator = Simulator(
            noise,
            blocks=blocks,
            alpha_per_run=given.alpha,
            candidates=given.candidates,
            band=given.band,
            seed=given.seed,
            cells=given.cells,
        )
        faster = Scenario({}, 0.2)
        rates = stage_rates(simulator, Scenario({0: 0.0}, 0.2), faster, given.trials)
        value, high = run_rate(rates, given.candidates)
        power = [accept_rate(simulator, simulator.everywhere(Scenario({}, gain)), given.trials) for gain in (0.05, 0.1)]
        stages = " + ".join(f"{s.blocks} at {s.alpha:.3g}" for s in simulator.stages)
        powers = " | ".join(f"{p.value:.1%} ({p.low:.1%}–{p.high:.1%})" for p in power)
        print(f"| {blocks} | {stages} | {value:.2%} (at most {high:.2%}) | {powers} |", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
