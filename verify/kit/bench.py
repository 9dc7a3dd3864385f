"""The peer table on the GPU machine: one raw line per cell, our kernels beside the peers that are to be had.

It is a section of a kit beside the gates: carried, chained and imported like one, but it decides nothing about a
candidate. Cells run one after the other in one worker, half-layers in one process per arm that take turns, so that
nothing else keeps the GPU busy; a cell that ends a worker is recorded and never repeated. Rows and figures are
`verify.protocol.peers`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.errors import FasttrackError
from verify.bench.gpu.cells import PeerCell
from verify.evaluator.client import Client
from verify.evaluator.failures import WorkerError, WorkerFailure
from verify.kit import bench_halves
from verify.kit.child import started
from verify.kit.context import KitContext
from verify.kit.manifest import Unit
from verify.kit.store import now
from verify.protocol.peer_figures import HALF_LAYERS
from verify.protocol.peers import PROTOCOL_ID

__all__ = ["SECTION", "run", "tree_digest"]

SECTION = "bench"
PACKAGES = "site"
"""Folder below `--peers` that is put on the path: what `pip install --target` leaves."""
_BUFFER_BYTES = 1 << 16
_LOAD_TIMEOUT_S = 180.0
_CELL_TIMEOUT_S = 240.0
"""A cell whose peers are compiled for the first time takes half a minute."""


def run(kit: KitContext, arm: str = "candidate") -> None:
    """Measure the cells that have no line yet, until all are done or the time is over."""
    cells = _planned(kit, arm)
    done = {line["key"] for line in kit.results.lines(SECTION) if line["kind"] == "cell"}
    undone = [cell for cell in cells if cell["key"] not in done]
    kit.progress(f"{SECTION}: {len(cells) - len(undone)} of {len(cells)} cells have a line")
    _ops(kit, arm, [PeerCell.from_json(cell) for cell in undone if cell["op"] not in HALF_LAYERS])
    if halves := [cell for cell in undone if cell["op"] in HALF_LAYERS]:
        bench_halves.measure(kit, arm, halves)


def _ops(kit: KitContext, arm: str, left: list[PeerCell]) -> None:
    """Cells of single ops, and the ceilings before and after them."""
    measured = False
    while left and not kit.over():
        with ExitStack() as stack:
            worker = stack.enter_context(
                started(
                    SECTION, kit.root, kit.schedules(arm), code=kit.code, logs=kit.logs, buffer_bytes=_BUFFER_BYTES,
                    bootstrap=kit.machine.bootstrap,
                )
            )  # fmt: skip
            if kit.peers is not None:
                worker.call("peers.packages", timeout_s=_LOAD_TIMEOUT_S, folder=str(kit.peers))
            if not measured:
                _ceilings(kit, worker)
                measured = True
            _cells(kit, arm, worker, left)
            if not left and measured:
                _ceilings(kit, worker)


def _cells(kit: KitContext, arm: str, worker: Client, left: list[PeerCell]) -> None:
    """Measure until none is left, the time is over or the worker has ended; takes what is done out of `left`."""
    loaded: Unit | None = None
    while left and not kit.over():
        cell = left.pop(0)
        unit = Unit(cell.geometry, cell.op, kit.manifest.arch)
        line: dict[str, Any] = {"kind": "cell", "key": cell.key, "seed": secrets.randbits(31), "failure": None}
        try:
            if unit != loaded:
                worker.call(
                    "peers.load", timeout_s=_LOAD_TIMEOUT_S, op=unit.op, arch=unit.arch, geometry_name=unit.geometry,
                    artifact=str(kit.artifact(arm, unit)),
                )  # fmt: skip
                loaded = unit
            line |= worker.call("peers.cell", timeout_s=_CELL_TIMEOUT_S, cell=cell.to_json(), seed=line["seed"])
        except WorkerFailure as failure:
            line["failure"] = str(kit.without_folders(f"{failure.kind}: {failure}"))[:500]
            # After an error of the device every later call fails for this one's reason.
            alive = isinstance(failure, WorkerError) and "CUDA" not in str(failure)
            kit.results.append(SECTION, line)
            kit.progress(f"{SECTION}: {cell.key} failed: {line['failure'][:120]}")
            if not alive:
                return
            continue
        kit.results.append(SECTION, kit.without_folders(line))
        kit.progress(f"{SECTION}: {cell.key}, {len(left)} to go")


def _ceilings(kit: KitContext, worker: Client) -> None:
    found = worker.call("peers.ceilings", timeout_s=_CELL_TIMEOUT_S)
    kit.results.append(SECTION, {"kind": "ceilings", **found, "state": kit.machine.state()})


def _planned(kit: KitContext, arm: str) -> list[dict[str, Any]]:
    """The cells of the kit; writes the header, if nothing is there yet."""
    packages = None if kit.peers is None else _packages(kit.peers)
    lines = kit.results.lines(SECTION)
    plan = kit.manifest.plans[SECTION]
    own = {"packages": packages, "standard": kit.machine.standard_path()}
    if not lines:
        kit.results.append(SECTION, {**kit.header(SECTION, PROTOCOL_ID, arm), **plan, **own, "begun": now()})
    elif lines[0]["packages"] != packages:
        raise FasttrackError(
            "the peers' packages are others than when this was begun", where="--peers",
            expected="the same folder on every resume", next="python3 kit.py run --out R2 --peers DIR",
        )  # fmt: skip
    elif lines[0]["standard"] != own["standard"]:
        raise FasttrackError(
            "the standard path is another than when this was begun", where="--packages",
            expected="the same wheels on every resume", next="python3 kit.py run --out R2 --packages DIR",
        )  # fmt: skip
    return list(plan["planned"])


def _packages(folder: Path) -> dict[str, Any]:
    """What `--peers` brings: distributions by name and version, shared objects, and a digest over everything.

    Raises:
        FasttrackError: no such folder.
    """
    if not folder.is_dir():
        raise FasttrackError(
            "no such folder", where=f"--peers {folder}", expected=f"a folder with {PACKAGES}/ and shared objects",
            next="docs/peers.md",
        )  # fmt: skip
    site = folder / PACKAGES
    names = sorted(path.name.removesuffix(".dist-info") for path in site.glob("*.dist-info"))
    objects = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.so"))}
    return {"distributions": names, "objects": objects, "digest": tree_digest(sorted(folder.rglob("*")), folder)}


def tree_digest(paths: Sequence[Path], root: Path) -> str:
    """sha256 over names and contents of the plain files; compiled bytecode does not count."""
    total = hashlib.sha256()
    for path in paths:
        if path.is_file() and path.suffix != ".pyc":
            total.update(
                f"{path.relative_to(root).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
            )
    return total.hexdigest()
