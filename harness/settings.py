"""`harness.toml` as validated data: scope table, audit policies, tiers, targets and their matrices.

Everything is resolved once here; gates see only frozen objects. The module knows no op, kernel or geometry (the
layers above check those names against `k3_backend`) and reads nothing from the environment.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import Field, field_validator, model_validator

from harness import globs, toml
from harness.errors import FasttrackError
from harness.matrix import Axes, Layout, Name, Point, PositiveInt, Prune, PrunedMatrix, as_cells, prune
from harness.records import Cell, Digest, EvidenceClass, GateName, Record
from harness.toml import At

__all__ = [
    "FILE_NAME",
    "PROTECTED_ALWAYS", "AuditPolicy", "BuildLimits", "Cost", "Layout", "PerfPolicy", "Prune", "PrunedMatrix",
    "Scope", "ScopeLimits", "Settings", "Target", "Tier", "load",
]  # fmt: skip

PROTECTED_ALWAYS = (
    "fasttrack/**", "agents/**", "reports/**", "verify/**", "harness/**", "tests/**", "prompts/**", "tasks/**",
    "docs/**", ".ci/**", ".git/**", "*",
    "k3_backend/*", "k3_backend/ops/**", "k3_backend/model/**", "k3_backend/step/**", "k3_backend/aot/**",
    "k3_backend/vllm_plugin/**",
)  # fmt: skip
"""Judging code, its inputs and its configuration: no settings file can make these editable. `*` is the root's files."""

Fraction = Annotated[float, Field(gt=0, lt=1)]
Glob = Annotated[str, Field(min_length=1)]
T = TypeVar("T")
FILE_NAME = "harness.toml"


def _unique_ascending(values: tuple[int, ...], what: str) -> tuple[int, ...]:
    if not values:
        raise At((), f"{what} is empty; a matrix needs at least one value")
    for index, (before, after) in enumerate(pairwise(values), start=1):
        if after == before:
            raise At((index,), f"{what} lists {after} twice")
        if after < before:
            raise At((index,), f"{what} must ascend, {after} follows {before}")
    return values


def _unique(values: tuple[str, ...]) -> tuple[str, ...]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise At((index,), f"{value!r} is listed twice")
    return values


class ScopeLimits(Record):
    """How large a change may be before a person has to look first."""

    files: PositiveInt
    """Changed files per candidate."""
    file_bytes: PositiveInt
    """Bytes per changed file."""
    line_chars: PositiveInt
    """Characters per line: generated or packed code is not reviewable."""


