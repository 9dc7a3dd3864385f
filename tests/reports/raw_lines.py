"""Raw lines as the gates write them, made up but consistent, and stand-ins for decision functions."""

from __future__ import annotations

import math
import random
import statistics
from types import SimpleNamespace
from typing import Any

from harness import canonical
from harness.records import GateName
from harness.settings import Settings
from verify.protocol import evals, features
from verify.protocol.decision import Decision, Finding

Lines = list[dict[str, Any]]
SCHEDULE = "k3_backend/schedules/cpu/k3-nano/kda_decode.toml"


def all_passing(settings: Settings, artifacts: dict[str, str], base: str, head: str) -> dict[GateName, Lines]:
    """Lines of every gate for a candidate that passes.

    Args:
        settings: the project's settings.
        artifacts: `op/arch` to artifact digest.
        base: commit.
        head: commit.
    """
    return {
        "scope": scope_lines(settings, base, head),
        "build": build_lines(artifacts, base, head),
        "audit": audit_lines(settings, artifacts),
        "kernels": kernels_lines(artifacts),
        "path": generic_lines("path", artifacts),
        "features": features_lines(artifacts),
        "evals": evals_lines(artifacts),
        "perf": perf_lines(settings, artifacts),
    }


def scope_lines(settings: Settings, base: str, head: str, path: str = SCHEDULE) -> Lines:
    """One changed schedule."""
    scope = settings.scope
    header = {
        "kind": "header", "gate": "scope", "protocol": "scope/1", "base": base, "head": head, "allow": [],
        "editable": list(scope.editable), "limits": scope.limits.model_dump(), "next": "fasttrack verify --gates scope",
        "python_imports": list(scope.python_imports), "cpp_includes": list(scope.cpp_includes),
    }  # fmt: skip
    change = {
        "kind": "change", "path": path, "status": "M", "old_mode": "100644", "new_mode": "100644", "allowed": False,
        "editable": scope.is_editable(path), "band": "schedules", "bytes": 120, "unsafe": None, "added": 6,
        "removed": 2,
    }  # fmt: skip
    return [header, change, {"kind": "end", "changes": 1}]


def build_lines(artifacts: dict[str, str], base: str, head: str) -> Lines:
    """Every unit built twice."""
    names = [name.split("/") for name in artifacts]
    ops, archs = sorted({op for op, _ in names}), sorted({arch for _, arch in names})
    header = {
        "kind": "header", "gate": "build", "protocol": "build/1", "base": base, "head": head, "ops": ops,
        "base_ops": ops, "archs": archs,
        "next": "fasttrack verify --gates build",
    }  # fmt: skip
    size = {"object_bytes": 1604, "seconds": [3.5, 3.25], "changed": True}
    units = [
        {"kind": "unit", "op": op, "arch": arch, "digests": [digest, digest], **size}
        for (op, arch), digest in zip(names, artifacts.values(), strict=True)
    ]
    return [header, *units]


def audit_lines(settings: Settings, artifacts: dict[str, str]) -> Lines:
    """Facts of harmless objects."""
    objects = [dict(zip(("op", "arch"), name.split("/"), strict=True), digest=d) for name, d in artifacts.items()]
    header = {
        "kind": "header", "gate": "audit", "protocol": "audit-cpu/1", "objects": objects,
        "policy": settings.audit["cpu"].model_dump(mode="json"), "next": "fasttrack verify --gates audit",
    }  # fmt: skip
    facts: dict[str, Any] = {
        "malformed": None, "undefined": ["expf"], "needed": ["libm.so.6"], "load_time_entries": {}, "ifuncs": [],
        "unique": [], "textrel": False, "relocations": {"R_X86_64_JUMP_SLOT": 1}, "stack_flags": "RW", "segments": [],
        "writable_bytes": 0, "writable_objects": [], "tls_bytes": 0, "sections": [".text"], "search_paths": [],
        "dynamic_tags": ["DT_NULL"], "instructions": {}, "segment_accesses": 0, "code_bytes": 900,
    }  # fmt: skip
    lines = [
        {"kind": "object", **entry, "facts": facts | {"exported": [f"__tvm_ffi_{entry['op']}"]}} for entry in objects
    ]
    return [header, *lines]


