"""The path gate: steps that fall back, count wrongly, differ or touch foreign state are refused; watermarks show."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gate_fixtures import make_bench
from measured_fixtures import ARCH, PICO, ROOT, plain_context

from harness import sandbox
from harness.records import Outcome
from k3_backend.aot.build import build, build_runtime
from k3_backend.model.program import decode_program
from tests.hostile.kernels.faults import DECLARATIONS, PLAIN
from verify.evaluator.steps import draw_chain, ownership, reference_steps, standard_steps
from verify.evaluator.walk import distance, walk
from verify.evaluator.worker import ArmSpec, Worker
from verify.gates import path as gate
from verify.protocol.path import MEASURES, PROTOCOL_ID, decide, step_exceeds, step_tolerance
from verify.workers.path_model import path_model

_REASON = sandbox.unavailable()
needs_sandbox = pytest.mark.skipif(_REASON is not None, reason=_REASON.message if _REASON else "")

SEED = 11
Lines = list[dict[str, Any]]


# --- steps of the evaluator -------------------------------------------------------------------------------------------


def test_standard_steps_are_near_the_reference_on_every_row() -> None:
    """A model on which correct steps differ by another choice of experts, so that no tolerance can be earned."""
    weights = path_model(PICO.name, SEED)
    chain = draw_chain(PICO, requests=5, tokens=2, context=20, steps=2, seed=3)
    for usual, exact in zip(standard_steps(weights, chain), reference_steps(weights, chain), strict=True):
        assert distance(usual, exact)["row_l2"] < 0.2


def test_chains_are_reproducible_and_second_steps_read_the_first() -> None:
    """Steps that do not depend on what the step before wrote."""
    weights = path_model(PICO.name, SEED)
    chain = draw_chain(PICO, requests=3, tokens=1, context=5, steps=2, seed=4)
    again = draw_chain(PICO, requests=3, tokens=1, context=5, steps=2, seed=4)
    assert torch.equal(standard_steps(weights, chain)[1], standard_steps(weights, again)[1])
    alone = type(chain)(chain.state, chain.batches[1:])
    assert distance(standard_steps(weights, alone)[0], standard_steps(weights, chain)[1])["median_row_l2"] > 0.01


def test_ownership_covers_what_the_standard_step_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that the step owns but that is watched as foreign, or the reverse."""
    chain = draw_chain(PICO, requests=3, tokens=2, context=9, steps=2, seed=5)
    masks = ownership(chain)
    state = chain.state.clone()
    monkeypatch.setattr(type(state), "clone", lambda self: self)  # the steps then write into `state` itself
    standard_steps(path_model(PICO.name, SEED), type(chain)(state, chain.batches))
    for name, pool in state.tensors().items():
        before = chain.state.tensors()[name]
        assert torch.equal(pool[~masks.written[name]], before[~masks.written[name]]), name
        assert not (masks.written[name] & masks.free[name]).any()


# --- steps in a worker ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker whose only kernel is the plain KDA one: the planner has to refuse every step."""
    folder = tmp_path_factory.mktemp("path")
    kernels = folder / "kernels" / "kda_decode"
    kernels.mkdir(parents=True)
    (kernels / "cpu.cc").write_text(PLAIN)
    (kernels / "cpu.toml").write_text(DECLARATIONS)
    (folder / "schedules").mkdir()
    artifacts = {
        "kda_decode": build("kda_decode", ARCH, PICO, folder / "kernels", folder / "artifacts").path,
        "runtime": build_runtime(folder / "artifacts").path,
    }
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    arm = ArmSpec("specialized", artifacts, folder / "schedules")
    with Worker.start(arm, base_tree=ROOT, run_dir=folder / "run", threads=1, buffer_bytes=1 << 28) as running:
        running.call("path.open", timeout_s=120, geometry_name=PICO.name, seed=SEED)
        yield running


def walked(worker: Worker, mode: str) -> dict[str, Any]:
    chain = draw_chain(PICO, requests=3, tokens=2, context=9, steps=2, seed=6)
    expected = standard_steps(path_model(PICO.name, SEED), chain)
    return walk(worker, chain, expected, np.random.default_rng(1), mode=mode, threads=1)


@needs_sandbox
def test_a_refused_step_names_every_reason(worker: Worker) -> None:
    """A step that silently takes the standard path, right in its numbers and proving nothing."""
    found = walked(worker, "auto")
    reasons = {(code, place) for code, _, place, _ in found["refusals"]}
    assert ("op.missing", "op mla_decode") in reasons
    assert ("op.no_schedule", "op kda_decode") in reasons
    assert found["ledger"]["steps"] == {"specialized": 0, "standard": 2}
    assert max(d["row_l2"] for d in found["distances"]) < 0.05
    decision = decide(lines_with(cell("auto", **found)))
    assert {f.code for f in decision.findings} == {"path.fallback"}
    assert any("op.no_schedule" in f.message for f in decision.findings)


