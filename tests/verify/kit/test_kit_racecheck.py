"""What racecheck's word is worth beside kernels whose races are known: rules, logs, and a session with a false tool."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kit_fixtures import FakeMachine, fake_arm, lines_of, write_fake_kit
from test_kit_run import SETTINGS

from verify.kit import kernels, run, sanitizer
from verify.kit.mbarriers import kernels_with_mbarriers
from verify.kit.sanitizer import judge
from verify.protocol.kernels import decide
from verify.protocol.sanitizers import CONTROLS, RACY, verdicts
from verify.workers import race_controls

ENTRY = "kernel_mla_query"
ARRIVAL, ANNOUNCEMENT, RELEASE, INIT = CONTROLS[1:]
BOTH = ["clusters", "mbarriers"]
RACE = "error Read-Write"
WARNING = "warning Read-Write"


def hazard_log(entry: str, severity: str = "Error") -> str:
    """As racecheck 2025.3.1 writes it: one write, two reads."""
    return f"""========= COMPUTE-SANITIZER
========= {severity}: Race reported between Write access at {entry}+0x43c0 in steps.py:101
=========     and Read access at {entry}+0x5e10 in cute_vector.py:67 [5952 hazards]
=========     and Read access at {entry}+0x5e20 in cute_vector.py:67 [5952 hazards]
========= 
========= RACECHECK SUMMARY: 1 hazard displayed ({"1 error, 0 warnings" if severity == "Error" else "0 errors, 1 warning"})
"""  # noqa: E501 - the tool's own lines


CLEAN_LOG = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def check(*hazards: str, uses: list[str] | None = None, tool: str = "racecheck", errors: int | None = None) -> Any:
    """An artifact's line with these kinds of hazards; clean without any."""
    counted = sum(kind.startswith("error") for kind in hazards) if errors is None else errors
    return {
        "kind": "sanitizer", "tool": tool, "unit": "u", "status": "errors" if hazards or counted else "clean",
        "reason": None, "summary": "1 hazard displayed", "errors": counted, "hazards": dict.fromkeys(hazards, 1),
        "uses": BOTH if uses is None else uses,
    }  # fmt: skip


def controls(*found: str, absent: str | None = None, kind: str = RACE) -> list[Any]:
    """Lines of all controls: `found` were charged with a hazard of this kind."""
    return [
        {
            "kind": "sanitizer_control", "control": name, "status": "errors" if name in found else "clean",
            "reason": None, "summary": "s", "hazards": {kind: 3} if name in found else {},
        }
        for name in CONTROLS
        if name != absent
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "others", "status"),
    [
        (check(), controls(RACY), "clean"),
        (check(), controls(), "not_evaluated"),
        (check(), controls(RACY, absent=RACY), "not_evaluated"),
        (check(), [], "not_evaluated"),
        (check(tool="memcheck"), [], "clean"),
        (check(RACE), [], "errors"),
        (check(RACE), controls(RACY), "errors"),
        (check(RACE), controls(), "errors"),
        (check(RACE), controls(RACY, ARRIVAL), "not_evaluated"),
        (check(RACE), controls(RACY, ANNOUNCEMENT), "not_evaluated"),
        (check(RACE), controls(RACY, RELEASE), "not_evaluated"),
        (check(RACE, uses=[]), controls(RACY, ARRIVAL, ANNOUNCEMENT, INIT), "errors"),
        (check(RACE, uses=["clusters"]), controls(RACY, ARRIVAL), "errors"),
        (check(RACE, uses=["mbarriers"]), controls(RACY, INIT), "errors"),
        (check(RACE), controls(RACY, INIT), "not_evaluated"),
        (check(RACE), [{**line, "status": "not_evaluated"} for line in controls(RACY, ARRIVAL)], "errors"),
        (check(WARNING), controls(RACY), "errors"),
        (check(WARNING), controls(RACY, INIT, kind=WARNING), "not_evaluated"),
        (check(WARNING), controls(RACY, ARRIVAL), "not_evaluated"),
        (check(RACE), controls(RACY, ARRIVAL, kind=WARNING), "errors"),
        (check("error Write-Write"), controls(RACY, ARRIVAL), "errors"),
        (check(RACE, "error Write-Write"), controls(RACY, ARRIVAL), "errors"),
        (check(RACE, "error other"), controls(RACY, ARRIVAL), "errors"),
        (check("error other"), controls(RACY, ARRIVAL, kind="error other"), "errors"),
        (check(errors=2), controls(RACY, ARRIVAL), "errors"),
        (check(WARNING, errors=2), controls(RACY, ARRIVAL), "errors"),
        (check(RACE, tool="memcheck"), controls(RACY, ARRIVAL), "errors"),
    ],
)
def test_hazards_are_set_aside_only_where_the_tool_is_shown_to_be_wrong(
    line: Any, others: list[Any], status: str
) -> None:
    """A race that passes for the tool's mistake, or a clean word of a tool that finds nothing."""
    (verdict,) = verdicts([line, *others])
    assert verdict.status == status
    assert (verdict.reason is not None) == (status == "not_evaluated")


