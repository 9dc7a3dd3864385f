"""Running git as plumbing: everything that configuration, environment or a tree could switch on is switched off.

No hooks, filters, attributes, external diffs, aliases, pagers, prompts, replacement objects or lazy fetches; nothing of
the user's environment but the search path. Says nothing about what the commands mean.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from harness.errors import FasttrackError
from harness.evidence import DISK_ERRNOS, DiskError

__all__ = ["EMPTY_TREE", "GitProcess", "first_line"]

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Id of the tree without entries."""

_TIMEOUT_S = 120.0
_DISK_SIGNS = tuple(f": {os.strerror(number)}".encode() for number in DISK_ERRNOS)
_CONFIG = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.attributesFile=/dev/null", "core.autocrlf=false",
    "core.quotePath=true", "core.untrackedCache=false", "protocol.allow=never", "apply.whitespace=nowarn", "gc.auto=0",
    "maintenance.auto=false", "diff.orderFile=/dev/null", "diff.external=", "log.showSignature=false",
    f"attr.tree={EMPTY_TREE}",
)  # fmt: skip


class GitProcess:
    """Runs git in one repository.

    Args:
        root: top folder of the working tree, or any folder inside it.
        git_dir: the repository's own folder.
    """

    def __init__(self, root: Path, git_dir: Path) -> None:
        self.root = root
        self.git_dir = git_dir

    def run(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        check: bool = True,
        bare: bool = True,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one git command. `bare` hides the working tree from it; `check` turns a bad status into an error.

        Raises:
            DiskError: git could not write.
            FasttrackError: git is missing or takes too long, or (with `check`) the command failed.
        """
        if shutil.which("git") is None:
            raise FasttrackError(
                "git is not installed", where="PATH", expected="git 2.30 or later", next="fasttrack doctor"
            )
        command = ["git", "--no-pager", "--literal-pathspecs"]
        for setting in (*_CONFIG, f"safe.directory={self.root}", f"safe.directory={self.git_dir}"):
            command += ["-c", setting]
        if bare:
            command += ["-c", "core.bare=true", f"--git-dir={self.git_dir}"]
        try:
            done = subprocess.run(
                [*command, *args],
                cwd=self.git_dir if bare else self.root,
                env=_environment() | dict(env or {}),
                input=stdin,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise FasttrackError(
                f"git {args[0]} took over {_TIMEOUT_S:.0f} s",
                where=str(self.root),
                expected="an answer",
                next="git fsck",
            ) from error
        except OSError as error:
            raise FasttrackError(
                f"cannot run git ({error.strerror})",
                where=str(self.root),
                expected="git on the PATH",
                next="fasttrack doctor",
            ) from error
        disk = next((line for line in done.stderr.splitlines() if line.endswith(_DISK_SIGNS)), None)
        if done.returncode and disk is not None:
            raise DiskError(
                f"git {args[0]} cannot use its files: {first_line(disk)}",
                where=str(self.git_dir),
                expected="a writable disk with free space for the repository and temporary files",
                next=f"df -h {self.git_dir} {tempfile.gettempdir()}",
            )
        if check and done.returncode:
            raise FasttrackError(
                f"git {args[0]} failed: {first_line(done.stderr) or f'exit status {done.returncode}'}",
                where=str(self.root),
                expected="a healthy, writable repository",
                next=f"git -C {self.root} fsck",
            )
        return done

    def out(self, *args: str, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> str:
        """Standard output of a command that must succeed."""
        return self.run(*args, env=env, stdin=stdin).stdout.decode("utf-8", "surrogateescape")


def _environment() -> dict[str, str]:
    """Environment of git: nothing of the user's is inherited but the search path."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_GRAFT_FILE": "/dev/null",
    }


def first_line(stderr: bytes) -> str:
    """The first line that git complained with, without its prefix; empty if it said nothing. Hints are no complaint."""
    lines = (line.strip() for line in stderr.decode("utf-8", "replace").splitlines())
    complaint = next((line for line in lines if line and not line.startswith("hint:")), "")
    return complaint.removeprefix("fatal: ").removeprefix("error: ")
