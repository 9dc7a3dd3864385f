"""Scope gate: only editable paths changed, and the changed files hold allowed constructs only.

Reads git tree objects of base and candidate, never a working tree, and runs nothing of the candidate. Needs no export:
symbolic links, submodules and unsafe names are findings here. What it cannot see: what macros expand to across files,
and whether the numbers are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from harness.git import Change, Repository, unsafe_name
from harness.records import EvidenceClass, GateResult
from harness.settings import Scope
from verify.context import GateContext
from verify.gates.common import command_for, gate_guard, to_result
from verify.gates.scope import cpp, python, text
from verify.gates.scope.observation import Observation
from verify.protocol.scope import PROTOCOL_ID, decide

__all__ = ["PROTOCOL_ID", "run", "scan_file"]

KERNELS = "k3_backend/kernels/"
SCHEDULES = "k3_backend/schedules/"
_CPP = (".cc", ".h")


@gate_guard("scope", PROTOCOL_ID)
def run(ctx: GateContext) -> GateResult:
    """Judge the diff between base and candidate."""
    started = time.monotonic()
    base, head = ctx.candidate.base, ctx.candidate.head
    scope = ctx.settings.scope
    ctx.evidence.append("scope", _header(ctx))
    changes = ctx.repo.changes(base, head)
    sizes = {e.path: e.size for e in ctx.repo.entries(head)}
    counts = ctx.repo.line_counts(base, head)
    doubles = _case_doubles(sizes)
    lines = [_change_line(change, scope, ctx.allow, sizes, counts, doubles) for change in changes]
    lines += [
        {"kind": "finding", "path": change.path, **_observation(seen)}
        for change in changes
        if scope.is_editable(change.path) and _is_scannable(change, sizes, scope)
        for seen in _scan(ctx.repo, change, scope, frozenset(sizes))
    ]
    ctx.evidence.append_block("scope", [*lines, {"kind": "end", "changes": len(changes)}])
    decision = decide(ctx.evidence.lines("scope"))
    detail = {"files": [line for line in lines if line["kind"] == "change"], "allow": list(ctx.allow)}
    return to_result(
        "scope",
        PROTOCOL_ID,
        decision,
        EvidenceClass.STATIC,
        [ctx.evidence.ref("scope")],
        time.monotonic() - started,
        detail,
    )


def scan_file(path: str, data: bytes, scope: Scope, has_file: Callable[[str], bool]) -> list[Observation]:
    """All rules that apply to one file under the editable paths.

    Args:
        path: repository path.
        data: content.
        scope: the scope table.
        has_file: whether a repository path exists in the candidate's tree.
    """
    kind = _kind(path)
    if kind is None:
        return [
            Observation(
                "scope.file_type",
                1,
                f"no rules for {PurePosixPath(path).name} here",
                "kernels/<op>/cpu.cc, *.h, *.py, cpu.toml, cute.toml; schedules/**/*.toml",
            )
        ]
    content, found = text.decode(data)
    if found:
        return found
    found = text.scan_lines(content, line_chars=scope.limits.line_chars)
    if kind == "toml":
        return [*found, *text.scan_toml(content)]
    if kind == "python":
        return [*found, *python.scan(content, imports=scope.python_imports)]
    found += _shadowing(path, scope)
    return [*found, *cpp.scan(content, includes=scope.cpp_includes, has_header=_header_lookup(path, has_file, scope))]


def _kind(path: str) -> str | None:
    """Language of a file that may stand at this path, or None."""
    name = PurePosixPath(path)
    if path.startswith(SCHEDULES):
        return "toml" if name.suffix == ".toml" else None
    if not path.startswith(KERNELS):
        return None
    if name.suffix in _CPP:
        return "cpp"
    if name.suffix == ".py":
        return "python"
    return "toml" if name.name in ("cpu.toml", "cute.toml") and len(name.parts) == 4 else None


def _shadowing(path: str, scope: Scope) -> list[Observation]:
    """A file that is found in place of an allowed header of the same name, by its own folder or by the tree's root."""
    names = {PurePosixPath(path).name, path.removeprefix(KERNELS)}
    return [
        Observation(
            "scope.cpp_include", 1, f"takes the place of the header {name}", "a name that no allowed header has"
        )
        for name in sorted(names & set(scope.cpp_includes))
    ]


