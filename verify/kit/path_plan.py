"""Which half-layers the path gate replays on a GPU machine, and which kernels each of their sites should launch.

The plan is drawn after the kit's digests were compared. What a site should launch follows from the arm's schedule and
launch descriptor alone, before anything runs and on any machine: where results are imported, it is derived again.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.errors import FasttrackError
from k3_backend.aot.arguments import call_sizes
from k3_backend.aot.cuda.choices import Choices, Declined
from k3_backend.aot.cuda.descriptor import LaunchSpec
from k3_backend.geometry import Geometry, LayerKind, geometry
from k3_backend.model.program import Site, program_buffers
from k3_backend.ops import OPS
from verify.kit.manifest import KitManifest, Unit
from verify.protocol.path_cuda_record import HALF_LAYERS, judged
from verify.workers.half_layer import half_layer

__all__ = ["Planned", "draw_plan", "expected_sites", "read_choices", "require_expected", "symbols"]

CACHED_TOKENS = 65_536
"""Cached tokens per cell, over all requests, beyond which contexts are cut where the batch is above 1."""
WATERMARK = (3, 1)
"""(batch, tokens) of watermarked cells."""
WATERMARK_CONTEXT = 4
"""Cached tokens there: the average over few values is large, so that attention weighs as much as other ops do."""
FULL_DRAWS = 4
"""Tiers with at least so many draws run every batch with every T."""
MOST_ROWS = 64
"""Largest rows of cells with several tokens in other tiers."""

Arm = Mapping[str, Mapping[str, Choices]]
"""Geometry -> op -> what decides its calls."""


@dataclass(frozen=True)
class Planned:
    """One cell: a half-layer on one batch, or a watermark."""

    id: str
    geometry: str
    half: LayerKind
    mode: str
    """`auto`, or `off` for the standard arm."""
    batch: int
    tokens: int
    context: int
    """Cached tokens of the longest request."""
    seed: int
    spoil: str
    """Op that is made deliberately wrong; empty for none."""
    sites: list[dict[str, Any]]
    """Per site: `key`, `op`, `path`, `code` and `message` of a fallback, `launches` in order (`expected_sites`)."""

    def to_json(self) -> dict[str, Any]:
        """As the header carries it."""
        return asdict(self)


def read_choices(folders: Mapping[Unit, Path], schedules: Path) -> dict[str, dict[str, Choices]]:
    """Descriptors, declarations and schedules of every artifact of a step's ops; ops beside a step are not in it.

    Raises:
        ArtifactError, ScheduleError: one of them cannot be read, or they do not fit.
    """
    arm: dict[str, dict[str, Choices]] = {}
    for unit, folder in folders.items():
        if unit.op not in OPS:
            continue
        choices = Choices.read(folder, schedules, OPS[unit.op], geometry(unit.geometry), unit.arch)
        arm.setdefault(unit.geometry, {})[unit.op] = choices
    return arm


def symbols(arm: Arm) -> dict[str, dict[str, list[str]]]:
    """Geometry -> op -> entry symbols of all its variants."""
    return {
        name: {
            op: sorted({launch.entry for variant in choices.descriptor.variants for launch in variant.launches})
            for op, choices in ops.items()
        }
        for name, ops in arm.items()
    }


def draw_plan(arm: Arm, manifest: KitManifest) -> list[Planned]:
    """Draw the cells of every claimed half-layer; none for one that lacks an op.

    Args:
        arm: the candidate's choices.
        manifest: batches, T values, contexts and draws of the tier, and the geometries that one GPU runs.
    """
    plan: list[Planned] = []
    for name, half in judged(manifest.arms["candidate"], manifest.plans["path"]["geometries"]):
        if all(op in arm[name] for op in HALF_LAYERS[half]):
            plan += _cells(arm[name], geometry(name), half, manifest)
    return plan


def _cells(ops: Mapping[str, Choices], g: Geometry, half: LayerKind, manifest: KitManifest) -> list[Planned]:
    """Every declared batch, T and context, two batches that nobody declared, mode off, and each op's watermark."""
    chooser = random.SystemRandom()
    shapes = {(batch, 1) for batch in manifest.batches}
    shapes |= {(chooser.randint(1, max(manifest.batches)), 1) for _ in range(2)}
    full = manifest.draws >= FULL_DRAWS
    for tokens in manifest.tokens:
        most = max(1, min(max(manifest.batches), MOST_ROWS // tokens))
        shapes |= {(batch, tokens) for batch in (manifest.batches if full else [chooser.randint(1, most)])}
    cells = {}
    for batch, tokens in sorted(shapes):
        contexts = manifest.contexts if (batch, tokens) == (1, 1) else (chooser.choice(manifest.contexts),)
        for wanted in contexts:
            context = wanted if batch == 1 else min(wanted, CACHED_TOKENS // batch)
            cells[batch, tokens, 0 if half == "kda" else context] = secrets.randbits(62)
    seed = secrets.randbits(62)  # one draw for the watermarks and the honest cell beside them
    marked = (*WATERMARK, 0 if half == "kda" else WATERMARK_CONTEXT)
    rows = [("auto", shape, number, "") for shape, number in cells.items() if shape != marked]
    rows += [("auto", marked, seed, ""), ("off", marked, seed, "")]
    rows += [("auto", marked, seed, op) for op in HALF_LAYERS[half]]
    return [_planned(ops, g, half, *row) for row in rows]


def _planned(
    ops: Mapping[str, Choices], g: Geometry, half: LayerKind, mode: str, shape: tuple[int, int, int], seed: int,
    spoil: str,
) -> Planned:  # fmt: skip
    batch, tokens, context = shape
    kind = f"watermark/{spoil}" if spoil else mode
    name = f"{g.name}/{half}/{kind}/b{batch}/t{tokens}/c{context}"
    sites = expected_sites(ops if mode == "auto" else {}, g, half, batch=batch, tokens=tokens)
    return Planned(name, g.name, half, mode, batch, tokens, context, seed, spoil, sites)


def expected_sites(
    ops: Mapping[str, Choices], g: Geometry, half: LayerKind, *, batch: int, tokens: int
) -> list[dict[str, Any]]:
    """What every site of a half-layer should be captured as.

    Args:
        ops: what decides each op's calls; an op that is absent takes the standard path, as in mode `off`.
        g: the model's dimensions.
        half: `kda` or `mla`.
        batch: B.
        tokens: T.

    Returns:
        Per site `key`, `op`, `path`, `code` and `message` of a fallback, and `launches`: symbol (`name`), threads
        (`block`), `registers` and bytes of `shared` memory of every kernel, which tell one variant from another.
    """
    return [_expected(ops.get(site.op), g, site, batch, tokens) for site in half_layer(g, half, tokens)]


def _expected(choices: Choices | None, g: Geometry, site: Site, batch: int, tokens: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": site.key, "op": site.op, "path": "standard", "launches": []}
    if choices is None:
        return {**entry, "code": "op.missing", "message": "the arm has no artifacts"}
    sizes = call_sizes(OPS[site.op], g, _shapes(g, site, batch, tokens))
    sizes |= {name: value for name, value in site.attrs.items() if isinstance(value, int)}
    chosen = choices.tunables(batch * tokens, sizes, site.attrs)
    if isinstance(chosen, Declined):
        return {**entry, "code": chosen.code, "message": chosen.message}
    variant = choices.descriptor.variant({**sizes, "M": batch * tokens, **chosen})
    launches = [] if variant is None else [_launch(launch) for launch in variant.launches]
    return {**entry, "path": "specialized", "code": None, "message": None, "launches": launches}


def _launch(launch: LaunchSpec) -> dict[str, Any]:
    return {
        "name": launch.entry,
        "block": launch.block,
        "registers": launch.registers,
        "shared": launch.shared,
    }


def _shapes(g: Geometry, site: Site, batch: int, tokens: int) -> dict[str, Tensor | None]:
    """The call's tensors without memory; pools and tables of the least size, on which no schedule depends."""
    rows = batch * tokens
    shapes = {buffer.name: buffer.shape for buffer in program_buffers(g, (site,), rows)}
    width, head = 3 * g.kda_width, g.kda_head_dim
    shapes |= {
        "slots": (batch, tokens), "accepted": (batch,), "block_table": (batch, 1), "seq_lens": (batch,),
        "slot_mapping": (rows,), "kv_cache.0": (2, 64, g.mla_row), "conv_state.0": (1 + rows, tokens + 2, width),
        "state.0": (1 + rows, g.heads, head, head),
    }  # fmt: skip
    found: dict[str, Tensor | None] = {}
    for spec in OPS[site.op].tensors:
        bound = site.bindings.get(spec.name)
        if bound is not None:
            shape = shapes[bound]
            found[spec.name] = torch.empty(shape[len(shape) - len(spec.dims) :], device="meta")
    return found


def require_expected(header: Mapping[str, Any], arm: Arm) -> None:
    """Refuse a record whose plan expects other kernels than the artifacts' own schedules and descriptors give.

    Args:
        header: of `raw/path.jsonl`.
        arm: choices of the candidate's artifacts, read here.

    Raises:
        FasttrackError: names the first such cell.
    """
    for entry in header["plan"]:
        try:
            g, half = geometry(str(entry["geometry"])), entry["half"]
            ops: Mapping[str, Choices] = arm[g.name] if entry["mode"] == "auto" else {}
            ours = expected_sites(ops, g, half, batch=int(entry["batch"]), tokens=int(entry["tokens"]))
            same = ours == entry["sites"]
        except (KeyError, ValueError, TypeError):
            same = False
        if not same:
            raise _refused(f"expects other kernels in cell {str(entry.get('id'))[:100]}")
    if header.get("symbols") != symbols(arm):
        raise _refused("names other kernels than the artifacts have")


def _refused(what: str) -> FasttrackError:
    return FasttrackError(
        what, where="raw/path.jsonl:1", expected="what schedules and launch descriptors of the kit say",
        next="run the kit again: python3 kit.py run --out R2",
    )  # fmt: skip
