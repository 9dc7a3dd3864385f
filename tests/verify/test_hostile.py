from __future__ import annotations

from pathlib import Path

import pytest
from gate_fixtures import Bench, make_bench

from harness import sandbox
from harness.records import Outcome
from tests.hostile.make import CASES, Expected, expectations, make_commit, make_patch
from verify.gates import audit, build, scope

STATIC_GATES = {"scope": scope, "build": build, "audit": audit}
EXPECTED = [e for e in expectations() if e.gate in (*STATIC_GATES, "none")]
_REASON = sandbox.unavailable()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory, "hostile")


@pytest.mark.parametrize("expected", [e for e in EXPECTED if e.gate == "scope"], ids=lambda e: e.id)
def test_scope_stops_it(bench: Bench, expected: Expected) -> None:
    """The patch named by the case reaches a compiler or a reviewer."""
    head = make_commit(bench.repo, bench.base, expected.id)
    result = scope.run(bench.context(head, export=False))
    assert result.outcome is Outcome.FAILED
    assert expected.code in {r.code for r in result.reasons}, [r.message for r in result.reasons]
    if expected.code not in ("scope.protected_path", "scope.mode", "scope.unsafe_name"):
        assert all(r.where.rpartition(":")[2].isdigit() for r in result.reasons if r.code == expected.code)


@pytest.mark.skipif(_REASON is not None, reason=_REASON.message if _REASON else "")
@pytest.mark.parametrize("expected", [e for e in EXPECTED if e.gate != "scope"], ids=lambda e: e.id)
def test_later_gates_stop_it_or_let_the_honest_pass(bench: Bench, expected: Expected) -> None:
    """A patch that looks harmless as text passes as an object; or an honest twin is refused."""
    head = make_commit(bench.repo, bench.base, expected.id)
    context = bench.context(head)
    for name, gate in STATIC_GATES.items():
        result = gate.run(context)
        if name == expected.gate:
            assert result.outcome is Outcome.FAILED
            assert expected.code in {r.code for r in result.reasons}, [r.message for r in result.reasons]
            return
        assert result.outcome is Outcome.PASSED, (name, result.reasons)
    assert expected.gate == "none"


def test_patches_apply_and_give_the_same_commit(bench: Bench) -> None:
    """The patch files of end-to-end tests differ from the commits that the gates were tested on."""
    for name in ("edit-planner", "symlink", "executable", "prebuilt-object", "cpp-hidden-text", "build-op-removed"):
        head = make_commit(bench.repo, bench.base, name)
        again = bench.repo.commit_patch(bench.base, make_patch(bench.repo, bench.base, name), f"hostile case {name}")
        assert again == head, name


def test_cases_have_one_row_each() -> None:
    """A case is made but no gate is expected to stop it."""
    assert len(expectations()) == len(CASES)
    assert Path(__file__).parents[1].joinpath("hostile", "cases.toml").is_file()
