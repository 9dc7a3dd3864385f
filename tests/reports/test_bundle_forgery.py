"""Forgeries whose digests are all consistent: only deciding again can tell."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bundle_fixtures as fixtures
import pytest
import raw_lines
from forger import Forger

import reports
from harness.errors import FasttrackError
from reports import CheckWord


def codes(bundle: Path) -> set[str]:
    check = reports.verify_bundle(bundle)
    assert check.word is CheckWord.REFUSED, check.text()
    return {reason.code for reason in check.reasons}


def test_the_forger_changes_nothing_by_itself(accepted: Path, tmp_path: Path) -> None:
    """If publishing alone broke a bundle, the tests below would pass for the wrong reason."""
    assert Forger(accepted).publish(tmp_path) == tmp_path / accepted.name
    assert reports.verify_bundle(tmp_path / accepted.name).ok


@pytest.fixture(scope="module")
def rejected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose kernels gate failed."""
    return fixtures.make_bundle(
        tmp_path_factory.mktemp("rejected"), lines={"kernels": partial(raw_lines.kernels_lines, factor=50.0)}
    )


def test_a_failed_gate_cannot_be_declared_passed(rejected: Path, tmp_path: Path) -> None:
    """The plainest lie."""
    forger = Forger(rejected)
    forger.edit("gates/kernels.json", lambda result: result.update(outcome="passed", reasons=[]))
    forger.edit("bundle.json", lambda b: b["verdict"].update(word="incomplete", failed=[]))
    assert "bundle.outcome" in codes(forger.publish(tmp_path))


def test_a_verdict_cannot_differ_from_its_gates(rejected: Path, tmp_path: Path) -> None:
    """A reader may look at the verdict word only."""
    forger = Forger(rejected)
    forger.edit("bundle.json", lambda b: b["verdict"].update(word="accept", failed=[], unmet=[]))
    assert "bundle.verdict" in codes(forger.publish(tmp_path))


def test_requirements_cannot_be_dropped_from_the_verdict_alone(rejected: Path, tmp_path: Path) -> None:
    """The verdict's requirements are those of the target."""
    forger = Forger(rejected)
    forger.edit("bundle.json", lambda b: b["verdict"]["required"].pop("kernels"))
    with pytest.raises(ValueError, match="required gates"):
        forger.publish(tmp_path)
    forger = Forger(rejected)
    forger.edit("bundle.json", lambda b: b["verdict"]["required"].pop("kernels"))
    assert codes(forger.publish(tmp_path, render=False)) == {"bundle.schema"}


def test_metrics_and_reasons_follow_from_raw_lines(accepted: Path, rejected: Path, tmp_path: Path) -> None:
    """A prettier number beside the right outcome is still a lie."""
    forger = Forger(accepted)
    forger.edit("gates/perf.json", lambda result: result["metrics"]["worst_ratio_best"].update(value=2.0))
    assert codes(forger.publish(tmp_path / "a")) == {"bundle.metric"}
    forger = Forger(accepted)
    forger.edit(
        "gates/perf.json",
        lambda r: r["metrics"].update(extra={"value": 9.0, "unit": "x", "low": None, "high": None, "samples": None}),
    )
    assert codes(forger.publish(tmp_path / "b")) == {"bundle.metric"}
    forger = Forger(rejected)
    forger.edit("gates/kernels.json", lambda result: result["reasons"][0].update(message="a harmless difference"))
    assert "bundle.reasons" in codes(forger.publish(tmp_path / "c"))


