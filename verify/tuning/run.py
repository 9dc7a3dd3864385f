"""`kit.py run` of a tuning archive: times every point, appends a raw line for each, goes on with `--resume`."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from harness.errors import FasttrackError
from k3_backend.errors import BackendError
from verify.kit.machine import Machine
from verify.kit.store import Results
from verify.tuning.manifest import RAW, Timed, TuningManifest, read_manifest

__all__ = ["broken_points", "command", "session"]

FINE, USAGE, INCOMPLETE = 0, 2, 3
AHEAD = 2
"""Calls whose inputs are drawn while one is timed."""


def command(root: Path, options: argparse.Namespace) -> int:
    """Run a session as the entry script asks; the exit code. Problems go to stderr in their four parts."""
    try:
        return session(root.resolve(), options.out, options.max_minutes, resume=options.resume)
    except (FasttrackError, BackendError) as error:
        for name in ("what", "where", "expected", "next"):
            print(f"{name:>9}  {getattr(error, name)}", file=sys.stderr)
        return USAGE


def session(root: Path, out: Path, minutes: float | None, *, resume: bool) -> int:
    """Time the archive's calls.

    Args:
        root: the archive's folder, checked by the entry script.
        out: folder of the results.
        minutes: no call begins after this time.
        resume: go on with results in `out`: calls whose points all have a line are not repeated.

    Raises:
        FasttrackError: the machine cannot run the archive, or `out` cannot be used.
    """
    began = time.monotonic()
    manifest = read_manifest(root / "manifest.json")
    machine = Machine()
    machine.require(manifest.compute_capability)
    from verify.tuning.measure import METHOD, Bench, DeviceLostError

    results = Results.open(out, manifest.digest, manifest.document(), resume=resume)
    try:
        results.session({"kind": "begin", "machine": machine.describe(), "state": machine.state(), "method": METHOD})
        done = _done(manifest, results.lines(RAW))
        if not results.lines(RAW):
            results.append(RAW, {"kind": "header", "method": METHOD, "machine": machine.describe()})
        bench = Bench(manifest.op, root)
        broken = broken_points(manifest, results.lines(RAW))
        left = [timed for timed in manifest.calls if timed.key not in done and timed.points]
        drawn: dict[str, Any] = {}
        while left and (minutes is None or time.monotonic() - began < 60 * minutes):
            for timed in left[: 1 + AHEAD]:
                if timed.key not in drawn:
                    drawn[timed.key] = bench.draw(timed, secrets.token_hex(16))
            timed = left.pop(0)
            try:
                lines = list(bench.lines(timed, drawn.pop(timed.key), broken.get(timed.key, {})))
            except DeviceLostError as lost:
                point = dict(timed.points[lost.index])
                results.append(RAW, {"kind": "broken", "call": timed.key, "tunables": point, "said": str(lost)})
                _say(f"{timed.key}: {point}: {lost}; go on with --resume")
                left.insert(0, timed)
                break
            for line in lines:
                results.append(RAW, line)
            _say(_summary(timed, lines))
        results.session({"kind": "end", "state": machine.state(), "over": bool(left)})
        results.finish({RAW: {"outcome": "incomplete" if left else "complete"}})
    finally:
        results.close()
    _say(f"results in {out}; where the archive was built: fasttrack tune import {out}")
    return INCOMPLETE if left else FINE


def _done(manifest: TuningManifest, lines: list[dict[str, Any]]) -> set[str]:
    """Calls that need no repetition."""
    seen: dict[str, int] = {}
    for line in lines:
        if line["kind"] == "point":
            seen[line["call"]] = seen.get(line["call"], 0) + 1
    return {timed.key for timed in manifest.calls if seen.get(timed.key, 0) >= len(timed.points)}


def broken_points(manifest: TuningManifest, lines: list[dict[str, Any]]) -> dict[str, dict[int, str]]:
    """Call to its points that broke a session's context."""
    found: dict[str, dict[int, str]] = {}
    calls = {timed.key: timed for timed in manifest.calls}
    for line in lines:
        if line["kind"] == "broken":
            points = [dict(point) for point in calls[line["call"]].points]
            found.setdefault(line["call"], {})[points.index(line["tunables"])] = line["said"]
    return found


def _summary(timed: Timed, lines: list[dict[str, Any]]) -> str:
    from verify.tuning.measure import median

    usual = median(lines[0]["us"])
    best = sorted((median(line["us"]), str(line["tunables"])) for line in lines[1:] if line["us"] is not None)
    wrong = sum(line["us"] is None for line in lines[1:])
    text = "; ".join(f"{us:.2f} {point}" for us, point in best[:3])
    return f"{timed.key}: standard {usual:.2f} us; best {text}; {wrong} of {len(timed.points)} points wrong"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