def test_the_reason_names_the_controls() -> None:
    """A reader who cannot tell what discredited the tool."""
    (verdict,) = verdicts([check(RACE), *controls(RACY, ARRIVAL, ANNOUNCEMENT)])
    assert f"{ANNOUNCEMENT}, {ARRIVAL}" in str(verdict.reason)


def test_kinds_are_read_from_the_whole_log() -> None:
    """A kind behind the part of the log that is kept, or one that is none of a race."""
    turned = (
        hazard_log(ENTRY)
        .replace("Write access", "W")
        .replace("Read access", "Write access")
        .replace(" W ", " Read access ")
    )
    assert "between Read access" in turned
    text = hazard_log(ENTRY) * 29 + turned + "=== Error: Deadlock\n" + hazard_log(ENTRY, "Warning")
    line = judge(text, 86, None, [ENTRY])
    assert (line["status"], line["errors"], line["warnings"]) == ("errors", 0, 1)
    assert line["hazards"] == {RACE: 60, "error other": 1, WARNING: 2}
    assert judge(CLEAN_LOG, 0, None, [ENTRY])["hazards"] == {}


def image(*tables: tuple[str, bytes]) -> bytes:
    """An ELF file of named sections."""
    names, contents, headers = b"\0.names\0", b"", [(0, 0, 0, 0, 0, 0)]
    for name, data in tables:
        headers.append((len(names), 1, 0, 0, 64 + len(contents), len(data)))
        names, contents = names + name.encode() + b"\0", contents + data
    headers.append((1, 3, 0, 0, 64 + len(contents), len(names)))
    contents += names
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, 64 + len(contents))
    struct.pack_into("<HHH", head, 0x3A, 64, len(headers), len(headers) - 1)
    return bytes(head) + contents + b"".join(struct.pack("<IIQQQQIIQQ", *header, 0, 0, 0, 0) for header in headers)


REGISTERS = struct.pack("<BBHI", 4, 0x2F, 4, 0x39)
FLAG = struct.pack("<BBH", 3, 0x1B, 0x39)
MBARRIERS = struct.pack("<BBHII", 4, 0x39, 8, 0x150, 0x160)


def test_the_images_own_table_says_whether_a_kernel_has_mbarriers() -> None:
    """A value that looks like the attribute, another kernel's table, or an image that is read as one without any."""
    data = image((".nv.info.plain", REGISTERS + FLAG), (".nv.info.armed", REGISTERS + MBARRIERS), (".nv.info", b""))
    assert kernels_with_mbarriers(data) == {"armed"}
    for broken in (b"machine code", data[:200], data[:6]):
        with pytest.raises(ValueError, match=r"ELF file|cannot be read"):
            kernels_with_mbarriers(broken)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on PATH")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", CONTROLS)