def drop(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[:1] + lines[2:]


def duplicate(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[:2] + lines[1:]


def cut(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[:-2]


def headless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[1:]


@pytest.mark.parametrize("spoil", [drop, duplicate, cut, headless])
@pytest.mark.parametrize("gate", ["scope", "build", "audit", "kernels", "features", "evals", "perf"])
def test_dropped_and_repeated_raw_lines_are_refused(
    accepted: Path, tmp_path: Path, gate: str, spoil: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> None:
    """Leaving out the slow block is the oldest trick; the plan in the header has to notice."""
    forger = Forger(accepted)
    spoiled = spoil(forger.lines(gate))
    forger.put_lines(gate, spoiled)
    codes(forger.publish(tmp_path, render=False))


def test_reordered_lines_that_change_nothing_still_need_new_digests(accepted: Path, tmp_path: Path) -> None:
    """Order carries time; without a new manifest it cannot change at all."""
    forger = Forger(accepted)
    lines = forger.lines("kernels")
    forger.put_lines("kernels", [lines[0], *reversed(lines[1:])])
    published = forger.publish(tmp_path)
    assert published.name != accepted.name
    assert reports.verify_bundle(published).digest != reports.verify_bundle(accepted).digest


def test_a_wrong_number_of_lines_is_refused(accepted: Path, tmp_path: Path) -> None:
    """bundle.json states how many lines each raw file has."""
    forger = Forger(accepted)
    forger.edit("bundle.json", lambda b: b["gates"][0]["raw"].update(lines=99))
    assert codes(forger.publish(tmp_path, render=False, refresh=False)) == {"bundle.line_count"}


@pytest.mark.parametrize("form", ["md", "html"])
def test_a_swapped_report_is_refused(accepted: Path, tmp_path: Path, form: str) -> None:
    """People read the page, not the records."""
    forger = Forger(accepted)
    forger.files[f"report.{form}"] = forger.files[f"report.{form}"].replace(b"2.1", b"9.1", 1) + b"\n"
    assert codes(forger.publish(tmp_path, render=False)) == {"bundle.report"}


def test_derived_tables_are_the_raw_lines(accepted: Path, tmp_path: Path) -> None:
    """Dashboards query the Parquet files."""
    forger = Forger(accepted)
    forger.files["derived/perf.parquet"] = forger.files["derived/audit.parquet"]
    assert codes(forger.publish(tmp_path / "a")) == {"bundle.derived"}
    forger = Forger(accepted)
    forger.files["derived/perf.parquet"] = b"PAR1 not really PAR1"
    assert codes(forger.publish(tmp_path / "b")) == {"bundle.derived"}


def test_the_patch_is_the_one_that_was_judged(accepted: Path, tmp_path: Path) -> None:
    """Another patch under a good verdict is how bad code would get in."""
    forger = Forger(accepted)
    forger.files["candidate.patch"] += b"+more\n"
    assert codes(forger.publish(tmp_path)) == {"bundle.patch"}


def test_artifacts_are_those_that_were_built_and_listed(accepted: Path, tmp_path: Path) -> None:
    """One digest chain from the build's raw lines to the object file."""
    forger = Forger(accepted)
    path = "artifacts/kda_decode/x86-64-v3/kda_decode.so"
    forger.files[path] += b"\0"
    assert codes(forger.publish(tmp_path / "a")) == {"bundle.digest"}
    forger = Forger(accepted)
    forger.edit("bundle.json", lambda b: b["candidate"]["artifacts"].update({"kda_decode/x86-64-v3": "0" * 64}))
    assert codes(forger.publish(tmp_path / "b")) == {"bundle.artifacts", "bundle.identity"}
    forger = Forger(accepted)
    manifest = "artifacts/kda_decode/x86-64-v3/manifest.json"
    forger.files[manifest] = forger.files[manifest].replace(b"x86-64-v3", b"x86-64-v2")
    assert codes(forger.publish(tmp_path / "c")) == {"bundle.artifacts"}
    forger = Forger(accepted)
    forger.files[manifest] = b"[]"
    assert codes(forger.publish(tmp_path / "d")) == {"bundle.artifacts"}


def test_the_planned_cells_are_those_of_the_tier(accepted: Path, tmp_path: Path) -> None:
    """Fewer cells would make "every cell" cheaper."""
    forger = Forger(accepted)
    forger.edit("bundle.json", lambda b: b["cells"].pop())
    assert codes(forger.publish(tmp_path)) == {"bundle.cells"}


def test_raw_lines_name_the_candidate_they_are_about(accepted: Path, tmp_path: Path) -> None:
    """Another candidate's measurements under this one's name decide the same way."""
    forger = Forger(accepted)
    lines = forger.lines("scope")
    lines[0]["head"] = "f" * 40
    forger.put_lines("scope", lines)
    assert codes(forger.publish(tmp_path)) == {"bundle.identity"}


@pytest.mark.parametrize(
    "weaken",
    [
        lambda header: header.update(band=0.09),
        lambda header: header.update(candidates=1),
        lambda header: header.update(tier="full"),
        lambda header: header["cells"][0]["claims"].pop(0),
        lambda header: header["cells"][0]["claims"][0].update(rule="not_slower"),
        lambda header: header["arms"]["candidate"]["artifacts"].update(kda_decode="9" * 64),
    ],
)
def test_a_weaker_performance_plan_is_refused(
    accepted: Path, tmp_path: Path, weaken: Callable[[dict[str, Any]], None]
) -> None:
    """A wide band, a larger budget or a missing claim would make the same numbers pass."""
    forger = Forger(accepted)
    lines = forger.lines("perf")
    weaken(lines[0])
    forger.put_lines("perf", lines)
    assert codes(forger.publish(tmp_path, render=False)) & {"bundle.identity", "bundle.plan"}


def test_the_tasks_cells_have_to_be_claimed(tmp_path: Path) -> None:
    """A task asks for strictly faster in its cells; a plan that asks for less does not answer it."""
    cells = fixtures.SETTINGS.target("cpu").cells(fixtures.SETTINGS.tier("smoke"))[:1]
    with pytest.raises(FasttrackError, match="does not claim"):
        fixtures.make_bundle(tmp_path, changes={"task_cells": cells})


def test_another_protocol_is_not_checked_rather_than_believed(accepted: Path, tmp_path: Path) -> None:
    """An unknown protocol id must not become a way around deciding again."""
    forger = Forger(accepted)
    forger.edit("gates/audit.json", lambda result: result.update(protocol_id="audit/999"))
    check = reports.verify_bundle(forger.publish(tmp_path))
    assert check.word is CheckWord.PARTIAL
    assert check.verdict is None
    assert any("audit/999" in claim.note for claim in check.claims)


def test_another_report_version_is_not_checked_rather_than_believed(accepted: Path, tmp_path: Path) -> None:
    """A page of another release cannot be compared byte by byte, and that has to be said."""
    forger = Forger(accepted)
    forger.edit("bundle.json", lambda b: b.update(render_version=999))
    check = reports.verify_bundle(forger.publish(tmp_path))
    assert check.word is CheckWord.PARTIAL


def test_not_evaluated_has_no_numbers_and_a_fitting_error_record(tmp_path: Path) -> None:
    """A number beside not_evaluated would be read as a measurement."""
    bundle = fixtures.make_bundle(tmp_path / "made", not_evaluated="features")
    metric = {"value": 1.0, "unit": "x", "low": None, "high": None, "samples": None}
    forger = Forger(bundle)
    forger.edit("gates/features.json", lambda result: result["metrics"].update(score=metric))
    assert "bundle.metric" in codes(forger.publish(tmp_path / "a"))
    forger = Forger(bundle)
    forger.files["raw/features_error.jsonl"] = b'{"gate":"perf","kind":"error","protocol":"perf/1"}\n'
    assert "bundle.error_record" in codes(forger.publish(tmp_path / "b"))


def test_records_name_all_files(accepted: Path, tmp_path: Path) -> None:
    """A file that the manifest lists but no record explains could mislead a reader."""
    forger = Forger(accepted)
    forger.files["README.md"] = b"This candidate is great.\n"
    assert codes(forger.publish(tmp_path / "a")) == {"bundle.extra_file"}
    forger = Forger(accepted)
    forger.edit("bundle.json", lambda b: b["patch"].update(path="report.md"))
    assert "bundle.layout" in codes(forger.publish(tmp_path / "b", render=False))
    forger = Forger(accepted)
    del forger.files["raw/audit.jsonl"]
    assert codes(forger.publish(tmp_path / "c", render=False)) == {"bundle.missing_file"}


def test_unknown_schema_versions_and_fields_are_refused(accepted: Path, tmp_path: Path) -> None:
    """A reader that skips what it does not know would skip what matters."""
    for index, change in enumerate(({"schema_version": 4}, {"surprise": 1}, {"seconds": "287"}, {"seconds": 287})):
        forger = Forger(accepted)
        forger.edit("bundle.json", lambda b, c=change: b.update(c))
        found = codes(forger.publish(tmp_path / str(index), render=False))
        assert found <= {"bundle.schema_version", "bundle.schema", "bundle.not_canonical"}
