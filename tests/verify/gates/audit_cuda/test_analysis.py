"""Origin of addresses, order and control flow, on hand-written listings."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.verify.gates.audit_cuda.listings import facts, listing, rows
from verify.gates.audit.cuda.sass import parse
from verify.protocol.audit_cuda import judge_kernel

LOAD_A = "LDC.64 R2, c[0x0][0x380]\nLDG.E R0, desc[UR4][R2.64]"


def test_address_follows_selects_and_uniform_registers(tmp_path: Path) -> None:
    """An address that may be either of two parameters belongs to both."""
    found = facts(
        tmp_path,
        """
        LDCU.64 UR6, c[0x0][0x388]
        LDC.64 R2, c[0x0][0x380]
        SEL R4, R2, UR6, P0
        SEL R5, R3, UR7, P0
        LDG.E R0, desc[UR4][R4.64+0x10]
        EXIT
        """,
    )
    assert rows(found, "LDG.E")[0]["params"] == ["param0", "param1"]


def test_overwritten_register_forgets_its_origin(tmp_path: Path) -> None:
    """A stale origin would be a false alarm."""
    found = facts(
        tmp_path,
        """
        LDC.64 R2, c[0x0][0x380]
        IMAD.WIDE R2, R9, 0x4, R2
        LDC.64 R2, c[0x0][0x390]
        LDG.E.128 R4, desc[UR4][R2.64]
        EXIT
        """,
    )
    assert rows(found, "LDG.E.128")[0]["params"] == ["param2"]


def test_pointer_loaded_from_memory_is_an_activation(tmp_path: Path) -> None:
    """A table of pointers says nothing about when the memory behind them is written."""
    found = facts(
        tmp_path,
        "LDC.64 R2, c[0x0][0x380]\nLDG.E.64 R4, desc[UR4][R2.64]\nLDG.E R6, desc[UR4][R4.64]\nACQBULK\nEXIT",
        constants=(0,),
    )
    row = rows(found, "LDG.E")[0]
    assert (row["via"], row["params"], row["roles"]) == ("loaded", ["param0"], ["activation"])
    assert "audit.load_above_wait" in {f.code for f in judge_kernel(found, "k", "n")}


def test_wait_on_one_branch_does_not_count(tmp_path: Path) -> None:
    """Order must hold on every path."""
    found = facts(tmp_path, f"@P0 BRA `(.L_x_1)\nACQBULK\n.L_x_1:\n{LOAD_A}\nEXIT")
    assert rows(found, "LDG.E")[0]["order"] == "none"


def test_wait_on_both_branches_counts(tmp_path: Path) -> None:
    """A must-analysis, not dominance by one instruction."""
    found = facts(tmp_path, f"@P0 BRA `(.L_x_1)\nACQBULK\nBRA `(.L_x_2)\n.L_x_1:\nACQBULK\n.L_x_2:\n{LOAD_A}\nEXIT")
    assert rows(found, "LDG.E")[0]["order"] == "waited"


def test_predicated_wait_does_not_count(tmp_path: Path) -> None:
    """A wait that some threads skip orders nothing for them."""
    found = facts(tmp_path, f"@P0 ACQBULK\n{LOAD_A}\nEXIT")
    assert rows(found, "LDG.E")[0]["order"] == "none"


def test_code_before_a_loops_wait_is_above_it(tmp_path: Path) -> None:
    """In the first iteration the load stands before the wait."""
    found = facts(tmp_path, f".L_x_0:\n{LOAD_A}\nACQBULK\n@P0 BRA `(.L_x_0)\nEXIT")
    row = rows(found, "LDG.E")[0]
    assert (row["order"], row["wait_follows"]) == ("none", True)


def test_barrier_before_every_wait_proves_nothing(tmp_path: Path) -> None:
    """Nobody can have waited who arrives at a barrier that all pass before their wait."""
    found = facts(tmp_path, f"BAR.SYNC.DEFER_BLOCKING 0x0\n{LOAD_A}\nACQBULK\nEXIT")
    assert rows(found, "LDG.E")[0]["order"] == "none"


def test_barrier_in_one_arm_before_every_wait(tmp_path: Path) -> None:
    """Cluster or CTA barrier, chosen by launch: neither has a waiter, though neither dominates the wait."""
    found = facts(
        tmp_path,
        f"""
        @P0 BRA `(.L_x_1)
        UCGABAR_ARV
        UCGABAR_WAIT
        BRA `(.L_x_2)
        .L_x_1:
        BAR.SYNC.DEFER_BLOCKING 0x0
        .L_x_2:
        @P1 BRA `(.L_x_3)
        ACQBULK
        EXIT
        .L_x_3:
        {LOAD_A}
        EXIT
        """,
    )
    assert rows(found, "LDG.E")[0]["order"] == "none"


def test_barrier_behind_one_warps_wait_orders_the_cta(tmp_path: Path) -> None:
    """griddepcontrol.wait makes writes visible to the grid; the CTA barrier passes that on."""
    body = "S2R R0, SR_TID.X\nISETP.GT.U32.AND P0, PT, R0, 0x1f, PT\n@P0 BRA `(.L_x_1)\nACQBULK\n.L_x_1:\n"
    assert rows(facts(tmp_path, f"{body}BAR.SYNC.DEFER_BLOCKING 0x0\n{LOAD_A}\nEXIT"), "LDG.E")[0]["order"] == "waited"
    named = rows(facts(tmp_path, f"{body}BAR.SYNC.DEFER_BLOCKING 0x1, 0x40\n{LOAD_A}\nEXIT"), "LDG.E")[0]
    assert named["order"] == "barrier"


