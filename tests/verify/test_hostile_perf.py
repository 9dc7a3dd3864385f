"""Kernels that only the clock or the timed outputs expose, measured by real workers; slow because blocks are.

The arms are plain KDA kernels with and without an idle part, in two cells of the op: the decision code, the campaign
and the workers are those of the gate, the plan is cut to what the fault needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from measured_fixtures import ARCH, ROOT
from perf_records import begin, make_plan

from harness import sandbox
from harness.progress import silent
from harness.records import Cell
from k3_backend.aot.build import build, build_runtime
from k3_backend.geometry import geometry
from tests.hostile.kernels import faults
from verify.bench.ceilings import measure_ceilings
from verify.evaluator.worker import ArmSpec
from verify.gates.perf.workers import WorkerSampler
from verify.protocol.decision import Decision
from verify.protocol.perf import decide
from verify.timing.campaign import run_campaign

_REASON = sandbox.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(_REASON is not None, reason=_REASON.message if _REASON else "")]

NANO = geometry("k3-nano")
ALL = "all(c);"
IDLE = """
for (int n = 0; n < {heads}; ++n) {{
  float S[kState];
  memcpy(S, c.state + int64_t(c.slots[0]) * kHeads * kState, sizeof(S));
  token(c, 0, 0, 0, c.conv_state + c.slots[0] * c.taps * 3 * kWidth, S);
}}
"""
"""Work of so many heads of one request, whose results the rest of the call writes over."""
COUNTED = """
int64_t* calls = static_cast<int64_t*>(c.context->scratch);
calls[0] = calls[0] == -1 ? 1 : calls[0] + 1;
"""
CELLS = (Cell(scope="kda_decode", batch=1), Cell(scope="kda_decode", batch=8))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Readable by the sandbox's user."""
    tmp_path.chmod(0o755)
    return tmp_path


def arm(folder: Path, name: str, before: str, run: str = ALL) -> ArmSpec:
    """The plain kernel with statements in front of its work, and another way of doing it."""
    kernels, schedules = folder / name / "kernels", folder / name / "schedules"
    (kernels / "kda_decode").mkdir(parents=True)
    (schedules / "cpu" / NANO.name).mkdir(parents=True)
    assert faults.PLAIN.count(ALL) == 1
    (kernels / "kda_decode" / "cpu.cc").write_text(faults.PLAIN.replace(ALL, before + run))
    (kernels / "kda_decode" / "cpu.toml").write_text(faults.DECLARATIONS)
    table = "version = 1\n\n[[bucket]]\nmax_rows = 512\nfault = 0\n"
    (schedules / "cpu" / NANO.name / "kda_decode.toml").write_text(table)
    artifacts = {
        "kda_decode": build("kda_decode", ARCH, NANO, kernels, folder / "artifacts").path,
        "runtime": build_runtime(folder / "artifacts").path,
    }
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return ArmSpec("specialized", artifacts, schedules)


def decided(folder: Path, best: ArmSpec, candidate: ArmSpec) -> Decision:
    """What the perf decision says of a candidate that has to be faster in both cells."""
    plan = make_plan(blocks=8, task=CELLS, cells=CELLS, band=0.05)
    evidence = begin(folder / "run", plan, ceilings=measure_ceilings(2, folder))
    arms = {"standard": ArmSpec("standard"), "best": best, "candidate": candidate}
    sampler = WorkerSampler(arms, NANO, base_tree=ROOT, run_dir=folder / "logs", threads=2)
    run_campaign(plan, sampler, evidence, silent)
    return decide(evidence.lines("perf"))


def codes(decision: Decision) -> set[str]:
    return {finding.code for finding in decision.findings}


def test_a_tenth_slower_in_one_cell_is_refused_with_the_cell(folder: Path) -> None:
    """A large gain in one cell pays for a loss in another."""
    best = arm(folder, "best", IDLE.format(heads=1))
    candidate = arm(folder, "candidate", f"if (c.batch == 8) {{ {IDLE.format(heads=2)} }}")
    decision = decided(folder, best, candidate)
    ratios = {cell: decision.metrics[f"ratio_best/{cell.key}"]["value"] for cell in CELLS}
    assert ratios[CELLS[0]] > 1.1
    assert 0.8 < ratios[CELLS[1]] < 0.98
    assert decision.outcome in ("failed", "inconclusive"), "on a busy machine it may not be proven, but never accepted"
    if decision.outcome == "failed":
        assert codes(decision) == {"perf.cell_slower"}
        assert {finding.where for finding in decision.findings} == {CELLS[1].key}


def test_the_same_kernel_again_is_never_accepted(folder: Path) -> None:
    """Noise is taken for a gain."""
    best = arm(folder, "best", "")
    candidate = arm(folder, "candidate", "const int64_t unused = c.fault; if (unused == 7) return -1;")
    decision = decided(folder, best, candidate)
    assert decision.outcome != "passed"


@pytest.mark.parametrize(
    ("name", "work"),
    [
        # From the second slice on, if outputs and scratch of the first are still there.
        ("already-there", "if (c.out[0] == 0xffff || calls[0] < 3) { all(c); }"),
        # Within each slice, with an output that looks like one.
        ("middle", "if (calls[0] < 4 || calls[0] > 9) { all(c); } else { memset(c.out, 0x3e, 2 * kWidth); }"),
    ],
    ids=("already-there", "middle"),
)
def test_calls_that_are_left_out_show(folder: Path, name: str, work: str) -> None:
    """A kernel that counts its calls skips those that nobody looks at."""
    best = arm(folder, "best", "")
    decision = decided(folder, best, arm(folder, name, COUNTED, work))
    if name == "already-there":  # every run of a chain finds poison, so nothing is left out and nothing gained
        assert decision.outcome != "passed"
        assert "perf.output_mismatch" not in codes(decision)
    else:
        assert decision.outcome == "failed"
        assert "perf.output_mismatch" in codes(decision)
