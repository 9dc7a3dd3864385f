from __future__ import annotations

import errno
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from harness.errors import FasttrackError
from harness.evidence import DiskError, JsonLines, write_atomic
from harness.records import EvidenceClass, GateResult, Measurement, Outcome
from harness.store import EvidenceSink, RunStore, new_run_id
from harness.tables import Tables

ROOT = Path(__file__).resolve().parents[2]
HEAD = "a" * 40


def child(code: str, *args: object) -> subprocess.Popen[bytes]:
    """A process that runs code on this project; it prints a line when it is ready."""
    argv = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": os.environ["PATH"]}
    )


def rows(run: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(run / "run.sqlite") as connection:
        return connection.execute("select number, key, outcome from candidates order by number").fetchall()


def test_run_ids_sort_by_time_and_do_not_repeat() -> None:
    """Runs overwrite each other, or the list of runs is out of order."""
    ids = [new_run_id() for _ in range(200)]
    assert len(set(ids)) == 200
    assert [i.split("-")[0] for i in ids] == sorted(i.split("-")[0] for i in ids)


def test_everything_proposed_appears_once_with_its_outcome(tmp_path: Path) -> None:
    """A proposal disappears, appears twice, or changes its outcome afterwards."""
    with RunStore.create(tmp_path, {"task": "t"}) as run:
        first = run.propose("tuner:1", head=HEAD, origin="tuner", note="try 32")
        assert run.propose("tuner:1", head=HEAD, origin="tuner") == first
        second = run.propose("tuner:2", head="b" * 40, origin="tuner")
        run.finish(first.number, "rejected", "kernels: wrong numbers")
        run.finish(first.number, "rejected")
        with pytest.raises(ValueError, match="cannot become accepted"):
            run.finish(first.number, "accepted")
        with pytest.raises(ValueError, match="not one of"):
            run.finish(second.number, "great")  # type: ignore[arg-type]
        with pytest.raises(KeyError):
            run.finish(9, "rejected")
        with pytest.raises(FasttrackError, match="one commit per proposal key"):
            run.propose("tuner:2", head=HEAD, origin="tuner")
        assert run.candidate_dir(first).name == "001-aaaaaaaaaaaa"
        assert run.candidate_dir(second).is_dir()
    with RunStore.read(tmp_path, run.run_id) as again:
        assert [(c.number, c.key, c.outcome, c.reason) for c in again.candidates()] == [
            (1, "tuner:1", "rejected", "kernels: wrong numbers"), (2, "tuner:2", None, None),
        ]  # fmt: skip
        assert again.spec == {"task": "t"}
        with pytest.raises(RuntimeError, match="reading only"):
            again.put("k", 1)
    assert rows(run.path) == [(1, "tuner:1", "rejected"), (2, "tuner:2", None)]


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    """Two runs share a file or a lock."""
    with RunStore.create(tmp_path, {}) as one, RunStore.create(tmp_path, {}) as two:
        one.put("who", 1)
        two.put("who", 2)
        assert (one.get("who"), two.get("who"), one.path == two.path) == (1, 2, False)
    assert RunStore.list(tmp_path) == tuple(sorted((one.run_id, two.run_id)))


def test_lock_names_its_owner_and_dies_with_it(tmp_path: Path) -> None:
    """Two writers work on one run; or a killed one blocks its run forever."""
    with RunStore.create(tmp_path, {}) as run:
        pass
    holder = child(
        """
        import sys, time
        from pathlib import Path
        from harness.store import RunStore
        run = RunStore.open(Path(sys.argv[1]), sys.argv[2])
        print("ready", flush=True)
        time.sleep(60)
        """,
        tmp_path,
        run.run_id,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n"
    with pytest.raises(
        FasttrackError, match=f"pid {holder.pid} on .*lock|lock: another process works on this run \\(pid {holder.pid}"
    ):
        RunStore.open(tmp_path, run.run_id)
    RunStore.read(tmp_path, run.run_id).close()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    RunStore.open(tmp_path, run.run_id).close()


def test_unknown_runs_are_clear_errors(tmp_path: Path) -> None:
    """A mistyped run id ends in a traceback, or reads another folder."""
    for bad in ("nope", "../x", "20260101T000000Z-00000000"):
        with pytest.raises(FasttrackError, match="unknown run"):
            RunStore.open(tmp_path, bad)


def test_budgets_survive_resumption(tmp_path: Path) -> None:
    """Resuming a run sets its spending limits back to zero."""
    with RunStore.create(tmp_path, {}) as run:
        run.spend("usd", 1.5)
    with RunStore.open(tmp_path, run.run_id) as again:
        assert again.spend("usd", 0.25) == 1.75
        assert again.spent("minutes") == 0.0
        for bad in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="cannot spend"):
                again.spend("usd", bad)


def test_damaged_tables_are_rebuilt_from_history(tmp_path: Path) -> None:
    """A torn sqlite file loses the run, or stale rows survive in it."""
    with RunStore.create(tmp_path, {}) as run:
        run.propose("a", head=HEAD, origin="t")
        run.put("phase", "measure")
    database = run.path / "run.sqlite"
    for damage in (b"not a database at all" * 50, b"", database.read_bytes()[:3000]):
        database.write_bytes(damage)
        RunStore.open(tmp_path, run.run_id).close()
        assert rows(run.path) == [(1, "a", None)]
    database.unlink()
    RunStore.open(tmp_path, run.run_id).close()
    assert rows(run.path) == [(1, "a", None)]


def test_damaged_history_is_refused_with_its_line(tmp_path: Path) -> None:
    """Lost or edited events go unnoticed and the run continues from a wrong state."""
    with RunStore.create(tmp_path, {}) as run:
        for index in range(4):
            run.put("k", index)
    events = run.path / "events.jsonl"
    lines = events.read_bytes().splitlines(keepends=True)
    events.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(FasttrackError, match=r"events\.jsonl:2: event 3 follows event 1"):
        RunStore.open(tmp_path, run.run_id)
    events.write_bytes(b"".join([lines[0], b"{broken\n", *lines[2:]]))
    with pytest.raises(FasttrackError, match=r"events\.jsonl:2: damaged line"):
        RunStore.open(tmp_path, run.run_id)


@pytest.mark.parametrize("torn", [b'{"k', b"\x00\x00\x00", b'{"kind":"x"}', b"\xff" * 100_000])
def test_torn_last_line_is_cut_at_the_next_write(tmp_path: Path, torn: bytes) -> None:
    """The rest of an interrupted write joins the next line, or readers stumble over it."""
    file = JsonLines(tmp_path / "raw" / "perf.jsonl")
    file.append([{"n": 1}, {"n": 2}])
    with file.path.open("ab") as raw:
        raw.write(torn)
    assert file.read() == [{"n": 1}, {"n": 2}]
    again = JsonLines(file.path)
    again.append([{"n": 3}])
    assert again.read() == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_lines_are_canonical_and_finite(tmp_path: Path) -> None:
    """The digest of a raw file depends on dictionary order, or NaN enters a record."""
    sink = EvidenceSink(tmp_path)
    sink.append("perf", {"b": 1, "a": "ü"})
    assert (tmp_path / "raw" / "perf.jsonl").read_bytes() == b'{"a":"\\u00fc","b":1}\n'
    before = sink.ref("perf")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            sink.append("perf", {"x": bad})
    assert sink.ref("perf") == before
    assert before.path == "raw/perf.jsonl"
    for name in ("../x", "A", "a/b", ""):
        with pytest.raises(ValueError, match="evidence name"):
            sink.append(name, {})


def test_gate_results_round_trip(tmp_path: Path) -> None:
    """A finished gate is judged again after a resume, or its stored result differs."""
    sink = EvidenceSink(tmp_path)
    assert sink.gate("scope") is None
    result = GateResult(
        gate="scope",
        protocol_id="scope/1",
        outcome=Outcome.PASSED,
        evidence_class=EvidenceClass.STATIC,
        metrics={"files": Measurement(value=1, unit="files")},
        seconds=0.5,
    )
    sink.save_gate(result)
    assert EvidenceSink(tmp_path).gate("scope") == result
    (tmp_path / "gates" / "scope.json").write_text("{}")
    with pytest.raises(FasttrackError, match="damaged gate result"):
        sink.gate("scope")


FULL_DISK = """
    import json, resource, sys
    from pathlib import Path
    from harness.errors import FasttrackError
    from harness.evidence import write_atomic
    from harness.store import EvidenceSink
    sink = EvidenceSink(Path(sys.argv[1]))
    sink.append("perf", {"n": 0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # every write beyond 100 bytes of a file fails part-way
    said = []
    file = Path(sys.argv[1]) / "f"
    too_much = (lambda: sink.append("perf", {"x": "y" * 500}), lambda: write_atomic(file, b"z" * 500))
    for attempt in too_much:
        try:
            attempt()
        except FasttrackError as error:
            said.append(str(error))
    sink.append("perf", {"n": 1})
    print(json.dumps(said))
"""


def test_full_disk_keeps_what_was_stored(tmp_path: Path) -> None:
    """A full disk leaves half a line behind, replaces a file by half of it, or ends in a traceback."""
    write_atomic(tmp_path / "f", b"old")
    done = child(FULL_DISK, tmp_path)
    stdout, stderr = done.communicate(timeout=60)
    assert done.returncode == 0, stderr.decode()
    first, second = json.loads(stdout)
    assert "perf.jsonl: cannot use the file (File too large)" in first
    assert "df -h" in first
    assert "cannot use the file" in second
    assert EvidenceSink(tmp_path).lines("perf") == [{"n": 0}, {"n": 1}]
    assert (tmp_path / "f").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "raw"]


