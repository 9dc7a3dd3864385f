"""Bad input at the command line: one message in four parts, exit 2, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrack.cli import EXIT_INTERRUPTED, main
from fasttrack.commands import runs
from fasttrack.console import EXIT_FINE, EXIT_USAGE, Output, _People
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from harness.evidence import DiskError
from harness.settings import Target
from verify import capability

ROOT = Path(__file__).parents[2]
TASK = ROOT / "tasks" / "cpu-kda-decode.toml"
LONG = "a" * 300


def problem(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """The one message of a command that must exit with 2."""
    assert main([*words, "--json"]) == EXIT_USAGE
    return json.loads(capsys.readouterr().out)["error"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings and a task in a folder of their own, on which commands work."""
    shutil.copy(ROOT / "harness.toml", tmp_path)
    (tmp_path / "tasks").mkdir()
    shutil.copy(TASK, tmp_path / "tasks")
    monkeypatch.setattr(Workspace, "here", classmethod(lambda cls: cls(tmp_path)))
    return tmp_path


def test_no_command_shows_the_help_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty error follows the help."""
    assert main([]) == EXIT_USAGE
    shown = capsys.readouterr()
    assert "Usage" in shown.out
    assert shown.err == ""


def test_unknown_command_points_to_help_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """The next command fails like the first."""
    assert problem(capsys, "nope")["next"] == "fasttrack --help"
    assert problem(capsys, "verify", "--nope")["next"] == "fasttrack verify --help"


@pytest.mark.parametrize(
    "words", [("bundle", "verify", LONG), ("report", LONG), ("audit", LONG), ("optimize", f"{LONG}.toml")]
)
def test_a_name_too_long_for_the_file_system_is_an_unknown_one(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """Asking whether such a file exists raises."""
    assert any(said in problem(capsys, *words)["what"] for said in ("no such", "unknown task"))


def test_a_disk_that_refuses_is_a_message_and_a_bug_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends in a traceback, or a bug hides behind a message about disks."""
    errors = [OSError(errno.ENOSPC, "No space left on device", "/full/x"), OSError(errno.ECONNRESET, "reset")]

    def refuse(root: Path) -> Any:
        raise errors.pop(0)

    monkeypatch.setattr(runs.RunStore, "list", refuse)
    found = problem(capsys, "runs")
    assert (found["where"], found["next"]) == ("/full/x", "df -h /full; then resume the run")
    assert "No space left" in found["what"]
    with pytest.raises(ConnectionResetError):
        main(["runs"])


def test_interruption_has_its_own_status_and_says_what_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reads as a reject, or as nothing."""

    def interrupt(root: Path) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.RunStore, "list", interrupt)
    assert main(["runs"]) == EXIT_INTERRUPTED
    assert "fasttrack runs" in capsys.readouterr().err


def test_closed_or_full_stdout_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--json >&-` and `> /dev/full` end in a traceback."""
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(DiskError, match="it is closed"):
        Output.write("x")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(DiskError, match="No space left"):
            Output.write("x")


def test_a_reader_that_leaves_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`| head -1` turns an accept into a failure, or stops a run that somebody pipes to a pager."""
    for write in (Output.write, lambda text: _People(file=sys.stdout).print(text)):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            monkeypatch.setattr(sys, "stdout", pipe)
            write("text\n" * 100)
            monkeypatch.undo()


@pytest.mark.parametrize(
    ("old", "new", "where", "says"),
    [
        ('target = "cpu"', 'target = "tpu"', "target", "unknown target 'tpu'"),
        ('final_tier = "pr"', 'final_tier = "huge"', "search.final_tier", "unknown tier 'huge'"),
        ('agent = "tuner"', 'agent = "replay"\npatches = ["gone.patch"]', "search.patches", "no such patch file"),
    ],
)
def test_a_task_that_names_what_is_not_there_is_blamed_by_its_key(
    checkout: Path, old: str, new: str, where: str, says: str
) -> None:
    """The message blames an option that nobody gave, or comes after minutes of tuning."""
    path = checkout / "tasks" / TASK.name
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FasttrackError, match=says) as caught:
        Workspace.here().task(TASK.stem)
    assert caught.value.where == f"{path}: {where}"


def test_broken_settings_are_not_a_problem_of_the_tasks(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tasks lint` lists the same error once per task and exits with 1."""
    assert main(["tasks", "lint"]) == EXIT_FINE
    (checkout / "harness.toml").write_text("x = [")
    assert problem(capsys, "tasks", "lint")["where"] == "harness.toml:1"


def test_unknown_agent_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Several lines of a library's own words, with an address of its manual."""
    found = problem(capsys, "optimize", TASK.stem, "--agent", "nobody", "--dry-run")
    assert found["where"] == "--agent"
    assert "\n" not in found["what"]


def test_missing_compiler_stops_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is left behind that could judge nothing."""
    settings = Workspace(ROOT).settings

    def target(name: str) -> Target:
        return settings.target(name)

    capability.require_compiler(target("cpu"))
    monkeypatch.setattr(capability, "tool", {}.get)
    capability.require_compiler(target("h200"))
    with pytest.raises(FasttrackError, match="next: apt-get install g"):
        capability.require_compiler(target("cpu"))
