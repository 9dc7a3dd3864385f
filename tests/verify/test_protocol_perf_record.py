"""Records of a performance measurement that are cut, edited or beyond the protocol: none is decided on."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.verify.perf_records import (
    codes,
    header_of,
)
from verify.protocol.perf import decide
from verify.protocol.perf_data import order_code
from verify.protocol.perf_plan import (
    MIN_ROUNDS,
)


@pytest.mark.parametrize("missing", ["end", "last block", "first begin", "header", "everything"])
def test_an_incomplete_record_never_passes(accepted: list[dict[str, Any]], missing: str) -> None:
    """Missing blocks read as a shorter, still successful measurement."""
    blocks = [at for at, line in enumerate(accepted) if line["kind"] == "block"]
    begins = [at for at, line in enumerate(accepted) if line["kind"] == "begin"]
    drop = {
        "end": [len(accepted) - 1],
        "last block": [blocks[-1]],
        "first begin": [begins[0]],
        "header": [0],
        "everything": range(len(accepted)),
    }[missing]
    assert decide([line for at, line in enumerate(accepted) if at not in drop]).outcome == "not_evaluated"


def test_no_single_removed_line_or_cell_lets_the_record_pass(accepted: list[dict[str, Any]]) -> None:
    """Some line of the record does not matter."""
    for at in range(len(accepted)):
        assert decide(accepted[:at] + accepted[at + 1 :]).outcome != "passed", accepted[at]["kind"]
    for at, line in enumerate(accepted):
        if line["kind"] == "block":
            for cell in range(len(line["cells"])):
                changed = copy.deepcopy(accepted)
                del changed[at]["cells"][cell]
                assert decide(changed).outcome == "not_evaluated"


def edit_block(lines: list[dict[str, Any]], change: Any) -> list[dict[str, Any]]:
    changed = copy.deepcopy(lines)
    change(next(line for line in changed if line["kind"] == "block"))
    return changed


def shorten(block: dict[str, Any]) -> None:
    block["cells"][0]["ns"] = [900_000] * len(block["cells"][0]["ns"])


def swap_arms(block: dict[str, Any]) -> None:
    cell = block["cells"][0]
    cell["order"] = cell["order"][1] + cell["order"][0] + cell["order"][2:]


def other_seed(block: dict[str, Any]) -> None:
    block["seed"] = "00" * 16


def repeat_number(block: dict[str, Any]) -> None:
    block["block"] = 1


def no_calls(block: dict[str, Any]) -> None:
    block["cells"][0]["calls"] = 0


def text_time(block: dict[str, Any]) -> None:
    block["cells"][0]["ns"][0] = "fast"


def no_time(block: dict[str, Any]) -> None:
    block["cells"][0]["worker_ns"][3] = 0


def few_rounds(block: dict[str, Any]) -> None:
    cell = block["cells"][0]
    arms = ("standard", "best", "candidate", "control")
    cell["rounds"] = MIN_ROUNDS - 2
    cell["order"] = order_code(block["seed"], cell["key"], cell["rounds"], arms)
    cell["ns"], cell["worker_ns"] = (cell[name][: len(cell["order"])] for name in ("ns", "worker_ns"))


def missing_slice(block: dict[str, Any]) -> None:
    del block["cells"][0]["ns"][-1]


@pytest.mark.parametrize(
    "change", [shorten, swap_arms, other_seed, repeat_number, no_calls, text_time, no_time, few_rounds, missing_slice]
)
def test_blocks_that_the_protocol_does_not_allow_are_not_evaluated(accepted: list[dict[str, Any]], change: Any) -> None:
    """Short or missing slices, few rounds, exchanged arms or a chosen seed count as a measurement."""
    decision = decide(edit_block(accepted, change))
    assert decision.outcome == "not_evaluated"
    assert decision.findings[0].code == "perf.malformed"


def test_a_plan_that_overspends_its_error_budget_is_refused(accepted: list[dict[str, Any]]) -> None:
    """A record with generous levels passes by luck."""
    for field, value in (("candidates", 400), ("alpha_per_run", 1e-6), ("band", 0.5), ("cells", []), ("stages", [])):
        changed = copy.deepcopy(accepted)
        header_of(changed)[field] = value
        assert decide(changed).outcome == "not_evaluated", field
        assert codes(changed) == {"perf.plan"}, field
    changed = copy.deepcopy(accepted)
    for cell in header_of(changed)["cells"]:
        cell["claims"] = [{"against": "best", "rule": "not_slower"}]
    assert codes(changed) == {"perf.plan"}, "nothing has to be faster"


def test_a_missing_check_is_not_a_passed_one(accepted: list[dict[str, Any]]) -> None:
    """A record without output checks passes."""

    def drop(block: dict[str, Any]) -> None:
        block["cells"][0]["checks"]["candidate"] = {}

    assert codes(edit_block(accepted, drop)) == {"perf.output_mismatch"}
