"""What a performance measurement must consist of: cells and their claims, stages and their error budget, slice order.

The plan is written before the first block and read back from the raw header. It holds no measurements. Constants of the
method are here and not in the header: they are part of the protocol id.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, cast

from verify.protocol.floors import Traffic

__all__ = [
    "ARMS", "CONTROL_ALPHA", "CUDA_PROTOCOL_ID", "MIN_ROUNDS", "MIN_SLICE_NS", "PROTOCOL_ID", "PROTOCOL_IDS",
    "CellPlan", "Claim", "Plan", "PlanError", "Stage", "cell_order", "plan_stages", "seed_digest", "slice_order",
]  # fmt: skip

PROTOCOL_ID = "perf/3"
CUDA_PROTOCOL_ID = "perf-cuda/1"
"""On a GPU: a call is one replay of a graph of several half-layers, or calls of one op, each on weights of its own; all
arms run the same number of them, the standard arm too."""
PROTOCOL_IDS = (PROTOCOL_ID, CUDA_PROTOCOL_ID)

ARMS = ("standard", "best", "candidate", "control")
"""`control` is a second process of the current best, entered as if it were a candidate."""

MIN_SLICE_NS = 1_000_000
"""Least median duration of an arm's slices in a visit, on the evaluator's clock: asking and answering cost 0.15 ms."""

MIN_ROUNDS = 12
"""Least number of rounds of a visit. In each, every compared arm runs one slice, so all of them see the same moment."""

STANDARD_SLICES = 4
"""Slices of the standard arm per visit, after all rounds: its distance is large, so few are enough, and its threads
spin on for a while, which would disturb the slice that follows."""

CONTROL_ALPHA = 0.01
"""Probability that a sound rig is called unsound by its A/A control, over all cells."""

Rule = Literal["faster", "not_slower"]
Baseline = Literal["standard", "best"]


class PlanError(ValueError):
    """The header does not describe a measurement that could pass; the message says which rule it breaks."""


@dataclass(frozen=True)
class Claim:
    """What must hold in a cell."""

    against: Baseline
    rule: Rule


@dataclass(frozen=True)
class CellPlan:
    """One cell."""

    key: str
    cell: Mapping[str, Any]
    """Fields of `harness.records.Cell`."""
    claims: tuple[Claim, ...]
    traffic: Traffic
    """The least that one call must move and compute."""

    @property
    def is_step(self) -> bool:
        """Whether it is a whole decode step."""
        return bool(self.cell["scope"] == "step")


@dataclass(frozen=True)
class Stage:
    """A series of blocks that decides on its own; all stages must agree."""

    name: str
    blocks: int
    alpha: float
    """Level of every test of this stage."""
    control: bool
    """Whether the standard arm and the control take part. They do once per measurement: the standard arm is far away,
    and a rig that was sound in one stage is not another one in the next."""

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms of its blocks."""
        return ARMS if self.control else ("best", "candidate")

    def has(self, arm: str) -> bool:
        """Whether an arm takes part."""
        return arm in self.arms


