#!/usr/bin/env python3
"""Entry script of an evaluation kit, `kit.py` at its root: checks the kit, then runs it.

    python3 kit.py run --out R [--max-minutes N] [--gates a,b] [--resume] [--jobs N] [--no-sanitizer] [--packages DIR]
                       [--peers DIR]
    python3 kit.py check

Exit codes: 0 everything evaluated and nothing failed; 1 a gate failed; 2 usage or environment; 3 incomplete.
Standard library only, and nothing of the kit is imported before every digest has been compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

USAGE = 2
MINIMUM = (3, 11)
TUNING = "fasttrack-tuning"
"""Kind of an archive that times points of a schedule instead of judging a candidate."""


class KitError(Exception):
    """A problem in four parts: what, where, expected, next."""


def check(root: Path) -> dict[str, Any]:
    """Compare every file with the manifest; the manifest's content.

    Raises:
        KitError: the first difference.
    """
    again = "copy the kit again, unchanged"
    try:
        manifest = json.loads((root / "manifest.json").read_bytes())
        digest = manifest.pop("digest")
        files = dict(manifest["files"])
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KitError(f"unreadable manifest ({error})", root / "manifest.json", "a complete kit", again) from error
    if hashlib.sha256(text.encode("ascii")).hexdigest() != digest:
        raise KitError("the manifest was changed", root / "manifest.json", f"digest {digest}", again)
    for name, listed in sorted(files.items()):
        path = root / name
        if ".." in Path(name).parts or os.path.isabs(name) or path.is_symlink() or not path.is_file():
            raise KitError("no such plain file", path, "every file of the manifest", again)
        if hashlib.sha256(path.read_bytes()).hexdigest() != listed["sha256"]:
            raise KitError("its content was changed", path, f"sha256 {listed['sha256']}", again)
    for folder in ("code", "arms"):
        for found in sorted((root / folder).rglob("*")):
            if found.is_symlink() or (found.is_file() and found.relative_to(root).as_posix() not in files):
                raise KitError("is not part of the kit", found, "only files of the manifest", f"rm {found}")
    return {**manifest, "digest": digest}


def main(arguments: list[str]) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="kit.py", description="Evaluate the candidate of this kit on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="compare every file of the kit with its digest")
    run = commands.add_parser("run", help="evaluate, and write results into a folder")
    run.add_argument("--out", required=True, type=Path, metavar="R", help="folder of the results")
    run.add_argument("--max-minutes", type=float, metavar="N", help="stop cleanly after this time")
    run.add_argument("--gates", metavar="A,B", help="only these of the kit's gates")
    run.add_argument("--resume", action="store_true", help="go on with results that were begun in this folder")
    run.add_argument("--jobs", type=int, metavar="N", help="ops evaluated at a time")
    run.add_argument("--no-sanitizer", action="store_true", help="leave compute-sanitizer out")
    run.add_argument(
        "--packages", type=Path, metavar="DIR",
        help="wheels of pure Python packages that the standard path uses where they are there (fla-core)",
    )  # fmt: skip
    run.add_argument("--peers", type=Path, metavar="DIR", help="packages that the peer table runs beside our kernels")
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parent
    try:
        if sys.version_info < MINIMUM:
            raise KitError(f"Python {sys.version.split()[0]}", sys.executable, "Python 3.11 or newer", "python3.11 ...")
        manifest = check(root)
    except KitError as error:
        for name, value in zip(("what", "where", "expected", "next"), error.args, strict=True):
            print(f"{name:>9}  {value}", file=sys.stderr)
        return USAGE
    if options.command == "check":
        print(f"kit {manifest['digest'][:12]}: {len(manifest['files'])} files as listed", file=sys.stderr)
        return 0
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root / "code"))
    if manifest["kind"] == TUNING:
        from verify.tuning.run import command
    else:
        from verify.kit.run import command
    return command(root, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
