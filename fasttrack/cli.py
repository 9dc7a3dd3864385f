"""Entry point: the application, and the one place where problems become messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Before torch is imported: the evaluator's threads sleep between operations, so that what they wait for has the CPUs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import typer
from typer.main import get_command

from fasttrack.commands import audit, bench, build, bundle, catalogue, doctor, optimize, runs, verify
from fasttrack.console import report_problem
from harness.errors import FasttrackError
from k3_backend.errors import BackendError

__all__ = ["app", "main"]

app = typer.Typer(
    name="fasttrack",
    help="Optimise and verify the decode path of Kimi K3. Exit codes: 0 accept or fine, 1 reject or falls short, "
    "2 usage or environment, 3 incomplete or inconclusive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (doctor, catalogue, optimize, verify, build, audit, bench, runs, bundle):
    module.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    json_mode = "--json" in words
    try:
        code = get_command(app).main(args=words, prog_name="fasttrack", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as end:
        return end.exit_code
    except FasttrackError as error:
        problem = error
    except typer.TyperException as error:
        problem = FasttrackError(
            error.format_message() if isinstance(error, typer.BadParameter.__mro__[2]) else str(error),
            where="fasttrack " + " ".join(words),
            expected="the usage that --help shows",
            next=f"fasttrack {' '.join(words[:1])} --help",
        )
    except (typer.Abort, KeyboardInterrupt):
        problem = FasttrackError("interrupted", where="this command", expected="to finish", next="fasttrack runs")
    except BackendError as error:
        problem = FasttrackError(error.what, where=error.where, expected=error.expected, next=error.next)
    return report_problem(problem, json_mode)


if __name__ == "__main__":
    sys.exit(main())
