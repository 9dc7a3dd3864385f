"""Scope decision: may this change be judged at all?

Decides from the list of changed paths and the scanners' observations. A path is judged by the editable globs and the
allowed paths that the header declares; what a scanner saw in a file is a finding as it stands. Text rules inform a
reader early and cheaply; that code *behaves* is decided by the audit, kernels and path gates.
"""

from __future__ import annotations

from collections.abc import Sequence

from verify.protocol.decision import Decision, Finding, Line
from verify.protocol.lines import incomplete, last_attempt, of_kind

__all__ = ["CODES", "PROTOCOL_ID", "decide"]

PROTOCOL_ID = "scope/1"

CODES = {
    "scope.allowed_protected_change": "a person allowed this change of protected code; shown first, no failure",
    "scope.protected_path": "a path outside the editable table changed",
    "scope.mode": "a changed entry is not a plain, non-executable file",
    "scope.unsafe_name": "a changed path cannot be exported safely",
    "scope.too_many_files": "more changed files than a reviewer is asked to read",
    "scope.too_large": "a changed file is larger than the limit",
    "scope.file_type": "a file whose kind or place has no rules",
    "scope.text": "not plain reviewable text: encoding, control or bidirectional characters, over-long lines",
    "scope.toml": "a TOML file does not parse",
    "scope.py_syntax": "Python that does not parse",
    "scope.py_import": "import outside the allow-list",
    "scope.py_dynamic": "dynamic code: exec, eval, computed attribute names, namespaces as dictionaries",
    "scope.py_builtin": "built-in that reaches files, input or the debugger",
    "scope.py_introspection": "frame, code-object, module or dunder access",
    "scope.py_state": "state that outlives a call: global statement, mutated module-level object, mutable default",
    "scope.cpp_lexical": "trigraph, universal character name, non-ASCII or unterminated token outside literals",
    "scope.cpp_include": "include outside the allow-list, computed, or of a file that is not in the tree",
    "scope.cpp_directive": "preprocessor directive outside the allow-list",
    "scope.cpp_paste": "token pasting",
    "scope.cpp_macro": "macro that redefines a keyword, a reserved name or a name of the calling convention",
    "scope.cpp_pragma": "pragma outside the allow-list",
    "scope.cpp_asm": "inline assembly",
    "scope.cpp_attribute": "attribute outside the allow-list",
    "scope.cpp_identifier": "identifier of a process, file, environment, clock, loader or thread interface",
    "scope.cpp_extern": "linkage declaration",
    "scope.cpp_state": "mutable static or thread-local storage",
    "scope.incomplete_record": "the raw lines do not hold a complete attempt",
    "scope.environment": "the machine could not run the gate",
    "scope.internal_error": "the gate itself failed",
}
"""Every reason code of this gate and what it means."""

_LIMIT_CODES = {"files": "scope.too_many_files", "file_bytes": "scope.too_large"}


def decide(lines: Sequence[Line]) -> Decision:
    """Failed on any finding; passed otherwise. Allowed protected changes are listed first in either case."""
    attempt = last_attempt(lines)
    if attempt is None:
        return incomplete("scope", "no header line")
    header, body = attempt
    changes = of_kind(body, "change")
    end = of_kind(body, "end")
    if len(end) != 1 or end[0]["changes"] != len(changes):
        return incomplete("scope", f"{len(changes)} change lines and {len(end)} end lines")
    allowed = [_allowed(change) for change in changes if change["allowed"]]
    refused = [finding for change in changes for finding in _refusals(change, header)]
    refused += [_observed(line, header) for line in of_kind(body, "finding")]
    limit = header["limits"]["files"]
    if len(changes) > limit:
        refused.append(
            Finding(
                _LIMIT_CODES["files"],
                f"{len(changes)} files changed",
                changes[limit]["path"],
                f"at most {limit} files per candidate",
                "split the change",
            )
        )
    return Decision("failed" if refused else "passed", (*allowed, *refused), _metrics(changes))


def _allowed(change: Line) -> Finding:
    return Finding(
        "scope.allowed_protected_change",
        f"protected file changed with permission: {change['path']} (+{change['added']} -{change['removed']})",
        change["path"],
        "a person reads this file's diff",
        f"git diff BASE HEAD -- {change['path']}",
    )


def _refusals(change: Line, header: Line) -> list[Finding]:
    path = change["path"]
    found = []
    if not change["editable"] and not change["allowed"]:
        found.append(
            Finding(
                "scope.protected_path",
                f"protected path changed ({change['status']})",
                path,
                "changes only below " + ", ".join(header["editable"]),
                f"drop the change, or as its reviewer: --allow {path}",
            )
        )
    if change["status"] == "D":
        return found
    if change["new_mode"] != "100644" and not change["allowed"]:
        kind = {"120000": "a symbolic link", "160000": "a submodule", "100755": "an executable file"}.get(
            change["new_mode"], f"mode {change['new_mode']}"
        )
        found.append(
            Finding(
                "scope.mode",
                f"the entry is {kind}",
                path,
                "plain files of mode 100644",
                "git update-index --chmod=-x, or replace the link by its content",
            )
        )
    if change["unsafe"] is not None:
        found.append(
            Finding(
                "scope.unsafe_name", f"the name {change['unsafe']}", path, "portable relative names", "rename the file"
            )
        )
    limit = header["limits"]["file_bytes"]
    if change["bytes"] is not None and change["bytes"] > limit:
        found.append(
            Finding(
                _LIMIT_CODES["file_bytes"],
                f"the file has {change['bytes']} bytes",
                path,
                f"at most {limit} bytes",
                "split the file",
            )
        )
    return found


def _observed(line: Line, header: Line) -> Finding:
    return Finding(line["code"], line["message"], f"{line['path']}:{line['line']}", line["expected"], header["next"])


def _metrics(changes: Sequence[Line]) -> dict[str, dict[str, object]]:
    """Complexity: changed files and lines, in total and per band."""
    metrics: dict[str, dict[str, object]] = {"files_changed": {"value": float(len(changes)), "unit": "files"}}
    for band in ("kernels", "schedules", "protected"):
        for what in ("added", "removed"):
            counts = [change[what] for change in changes if change["band"] == band]
            metrics[f"{band}_lines_{what}"] = (
                {"missing": "a binary file changed"}
                if None in counts
                else {"value": float(sum(counts)), "unit": "lines"}
            )
    metrics["allowed_protected_files"] = {"value": float(sum(bool(c["allowed"]) for c in changes)), "unit": "files"}
    return metrics