def test_controls_assemble(name: str, arch: str, tmp_path: Path) -> None:
    """A control that no driver takes discredits nothing and shows nothing."""
    (tmp_path / "c.ptx").write_text(race_controls.ptx(name))
    command = ["ptxas", "-arch", arch, "-o", str(tmp_path / "c.cubin"), str(tmp_path / "c.ptx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert kernels_with_mbarriers((tmp_path / "c.cubin").read_bytes()) == ({name} - {RACY})


@pytest.mark.parametrize("word", ["racy", "elected_arrival"])
def test_a_control_that_computes_something_else_says_nothing(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control that is broken on this driver, and discredits the tool or vouches for it."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"""#!/bin/bash
while [ "${{1#--}}" != "$1" ]; do [ "$1" = --log-file ] && log=$2; shift 2; done
cp {tmp_path}/hazard "$log"; echo "Traceback" >&2; echo "RuntimeError: {word} computed 7" >&2; exit 86
""")
    tool.chmod(0o755)
    (tmp_path / "hazard").write_text(hazard_log(word))
    line = sanitizer._run_control(tmp_path, word, str(tool))
    assert (line["status"], line["hazards"]) == ("not_evaluated", {RACE: 2})
    assert line["reason"] == f"status 86: RuntimeError: {word} computed 7"


FALSE_TOOL = """#!/bin/bash
# racecheck charges what FLAGGED lists; everything else is clean.
[ "$1" = --version ] && echo "Version 1.2.3" && exit 0
[ "$1 $2" = "--tool racecheck" ] && racecheck=yes
while [ "${1#--}" != "$1" ]; do [ "$1" = --log-file ] && log=$2; shift 2; done
entry="${!#}"
case " CONTROLS " in *" $entry "*) ;; *) entry=ENTRY; "$@" || exit ;; esac
cp CLEAN "$log"
case " FLAGGED " in *" $entry "*) [ "$racecheck" ] && sed "s/NAME/$entry/" HAZARD > "$log" && exit 86 ;; esac
exit 0
"""


def session(folder: Path, monkeypatch: pytest.MonkeyPatch, *flagged: str) -> tuple[int, list[dict[str, Any]]]:
    """A kit's run under a tool that charges these kernels."""
    texts = {"CLEAN": CLEAN_LOG, "HAZARD": hazard_log("NAME")}
    script = FALSE_TOOL.replace("CONTROLS", " ".join(CONTROLS)).replace("ENTRY", ENTRY)
    script = script.replace("FLAGGED", " ".join(flagged))
    for name, text in texts.items():
        (folder / name).write_text(text)
        script = script.replace(name, str(folder / name))
    (folder / "bin").mkdir()
    (folder / "bin" / "compute-sanitizer").write_text(script)
    (folder / "bin" / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(kernels, "BUFFER_BYTES", 1 << 28)
    arm = fake_arm(
        folder / "arm", {"mla_query": "k3-pico"}, images={"mla_query": image((f".nv.info.{ENTRY}", MBARRIERS))}
    )
    write_fake_kit(folder / "K", arm, SETTINGS)
    code = run.session(folder / "K", folder / "R", machine=FakeMachine(), jobs=2)
    return code, lines_of(folder / "R")


@pytest.mark.parametrize(
    ("flagged", "code", "clean", "not_evaluated"),
    [
        ((RACY, ARRIVAL, ENTRY), run.FINE, 2.0, 1.0),
        ((RACY, ENTRY), run.FALLS_SHORT, 2.0, 0.0),
    ],
)
def test_a_session_judges_hazards_beside_its_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flagged: tuple[str, ...], code: int, clean: float,
    not_evaluated: float,
) -> None:  # fmt: skip
    """Controls that are not run, or whose lines change nothing."""
    found, lines = session(tmp_path, monkeypatch, *flagged)
    assert sorted(line["control"] for line in lines if line["kind"] == "sanitizer_control") == sorted(CONTROLS)
    assert {line["version"] for line in lines if line["kind"] == "sanitizer_control"} == {"Version 1.2.3"}
    decision = decide(lines)
    assert found == code, decision.findings
    assert [finding.code for finding in decision.findings] == ["kernels.sanitizer"] * (code == run.FALLS_SHORT)
    assert decision.metrics["sanitizer_clean"]["value"] == clean
    assert decision.metrics["sanitizer_not_evaluated"]["value"] == not_evaluated
    assert decision.metrics["sanitizer_errors"]["value"] == float(code == run.FALLS_SHORT)
