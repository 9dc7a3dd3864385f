"""Files that are broken, cut, or made to mislead: never an exception, never a silent pass."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import sandbox
from k3_backend.aot.cuda.cubin import CubinError, read
from tests.verify.gates.audit_cuda.conftest import PARAMS, Built
from tests.verify.gates.audit_cuda.listings import HEAD
from verify.gates.audit.cuda import Facts, inspect_cubin, inspect_file
from verify.gates.audit.cuda.ptx import entries
from verify.gates.audit.cuda.sass import parse
from verify.protocol.audit_cuda import judge

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True
)


def refused(facts: list[Facts]) -> bool:
    """At least one finding: nothing unread passes."""
    return bool(judge(facts, "file", "next"))


@quick
@given(st.binary(max_size=2000))
def test_random_bytes(data: bytes) -> None:
    """Not an ELF file at all."""
    assert refused(inspect_cubin(data))


@quick
@given(st.binary(max_size=600))
def test_random_bytes_behind_an_elf_header(data: bytes) -> None:
    """The ELF parser meets nonsense in every table."""
    head = bytes.fromhex("7f454c460201014108000000000000000200be00") + (1).to_bytes(4, "little")
    try:
        read(head + data)
    except CubinError:
        return
    assert refused(inspect_cubin(head + data))


def test_empty_file(tmp_path: Path) -> None:
    """Zero bytes of every kind."""
    for name in ("k.cubin", "k.ptx", "k.sass", "k.txt", "nothing.cubin"):
        path = tmp_path / name
        if name != "nothing.cubin":
            path.write_bytes(b"")
        assert refused(inspect_file(path))


@quick
@given(st.text(max_size=800))
def test_random_text(tmp_path: Path, text: str) -> None:
    """Text that is neither listing nor PTX."""
    for suffix in (".sass", ".ptx"):
        path = tmp_path / f"k{suffix}"
        path.write_text(text, encoding="utf-8", errors="replace")
        assert refused(inspect_file(path))


_WORDS = st.sampled_from([
    "LDG.E R0, desc[UR4][R2.64] ;", "BRA `(.L_x_0) ;", ".L_x_0:", "@P0 EXIT ;", "EXIT ;", "ACQBULK ;", "BRX R2 -0x10 ;",
    "CALL.REL.NOINC `(k) ;", "RET.REL.NODEC R20 `(k) ;", "LDC.64 R2, c[0x0][0x380] ;", "HFMA2.MMA R1, -RZ, RZ, 0, 0 ;",
    "LDG.E R0, [[[ ;", "UTMALDG.2D [UR8], [UR6], desc[UR10] ;", "LDGSTS.E [R7] ;", "ATOMG.E.ADD PT, R5, [R4.64], R9 ;",
    "UMOV UR5, 0x14f00000 ;", "CCTL.IVALL ;", "MOV R1, `(.L_x_9) ;", "R2UR P1, UR6, R2 ;", "IMAD R2, , ;", "/* 0x0 */",
    "BRA ;", "LDC R1, c[0x0][R300+0x380] ;", "S2R R0, SR_CLOCKLO ;", "BSYNC B0 ;",
    "WARPSYNC.COLLECTIVE R1, `(.L_x_0) ;",
])  # fmt: skip


@quick
@given(st.lists(_WORDS, max_size=40))
def test_random_instructions(tmp_path: Path, words: list[str]) -> None:
    """Every order of instructions, loops and calls has an answer."""
    body = "\n".join(w if w.endswith(":") else f"/*{16 * i:04x}*/ {w}" for i, w in enumerate(words))
    path = tmp_path / "k.sass"
    path.write_text(HEAD + body)
    assert refused(inspect_file(path))


_STATEMENTS = st.sampled_from([
    "ld.global.b32 %r1, [%rd1];", "bra L;", "L:", "@%p1 bra L;", "ret;", "{", "}", ".reg .pred %p<2>;",
    "ld.param.b64 %rd1, [k_param_0];", "griddepcontrol.wait;", "brx.idx %r1, ts;", "ts: .branchtargets L;",
    "call f, (a);", "mov.b64 {%r1, %r2}, %rd1;", "ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1+16];", ".loc 1 2 3",
    "st.global.b32 [;", "createpolicy.fractional.L2::evict_last.b64 %rd1, 1.0;", "nonsense", ";",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2];",
])  # fmt: skip


@quick
@given(st.lists(_STATEMENTS, max_size=40))
def test_random_ptx(tmp_path: Path, lines: list[str]) -> None:
    """As above for PTX, with unbalanced braces."""
    path = tmp_path / "k.ptx"
    path.write_text(".target sm_90a\n.visible .entry k(\n .param .u64 k_param_0\n)\n{\n" + "\n".join(lines))
    assert refused(inspect_file(path))


def test_truncated_cubins(built: Built) -> None:
    """A cubin cut at any place is refused; seeds are fixed by the architecture."""
    whole = built.cubin("prints")
    chance = random.Random(built.arch)
    for cut in sorted(chance.sample(range(len(whole)), 12)):
        assert refused(inspect_cubin(whole[:cut], params=PARAMS))


def test_damaged_cubins(built: Built) -> None:
    """Flipped bytes lead to facts or to a stated reason, never to an exception."""
    whole = bytearray(built.cubin("prints"))
    chance = random.Random(built.arch)
    for _ in range(10):
        damaged = bytearray(whole)
        for at in chance.sample(range(len(whole)), 8):
            damaged[at] ^= 1 << chance.randrange(8)
        assert isinstance(judge(inspect_cubin(bytes(damaged), params=PARAMS), "k", "n"), list)


def test_wrong_entry(built: Built) -> None:
    """A descriptor that names another kernel finds nothing to launch."""
    assert [f.code for f in judge(inspect_cubin(built.cubin("prints"), entry="other"), "k", "n")] == [
        "audit.cubin_malformed"
    ]


@pytest.mark.parametrize("parser", [parse, entries])
def test_huge_single_line(parser: object) -> None:
    """No rule of the grammar may backtrack without bound."""
    text = "/*0000*/ LDG.E " + "[" * 200_000 + " ;\n.entry k(" + "," * 200_000 + "{" * 1000
    assert callable(parser)
    parser(text)


def test_no_disassembler_is_not_evaluated(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without nvdisasm says so with the command that installs it."""
    monkeypatch.setattr("verify.gates.audit.cuda.nvdisasm.find", lambda: None)
    found = judge(inspect_cubin(built.cubin("prints"), params=PARAMS), "k", "n")
    gap = next(f for f in found if f.code == "audit.not_evaluated")
    assert "pip install nvidia-cuda-nvdisasm" in gap.message


@pytest.mark.parametrize(
    ("status", "stderr", "gap"), [(137, b"", True), (1, b"bwrap: no", True), (1, b"nvdisasm fatal", False)]
)
def test_a_failing_machine_is_not_the_files_fault(
    built: Built, monkeypatch: pytest.MonkeyPatch, status: int, stderr: bytes, gap: bool
) -> None:
    """A disassembler that was killed leaves the kernel unjudged; one that refuses the file fails it."""
    done = sandbox.Finished(status, b"", stderr, False, 0.1)
    monkeypatch.setattr("verify.gates.audit.cuda.nvdisasm.sandbox.run", lambda *_, **__: done)
    codes = {f.code for f in judge(inspect_cubin(built.cubin("switch"), params=PARAMS))}
    assert ("audit.not_evaluated" in codes) == gap
    assert ("audit.cubin_malformed" in codes) != gap
