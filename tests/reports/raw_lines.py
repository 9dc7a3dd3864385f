"""Raw lines as the gates write them: made up, but complete and consistent, for the project's own decisions."""

from __future__ import annotations

import math
import random
from typing import Any

from harness.records import Cell, GateName
from harness.settings import Settings
from verify.protocol import evals, features, perf_checks, perf_data, perf_plan
from verify.protocol.floors import Ceilings, Traffic

CEILINGS = Ceilings(
    threads=2,
    read=((1 << 20, 100.0),),
    write=((1 << 20, 50.0),),
    copy=((1 << 20, 80.0),),
    fma_gflops=100.0,
    bf16_gflops=1000.0,
    bf16_unit="amx",
)

Lines = list[dict[str, Any]]
SCHEDULE = "k3_backend/schedules/cpu/k3-nano/kda_decode.toml"


def all_passing(
    settings: Settings, tier: str, artifacts: dict[str, str], base: str, head: str
) -> dict[GateName, Lines]:
    """Lines of every gate for a candidate that passes.

    Args:
        settings: the project's settings.
        tier: name of the tier.
        artifacts: `op/arch` to artifact digest.
        base: commit.
        head: commit.
    """
    return {
        "scope": scope_lines(settings, base, head),
        "build": build_lines(artifacts, base, head),
        "audit": audit_lines(settings, artifacts),
        "kernels": kernels_lines(artifacts),
        "path": path_lines(artifacts),
        "features": features_lines(artifacts),
        "evals": evals_lines(artifacts),
        "perf": perf_lines(settings, artifacts, tier=tier),
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
    return [header, {"kind": "load", "failure": None, "receipts": _receipts(digests)}, *cases]


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


def path_lines(artifacts: dict[str, str], fallbacks: int = 0) -> Lines:
    """Two steps of a program with three sites, all specialised, and one watermark per op."""
    sites = [(0, "kda_decode", "kda_decode"), (3, "mla_decode", "mla_decode"), (None, "attn_res", "attn_res.final")]
    digests = {name.split("/")[0]: digest for name, digest in artifacts.items()}
    near = {"median_row_l2": 0.004, "mean": 0.004, "row_l2": 0.02, "nonfinite": 0}
    far = {"median_row_l2": 1.4, "mean": 1.3, "row_l2": 1.5, "nonfinite": 0}
    lines: Lines = [
        {
            "kind": "header", "gate": "path", "protocol": "path/1", "artifacts": digests, "sites": sites,
            "planned": ["b1", "b64", "mark-kda_decode"], "command": "fasttrack verify --gates path",
        },
        {"kind": "load", "failure": None, "receipts": _receipts(digests)},
        {"kind": "tolerance", "standard": near},
    ]  # fmt: skip
    for name in ("b1", "b64"):
        counts = [{"layer": la, "op": op, "site": at, "specialized": 4, "standard": 0} for la, op, at in sites]
        refused = {"batch.too_large": fallbacks} if fallbacks else {}
        ledger = {"sites": counts, "steps": {"specialized": 4, "standard": 0}, "fallbacks": refused}
        lines.append(
            {
                "kind": "cell", "id": name, "mode": "auto", "steps": 4, "ledger": ledger, "distances": [near] * 4,
                "refusals": [], "changed_pools": [], "failure": None,
            }
        )  # fmt: skip
    wrong = kernels_lines(artifacts, factor=500.0)[2]
    mark = {"kind": "watermark", "id": "mark-kda_decode", "spoil": "kda_decode", "distances": [far], "case": wrong}
    return [*lines, mark | {"failure": None, "refusals": []}]


def _receipts(digests: dict[str, str]) -> dict[str, Any]:
    return {op: {"digest": digest, "mapped": "m" * 8, "object": "m" * 8} for op, digest in digests.items()}


def perf_lines(
    settings: Settings, artifacts: dict[str, str], *, tier: str = "smoke", gain: float = 0.25, noise: float = 0.00002
) -> Lines:
    """All blocks of all stages over the cells of a tier, in the order that their seeds dictate.

    Args:
        settings: the project's settings.
        artifacts: `op/arch` to artifact digest.
        tier: name of the tier.
        gain: speed-up over the best at batch 1; less at larger batches.
        noise: standard deviation of the log of a slice's time; two blocks prove nothing with more.
    """
    target, limits = settings.target("cpu"), settings.tier(tier)
    steps = target.cells(limits)
    cells = (*steps, *(Cell(scope="kda_decode", batch=batch) for batch in (1, 64)))
    not_slower = perf_plan.Claim("best", "not_slower")
    claims = {cell.key: (perf_plan.Claim("standard", "faster"), not_slower) for cell in steps}
    digests = {name.split("/")[0]: digest for name, digest in artifacts.items()}
    plan = perf_plan.Plan(
        target=target.name, tier=tier, band=target.perf.not_slower_band, candidates=20,
        alpha_per_run=target.perf.alpha_per_run, command="fasttrack verify --gates perf",
        arms={
            "standard": {"geometry": target.geometry},
            "best": {"artifacts": digests, "schedules": {"kda_decode": "0" * 64}},
            "candidate": {"artifacts": digests, "schedules": {"kda_decode": "1" * 64}},
        },
        stages=perf_plan.plan_stages(limits.perf_blocks, target.perf.alpha_per_run, 20),
        cells=tuple(
            perf_plan.CellPlan(
                cell.key, cell.model_dump(mode="json"), claims.get(cell.key, (not_slower,)), Traffic(1e4, 1e3, 1e5)
            )
            for cell in cells
        ),
        gain_cells=tuple(cell.key for cell in cells),
    )  # fmt: skip
    draw = random.Random(1)
    lines: Lines = [plan.header(), {"kind": "ceilings", "ceilings": CEILINGS.record()}]
    for stage in plan.stages:
        for number in range(stage.blocks):
            seed = f"{stage.name}-{number}"
            digest = perf_plan.seed_digest(seed)
            lines.append({"kind": "begin", "stage": stage.name, "block": number, "seed_sha256": digest})
            lines.append(
                {
                    "kind": "block", "stage": stage.name, "block": number, "seed": seed,
                    "load": {"foreign_share": 0.01},
                    "order": perf_plan.cell_order(seed, plan.keys),
                    "cells": [_perf_cell(cell, seed, stage.arms, gain, noise, draw) for cell in cells],
                }
            )  # fmt: skip
    return [*lines, {"kind": "end"}]


def _perf_cell(
    cell: Cell, seed: str, arms: tuple[str, ...], gain: float, noise: float, draw: random.Random
) -> dict[str, Any]:
    calls = 100
    best = 900_000.0 * math.sqrt(cell.batch) * (1 + (cell.context or 0) / 8192)
    speed = 1 + gain * (0.4 + 0.6 / math.sqrt(cell.batch))
    times = {"standard": 1.9 * best, "best": best, "candidate": best / speed, "control": best}
    rounds = perf_plan.MIN_ROUNDS
    order = perf_plan.slice_order(seed, cell.key, rounds, arms)
    process = {arm: draw.gauss(0, noise) for arm in arms}
    taken = [calls * times[arm] * math.exp(process[arm] + draw.gauss(0, noise)) for arm in order]
    compared = [arm for arm in arms if arm != "standard"]
    checks = {arm: dict.fromkeys(perf_checks.TOLERANCES, 0.0) for arm in compared}
    paths = {arm: {"specialized": calls, "standard": 0} for arm in compared}
    return {
        "key": cell.key, "calls": calls, "standard_calls": calls, "rounds": rounds, "restarts": 0,
        "order": perf_data.order_code(seed, cell.key, rounds, arms),
        "ns": [round(ns) for ns in taken], "worker_ns": [round(ns * 0.999) for ns in taken],
        "checks": checks, "paths": paths,
    }  # fmt: skip
