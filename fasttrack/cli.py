"""Entry point: the application, and the one place where problems become messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Before torch is imported: the evaluator's threads sleep between operations, so that what they wait for has the CPUs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import typer
from typer.main import get_command

from fasttrack.commands import audit, bench, build, bundle, catalogue, doctor, kit, optimize, runs, tune, verify
from fasttrack.console import EXIT_USAGE, report_problem
from fasttrack.workspace import Workspace
from harness.errors import FasttrackError
from harness.evidence import DISK_ERRNOS, disk_error
from k3_backend.errors import BackendError

__all__ = ["app", "main"]

EXIT_INTERRUPTED = 130
"""Ctrl-C, as typer returns it and shells know it."""
_INTERRUPTED = FasttrackError(
    "interrupted", where="this command", expected="to finish; what was stored so far is kept", next="fasttrack runs"
)

app = typer.Typer(
    name="fasttrack",
    help="Optimise and verify the decode path of Kimi K3. Exit codes: 0 accept or fine, 1 reject or falls short, "
    "2 usage or environment, 3 incomplete or inconclusive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (doctor, catalogue, optimize, verify, build, audit, bench, kit, tune, runs, bundle):
    module.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    json_mode = "--json" in words
    command = get_command(app)
    known = getattr(command, "commands", {})
    try:
        code = command.main(args=words, prog_name="fasttrack", standalone_mode=False)
        if code != EXIT_INTERRUPTED:
            return code if isinstance(code, int) else 0
        report_problem(_INTERRUPTED, json_mode)
        return EXIT_INTERRUPTED
    except typer.Exit as end:
        return end.exit_code
    except FasttrackError as error:
        problem = error
    except typer.TyperException as error:
        what = error.format_message() if isinstance(error, typer.BadParameter.__mro__[2]) else str(error)
        if not what:  # a command group without a command: its help is on stdout already
            return EXIT_USAGE
        problem = FasttrackError(
            what,
            where="fasttrack " + " ".join(words),
            expected="the usage that --help shows",
            next=" ".join(("fasttrack", *(w for w in words[:1] if w in known), "--help")),
        )
    except OSError as error:
        if error.errno not in DISK_ERRNOS:
            raise
        problem = disk_error(error, Path(error.filename or Workspace.here().root))
    except BackendError as error:
        problem = FasttrackError(error.what, where=error.where, expected=error.expected, next=error.next)
    return report_problem(problem, json_mode)


if __name__ == "__main__":
    sys.exit(main())
