"""Half-layers of the peer table: ours beside the standard path, by the processes and chains of the perf gate.

Both arms run the same program, AttnRes, input projection and token mixing of one attention layer, as one graph of
several half-layers with weights and states of their own. Arms take turns as in every row of the table, and make the
same number of replays: what they left after the first and after the last one is compared, by the tolerances of the
perf gate, and the device's ledger has to have counted every replay on the planned path. A site without a schedule for
the rows runs the standard path in our arm, too, and the row names it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import FasttrackError
from verify.kit.context import KitContext
from verify.kit.perf_arms import ArmFiles, KitBlock, KitSampler, files_of
from verify.protocol.floors import Traffic
from verify.protocol.peer_figures import STANDARD
from verify.protocol.peer_rows import OURS
from verify.protocol.perf_checks import TOLERANCES
from verify.protocol.perf_plan import CellPlan
from verify.timing.compare import against_best, against_standard
from verify.timing.sampler import ArmFault

__all__ = ["ROUNDS", "measure"]

SECTION = "bench"
ROUNDS = 30
SLICE_NS = 1_500_000
"""A slice lasts about this long at least, as the graphs of the table's other rows do."""
_ARMS = (OURS, STANDARD)


def measure(kit: KitContext, arm: str, left: list[dict[str, Any]]) -> None:
    """Measure planned half-layers until none is left or the time is over; a cell that breaks is recorded and left out.

    Args:
        kit: the kit, and the results that lines go to.
        arm: of the kit, whose kernels are ours.
        left: planned cells; takes what is done out of it.

    Raises:
        FasttrackError: the arms' processes did not come up.
    """
    chains = {str(cell["key"]): {"geometry": cell["geometry"], "copies": cell["copies"]} for cell in left}
    sampler = KitSampler(
        chains, {OURS: files_of(kit, arm), STANDARD: ArmFiles()}, arch=kit.manifest.arch, code=kit.code, logs=kit.logs,
        bootstrap=kit.machine.bootstrap,
    )  # fmt: skip
    while left and not kit.over():
        seed = secrets.token_hex(16)
        started = False
        try:
            with sampler.block(_ARMS, seed, ()) as block:
                started = True
                _cells(kit, block, seed, left)
        except ArmFault as fault:
            # One that came after the first cell ended the block, and its line says so.
            if not started:
                raise FasttrackError(
                    f"arm {fault.arm} of the half-layers did not start: {kit.without_folders(str(fault))[:200]}",
                    where=SECTION, expected="two processes with a CUDA context each",
                    next="python3 kit.py run --gates bench --out R --resume",
                ) from fault  # fmt: skip


def _cells(kit: KitContext, block: KitBlock, seed: str, left: list[dict[str, Any]]) -> None:
    while left and not kit.over():
        planned = left.pop(0)
        line: dict[str, Any] = {"kind": "cell", "key": planned["key"], "seed": seed, "failure": None}
        try:
            line |= _measured(block, planned)
        except ArmFault as fault:
            line["failure"] = str(kit.without_folders(f"{fault.arm}: {fault.code}: {fault}"))[:500]
            kit.results.append(SECTION, line)
            kit.progress(f"{SECTION}: {line['key']} failed: {line['failure'][:120]}")
            raise
        kit.results.append(SECTION, kit.without_folders(line))
        kit.progress(f"{SECTION}: {line['key']}, {len(left)} to go")


def _measured(block: KitBlock, planned: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one cell, as `verify.bench.gpu.measure.measure_cell` has it.

    Raises:
        ArmFault: an arm's process did not answer as asked.
    """
    began = time.monotonic()
    size = {"scope": planned["op"], **{name: planned[name] for name in ("batch", "context", "tokens")}}
    moved = Traffic(float(planned["read_bytes"]), float(planned["write_bytes"]), 0.0)
    cell = CellPlan(str(planned["key"]), size, (), moved)
    copies = int(planned["copies"])
    for name in _ARMS:
        block.prepare(name, cell, 1, ROUNDS)
    captured = time.monotonic()
    replays = max(_replays(block, name, cell) for name in _ARMS)
    for name in _ARMS:
        block.prepare(name, cell, replays, ROUNDS)
        block.reset(name, cell)
        block.again(name, cell, 1)
    found = _compared(block, cell)
    samples: dict[str, list[float]] = {name: [] for name in _ARMS}
    for number in range(ROUNDS):
        for name in _ARMS if number % 2 == 0 else _ARMS[::-1]:
            samples[name].append(block.slice(name, cell).worker_ns / (replays * copies) / 1e3)
    timed = time.monotonic()
    last = _compared(block, cell)
    found = {name: max(found[name], value) for name, value in last.items()}
    arms = {name: _arm(block, name, cell, samples[name]) for name in _ARMS}
    arms[OURS]["errors"] = found
    if wrong := sorted(name for name, value in found.items() if not value <= TOLERANCES[name]):
        arms[OURS] |= {"missing": f"wrong results: {', '.join(wrong)}", "samples_us": None}
    seconds = {"capture": captured - began, "rounds": timed - captured, "check": time.monotonic() - timed}
    rotated = copies * (int(planned["read_bytes"]) + int(planned["write_bytes"]))
    return {
        "sets": copies,
        "calls": copies * replays,
        "rotated_bytes": rotated,
        "arms": arms,
        "seconds": seconds,
    }


def _compared(block: KitBlock, cell: CellPlan) -> dict[str, float]:
    """How far what our arm left is from what the standard one left, both after the same replays."""
    ours, standard = (block.left(name, cell) for name in _ARMS)
    return {**against_standard(ours, standard), **against_best(ours, standard)}


def _replays(block: KitBlock, arm: str, cell: CellPlan) -> int:
    """Replays of a slice; one slice before tells how long one takes."""
    block.reset(arm, cell)
    taken = max(1, block.slice(arm, cell).worker_ns)
    return max(1, min(block.most(cell), round(SLICE_NS / taken)))


def _arm(block: KitBlock, arm: str, cell: CellPlan, samples: Sequence[float]) -> dict[str, Any]:
    """An arm's record; missing where the ledger counted other paths than the plan's."""
    paths, facts = block.paths(arm, cell), block.facts(arm, cell)
    own = arm == OURS
    fallbacks = [f"{s['key']}: {s['message'] or s['code']}" for s in facts["sites"] if s["path"] == STANDARD and own]
    stray = f"failed: {paths.standard} replays of the ledger were not on the planned path" if paths.standard else None
    return {
        "missing": stray, "errors": {}, "samples_us": None if stray else list(samples), "pdl": own, "device_us": None,
        "note": "" if own else "every op on the standard path, as one graph", "facts": facts, "fallbacks": fallbacks,
    }  # fmt: skip