def test_unwritable_place_is_a_clear_error(tmp_path: Path) -> None:
    """A read-only or wrong folder ends in a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FasttrackError, match="cannot use the file"):
        RunStore.create(tmp_path / "file" / "runs", {})
    with pytest.raises(FasttrackError, match="cannot use the file"):
        EvidenceSink(tmp_path / "file").append("perf", {})


WRITER = """
    import sys
    from pathlib import Path
    from harness.store import RunStore
    root, run_id = Path(sys.argv[1]), sys.argv[2]
    with RunStore.open(root, run_id) as run:
        print("ready", flush=True)
        while True:
            number = len(run.candidates()) + 1
            row = run.propose(f"p{number}", head=f"{number:040x}", origin="t")
            sink = run.evidence(row)
            done = len(sink.lines("perf"))
            for block in range(done, 3):
                sink.append("perf", {"block": block, "pad": "x" * 3000})
            run.finish(row.number, "rejected", None)
            run.spend("candidates", 1)
"""
RESUME = """
    import sys
    from pathlib import Path
    from harness.store import RunStore
    with RunStore.open(Path(sys.argv[1]), sys.argv[2]) as run:
        for row in run.candidates():
            sink = run.evidence(row)
            for block in range(len(sink.lines("perf")), 3):
                sink.append("perf", {"block": block, "pad": "x" * 3000})
            if row.outcome is None:
                run.finish(row.number, "rejected", None)