@needs_sandbox
def test_the_standard_arm_counts_no_specialised_call(worker: Worker) -> None:
    """A standard arm that uses the candidate's kernels."""
    found = walked(worker, "off")
    assert found["changed_pools"] == []
    assert decide(lines_with(cell("off", **found))).outcome == "passed"
    cheated = copy.deepcopy(found)
    cheated["ledger"]["sites"][4]["specialized"] = 1
    assert [f.code for f in decide(lines_with(cell("off", **cheated))).findings] == ["path.ledger"]


@needs_sandbox
def test_foreign_state_is_watched(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that writes another request's state slot."""
    from verify.evaluator import walk as module

    plain = module.batch_json

    def redirected(batch: Any) -> dict[str, Any]:
        fields = plain(batch)
        used = {slot for row in fields["slots"] for slot in row}
        fields["slots"][0][1] = next(slot for slot in range(1, 9) if slot not in used)
        return fields

    monkeypatch.setattr(module, "batch_json", redirected)
    found = walked(worker, "off")
    assert found["changed_pools"] == sorted(f"state.{layer}" for layer in PICO.kda_layers)


@needs_sandbox
def test_the_gate_runs_its_plan_and_fails_on_fallbacks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A gate that passes while every step takes the standard path, or that plans anew after an interruption."""
    bench = make_bench(tmp_path_factory, "path-gate")
    context = plain_context(bench, tmp_path_factory.mktemp("path-arms"))
    result = gate.run(context)
    assert result.outcome is Outcome.FAILED
    assert {reason.code for reason in result.reasons} == {"path.fallback"}
    lines = context.evidence.lines("path")
    kinds = [line["kind"] for line in lines]
    assert (kinds.count("tolerance"), kinds.count("load"), kinds.count("watermark")) == (1, 1, 1)
    assert {(1, 1), (1, 2), (1, 4), (1, 8)} <= {
        (line["batch"], line["tokens"]) for line in lines if line["kind"] == "cell"
    }
    gate.run(context)
    assert context.evidence.lines("path") == lines


# --- the decision -----------------------------------------------------------------------------------------------------

CLEAN = {"nonfinite": 0, **dict.fromkeys(MEASURES, 0.01), "worst_row": 0}
FAR = {**CLEAN, **dict.fromkeys(MEASURES, 0.9)}
NO_SCHEDULE = ["op.no_schedule", "no schedule for 8 rows", "op kda_decode", "a bucket"]
SITES = [[site.layer, site.op, site.name] for site in decode_program(PICO)]


def ledger(specialized: int, standard: int, **fallbacks: int) -> dict[str, Any]:
    rows = [{"layer": la, "op": op, "site": s, "specialized": specialized, "standard": standard} for la, op, s in SITES]
    return {
        "sites": rows,
        "steps": {"specialized": specialized, "standard": standard},
        "fallbacks": {code.replace("_", ".", 1): count for code, count in fallbacks.items()},
    }


def cell(mode: str = "auto", **fields: Any) -> dict[str, Any]:
    line = {
        "kind": "cell",
        "id": f"{mode}/b3/t2",
        "mode": mode,
        "failure": None,
        "steps": 2,
        "refusals": [],
        "ledger": ledger(2, 0) if mode == "auto" else ledger(0, 2, mode_off=2),
        "distances": [CLEAN, CLEAN],
        "changed_pools": [],
    }
    return {**line, **fields}


def mark(**fields: Any) -> dict[str, Any]:
    case = {"failure": None, "events": [{"code": "nondeterministic", "tensor": "out", "run": "again"}]}
    line = {"kind": "watermark", "id": "watermark/kda_decode", "spoil": "kda_decode", "failure": None}
    return {**line, "refusals": [], "distances": [CLEAN, FAR], "ledger": ledger(2, 0), "case": case, **fields}


def lines_with(*body: dict[str, Any]) -> Lines:
    receipt = {"digest": "d", "object": "o", "mapped": "o"}
    header = {
        "kind": "header",
        "protocol": PROTOCOL_ID,
        "artifacts": {"kda_decode": "d"},
        "sites": SITES,
        "planned": [line["id"] for line in body],
        "command": "fasttrack verify",
    }
    tolerance = {"kind": "tolerance", "standard": dict.fromkeys(MEASURES, 0.02), "rows": []}
    return [header, tolerance, {"kind": "load", "failure": None, "receipts": {"kda_decode": receipt}}, *body]


def test_complete_and_clean_lines_pass() -> None:
    """A decision that never passes."""
    decision = decide(lines_with(cell(), cell("off"), mark()))
    assert decision.outcome == "passed"
    assert decision.metrics["specialised_launches"]["value"] == 2 * len(SITES)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (cell(refusals=[NO_SCHEDULE], ledger=ledger(0, 2)), "path.fallback"),
        (cell(ledger=ledger(1, 0)), "path.ledger"),
        (cell(ledger=ledger(2, 1)), "path.ledger"),
        (cell(ledger={**ledger(2, 0), "sites": ledger(2, 0)["sites"][1:]}), "path.ledger"),
        (cell(ledger=ledger(2, 0, op_missing=1)), "path.ledger"),
        (cell("off", ledger=ledger(2, 0)), "path.ledger"),
        (cell("off", ledger=ledger(0, 2)), "path.ledger"),
        (cell(distances=[CLEAN, {**CLEAN, "row_l2": 0.2}]), "path.step_mismatch"),
        (cell(distances=[{**CLEAN, "nonfinite": 1}, CLEAN]), "path.step_mismatch"),
        (cell(changed_pools=["state.0"]), "path.unowned_state_changed"),
        (cell(failure={"failure": "crash", "message": "ended by SIGSEGV"}), "path.crash"),
        (mark(distances=[CLEAN, CLEAN]), "path.watermark_unseen"),
        (mark(case={"failure": None, "events": []}), "path.watermark_unseen"),
        (mark(refusals=[["op.missing", "no kernel", "op kda_decode", "one"]]), "path.fallback"),
    ],
)  # fmt: skip
def test_each_finding_fails(line: dict[str, Any], code: str) -> None:
    """A broken rule that passes, or that is reported as something else."""
    decision = decide(lines_with(line))
    assert decision.outcome == "failed"
    assert {f.code for f in decision.findings} == {code}


def test_the_same_reason_is_one_finding() -> None:
    """Hundreds of findings for one missing bucket."""
    cells = [cell(id=f"auto/b{b}/t1", refusals=[NO_SCHEDULE] * 2, ledger=ledger(0, 2)) for b in range(1, 9)]
    (finding,) = decide(lines_with(*cells)).findings
    assert "16 places" in finding.message


@pytest.mark.parametrize(
    "edit",
    [
        lambda lines: lines[:1],
        lambda lines: lines[1:],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [*lines, lines[1]],
        lambda lines: [line for line in lines if line["kind"] != "load"],
        lambda lines: [{**lines[0], "planned": [*lines[0]["planned"], "auto/b64/t1"]}, *lines[1:]],
        lambda lines: [{**lines[0], "protocol": "path/0"}, *lines[1:]],
        lambda lines: [{**lines[0], "sites": []}, *lines[1:]],
        lambda lines: [*lines, {"kind": "note"}],
    ],
)
def test_incomplete_records_are_not_evaluated(edit: Any) -> None:
    """A record with missing, repeated or foreign lines that passes."""
    decision = decide(edit(lines_with(cell(), mark())))
    assert (decision.outcome, decision.findings[0].code) == ("not_evaluated", "path.incomplete_record")


def test_another_object_fails() -> None:
    """An object that is not the artifact's."""
    lines = lines_with(cell())
    lines[2]["receipts"]["kda_decode"]["mapped"] = None
    assert [f.code for f in decide(lines).findings] == ["path.wrong_object"]


def test_distances_see_scale_and_single_rows() -> None:
    """A step comparison that a scaled or one broken row passes."""
    want = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    allowed = step_tolerance(dict.fromkeys(MEASURES, 0.01))
    assert step_exceeds(distance(want, want), allowed) == []
    assert step_exceeds(distance(want * 1.2, want), allowed)
    broken = want.clone()
    broken[3] = broken[4]
    assert step_exceeds(distance(broken, want), allowed) == ["row_l2", "mean"]
    broken[3] = torch.nan
    assert step_exceeds(distance(broken, want), allowed)[0] == "nonfinite"


def test_the_path_model_routes_by_wide_margins() -> None:
    """A router whose choice depends on rounding."""
    weights = path_model(PICO.name, SEED)
    layers = [layer for layer in weights.sites if layer is not None and "moe_front" in weights.sites[layer]]
    assert len(layers) == PICO.layers - 1
    for layer in layers:
        bias = weights.constants(layer, "moe_front")["bias"].sort().values
        assert (bias[1:] - bias[:-1]).min() > 1.0
