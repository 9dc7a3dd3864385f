"""Measurements of a tuning run as they are kept beside the code: a page to read, and the lines it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import canonical
from verify.tuning.choose import Choice, spread
from verify.tuning.receive import Received

__all__ = ["raw_lines", "summary"]


def summary(received: Received, choices: Sequence[Choice]) -> str:
    """A page of Markdown."""
    manifest, header = received.manifest, received.header
    missing = [timed.key for timed in manifest.calls if timed.key not in {c.timed.key for c in choices}]
    lines = [
        f"# What did tuning {manifest.op} on {manifest.target} measure?",
        "",
        f"{_machine(header)}. Kernels of commit {manifest.commit[:12]}; archive {manifest.digest[:12]};",
        f"method {header.get('method')} (`verify/tuning/measure.py`). No gate's evidence: it chose the schedules.",
        "Microseconds per call: median, and 10th to 90th percentile of the replays. `standard` is the op's standard",
        "path (torch) in a graph; `TB/s` counts every input and output once.",
        "",
        "| call | standard | before | chosen | TB/s | points right | tunables |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for choice in choices:
        point = ", ".join(f"{name} {value}" for name, value in choice.point.items())
        rate = choice.bytes / choice.us[1] / 1e6
        before = "none" if choice.before is None else _us(choice.before)
        lines.append(
            f"| {choice.timed.key} | {_us(choice.standard)} | {before} | {_us(choice.us)} | {rate:.2f} | "
            f"{choice.right} of {len(choice.timed.points)} | {point} |"
        )
    lines += ["", *(f"Not measured, or no point right: {key}." for key in missing)]
    reasons: dict[str, int] = {}
    for entry in manifest.left_out:
        reasons[str(entry["reason"])] = reasons.get(str(entry["reason"]), 0) + 1
    lines += [f"Left out, {count} points: {reason}." for reason, count in sorted(reasons.items())]
    return "\n".join(lines).rstrip() + "\n"


def raw_lines(received: Received) -> str:
    """One line per point and standard path, samples reduced to (10th percentile, median, 90th)."""
    kept = []
    for line in received.lines:
        reduced: dict[str, Any] = {k: v for k, v in line.items() if k not in ("chain", "us")}
        if line.get("us") is not None:
            reduced["us"] = [round(value, 3) for value in spread(line["us"])]
        kept.append(canonical.line(reduced).decode())
    return "\n".join(kept) + "\n"


def _us(values: tuple[float, float, float]) -> str:
    low, middle, high = values
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _machine(header: Mapping[str, Any]) -> str:
    machine = header.get("machine") or {}
    gpu = machine.get("gpu") or {}
    packages = machine.get("packages") or {}
    return (
        f"1x {gpu.get('name')}, driver {gpu.get('driver')}, CUDA {machine.get('cuda')}, torch {packages.get('torch')}"
    )