def test_barrier_behind_a_wait_by_data_does_not(tmp_path: Path) -> None:
    """If the condition is a parameter, perhaps no thread waits."""
    body = "LDC R0, c[0x0][0x390]\nISETP.GT.U32.AND P0, PT, R0, 0x1f, PT\n@P0 BRA `(.L_x_1)\nACQBULK\n.L_x_1:\n"
    found = facts(tmp_path, f"{body}BAR.SYNC.DEFER_BLOCKING 0x0\n{LOAD_A}\nEXIT")
    assert rows(found, "LDG.E")[0]["order"] == "barrier"


@pytest.mark.parametrize(
    "line",
    ["BRX R2 -0x10", "CALL.ABS.NOINC R8", "JMX R4 0x0", "BRA `(.L_nowhere)", "RET.REL.NODEC R20 `(k)"],
)
def test_unknown_control_flow_is_not_evaluated(tmp_path: Path, line: str) -> None:
    """Code that may go anywhere must not count as read."""
    found = facts(tmp_path, f"ACQBULK\n{line}\nEXIT")
    assert any(gap["what"] == "control_flow" for gap in found["unevaluated"])
    assert "audit.not_evaluated" in {f.code for f in judge_kernel(found, "k", "n")}


def test_running_past_the_end_is_not_evaluated(tmp_path: Path) -> None:
    """A listing that was cut off."""
    found = facts(tmp_path, "ACQBULK\nNOP")
    assert any("past the last" in gap["why"] for gap in found["unevaluated"])


def test_declared_switch_is_followed(tmp_path: Path) -> None:
    """Warp roles are dispatched by indirect branches on sm_100; their targets are declared."""
    found = facts(
        tmp_path,
        f"""
        BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)
        .L_x_1:
        ACQBULK
        EXIT
        .L_x_2:
        {LOAD_A}
        EXIT
        """,
    )
    assert found["switches"] == 1
    assert rows(found, "LDG.E")[0]["order"] == "none"


def test_math_routine_keeps_the_callers_order(tmp_path: Path) -> None:
    """A routine called before and after the wait must not mix the two."""
    found = facts(
        tmp_path,
        f"""
        CALL.REL.NOINC `($__internal_0_$div)
        ACQBULK
        CALL.REL.NOINC `($__internal_0_$div)
        {LOAD_A}
        EXIT
        $__internal_0_$div:
        FADD R9, R9, R8
        RET.REL.NODEC R20 `(k)
        """,
    )
    assert rows(found, "LDG.E")[0]["order"] == "waited"


def test_unknown_memory_instruction_is_reported(tmp_path: Path) -> None:
    """A new opcode with an address is never taken for arithmetic."""
    found = facts(tmp_path, "LDC.64 R2, c[0x0][0x380]\nNEWLOAD.E R0, desc[UR4][R2.64]\nACQBULK\nEXIT")
    row = rows(found, "NEWLOAD.E")[0]
    assert (row["touch"], row["params"]) == ("unknown", ["param0"])
    assert "audit.load_above_wait" in {f.code for f in judge_kernel(found, "k", "n")}


def test_poll_through_predicate_logic(tmp_path: Path) -> None:
    """A loop's end may be decided by predicates that were combined, or packed into a register and back."""
    logic = "ISETP.NE.AND P1, PT, R0, RZ, PT\nPLOP3.LUT P0, PT, P1, P2, PT, 0xf8, 0x8f"
    packed = "ISETP.NE.AND P1, PT, R0, RZ, PT\nP2R R7, PR, RZ, 0x7f\nR2P PR, R7, 0x7f"
    for middle in (logic, packed):
        found = facts(
            tmp_path,
            f"LDC.64 R2, c[0x0][0x380]\n.L_x_0:\nLDG.E.STRONG.SYS R0, desc[UR4][R2.64]\n{middle}\n"
            "@!P0 BRA `(.L_x_0)\nEXIT",
        )
        assert len(found["polls"]) == 1