def kernels_lines(artifacts: dict[str, str], factor: float = 1.1) -> Lines:
    """Eight cases of one op, with errors of `factor` times the standard path's, and one that is refused."""
    cases: Lines = []
    clean = {"kind": "case", "op": "kda_decode", "failure": None, "refused": None, "skipped": None}
    for tensor, dtype in (("output", "bf16"), ("state", "f32")):
        for index in range(4):
            standard = {"element": 2e-3 * (index + 1), "mean": 1e-3, "row_l2": 1.5e-3}
            candidate = {key: factor * value for key, value in standard.items()}
            value = {
                "tensor": tensor, "dtype": dtype, "run": "first", "spread": 0.9, "standard": standard,
                "rounding": {"element": 1e-3, "mean": 1e-4, "row_l2": 1e-4},
                "candidate": candidate | {"nonfinite": 0, "nonzero": 0, "elements": 512, "worst": [index, 7]},
            }  # fmt: skip
            cases.append(clean | {"id": f"kda_decode-{tensor}-{index}", "seed": 77 + index, "values": [value]})
    cases.append(clean | {"id": "kda_decode-wide", "seed": 5, "refused": "tokens 8 above 4"})
    digests = {name.split("/")[0]: digest for name, digest in artifacts.items()}
    header = {
        "kind": "header", "gate": "kernels", "protocol": "kernels/1", "ops": ["kda_decode"], "artifacts": digests,
        "planned": [case["id"] for case in cases], "command": "fasttrack verify --gates kernels",
    }  # fmt: skip
    receipts = {op: {"digest": digest, "mapped": "m" * 8, "object": "m" * 8} for op, digest in digests.items()}
    return [header, {"kind": "load", "failure": None, "receipts": receipts}, *cases]


def features_lines(artifacts: dict[str, str]) -> Lines:
    """Both arms agree with themselves in every mode."""
    header = {
        "kind": "header", "gate": "features", "protocol": "features/1", "seed": "7", "checks": list(features.CHECKS),
        "arms": {"candidate": artifacts},
    }  # fmt: skip
    rule = {"what": "finished requests", "seen": 8, "expected": 8}
    lines: Lines = [header]
    for arm in ("standard", "candidate"):
        for check in features.CHECKS:
            seen: dict[str, Any] = {"difference_nats": 0.011, "positions": 96, "exact": [rule]}
            if check == "sampling":
                seen = {"probabilities": [0.5, 0.3, 0.2], "counts": [505, 295, 200], "exact": [rule]}
            lines.append({"kind": "check", "check": check, "arm": arm, **seen})
    return [*lines, {"kind": "end"}]


def evals_lines(artifacts: dict[str, str]) -> Lines:
    """Two suites of 64 pairs whose arms differ by noise."""
    draw = random.Random(3)
    suites = ["own_text", "recall_128"]
    header = {
        "kind": "header", "gate": "evals", "protocol": "evals/1", "suites": suites, "samples": 64,
        "margin_nats": evals.MARGIN_NATS, "alpha": evals.ALPHA, "arms": {"candidate": artifacts},
    }  # fmt: skip
    lines: Lines = [header]
    for suite in suites:
        for index in range(64):
            score = draw.gauss(-2.0, 0.3)
            line = {"kind": "sample", "suite": suite, "id": f"{suite}-{index}", "agreement": 0.98, "standard": score}
            line |= {"repeat": score + draw.gauss(0, 1e-3), "candidate": score + draw.gauss(0, 1e-3)}
            lines.append(line | {"classes": dict.fromkeys(("standard", "repeat", "candidate"), "ok")})
    return [*lines, {"kind": "end"}]


def generic_lines(gate: str, artifacts: dict[str, str], bad: int | None = None) -> Lines:
    """Twelve checks, one of them bad if asked for."""
    header = {"kind": "header", "gate": gate, "protocol": f"{gate}/1", "arms": {"candidate": artifacts}}
    checks = [{"kind": "check", "what": f"case {i}", "where": f"place {i}", "ok": i != bad} for i in range(12)]
    return [header, *checks, {"kind": "end", "lines": len(checks) + 2}]


