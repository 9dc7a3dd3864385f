from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from gate_fixtures import FILES, KERNEL, SETTINGS, Bench, make_bench

from harness import sandbox
from harness.records import EvidenceClass, Outcome, Reason
from k3_backend.aot.cpu.host import best_arch
from k3_backend.aot.manifest import Artifact
from verify.gates import build
from verify.protocol.build import decide

SOURCE = "k3_backend/kernels/kda_decode/cpu.cc"
ARCHS = SETTINGS.target("cpu").archs
_REASON = sandbox.unavailable()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=_REASON.message if _REASON else "")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory, "build")


def kernel(addition: str) -> dict[str, str]:
    return {SOURCE: KERNEL.replace("K3_EXPORT", addition + "\nK3_EXPORT", 1)}


def test_changed_ops_are_built_twice_for_every_architecture(bench: Bench) -> None:
    """An object is accepted that only one build, or only one architecture, ever produced."""
    context = bench.context(bench.commit({SOURCE: KERNEL.replace("1e9f", "2e9f")}))
    result = build.run(context)
    assert result.outcome is Outcome.PASSED, result.reasons
    units = {line["arch"]: line for line in context.evidence.lines("build") if line["kind"] == "unit"}
    assert set(units) == set(ARCHS)
    for line in units.values():
        assert line["changed"]
        assert len(line["digests"]) == 2
        assert len(set(line["digests"])) == 1
        assert line["toolchain"]["g++"].startswith("g++")
    assert context.candidate.artifacts == {f"kda_decode/{a}": units[a]["digests"][0] for a in ARCHS}
    assert {(a.op, a.arch) for a in context.built} == {("kda_decode", a) for a in ARCHS}
    assert result.metrics["objects_changed"].value == len(ARCHS)  # type: ignore[union-attr]


def test_a_change_of_a_shared_header_changes_every_op(bench: Bench) -> None:
    """A kernel changed through its header counts as the base's."""
    context = bench.context(
        bench.commit({"k3_backend/kernels/common/scale.h": FILES["k3_backend/kernels/common/scale.h"] + "// more\n"})
    )
    build.run(context)
    assert all(line["changed"] for line in context.evidence.lines("build") if line["kind"] == "unit")


def test_unchanged_ops_are_shared_with_the_base(bench: Bench) -> None:
    """A schedule-only candidate pays for compilers, or is judged on other objects than the base's."""
    first = bench.context(bench.commit({"README.md": "1\n"}))
    build.run(first)
    schedule = "k3_backend/schedules/cpu/k3-nano/kda_decode.toml"
    context = bench.context(bench.commit({schedule: FILES[schedule].replace("512", "64")}))
    started = time.monotonic()
    result = build.run(context)
    assert result.outcome is Outcome.PASSED
    assert time.monotonic() - started < 10
    arms = context.arms
    host = best_arch(ARCHS)
    assert arms is not None
    assert host is not None
    assert arms.candidate["kda_decode"].digest == arms.best["kda_decode"].digest
    assert (arms.candidate_schedules / "cpu/k3-nano/kda_decode.toml").read_text().count("64") == 1
    assert (arms.best_schedules / "cpu/k3-nano/kda_decode.toml").read_text().count("512") == 1
    assert arms.runtime.op == "runtime"
    assert result.evidence_class is EvidenceClass.HARDWARE
    assert not any(line.get("changed") for line in context.evidence.lines("build"))


def test_arms_are_snapshots(bench: Bench) -> None:
    """Cleaning the cache, or a later build, changes what a running measurement loads."""
    context = bench.context(bench.commit({SOURCE: KERNEL.replace("1e9f", "3e9f")}))
    build.run(context)
    assert context.arms is not None
    for artifact in (*context.arms.candidate.values(), *context.arms.best.values(), context.arms.runtime):
        assert artifact.path.is_relative_to(context.run_dir)
        assert Artifact.read(artifact.path).digest == artifact.digest
    assert context.arms.candidate["kda_decode"].digest != context.arms.best["kda_decode"].digest


def test_compile_errors_name_file_and_line_of_the_repository(bench: Bench) -> None:
    """The author of a patch has to guess what the compiler said, and where."""
    context = bench.context(bench.commit(kernel("inline int broken() { return missing_name; }")))
    result = build.run(context)
    assert result.outcome is Outcome.FAILED
    assert {r.code for r in result.reasons} == {"build.compile_error"}
    assert len(result.reasons) == len(ARCHS)
    line = KERNEL[: KERNEL.index("K3_EXPORT")].count("\n") + 1
    assert result.reasons[0].where == f"{SOURCE}:{line}"
    assert "missing_name" in result.reasons[0].message
    assert "kda_decode for x86-64-v3" in result.reasons[0].message
    errors = [e for e in context.evidence.lines("build") if e["kind"] == "error"]
    assert all("missing_name" in e["stderr"] and e["command"].startswith("g++") for e in errors)
    assert context.arms is None
    assert context.built == ()


def exported(expression: str) -> dict[str, str]:
    return kernel(f'__attribute__((visibility("default"))) const char* text() {{ return {expression}; }}')


def test_objects_that_depend_on_the_date_are_refused(bench: Bench) -> None:
    """Two people cannot get the same object from one commit; or the second attempt finds the first one cached."""
    for _ in range(2):
        result = build.run(bench.context(bench.commit(exported("__DATE__ __TIME__"))))
        assert result.outcome is Outcome.FAILED
        assert {r.code for r in result.reasons} == {"build.not_reproducible"}


