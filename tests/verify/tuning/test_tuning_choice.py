"""From points to lines to schedules: what is tried, what is chosen, what is written, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import canonical
from harness.errors import FasttrackError
from k3_backend.aot.cuda.launch import CudaError
from k3_backend.aot.schedule import Bucket, Schedule, Tunable, render
from verify.kit.store import Results
from verify.tuning.choose import choose, schedule_of
from verify.tuning.manifest import RAW, Timed, TuningManifest, read_manifest
from verify.tuning.measure import DeviceLostError, in_use
from verify.tuning.receive import read_results
from verify.tuning.run import broken_points
from verify.tuning.space import parse_vary, points
from verify.tuning.summary import raw_lines, summary

SPACE = (Tunable("rows", (16, 32), "rows"), Tunable("stages", (2, 4, 6), "slots"))
SLOW, FAST = {"rows": 16, "stages": 2}, {"rows": 32, "stages": 4}


def timed(rows: int, n: int = 96, current: dict[str, int] | None = SLOW) -> Timed:
    return Timed("k3-slice-tp8", {"N": n}, rows, current, (SLOW, FAST), ("arms/points/a/0", "arms/points/a/0"))


def manifest(*calls: Timed) -> TuningManifest:
    left_out = ({"geometry": "k3-slice-tp8", "choice": {}, "reason": "too much shared memory"},)
    return TuningManifest(
        op="input_projection", target="h200", arch="sm_90a", compute_capability=(9, 0), commit="c" * 40, calls=calls,
        left_out=left_out,
    )  # fmt: skip


def lines(call: Timed, slow: float | None, fast: float | None, spread: float = 0.01) -> list[dict[str, Any]]:
    """Raw lines of a call with these medians; null: the point was wrong."""

    def samples(middle: float) -> list[float]:
        return [middle * (1 + spread * (at - 10) / 10) for at in range(21)]

    common = {"call": call.key, "geometry": call.geometry, "sizes": dict(call.sizes), "rows": call.rows, "bytes": 1000}
    result: list[dict[str, Any]] = [{"kind": "standard", **common, "us": samples(30.0)}]
    for point, us in ((SLOW, slow), (FAST, fast)):
        wrong = None if us is not None else "gaussian: out: element"
        result.append({"kind": "point", **common, "tunables": point, "wrong": wrong, "us": us and samples(us)})
    return result


def test_without_vary_every_change_of_one_tunable_is_tried_and_the_centre_comes_first() -> None:
    found = points(SLOW, SPACE, [])
    assert found[0] == SLOW
    assert len(found) == 1 + 1 + 2
    assert all(sum(point[name] != SLOW[name] for name in SLOW) <= 1 for point in found)


def test_varied_tunables_are_crossed_and_need_no_centre_if_all_are() -> None:
    groups = parse_vary(["rows stages=4,6", "rows=16 stages=2"], SPACE)
    assert points(SLOW, SPACE, groups[:1]) == [SLOW, *points(None, SPACE, groups[:1])]
    assert len(points(None, SPACE, groups[:1])) == 4
    assert len(points(None, SPACE, groups)) == 5
    with pytest.raises(FasttrackError, match="no bucket to start from, and no values for stages"):
        points(None, SPACE, parse_vary(["rows"], SPACE))


@pytest.mark.parametrize("text", ["tiles", "rows=17", "rows=16,16", "rows=x", "rows rows", ""])
def test_a_value_that_is_not_declared_is_refused(text: str) -> None:
    with pytest.raises(FasttrackError, match="names no declared tunable") as refused:
        parse_vary([text], SPACE)
    assert "stages: 2, 4, 6" in refused.value.expected


def test_the_fastest_right_point_is_chosen() -> None:
    call = timed(8)
    (choice,) = choose(manifest(call), lines(call, 20.0, 10.0))
    assert choice.point == FAST
    assert choice.us[1] == 10.0
    assert choice.before is not None
    assert choice.before[1] == 20.0
    assert choice.standard[1] == 30.0


def test_a_gain_within_noise_leaves_the_schedule_as_it_is() -> None:
    call = timed(8)
    assert choose(manifest(call), lines(call, 20.0, 19.9))[0].point == SLOW
    assert choose(manifest(call), lines(call, 20.0, 19.0, spread=0.2))[0].point == SLOW


def test_a_wrong_point_is_never_chosen_and_a_call_without_a_right_one_is_left_out() -> None:
    call = timed(8)
    assert choose(manifest(call), lines(call, 20.0, None))[0].point == SLOW
    assert choose(manifest(call), lines(call, None, 25.0))[0].point == FAST
    assert choose(manifest(call), lines(call, None, None)) == ()


def test_a_call_whose_points_are_not_all_timed_is_left_out() -> None:
    call = timed(8)
    assert choose(manifest(call), lines(call, 20.0, 10.0)[:-1]) == ()


def test_buckets_end_at_timed_rows_merge_when_equal_and_name_sizes_only_where_they_differ() -> None:
    current = Schedule("input_projection", "k3-slice-tp8", SPACE, (Bucket(64, SLOW), Bucket(128, FAST)))
    calls = [timed(8), timed(16), timed(64)]
    same = choose(
        manifest(*calls), [line for call in calls for line in lines(call, 20.0, 10.0 if call.rows < 64 else 30.0)]
    )
    assert schedule_of(current, same).buckets == (Bucket(16, FAST), Bucket(64, SLOW), Bucket(128, FAST))
    both = [timed(8), timed(8, n=48)]
    other = choose(manifest(*both), [*lines(both[0], 20.0, 10.0), *lines(both[1], 10.0, 20.0)])
    found = schedule_of(current, other)
    assert [(b.max_rows, dict(b.when), dict(b.values)) for b in found.buckets] == [
        (8, {"N": 96}, FAST), (64, {"N": 96}, SLOW), (128, {"N": 96}, FAST),
        (64, {"N": 48}, SLOW), (128, {"N": 48}, FAST),
    ]  # fmt: skip
    assert found.lookup(9, {"N": 96}) == SLOW
    assert "N = 48" in render(found)


def test_rows_below_and_above_the_timed_ones_keep_their_buckets() -> None:
    current = Schedule("input_projection", "k3-slice-tp8", SPACE, (Bucket(4, SLOW), Bucket(128, FAST)))
    call = timed(16)
    found = schedule_of(current, choose(manifest(call), lines(call, 20.0, 30.0)))
    assert found.buckets == (Bucket(16, SLOW), Bucket(128, FAST))
    found = schedule_of(current, choose(manifest(call), lines(call, 20.0, 10.0)))
    assert found.buckets == (Bucket(4, SLOW), Bucket(128, FAST))


def test_where_no_schedule_was_none_begins_that_is_slower_than_the_standard_path() -> None:
    """A bucket that nobody had would make calls slower than without it; one below faster rows must stay."""
    current = Schedule("input_projection", "k3-slice-tp8", SPACE, (Bucket(4, SLOW),))
    calls = [timed(8, current=None), timed(16, current=None), timed(24, current=None)]
    medians = (40.0, 20.0, 29.9)  # standard: 30
    entries = [line for call, us in zip(calls, medians, strict=True) for line in lines(call, us + 1, us)]
    assert schedule_of(current, choose(manifest(*calls), entries)).buckets == (Bucket(4, SLOW), Bucket(16, FAST))
    slower = [line for call in calls for line in lines(call, 41.0, 40.0)]
    assert schedule_of(current, choose(manifest(*calls), slower)).buckets == current.buckets


def stored(folder: Path, *, drop: int | None = None) -> TuningManifest:
    """Results of a finished run."""
    call = timed(8)
    named = manifest(call)
    results = Results.open(folder, named.digest, named.document(), resume=False)
    results.append(RAW, {"kind": "header", "method": "tuning/1", "machine": {"gpu": {"name": "H200", "driver": "580"}}})
    for line in lines(call, 20.0, 10.0):
        results.append(RAW, line)
    results.close()
    if drop is not None:
        path = folder / "raw" / f"{RAW}.jsonl"
        kept = path.read_bytes().splitlines(keepends=True)
        del kept[drop]
        path.write_bytes(b"".join(kept))
    return named


def test_results_come_back_whole_and_are_summed_up(tmp_path: Path) -> None:
    named = stored(tmp_path / "R")
    received = read_results(tmp_path / "R")
    assert received.manifest == named
    text = summary(received, choose(received.manifest, received.lines))
    assert "| k3-slice-tp8 N=96 M=8 | 30.00 (29.76-30.24) | 20.00 (19.84-20.16) | 10.00 (9.92-10.08) |" in text
    assert "1x H200, driver 580" in text
    assert "Left out, 1 points: too much shared memory." in text
    kept = [canonical.parse(line.encode(), form="line") for line in raw_lines(received).splitlines()]
    assert [line.get("us") for line in kept[1:]] == [[29.76, 30.0, 30.24], [19.84, 20.0, 20.16], [9.92, 10.0, 10.08]]


def test_a_dropped_line_or_a_foreign_manifest_is_refused(tmp_path: Path) -> None:
    stored(tmp_path / "R", drop=1)
    with pytest.raises(FasttrackError, match="does not follow from the lines before it"):
        read_results(tmp_path / "R")
    stored(tmp_path / "S")
    (tmp_path / "S" / "manifest.json").write_bytes(manifest(timed(16)).document())
    with pytest.raises(FasttrackError, match="is not about the archive"):
        read_results(tmp_path / "S")


def test_a_manifest_reads_back_and_an_edited_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest(timed(8), timed(16)).document())
    assert read_manifest(path) == manifest(timed(8), timed(16))
    path.write_bytes(path.read_bytes().replace(b'"rows": 16', b'"rows": 32'))
    with pytest.raises(FasttrackError, match="its digest does not follow"):
        read_manifest(path)


def test_a_point_that_broke_a_context_is_known_to_the_next_session() -> None:
    call = timed(8)
    said = {"kind": "broken", "call": call.key, "tunables": FAST, "said": "the device failed"}
    assert broken_points(manifest(call, timed(16)), [said]) == {call.key: {1: "the device failed"}}
    assert choose(manifest(call), [said, *lines(call, 20.0, None)])[0].point == SLOW


def test_a_failure_is_the_points_in_use_and_never_blamed_on_one_for_the_standard_path() -> None:
    """A point that fails only when it is replayed would end the session without a name, as if all were to blame."""
    failure = CudaError("unspecified launch failure", where="replay", expected="a result", next="run it again")
    with pytest.raises(DeviceLostError, match=r"the device failed: .*unspecified launch failure") as lost, in_use(3):
        raise failure
    assert lost.value.index == 3
    with pytest.raises(CudaError), in_use(None):
        raise failure