def perf_lines(settings: Settings, artifacts: dict[str, str], *, gain: float = 0.25, seed: int = 1) -> Lines:
    """Eight blocks of three arms over the cells of the pr tier."""
    draw = random.Random(seed)
    header = {"kind": "header", "gate": "perf", "protocol": "perf/1", "blocks": 8, "arms": {"candidate": artifacts}}
    lines: Lines = [header]
    for block in range(8):
        for cell in settings.target("cpu").cells(settings.tier("pr")):
            base = 900.0 * math.sqrt(cell.batch) * (1 + (cell.context or 0) / 8192)
            speed = 1 + gain * (0.4 + 0.6 / math.sqrt(cell.batch))
            times = [t * math.exp(draw.gauss(0, 0.012)) for t in (base * 1.9, base, base / speed)]
            lines.append({"kind": "block", "block": block, "cell": cell.model_dump(mode="json"), "us": times})
    return [*lines, {"kind": "end", "lines": len(lines) + 1}]


def summarise_perf(lines: Lines) -> dict[str, Any]:
    cells: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "block":
            entry = cells.setdefault(canonical.line(line["cell"]).decode(), {"cell": line["cell"], "us": []})
            entry["us"].append(line["us"])
    out = []
    for entry in cells.values():
        against = {}
        for index, arm in enumerate(("standard", "best")):
            ratios = [us[index] / us[2] for us in entry["us"]]
            middle, spread = statistics.fmean(ratios), statistics.stdev(ratios)
            low, high = middle - spread, middle + spread
            word = "FAST" if low > 1 else "SLOW" if high < 0.98 else "AMBG" if low < 0.98 else "SAME"
            against[arm] = {"ratio": middle, "low": low, "high": high, "word": word, "blocks": ratios}
        medians = {
            arm: statistics.median(us[i] for us in entry["us"])
            for i, arm in enumerate(("standard", "best", "candidate"))
        }
        out.append({"cell": entry["cell"], "against": against, "median_us": medians})
    return {
        "cells": out,
        "note": "Mean of block ratios plus or minus one deviation.",
        "controls": [("A/A drift", "0.2 %")],
    }


def decide_perf(lines: Lines) -> Decision:
    if lines[-1] != {"kind": "end", "lines": len(lines)}:
        return Decision(
            "not_evaluated", [Finding("perf.incomplete", "lines are missing", "end", "all", "fasttrack verify")]
        )
    cells = summarise_perf(lines)["cells"]
    worst = min(cell["against"]["best"]["ratio"] for cell in cells)
    metrics = {"worst_ratio_best": {"value": worst, "unit": "x", "samples": 8}}
    slow = [cell for cell in cells if cell["against"]["best"]["word"] == "SLOW"]
    if slow:
        return Decision(
            "failed", [Finding("perf.cell_slower", "a cell is slower", "b1", "0.98", "fasttrack bench")], metrics
        )
    return Decision("passed", [], metrics)


def decide_generic(lines: Lines) -> Decision:
    gate = lines[0]["gate"]
    if lines[-1] != {"kind": "end", "lines": len(lines)}:
        return Decision(
            "not_evaluated", [Finding(f"{gate}.incomplete", "lines are missing", "end", "all", "fasttrack verify")]
        )
    metrics = {"checks": {"value": float(len(lines) - 2), "unit": "checks"}}
    bad = [line for line in lines if line.get("ok") is False]
    if bad:
        return Decision(
            "failed", [Finding(f"{gate}.wrong", bad[0]["what"], bad[0]["where"], "ok", "fasttrack verify")], metrics
        )
    return Decision("passed", [], metrics)


STAND_INS: dict[str, SimpleNamespace] = {
    gate: SimpleNamespace(
        PROTOCOL_ID=f"{gate}/1", decide=decide_perf if gate == "perf" else decide_generic, summarise=summarise_perf
    )
    for gate in ("path", "perf")
}