def test_objects_do_not_depend_on_the_place(bench: Bench) -> None:
    """The folder of the build enters the object, so that a second machine gets another digest."""
    context = bench.context(bench.commit(exported("__FILE__")))
    assert build.run(context).outcome is Outcome.PASSED
    assert all(str(context.run_dir).encode() not in a.object_path.read_bytes() for a in context.built)


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/hostname", str(Path.home() / ".bashrc"), "/proc/self/environ"])
def test_sources_cannot_read_the_machine(bench: Bench, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An include carries a file or a secret of the machine into an error message or an object."""
    monkeypatch.setenv("SECRET_TOKEN", "canary-77aa")
    context = bench.context(bench.commit({SOURCE: f'#include "{path}"\n' + KERNEL}))
    result = build.run(context)
    assert result.outcome is Outcome.FAILED
    text = json.dumps([r.model_dump() for r in result.reasons]) + (context.run_dir / "raw" / "build.jsonl").read_text()
    assert "canary-77aa" not in text
    assert "root:x:0" not in text


def test_endless_compilation_is_cut(bench: Bench) -> None:
    """A candidate keeps the gatekeeper busy forever, or fills its disk or memory."""
    bomb = (
        "template <int... N> struct List {}; template <int A, int B> constexpr int f() {"
        " return B == 0 ? A : f<A + 1, B - 1>() + f<A + 2, B - 1>(); }\n"
    )
    limits = SETTINGS.build.model_copy(update={"seconds": 2})
    context = bench.context(bench.commit(kernel(bomb + "const int kBomb = f<0, 40>();")))
    context.settings = SETTINGS.model_copy(update={"build": limits})
    started = time.monotonic()
    result = build.run(context)
    assert time.monotonic() - started < 30
    assert result.outcome is Outcome.FAILED
    assert {r.code for r in result.reasons} <= {"build.limit", "build.compile_error"}


def test_huge_objects_are_cut(bench: Bench) -> None:
    """A candidate fills the disk through the linker."""
    limits = SETTINGS.build.model_copy(update={"output_bytes": 1 << 20})
    table = '__attribute__((visibility("default"))) extern const char kHuge[]; const char kHuge[1 << 23] = {1};'
    context = bench.context(bench.commit(kernel(table)))
    context.settings = SETTINGS.model_copy(update={"build": limits})
    cache = bench.repo.root / "build" / "artifacts"
    before = set(cache.iterdir())
    result = build.run(context)
    assert result.outcome is Outcome.FAILED
    assert set(cache.iterdir()) == before


def test_cuda_targets_say_what_is_missing(bench: Bench) -> None:
    """A target that cannot be built here counts as built."""
    result = build.run(bench.context(bench.commit({"README.md": "2\n"}), target="gb300"))
    assert (result.outcome, result.evidence_class) == (Outcome.NOT_EVALUATED, None)
    assert result.reasons[0].code == "build.device"
    assert "sm_103a" in result.reasons[0].message


def test_no_sandbox_means_not_evaluated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bubblewrap the compiler runs on untrusted sources unprotected."""
    gone = Reason(
        code="sandbox.unavailable",
        message="bwrap not found",
        where="sandbox",
        expected="bubblewrap",
        next="apt-get install bubblewrap",
    )
    monkeypatch.setattr(sandbox, "unavailable", lambda: gone)
    result = build.run(bench.context(bench.commit({"README.md": "3\n"})))
    assert result.outcome is Outcome.NOT_EVALUATED
    assert result.reasons[0].next == "apt-get install bubblewrap"


def test_nothing_of_the_build_is_left_behind(bench: Bench) -> None:
    """Scratch folders pile up, or belong to another user."""
    context = bench.context(bench.commit({SOURCE: KERNEL.replace("1e9f", "4e9f")}))
    (context.run_dir / "build-of-a-killed-run").mkdir()
    build.run(context)
    assert sorted(p.name for p in context.run_dir.iterdir()) == ["arms", "raw"]
    cache = bench.repo.root / "build" / "artifacts"
    assert not [p for p in cache.iterdir() if p.name.startswith(".")]
    assert {p.stat().st_uid for p in cache.rglob("*")} == {os.geteuid()}


HEADER = {
    "kind": "header", "ops": ["a"], "base_ops": ["a"], "archs": ["x"], "next": "again",
}  # fmt: skip
UNIT = {
    "kind": "unit",
    "op": "a",
    "arch": "x",
    "changed": True,
    "digests": ["1", "1"],
    "seconds": [1.0, 1.0],
    "object_bytes": 10,
}


@pytest.mark.parametrize(
    ("lines", "outcome", "code"),
    [
        ([HEADER, UNIT], "passed", None),
        ([HEADER, {**UNIT, "changed": False, "digests": ["1"]}], "passed", None),
        ([HEADER, {**UNIT, "digests": ["1"]}], "failed", "build.not_reproducible"),
        ([HEADER, {**UNIT, "digests": ["1", "2"]}], "failed", "build.not_reproducible"),
        ([HEADER, {**UNIT, "digests": []}], "failed", "build.not_reproducible"),
        ([HEADER], "not_evaluated", "build.incomplete_record"),
        ([HEADER, UNIT, UNIT], "not_evaluated", "build.incomplete_record"),
        ([UNIT], "not_evaluated", "build.incomplete_record"),
        ([HEADER, UNIT, HEADER], "not_evaluated", "build.incomplete_record"),
        ([{**HEADER, "base_ops": ["a", "b"]}, UNIT], "failed", "build.op_removed"),
        ([HEADER, {**UNIT, "arch": "y"}], "not_evaluated", "build.incomplete_record"),
    ],
)
def test_decision(lines: list[dict[str, object]], outcome: str, code: str | None) -> None:
    """An incomplete or contradictory record is read as a success."""
    decision = decide(lines)
    assert decision.outcome == outcome
    assert [f.code for f in decision.findings] == ([code] if code else [])