def test_poll_by_one_thread_for_the_cta(tmp_path: Path) -> None:
    """One thread reads the flag and hands it on through shared memory."""
    found = facts(
        tmp_path,
        """
        LDC.64 R2, c[0x0][0x380]
        .L_x_0:
        @!P1 LDG.E.STRONG.SYS R0, desc[UR4][R2.64]
        @!P1 STS [UR6], R0
        BAR.SYNC.DEFER_BLOCKING 0x0
        LDS R7, [UR6]
        ISETP.NE.AND P0, PT, R7, RZ, PT
        @!P0 BRA `(.L_x_0)
        LDC.64 R4, c[0x0][0x388]
        LDG.E R0, desc[UR4][R4.64]
        EXIT
        """,
    )
    assert len(found["polls"]) == 1
    assert rows(found, "LDG.E")[0]["poll"] == "after"


_SWAP = """
LDC.64 R2, c[0x0][0x380]
.L_x_0:
{read}
ATOMG.E.CAS.STRONG.GPU PT, R6, desc[UR4][R2.64], R4, R5
ISETP.NE.U32.AND P0, PT, R6, R4, PT
@P0 BRA `(.L_x_0)
EXIT
"""


def test_compare_and_swap_is_a_poll_only_as_a_lock(tmp_path: Path) -> None:
    """A sum made of compare-and-swap waits for nobody; a lock does."""
    total = _SWAP.format(read="LDG.E R4, desc[UR4][R2.64]\nFADD R5, R4, R9")
    lock = _SWAP.format(read="MOV R4, 0x0\nMOV R5, 0x1")
    assert facts(tmp_path, total)["polls"] == []
    assert [p["op"] for p in facts(tmp_path, lock)["polls"]] == ["ATOMG.E.CAS.STRONG.GPU"]


def test_guard_that_leaves_no_loop_is_no_poll(tmp_path: Path) -> None:
    """A strong load that only guards a store inside a loop does not end it."""
    found = facts(
        tmp_path,
        """
        LDC.64 R2, c[0x0][0x380]
        .L_x_0:
        LDG.E.STRONG.SYS R0, desc[UR4][R2.64]
        ISETP.NE.AND P0, PT, R0, RZ, PT
        @P0 STG.E desc[UR4][R2.64], R9
        IADD3 R8, PT, PT, R8, 0x1, RZ
        ISETP.NE.AND P1, PT, R8, 0x10, PT
        @P1 BRA `(.L_x_0)
        EXIT
        """,
    )
    assert found["polls"] == []


def test_indexed_parameter_may_be_any(tmp_path: Path) -> None:
    """A computed offset in the constant bank reaches every parameter, wherever it starts."""
    for start in ("0x380", "0x100"):
        found = facts(
            tmp_path,
            f"LDC.64 R2, c[0x0][R9+{start}]\nLDC.64 R4, c[0x0][0x388]\nLDG.E R0, desc[UR4][R2.64]\nEXIT",
        )
        assert rows(found, "LDG.E")[0]["params"] == ["param0", "param1"]


def test_local_window_is_not_global_memory(tmp_path: Path) -> None:
    """Generic stores to the stack are no stores before the wait."""
    found = facts(tmp_path, "LDCU.64 UR4, c[0x0][0x2f8]\nMOV R2, UR4\nMOV R3, UR5\nST.E [R2.64], R9\nACQBULK\nEXIT")
    assert found["accesses"] == []


def test_garbage_lines_are_counted() -> None:
    """A line that is not understood is not skipped in silence."""
    text = listing("ACQBULK\nEXIT") + "        what is this\n        /*0040*/ lower R1 ;\n"
    assert parse(text).unread_lines == 2


def test_time_is_linear(tmp_path: Path) -> None:
    """A hostile author must not stop the gate with a long kernel."""
    unit = [
        f"LDC.64 R2, c[0x0][{0x380 + 8 * (i % 16):#x}]\nLDG.E R{4 + i % 200}, desc[UR4][R2.64]\n"
        f"@P{i % 6} BRA `(.L_x_{i + 1})\nIADD3 R{5 + i % 200}, PT, PT, R2, R9, RZ\n.L_x_{i + 1}:"
        for i in range(4000)
    ]
    took = []
    for size in (1000, 4000):
        started = time.perf_counter()
        found = facts(tmp_path, "ACQBULK\n" + "\n".join(unit[:size]) + "\nEXIT")
        took.append(time.perf_counter() - started)
        assert found["instructions"] > 3 * size
    assert took[1] < 12 * took[0] + 0.5


def test_many_nested_loops_end_in_a_statement(tmp_path: Path) -> None:
    """Loops within loops without end: an answer or a stated gap, within seconds."""
    depth = 3000
    body = "\n".join(f".L_x_{i}:\nIADD3 R{i % 200}, PT, PT, R2, R9, RZ" for i in range(depth))
    tail = "\n".join(f"@P0 BRA `(.L_x_{i})" for i in reversed(range(depth)))
    started = time.perf_counter()
    found = facts(tmp_path, f"{body}\n{tail}\nEXIT")
    assert time.perf_counter() - started < 30
    assert found["unevaluated"] or found["accesses"] == []