def _header_lookup(path: str, has_file: Callable[[str], bool], scope: Scope) -> Callable[[str], bool]:
    """Quoted includes resolve against the including file's folder, then against the kernels tree, as in the build."""
    folder = PurePosixPath(path).parent

    def lookup(name: str) -> bool:
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            return False
        return any(
            has_file(str(p)) and scope.is_editable(str(p)) for p in (folder / name, PurePosixPath(KERNELS) / name)
        )

    return lookup


def _header(ctx: GateContext) -> dict[str, Any]:
    scope = ctx.settings.scope
    return {
        "kind": "header",
        "gate": "scope",
        "protocol": PROTOCOL_ID,
        "base": ctx.candidate.base,
        "head": ctx.candidate.head,
        "editable": list(scope.editable),
        "allow": list(ctx.allow),
        "limits": scope.limits.model_dump(),
        "python_imports": list(scope.python_imports),
        "cpp_includes": list(scope.cpp_includes),
        "next": command_for("scope", ctx),
    }


def _change_line(
    change: Change,
    scope: Scope,
    allow: tuple[str, ...],
    sizes: Mapping[str, int | None],
    counts: Mapping[str, tuple[int, int] | None],
    doubles: Mapping[str, str],
) -> dict[str, Any]:
    editable = scope.is_editable(change.path)
    lines = counts.get(change.path)
    return {
        "kind": "change",
        "path": _printable(change.path),
        "status": change.status,
        "old_mode": change.old_mode,
        "new_mode": change.new_mode,
        "editable": editable,
        "allowed": not editable and _is_allowed(change.path, allow),
        "band": _band(change.path, editable),
        "bytes": sizes.get(change.path),
        "unsafe": unsafe_name(change.path) or doubles.get(change.path),
        "added": None if lines is None else lines[0],
        "removed": None if lines is None else lines[1],
    }


def _case_doubles(paths: Iterable[str]) -> dict[str, str]:
    """Paths that are one file where names ignore case, with what is wrong about them."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(path.casefold(), []).append(path)
    return {
        path: f"differs from {_printable(other)} in case only"
        for group in groups.values()
        for path, other in zip(group, [*group[1:], group[0]], strict=True)
        if len(group) > 1
    }


def _band(path: str, editable: bool) -> str:
    if not editable:
        return "protected"
    return "schedules" if path.startswith(SCHEDULES) else "kernels"


def _is_allowed(path: str, allow: tuple[str, ...]) -> bool:
    return any(path == entry or path.startswith(entry.rstrip("/") + "/") for entry in allow)


def _is_scannable(change: Change, sizes: Mapping[str, int | None], scope: Scope) -> bool:
    """Plain files of bearable size; the others are findings already."""
    return change.new_mode in ("100644", "100755") and (sizes.get(change.path) or 0) <= scope.limits.file_bytes


def _scan(repo: Repository, change: Change, scope: Scope, paths: frozenset[str]) -> list[Observation]:
    data = repo.blobs([change.new_blob])[change.new_blob]
    return scan_file(change.path, data, scope, paths.__contains__)


def _observation(seen: Observation) -> dict[str, Any]:
    return {"code": seen.code, "line": seen.line, "message": _printable(seen.message), "expected": seen.expected}


def _printable(value: str) -> str:
    """Names and quotes from untrusted files as text that terminals, JSON and HTML show as it is."""
    return (
        value
        if value.isprintable()
        else value.encode("ascii", "backslashreplace").decode().translate({c: f"\\x{c:02x}" for c in (*range(32), 127)})
    )
