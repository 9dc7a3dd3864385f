"""Rules that compare with claims, on facts of real kernels and on changed facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.verify.gates.audit_cuda.conftest import PARAMS, Built, claims
from verify.gates.audit.cuda import inspect_cubin
from verify.protocol.audit_cuda import LIMITS, judge, judge_kernel, outcome


def codes(facts: dict[str, Any]) -> list[str]:
    return [f.code for f in judge_kernel(facts, "k", "n")]


def test_missing_instruction_class(built: Built) -> None:
    """A kernel that claims tensor cores and has none fell back to scalar code."""
    assert codes(built.facts("weights_above_wait", expects=("tensor_core",))) == ["audit.missing_instruction"]
    assert codes(built.facts("tensor_core", expects=("tensor_core", "pdl_wait"))) == []
    assert codes(built.facts("tensor_core", expects=("a class that nobody knows",))) == ["audit.missing_instruction"]


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"min_ctas_per_sm": 16}, True),
        ({"min_ctas_per_sm": 17}, False),  # 17 x 4 warps exceed 64 warps
        ({"dynamic_smem": 115712, "min_ctas_per_sm": 2}, True),  # (113 + 1) KB twice is 228 KB
        ({"dynamic_smem": 115713, "min_ctas_per_sm": 2}, False),
        ({"dynamic_smem": 232448}, True),
        ({"dynamic_smem": 232449}, False),
    ],
)
def test_occupancy(built: Built, change: dict[str, Any], fits: bool) -> None:
    """Limits of the SM at their edges."""
    assert set(codes(built.facts("weights_above_wait", **change))) == (set() if fits else {"audit.occupancy"})


def test_registers_bound_occupancy(built: Built) -> None:
    """65,536 registers, allocated per warp in units of 256."""
    facts = built.facts("weights_above_wait", min_ctas_per_sm=4)
    for registers, fits in ((128, True), (129, False)):
        changed = {**facts, "resources": {**facts["resources"], "registers": registers}}
        assert codes(changed) == ([] if fits else ["audit.occupancy"])


def test_launch_with_other_block_size(built: Built) -> None:
    """A kernel compiled for 128 threads cannot be launched with 256."""
    assert codes(built.facts("weights_above_wait", block=256)) == ["audit.occupancy"]


def test_every_supported_architecture_has_limits() -> None:
    """No architecture without figures."""
    assert set(LIMITS) == {"sm_90", "sm_100", "sm_103"}


def test_unknown_architecture_is_not_evaluated(built: Built) -> None:
    """Limits of an SM that the tables do not hold cannot be checked."""
    assert codes({**built.facts("weights_above_wait"), "arch": "sm_120a"}) == ["audit.not_evaluated"]


def test_parameter_table(built: Built) -> None:
    """A descriptor with shifted offsets would give roles to the wrong memory."""
    shifted = [PARAMS[0], replace(PARAMS[1], offset=16), replace(PARAMS[2], offset=8), *PARAMS[3:]]
    facts = next(
        f
        for f in inspect_cubin(built.cubin("weights_above_wait"), params=shifted, claims=claims("weights_above_wait"))
        if "_weights_above_wait_" in f["kernel"]
    )
    assert "audit.parameter_table" in codes(facts)


def test_wait_that_the_assembler_dropped(built: Built) -> None:
    """PTX with a wait, machine code without: judged even where no dependent launch is claimed."""
    facts = built.facts("no_wait", pdl=False)
    assert codes(facts) == []
    assert codes({**facts, "ptx": {**facts["ptx"], "waits": 1}}) == ["audit.wait_dropped"]


def test_claimed_polling(built: Built) -> None:
    """A written argument allows the relaxed poll and nothing else."""
    argument = "flag and data are one 32-bit word, read in one access"
    assert codes(built.facts("poll_data_in_flag", polling=argument)) == []
    assert "audit.load_after_relaxed_poll" in codes(built.facts("poll_then_load", polling=argument))


def test_outcome_words(built: Built) -> None:
    """A gap is no pass, and no fault either."""
    passed = judge(built.facts("weights_above_wait"))
    gap = judge([built.facts("role_without_wait")])
    failed = judge([built.facts("role_without_wait"), built.facts("no_wait")])
    assert [outcome(found) for found in (passed, gap, failed)] == ["passed", "inconclusive", "failed"]


def test_missing_facts_are_no_pass(built: Built) -> None:
    """Stored lines from which accesses were cut decide nothing."""
    for name in ("accesses", "polls", "cache_policies", "waits"):
        cut = {key: value for key, value in built.facts("weights_above_wait").items() if key != name}
        assert "audit.not_evaluated" in codes(cut)


def test_device_state_and_unknown_call(built: Built) -> None:
    """printf brings an unknown callee, a format string in global memory and a stack."""
    assert {"audit.external_call", "audit.device_state", "audit.not_evaluated", "audit.spill"} <= set(
        codes(built.facts("prints"))
    )