"""


def test_kill_at_any_moment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """A kill -9 leaves a candidate or block missing, doubled or half written."""
    rng = random.Random(7)
    with RunStore.create(tmp_path, {}) as run:
        pass
    seen = 0
    for _ in range(6):
        writer = child(WRITER, tmp_path, run.run_id)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n", writer.communicate()[1].decode()
        time.sleep(rng.uniform(0.02, 0.35))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        resumed = child(RESUME, tmp_path, run.run_id)
        _, stderr = resumed.communicate(timeout=60)
        assert resumed.returncode == 0, stderr.decode()
        with RunStore.read(tmp_path, run.run_id) as check:
            candidates = check.candidates()
            assert [c.number for c in candidates] == list(range(1, len(candidates) + 1))
            assert all(c.outcome == "rejected" for c in candidates)
            assert len({c.key for c in candidates}) == len(candidates) >= seen
            for row in candidates:
                assert [line["block"] for line in check.evidence(row).lines("perf")] == [0, 1, 2]
            seen = len(candidates)
        assert rows(run.path) == [(c.number, c.key, c.outcome) for c in candidates]
    assert seen > 0


def test_full_disk_while_a_run_opens_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock's owner or the tables do not fit any more: a traceback, or a lock that stays taken."""

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_tables(tables: Tables) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database or disk is full")

    with RunStore.create(tmp_path, {}) as run:
        run_id = run.run_id
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(DiskError, match="No space left"):
            RunStore.open(tmp_path, run_id)
    with monkeypatch.context() as patched:
        patched.setattr(Tables, "_connect", no_tables)
        with pytest.raises(DiskError, match="disk is full"):
            RunStore.open(tmp_path, run_id)
    RunStore.open(tmp_path, run_id).close()