class Scope(Record):
    """Which paths a candidate may change, and what its files may contain."""

    editable: tuple[Glob, ...]
    protected: tuple[Glob, ...]
    """Documents what is protected by name. All that is not editable is protected in any case."""
    python_imports: tuple[Name, ...]
    """Top-level modules that Python files under the editable paths may import."""
    cpp_includes: tuple[str, ...]
    """Headers that C++ files under the editable paths may include, besides headers of the same tree."""
    limits: ScopeLimits

    @field_validator("editable", "protected", "python_imports", "cpp_includes")
    @classmethod
    def _listed_once(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if not values:
            raise At((), "the list is empty")
        return _unique(values)

    @model_validator(mode="after")
    def _no_contradiction(self) -> Scope:
        for name in ("editable", "protected"):
            for index, glob in enumerate(getattr(self, name)):
                if problem := globs.problem(glob):
                    raise At((name, index), f"{glob!r} {problem}")
        for index, glob in enumerate(self.editable):
            for guarded in (*PROTECTED_ALWAYS, *self.protected):
                if globs.overlap(glob, guarded):
                    raise At(("editable", index), f"{glob!r} is editable and also protected by {guarded!r}")
        return self

    def is_editable(self, path: str) -> bool:
        """Whether a repository path may be changed by a candidate."""
        return any(globs.matches(glob, path) for glob in self.editable)


class AuditPolicy(Record):
    """What a compiled host object may contain."""

    undefined_symbols: tuple[Name, ...]
    needed_libraries: tuple[Name, ...]
    constructors: Annotated[int, Field(ge=0, strict=True)]
    """Entries of the init and fini arrays."""
    writable_bytes: Annotated[int, Field(ge=0, strict=True)]
    """Bytes of writable data (.data, .bss, .tdata, .tbss) that stay writable after relocation."""

    @field_validator("undefined_symbols", "needed_libraries")
    @classmethod
    def _listed_once(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return _unique(values)


class BuildLimits(Record):
    """Bounds of one sandboxed compiler run."""

    seconds: PositiveInt
    memory_bytes: PositiveInt
    """Private memory per process."""
    processes: PositiveInt
    output_bytes: PositiveInt
    """Largest file the compiler may write."""


class Tier(Record):
    """Which part of a matrix is evaluated, with how many samples, in which time."""

    name: Name
    batches: tuple[PositiveInt, ...] | Literal["all"]
    contexts: PositiveInt | Literal["all"]
    """The N shortest contexts of the target, or all."""
    kernel_cases: PositiveInt
    """Secret input draws per op and input class."""
    perf_blocks: PositiveInt
    eval_samples: PositiveInt
    minutes: PositiveInt

    @field_validator("batches")
    @classmethod
    def _ascending(cls, values: tuple[int, ...] | Literal["all"]) -> tuple[int, ...] | Literal["all"]:
        return values if values == "all" else _unique_ascending(values, "batches")


class PerfPolicy(Record):
    """Constants of the performance decision, declared before any run."""

    not_slower_band: Fraction
    """Largest loss that "not slower" allows, as a fraction."""
    alpha_per_run: Fraction
    """Probability of a false accept per run, over all its candidates."""


@dataclass(frozen=True)
class Cost:
    """What a tier's perf matrix asks for, before it runs."""

    cells: int
    blocks: int
    measurements: int
    """Timed cell visits: cells * blocks * 3 arms, plus one A/A pass over the cells."""
    minutes: int
    """The tier's time limit for the whole verification."""


class Target(Record):
    """A kind of machine, a geometry, and the matrix in which candidates are judged there."""

    name: Name
    device: Literal["cpu", "cuda"]
    archs: tuple[Name, ...]
    geometry: Name
    layouts: tuple[Layout, ...]
    batches: tuple[PositiveInt, ...]
    contexts: tuple[PositiveInt, ...]
    drafts: tuple[Annotated[int, Field(ge=0, strict=True)], ...]
    """Draft tokens per request: the speculation settings that must work."""
    workloads: tuple[Name, ...]
    perf_drafts: tuple[Annotated[int, Field(ge=0, strict=True)], ...]
    """The subset of `drafts` that is timed."""
    perf_workloads: tuple[Name, ...]
    half_layer_contexts: tuple[PositiveInt, ...] = ()
    """Where whole steps cannot run (one GPU has one rank's shapes), attention half-layers are timed in their place, at
    these contexts; empty where steps are timed."""
    required: dict[GateName, EvidenceClass]
    """Gates that must pass for accept, with the class of evidence each needs."""
    perf: PerfPolicy
    prune: tuple[Prune, ...] = ()

    @field_validator("batches", "contexts", "drafts", "perf_drafts")
    @classmethod
    def _ascending(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        return _unique_ascending(values, "the axis")

    @field_validator("half_layer_contexts")
    @classmethod
    def _ascending_or_none(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        return _unique_ascending(values, "the axis") if values else values

    @field_validator("archs", "workloads", "perf_workloads")
    @classmethod
    def _listed_once(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if not values:
            raise At((), "the list is empty")
        return _unique(values)

    @field_validator("layouts")
    @classmethod
    def _layouts(cls, values: tuple[Layout, ...]) -> tuple[Layout, ...]:
        if not values:
            raise At((), "layouts is empty; a matrix needs at least one layout")
        for index, layout in enumerate(values):
            if layout in values[:index]:
                raise At((index,), f"layout {layout.key} is listed twice: its cells would be counted twice")
            if layout.tp % layout.dcp:
                raise At((index,), f"dcp {layout.dcp} does not divide tp {layout.tp}")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Target:
        for name, values, axis in (
            ("perf_drafts", self.perf_drafts, self.drafts),
            ("perf_workloads", self.perf_workloads, self.workloads),
        ):
            for index, value in enumerate(values):
                if value not in axis:
                    raise At(
                        (name, index), f"{value!r} is not one of the target's {name.removeprefix('perf_')} {list(axis)}"
                    )
        if self.half_layer_contexts and not self.one_gpu_layouts:
            raise At(("half_layer_contexts",), "no layout has dcp = 1 and gpus = 1; half-layers are timed on one GPU")
        if not self.required:
            raise At(("required",), "no gate is required; accept would mean nothing")
        _, counts = prune(self._axes(self.batches, self.contexts).points(), self.prune)
        for index, count in enumerate(counts):
            if not count:
                raise At(("prune", index), "the rule removes no cell that an earlier rule left; drop it or correct it")
        if not self._perf_points(self.batches, self.contexts):
            raise At(("prune",), "the prune rules leave no cell to measure")
        return self

    def full_matrix(self) -> PrunedMatrix:
        """Every supported cell, all drafts and workloads included, after pruning."""
        points, counts = prune(self._axes(self.batches, self.contexts).points(), self.prune)
        return PrunedMatrix(self._cells(points), len(points) + sum(counts), counts)

    def cells(self, tier: Tier) -> tuple[Cell, ...]:
        """The cells that the perf gate measures in a tier: whole steps after pruning, or half-layers. Never empty."""
        if self.half_layer_contexts:
            return self._half_layers(tier)
        return self._cells(self._perf_points(self.batches_of(tier), self.contexts_of(tier)))

    def batches_of(self, tier: Tier) -> tuple[int, ...]:
        """Batch sizes of a tier on this target."""
        return self.batches if tier.batches == "all" else tier.batches

    def contexts_of(self, tier: Tier) -> tuple[int, ...]:
        """Contexts of a tier on this target, in cached tokens per request."""
        return self.contexts if tier.contexts == "all" else self.contexts[: tier.contexts]

    def cost(self, tier: Tier) -> Cost:
        """What the tier's perf matrix asks for."""
        cells = len(self.cells(tier))
        return Cost(cells, tier.perf_blocks, cells * (3 * tier.perf_blocks + 1), tier.minutes)

    def _half_layers(self, tier: Tier) -> tuple[Cell, ...]:
        """Of every layout that one GPU has the shapes of, at T = 1; only MLA depends on the context."""
        contexts = self.half_layer_contexts
        contexts = contexts if tier.contexts == "all" else contexts[: tier.contexts]
        kinds = [("kda_half_layer", None), *(("mla_half_layer", context) for context in contexts)]
        return tuple(
            Cell(scope=scope, batch=batch, context=context, layout=layout.key)
            for layout in self.one_gpu_layouts
            for scope, context in kinds
            for batch in self.batches_of(tier)
        )

    @property
    def one_gpu_layouts(self) -> tuple[Layout, ...]:
        """Layouts without DCP whose rank shapes are measured on one GPU."""
        return tuple(layout for layout in self.layouts if layout.gpus == 1 and layout.dcp == 1)

    def _axes(self, batches: tuple[int, ...], contexts: tuple[int, ...]) -> Axes:
        return Axes(self.layouts, self.workloads, self.drafts, contexts, batches)

    def _perf_points(self, batches: tuple[int, ...], contexts: tuple[int, ...]) -> list[Point]:
        axes = Axes(self.layouts, self.perf_workloads, self.perf_drafts, contexts, batches)
        return prune(axes.points(), self.prune)[0]

    def _cells(self, points: list[Point]) -> tuple[Cell, ...]:
        return as_cells(points, name_layout=len(self.layouts) > 1)


class Settings(Record):
    """The whole of `harness.toml`."""

    version: Literal[1]
    scope: Scope
    build: BuildLimits
    audit: dict[Literal["cpu"], AuditPolicy]
    tiers: dict[Name, Tier]
    targets: dict[Name, Target]

    @model_validator(mode="before")
    @classmethod
    def _names_from_keys(cls, data: object) -> object:
        """Tables do not repeat their own name; the records carry it."""
        if not isinstance(data, dict):
            return data
        resolved = dict(data)
        for table in ("tiers", "targets"):
            entries = resolved.get(table)
            if not isinstance(entries, dict):
                continue
            for key, entry in entries.items():
                if isinstance(entry, dict) and "name" in entry:
                    raise At((table, key, "name"), "unknown key")
            resolved[table] = {k: {**v, "name": k} if isinstance(v, dict) else v for k, v in entries.items()}
        return resolved

    @model_validator(mode="after")
    def _tiers_fit_targets(self) -> Settings:
        for kind, table in (("tier", self.tiers), ("target", self.targets)):
            if not table:
                raise At((f"{kind}s",), f"no {kind} is declared")
        for tier in self.tiers.values():
            for target in self.targets.values():
                missing = [b for b in target.batches_of(tier) if b not in target.batches]
                if missing and tier.batches != "all":
                    index = tier.batches.index(missing[0])
                    raise At(
                        ("tiers", tier.name, "batches", index),
                        f"batch {missing[0]} is not in the batches of target {target.name}",
                    )
                if not target.cost(tier).cells:
                    raise At(("tiers", tier.name), f"the tier has no cell on target {target.name}")
        for target in self.targets.values():
            if "audit" in target.required and target.device == "cpu" and "cpu" not in self.audit:
                raise At(("targets", target.name, "required", "audit"), "needs the table [audit.cpu]")
        return self

    def target(self, name: str, where: str = "--target") -> Target:
        """The target of that name, which was given at `where`.

        Raises:
            FasttrackError: unknown name.
        """
        return _lookup(self.targets, name, "target", where)

    def tier(self, name: str, where: str = "--tier") -> Tier:
        """The tier of that name, which was given at `where`.

        Raises:
            FasttrackError: unknown name.
        """
        return _lookup(self.tiers, name, "tier", where)


def _lookup(table: dict[str, T], name: str, kind: str, where: str) -> T:
    try:
        return table[name]
    except KeyError:
        raise FasttrackError(
            f"unknown {kind} {name!r}", where=where, expected=f"one of {', '.join(table)}", next="fasttrack targets"
        ) from None


class LoadedSettings(NamedTuple):
    """Settings with the digest of the file that they came from."""

    settings: Settings
    sha256: Digest


def load(path: Path) -> Settings:
    """Read, validate and resolve a settings file.

    Args:
        path: `harness.toml`, or the folder that holds it.

    Raises:
        FasttrackError: unreadable file, broken TOML, unknown key, empty matrix, contradiction; names file and line.
    """
    return load_with_digest(path).settings


def load_with_digest(path: Path) -> LoadedSettings:
    """As `load`, together with the sha256 of the file's bytes."""
    if path.is_dir():
        path = path / FILE_NAME
    document = toml.read(path, path.name)
    settings = toml.validate(Settings, document, next=f"edit {path.name}, then: fasttrack targets")
    return LoadedSettings(settings, hashlib.sha256(path.read_bytes()).hexdigest())
