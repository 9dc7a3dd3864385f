"""`kit.py run`: one session on the GPU machine, after every digest of the kit was compared.

Gates run in the kit's order, each appending to its own raw file; a session that was killed or ran out of time goes on
with `--resume`. What the gates come to is decided from the lines alone, as it will be again where they are imported.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import FasttrackError
from k3_backend.errors import BackendError
from verify.kit import bench, kernels, path
from verify.kit.context import KitContext
from verify.kit.machine import Machine
from verify.kit.manifest import KitManifest, read_kit
from verify.kit.packages import use_wheels
from verify.kit.store import Results
from verify.protocol import kernels as kernels_protocol
from verify.protocol import path as path_protocol
from verify.protocol import peers as peers_protocol
from verify.protocol.decision import Decision

__all__ = ["GATES", "command", "session"]


def _perf(kit: KitContext) -> None:
    """`verify.kit.perf.run`; imported here, because only this gate needs scipy."""
    from verify.kit import perf

    perf.run(kit)


def _decide_perf(lines: Sequence[Mapping[str, Any]]) -> Decision:
    from verify.protocol import perf

    return perf.decide(lines)


GATES: Mapping[str, tuple[Callable[[KitContext], None], Callable[[Sequence[Mapping[str, Any]]], Decision]]] = {
    "kernels": (kernels.run, kernels_protocol.decide),
    "path": (path.run, path_protocol.decide),
    "perf": (_perf, _decide_perf),
    "bench": (bench.run, peers_protocol.decide),
}
"""Gate or section -> what measures it here, and what decides it from its lines."""

NEEDED: Mapping[str, str] = {"perf": "scipy"}
"""Gate -> package that it needs beside those of every gate."""
FINE, FALLS_SHORT, USAGE, INCOMPLETE = 0, 1, 2, 3
MOST_JOBS = 4


def command(root: Path, options: argparse.Namespace) -> int:
    """Run a session as the entry script asks; the exit code. Problems go to stderr in their four parts."""
    try:
        return session(
            root, options.out, gates=None if options.gates is None else options.gates.split(","),
            minutes=options.max_minutes, resume=options.resume, jobs=options.jobs, sanitizer=not options.no_sanitizer,
            packages=options.packages,
            peers=options.peers,
        )  # fmt: skip
    except (FasttrackError, BackendError) as error:
        for name in ("what", "where", "expected", "next"):
            print(f"{name:>9}  {getattr(error, name)}", file=sys.stderr)
        return USAGE


def session(
    root: Path,
    out: Path,
    *,
    gates: Sequence[str] | None = None,
    minutes: float | None = None,
    resume: bool = False,
    jobs: int | None = None,
    sanitizer: bool = True,
    packages: Path | None = None,
    peers: Path | None = None,
    machine: Machine | None = None,
) -> int:
    """Evaluate the kit's gates, or go on with them.

    Args:
        root: the kit's folder, checked by the entry script.
        out: folder of the results.
        gates: only these of the kit's gates.
        minutes: no new case begins after this time.
        resume: go on with results in `out`.
        jobs: ops evaluated at a time.
        sanitizer: run memory checkers too, where they are installed.
        packages: folder of wheels that this process and the workers may import from.
        peers: folder with packages that the peer table runs beside our kernels.
        machine: this machine; tests give one without a GPU.

    Raises:
        FasttrackError: the machine cannot run the kit, unknown gate, or `out` cannot be used.
    """
    root, machine = root.resolve(), machine or Machine()
    manifest = read_kit(root)
    chosen = _chosen(manifest, gates)
    if minutes is not None and not (math.isfinite(minutes) and minutes > 0):
        raise FasttrackError(
            f"is {minutes}", where="--max-minutes", expected="a number of minutes above 0", next="python3 kit.py run -h"
        )
    deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
    brought = {} if packages is None else use_wheels(packages)
    machine.require(manifest.compute_capability, {gate: NEEDED[gate] for gate in chosen if gate in NEEDED})
    results = Results.open(out, manifest.digest, manifest.document(), resume=resume)
    try:
        kit = KitContext(
            root, manifest, results, machine, {**machine.describe(), "brought": brought}, machine.evaluator(),
            Path(tempfile.mkdtemp(prefix="kit-logs-")), jobs or _jobs(), deadline, _say,
            None if sanitizer else "not asked", None if peers is None else peers.resolve(),
        )  # fmt: skip
        results.session({"kind": "begin", "machine": kit.description, "state": machine.state(), "gates": list(chosen)})
        _share_cores(kit.jobs)
        for gate in chosen:
            GATES[gate][0](kit)
        results.session({"kind": "end", "state": machine.state(), "over": kit.over()})
        decisions = {gate: GATES[gate][1](results.lines(gate)) for gate in chosen}
        results.finish({gate: _outcome(decision) for gate, decision in decisions.items()})
    finally:
        results.close()
    return _report(decisions, out)


def _chosen(manifest: KitManifest, gates: Sequence[str] | None) -> tuple[str, ...]:
    unknown = [gate for gate in gates or () if gate not in manifest.gates or gate not in GATES]
    if unknown or (gates is not None and not gates):
        raise FasttrackError(
            f"gate {unknown[0] if unknown else '(none)'!r} is not in this kit", where="--gates",
            expected=f"some of {', '.join(manifest.gates)}", next="fasttrack kit build --gates ...",
        )  # fmt: skip
    return tuple(gate for gate in manifest.gates if gates is None or gate in gates)


def _jobs() -> int:
    return max(1, min(MOST_JOBS, len(os.sched_getaffinity(0)) // 4))


def _share_cores(jobs: int) -> None:
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // jobs))


def _outcome(decision: Decision) -> dict[str, Any]:
    return {"outcome": decision.outcome, "reasons": [finding.message for finding in decision.findings][:20]}


def _report(decisions: Mapping[str, Decision], out: Path) -> int:
    for gate, decision in decisions.items():
        _say(f"{gate}: {decision.outcome}")
        for finding in decision.findings[:20]:
            _say(f"  {finding.code}: {finding.message}; where: {finding.where}; expected: {finding.expected}")
    _say(f"results in {out}; where the kit was built: fasttrack kit import {out}")
    outcomes = {decision.outcome for decision in decisions.values()}
    return FALLS_SHORT if "failed" in outcomes else FINE if outcomes == {"passed"} else INCOMPLETE


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