@dataclass(frozen=True)
class Plan:
    """The whole measurement."""

    target: str
    tier: str
    arms: Mapping[str, Any]
    """Arm -> digests of what it runs."""
    band: float
    """Largest loss that "not slower" allows, as a fraction."""
    alpha_per_run: float
    candidates: int
    """Over how many candidates the run spends its error budget."""
    stages: tuple[Stage, ...]
    cells: tuple[CellPlan, ...]
    gain_cells: tuple[str, ...]
    """Cells of which at least one must be faster than the best; empty where claims name the cells."""
    command: str
    """Measures again."""
    protocol: str = PROTOCOL_ID
    """One of `PROTOCOL_IDS`."""
    chains: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """On a GPU: cell key -> `geometry` of its shapes and `copies`, half-layers or calls of one replay."""

    @property
    def on_gpu(self) -> bool:
        """Whether calls are replays of a graph."""
        return self.protocol == CUDA_PROTOCOL_ID

    def meets_standard(self, cell: CellPlan) -> bool:
        """Whether the standard arm runs the same calls of a cell, so that its outputs must be those of the others."""
        return cell.is_step or self.on_gpu

    @property
    def margin(self) -> float:
        """The band as a log ratio."""
        return math.log1p(self.band)

    @property
    def share(self) -> float:
        """The candidate's part of the error budget: level of a claim that one stage alone decides."""
        return math.prod(stage.alpha for stage in self.stages)

    @property
    def is_look(self) -> bool:
        """Whether it is one block, which shows a size and no bound: it can refute a candidate and never accept one."""
        return len(self.stages) == 1 and self.stages[0].blocks == 1

    @property
    def keys(self) -> tuple[str, ...]:
        """Cell keys in plan order."""
        return tuple(cell.key for cell in self.cells)

    def header(self) -> dict[str, Any]:
        """The plan's part of the raw header line."""
        return {
            "kind": "header",
            "gate": "perf",
            "protocol": self.protocol,
            **{name: getattr(self, name) for name in _SCALARS},
            "arms": dict(self.arms),
            "stages": [asdict(stage) for stage in self.stages],
            "cells": [
                {**asdict(cell), "cell": dict(cell.cell), "claims": [asdict(claim) for claim in cell.claims]}
                for cell in self.cells
            ],
            "gain_cells": list(self.gain_cells),
            **({"chains": {key: dict(chain) for key, chain in self.chains.items()}} if self.on_gpu else {}),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Plan:
        """Read and check a header.

        Raises:
            PlanError: a field is missing or malformed, or the plan could not control its error.
        """
        protocol = header.get("protocol")
        if protocol not in PROTOCOL_IDS:
            known = " and ".join(PROTOCOL_IDS)
            raise PlanError(f"the header names protocol {protocol!r}; this code implements {known}")
        try:
            plan = cls(
                **{name: header[name] for name in _SCALARS},
                arms=header["arms"],
                stages=tuple(Stage(**stage) for stage in header["stages"]),
                cells=tuple(_cell(cell) for cell in header["cells"]),
                gain_cells=tuple(header["gain_cells"]),
                protocol=protocol,
                chains=header["chains"] if protocol == CUDA_PROTOCOL_ID else {},
            )
            plan.check()
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"the header is malformed ({type(error).__name__}: {error})") from error
        return plan

    def check(self) -> None:
        """Check that a complete measurement of this plan controls what it claims.

        Raises:
            PlanError: names the rule.
        """
        spent = self.share
        budget = self.alpha_per_run / self.candidates
        rules = (
            (self.cells and len(set(self.keys)) == len(self.cells), "it has cells, each once"),
            (all(cell.claims for cell in self.cells), "every cell has a claim"),
            (set(self.gain_cells) <= set(self.keys), "gain cells are cells"),
            (self.stages and (self.is_look or self.stages[0].control), "its first stage carries the A/A control"),
            (self.is_look or all(stage.blocks >= 2 for stage in self.stages), "stages have 2 blocks or more"),
            (all(0 < stage.alpha <= 0.5 for stage in self.stages), "levels are above 0 and at most 0.5"),
            (len({stage.name for stage in self.stages}) == len(self.stages), "stages have different names"),
            (self.candidates >= 1 and 0 < self.alpha_per_run <= 0.1, "the error budget is positive and at most 0.1"),
            (spent <= budget * (1 + 1e-9), f"stage levels multiply to {spent:.2g}, at most {budget:.2g}"),
            (0 <= self.band <= 0.1, "the band is a fraction between 0 and 0.1"),
            (self._claims_gain(), "something must be faster than the current best"),
            (set(self.chains) == (set(self.keys) if self.on_gpu else set()), "every cell on a GPU has a chain"),
            (all(chain["copies"] >= 1 for chain in self.chains.values()), "chains have a call or more"),
            (set(self.arms) == {"standard", "best", "candidate"}, "the arms are standard, best and candidate"),
        )
        for holds, rule in rules:
            if not holds:
                raise PlanError(f"the plan breaks the rule: {rule}")

    def _claims_gain(self) -> bool:
        gains = any(claim == Claim("best", "faster") for cell in self.cells for claim in cell.claims)
        return bool(self.gain_cells) or gains


_SCALARS = ("target", "tier", "band", "alpha_per_run", "candidates", "command")


def _cell(data: Mapping[str, Any]) -> CellPlan:
    claims = tuple(Claim(cast(Baseline, c["against"]), cast(Rule, c["rule"])) for c in data["claims"])
    for claim in claims:
        if claim.against not in ("standard", "best") or claim.rule not in ("faster", "not_slower"):
            raise PlanError(f"cell {data['key']}: unknown claim {claim}")
    return CellPlan(str(data["key"]), data["cell"], claims, Traffic.from_json(data["traffic"]))


def plan_stages(blocks: int, alpha_per_run: float, candidates: int) -> tuple[Stage, ...]:
    """Split a tier's blocks into stages whose levels multiply to the candidate's share of the run's error budget.

    From four blocks on: a search stage and a confirmation stage of equal level, with fresh processes, seeds and order.
    A candidate that fails the search costs half, a lucky one has to be lucky twice, and each level is far enough from
    the tail that a t quantile describes it. One block is a look at the candidate beside the current best.

    Raises:
        PlanError: no blocks.
    """
    if blocks < 1:
        raise PlanError(f"{blocks} perf blocks; expected at least 1")
    share = alpha_per_run / candidates
    if blocks == 1:
        return (Stage("look", 1, share, control=False),)
    if blocks < 4:
        return (Stage("search", blocks, share, control=True),)
    level = math.sqrt(share)
    return (
        Stage("search", blocks // 2, level, control=True),
        Stage("confirm", blocks - blocks // 2, level, control=False),
    )


def seed_digest(seed: str) -> str:
    """What the `begin` line of a block commits to before the block runs."""
    return hashlib.sha256(seed.encode()).hexdigest()


@lru_cache(maxsize=4096)
def cell_order(seed: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Order in which a block visits the cells."""
    return tuple(sorted(keys, key=lambda key: _draw(seed, "cells", key)))


@lru_cache(maxsize=1 << 14)
def slice_order(seed: str, key: str, rounds: int, arms: tuple[str, ...]) -> tuple[str, ...]:
    """Arms of a visit's slices, in turn.

    In every round the compared arms run in a secret order of its own, so that no arm has a place or a neighbour of its
    own; but none runs twice in a row, for it would find its data in the caches. The standard arm comes last.
    """
    compared = [arm for arm in arms if arm != "standard"]
    order: list[str] = []
    last = ""
    for number in range(rounds):
        drawn = sorted(compared, key=lambda arm: _draw(seed, f"{key}/{number}", arm))
        if drawn[0] == last:
            drawn = [*drawn[1:], drawn[0]]
        last = drawn[-1]
        order += drawn
    return (*order, *(["standard"] * STANDARD_SLICES if "standard" in arms else []))


def _draw(seed: str, what: str, item: str) -> bytes:
    return hashlib.sha256(f"{seed}/{what}/{item}".encode()).digest()
