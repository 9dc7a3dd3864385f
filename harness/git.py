"""The repository as data: objects are read and written by git plumbing, never checked out.

Trees of candidates are untrusted, so nothing here runs hooks, filters, attributes, external diffs or aliases, and no
function follows a link of such a tree. Exports write blobs themselves and refuse symlinks, submodules and names that
could leave the destination. The repository itself and its configuration belong to the user and are trusted to hold
objects; replacement objects and lazy fetches are off, so that an id always names the bytes that are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness.errors import FasttrackError
from harness.settings import Scope

__all__ = ["EMPTY_TREE", "Change", "Entry", "Repository", "unsafe_name"]

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Id of the tree without entries."""

NULL_ID = "0" * 40
MODE_FILE = "100644"
MODE_EXECUTABLE = "100755"
MODE_SYMLINK = "120000"
MODE_SUBMODULE = "160000"

_IDENTITY = {"NAME": "fasttrack", "EMAIL": "fasttrack@localhost"}
_MAX_EXPORT_BYTES = 512 << 20
_MAX_FILE_BYTES = 64 << 20
_TIMEOUT_S = 120.0
_CONFIG = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.attributesFile=/dev/null",
    "core.autocrlf=false",
    "core.quotePath=true",
    "core.untrackedCache=false",
    "protocol.allow=never",
    "apply.whitespace=nowarn",
    "gc.auto=0",
    "maintenance.auto=false",
    "diff.orderFile=/dev/null",
    "diff.external=",
    "log.showSignature=false",
    f"attr.tree={EMPTY_TREE}",
)
_REF_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")


@dataclass(frozen=True)
class Entry:
    """One file of a tree."""

    mode: str
    """Git mode: 100644, 100755, 120000 (symlink), 160000 (submodule)."""
    blob: str
    """Object id."""
    path: str
    """Repository path; bytes that are not UTF-8 appear as surrogate escapes."""
    size: int | None = None
    """Bytes; null for submodules."""


@dataclass(frozen=True)
class Change:
    """One raw diff-tree line; renames appear as a deletion and an addition."""

    status: str
    """A added, D deleted, M modified, T type changed."""
    old_mode: str
    new_mode: str
    old_blob: str
    new_blob: str
    path: str


class Repository:
    """A git repository, named by any path inside it.

    Raises:
        FasttrackError: git is missing, or the path is not inside a repository.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise FasttrackError("no such folder", where=str(path), expected="a git repository", next="git clone …")
        if shutil.which("git") is None:
            raise FasttrackError(
                "git is not installed", where="PATH", expected="git 2.30 or later", next="fasttrack doctor"
            )
        self.root = path
        self.git_dir = path
        found = self._run(
            "rev-parse", "--path-format=absolute", "--git-common-dir", "--show-toplevel", bare=False, check=False
        )
        if found.returncode:
            raise FasttrackError(
                _first_line(found.stderr) or "git does not recognise it",
                where=str(path),
                expected="a git repository with a working tree",
                next=f"git -C {path} init, or change to the checkout",
            )
        git_dir, _, root = found.stdout.decode().rstrip("\n").partition("\n")
        self.root = Path(root)
        """Top folder of the working tree."""
        self.git_dir = Path(git_dir)

    # --- reading ---------------------------------------------------------------------------------------------------

    def resolve(self, revision: str) -> str:
        """Full commit id of a revision.

        Raises:
            FasttrackError: it names no commit.
        """
        done = self._run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", check=False)
        if done.returncode:
            raise FasttrackError(
                f"unknown revision {revision!r}",
                where=str(self.root),
                expected="a commit, branch or tag of this repository",
                next="git log --oneline",
            )
        return done.stdout.decode().strip()

    def tree(self, commit: str) -> str:
        """Tree id of a commit."""
        return self._out("rev-parse", "--verify", "--end-of-options", f"{commit}^{{tree}}").strip()

    def entries(self, commit: str, prefixes: Sequence[str] = ()) -> tuple[Entry, ...]:
        """All files of a commit in path order, or those at or below one of the prefixes."""
        out = self._run("ls-tree", "-r", "-z", "-l", "--full-tree", commit).stdout
        entries = []
        for line in out.split(b"\0")[:-1]:
            meta, _, path = line.partition(b"\t")
            mode, _, blob, size = meta.decode().split()
            entries.append(Entry(mode, blob, os.fsdecode(path), None if size == "-" else int(size)))
        return tuple(e for e in entries if not prefixes or _below(e.path, prefixes))

    def changes(self, base: str, head: str) -> tuple[Change, ...]:
        """Raw differences between two commits, without rename detection, in path order."""
        out = self._run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", base, head).stdout
        fields = out.split(b"\0")
        changes = []
        for meta, path in zip(fields[::2], fields[1::2], strict=False):
            old_mode, new_mode, old_blob, new_blob, status = meta.decode().lstrip(":").split(" ")
            changes.append(Change(status[0], old_mode, new_mode, old_blob, new_blob, os.fsdecode(path)))
        return tuple(changes)

    def line_counts(self, base: str, head: str) -> dict[str, tuple[int, int] | None]:
        """Added and removed lines per changed path; None for binary files."""
        out = self._run(
            "diff-tree", "-r", "-z", "--numstat", "--no-renames", "--no-ext-diff", "--no-textconv", base, head
        ).stdout
        counts: dict[str, tuple[int, int] | None] = {}
        for line in out.split(b"\0")[:-1]:
            added, removed, path = line.split(b"\t", 2)
            counts[os.fsdecode(path)] = None if added == b"-" else (int(added), int(removed))
        return counts

    def read(self, commit: str, path: str) -> bytes:
        """Content of one file of a commit.

        Raises:
            FasttrackError: the commit has no such file, or it is a submodule.
        """
        entry = next((e for e in self.entries(commit, (path,)) if e.path == path and e.mode != MODE_SUBMODULE), None)
        if entry is None:
            raise FasttrackError(
                f"no such file in commit {commit[:12]}",
                where=path,
                expected="a file of the commit",
                next=f"git ls-tree -r {commit[:12]}",
            )
        return self.blobs([entry.blob])[entry.blob]

    def blobs(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Contents of blobs by id, in one git process."""
        wanted = list(dict.fromkeys(ids))
        out = self._run("cat-file", "--batch", stdin="".join(f"{i}\n" for i in wanted).encode()).stdout
        found: dict[str, bytes] = {}
        at = 0
        for blob in wanted:
            end = out.index(b"\n", at)
            header = out[at:end].decode().split()
            if len(header) != 3 or header[1] != "blob":
                raise FasttrackError(
                    f"object {blob} is {header[-1]}", where=str(self.git_dir), expected="a blob", next="git fsck"
                )
            size = int(header[2])
            found[blob] = out[end + 1 : end + 1 + size]
            at = end + 1 + size + 1
        return found

    def patch(self, base: str, head: str) -> bytes:
        """The canonical diff between two commits: the same bytes on every machine, and `commit_patch` accepts it."""
        return self._run(
            "diff-tree",
            "-r",
            "-p",
            "--binary",
            "--full-index",
            "--no-renames",
            "--no-ext-diff",
            "--no-textconv",
            "--no-color",
            "--diff-algorithm=myers",
            "--indent-heuristic",
            "-U3",
            "--inter-hunk-context=0",
            "--src-prefix=a/",
            "--dst-prefix=b/",
            base,
            head,
        ).stdout

    def dirty(self) -> tuple[str, ...]:
        """Paths whose state differs from HEAD: changed or staged files anywhere, and untracked files inside folders
        that HEAD has (there they could be imported or read instead of committed ones).
        """
        out = self._run("status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", bare=False).stdout
        tracked = {e.path.split("/")[0] for e in self.entries("HEAD") if "/" in e.path}
        found = []
        for line in out.split(b"\0")[:-1]:
            status, path = line[:2].decode(), os.fsdecode(line[3:])
            if status != "??" or ("/" in path and path.split("/")[0] in tracked):
                found.append(path)
        return tuple(found)

    def require_clean(self) -> None:
        """Refuse to work from a tree whose files are not those of its commit; see `dirty`.

        Raises:
            FasttrackError: lists the first differing paths.
        """
        paths = self.dirty()
        if paths:
            shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
            raise FasttrackError(
                f"the working tree is dirty: {shown}",
                where=str(self.root),
                expected="all files as committed, so that results name what produced them",
                next="git commit, or git stash -u",
            )

    def protected_digest(self, commit: str, scope: Scope) -> str:
        """sha256 over mode, path and blob id of every file of a commit that candidates may not change.

        Two commits with equal digests are judged by the same code.
        """
        lines = [f"{e.mode} {e.blob} {e.path}\n" for e in self.entries(commit) if not scope.is_editable(e.path)]
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    # --- writing ---------------------------------------------------------------------------------------------------

    def export(self, commit: str, dest: Path, prefixes: Sequence[str] = ()) -> None:
        """Write the files of a commit (or those at or below the prefixes) into a new or empty folder.

        Modes become 0644 or 0755, whatever the umask. Nothing is filtered or converted.

        Raises:
            FasttrackError: the tree holds a symlink, a submodule, an unsafe name, two names that differ in case only,
                or too many bytes; or the folder cannot be written. Nothing is written unless all names are safe.
        """
        entries = self.entries(commit, prefixes)
        _refuse_unsafe(entries, commit)
        try:
            dest.mkdir(parents=True, exist_ok=True)
            if any(dest.iterdir()):
                raise FasttrackError(
                    "the folder is not empty", where=str(dest), expected="a new or empty folder", next=f"rm -r {dest}"
                )
            contents = self.blobs(e.blob for e in entries)
            dest.chmod(0o755)
            for entry in entries:
                target = dest / entry.path
                _make_parents(dest, target)
                target.write_bytes(contents[entry.blob])
                target.chmod(0o755 if entry.mode == MODE_EXECUTABLE else 0o644)
        except OSError as error:
            raise FasttrackError(
                f"cannot export ({error.strerror})",
                where=str(error.filename or dest),
                expected="a writable disk with space",
                next=f"df -h {dest.parent}",
            ) from error

    def commit_patch(self, base: str, patch: bytes, message: str) -> str:
        """Commit a patch on top of a commit without touching index or working tree.

        The id depends on base, patch and message only.

        Raises:
            FasttrackError: the patch is empty, malformed, changes nothing, or does not apply (names file and line).
        """
        if not patch.strip():
            raise FasttrackError(
                "the patch is empty",
                where="patch",
                expected="a diff against the base commit",
                next=f"git diff {base[:12]}",
            )
        with self._temporary_index() as env:
            self._run("read-tree", base, env=env)
            done = self._run("apply", "--cached", "--whitespace=nowarn", "-", env=env, stdin=patch, check=False)
            if done.returncode:
                where, what = _apply_error(done.stderr)
                raise FasttrackError(
                    f"the patch does not apply to {base[:12]}: {what}",
                    where=where,
                    expected="a diff made against the base commit",
                    next="git diff BASE > FILE, or pass --base REV",
                )
            tree = self._out("write-tree", env=env).strip()
        if tree == self.tree(base):
            raise FasttrackError(
                "the patch changes nothing", where="patch", expected="a diff with changes", next=f"git diff {base[:12]}"
            )
        return self.commit_tree(tree, base, message)

    def commit_files(self, base: str, files: Mapping[str, tuple[str, bytes] | None], message: str) -> str:
        """Commit changed files on top of a commit, with the same properties as `commit_patch`.

        Args:
            base: parent commit.
            files: path to (git mode, content), or to None to delete it. For symlinks the content is the target.
            message: commit message.

        Raises:
            FasttrackError: git refuses a path.
        """
        lines = []
        for path, change in files.items():
            mode, blob = ("0", NULL_ID) if change is None else (change[0], self._store(change[1]))
            lines.append(f"{mode} {blob}\t".encode() + os.fsencode(path) + b"\0")
        with self._temporary_index() as env:
            self._run("read-tree", base, env=env)
            self._run("update-index", "-z", "--add", "--remove", "--index-info", env=env, stdin=b"".join(lines))
            tree = self._out("write-tree", env=env).strip()
        return self.commit_tree(tree, base, message)

    def _store(self, content: bytes) -> str:
        return self._out("hash-object", "-w", "--no-filters", "--stdin", stdin=content).strip()

    def commit_tree(self, tree: str, parent: str, message: str) -> str:
        """Commit a tree; author, committer and dates are fixed by the parent, so equal input gives an equal id."""
        when = self._out("show", "-s", "--format=%ct", parent).strip() + " +0000"
        env = {
            f"GIT_{who}_{key}": value
            for who in ("AUTHOR", "COMMITTER")
            for key, value in (*_IDENTITY.items(), ("DATE", when))
        }
        return self._out("commit-tree", tree, "-p", parent, "-m", message, env=env).strip()

    def keep(self, name: str, commit: str) -> None:
        """Protect a commit from garbage collection under `refs/fasttrack/<name>`.

        Raises:
            FasttrackError: unusable name or unknown commit.
        """
        self._run("update-ref", "--no-deref", _ref(name), self.resolve(commit))

    def kept(self, prefix: str = "") -> dict[str, str]:
        """Names below `refs/fasttrack/` that start with the prefix, and their commits."""
        out = self._out("for-each-ref", "--format=%(refname) %(objectname)", "refs/fasttrack/")
        refs = dict(line.split(" ") for line in out.splitlines())
        return {
            n.removeprefix("refs/fasttrack/"): c
            for n, c in refs.items()
            if n.removeprefix("refs/fasttrack/").startswith(prefix)
        }

    def forget(self, name: str) -> None:
        """Drop a name made by `keep`; git removes the objects in its own time."""
        self._run("update-ref", "--no-deref", "-d", _ref(name))

    # --- folders in which proposers edit ----------------------------------------------------------------------------

    def add_worktree(self, path: Path, commit: str) -> None:
        """Export a commit into a new folder for a proposer to edit.

        The folder is no git checkout on purpose: it holds no history to copy from and no `.git` to tamper with. Which
        commit it shows is recorded beside it (`<path>.json`), out of the proposer's reach.

        Raises:
            FasttrackError: see `export`.
        """
        self.export(commit, path)
        _record_path(path).write_text(json.dumps({"commit": commit}) + "\n")

    def worktree_commit(self, path: Path) -> str:
        """The commit that a worktree shows.

        Raises:
            FasttrackError: the folder is not a worktree made by `add_worktree`.
        """
        try:
            return str(json.loads(_record_path(path).read_text())["commit"])
        except (OSError, ValueError, KeyError) as error:
            raise FasttrackError(
                "no record of its commit",
                where=str(path),
                expected="a folder made by add_worktree",
                next="start the task again",
            ) from error

    def commit_worktree(
        self,
        path: Path,
        message: str,
        ignore: Sequence[str] = ("__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"),
    ) -> str | None:
        """Commit what a worktree holds now on top of the commit it shows; None if nothing changed.

        Files are hashed as they are: no filters, no ignore files. Symlinks become symlink entries (for the scope gate
        to see) and are never followed. The worktree then shows the new commit.

        Args:
            path: a folder made by `add_worktree`.
            message: commit message.
            ignore: names of folders that are left out at every depth.

        Raises:
            FasttrackError: a device, socket or pipe, an unreadable file or one above 64 MiB.
        """
        parent = self.worktree_commit(path)
        before = {e.path: e for e in self.entries(parent)}
        lines = []
        for name, mode, content in _walk(path, frozenset(ignore)):
            blob = _blob_id(content)
            if name not in before or before[name].blob != blob:
                blob = self._store(content)
            lines.append(f"{mode} {blob}\t".encode() + os.fsencode(name) + b"\0")
        with self._temporary_index() as env:
            self._run("read-tree", "--empty", env=env)
            self._run("update-index", "-z", "--add", "--index-info", env=env, stdin=b"".join(lines))
            tree = self._out("write-tree", env=env).strip()
        if tree == self.tree(parent):
            return None
        commit = self.commit_tree(tree, parent, message)
        _record_path(path).write_text(json.dumps({"commit": commit}) + "\n")
        return commit

    def remove_worktree(self, path: Path) -> None:
        """Remove a worktree and its record; nothing happens if it is gone already."""
        shutil.rmtree(path, ignore_errors=False, onerror=_missing_is_fine)
        _record_path(path).unlink(missing_ok=True)

    # --- plumbing ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _temporary_index(self) -> Iterator[dict[str, str]]:
        with tempfile.TemporaryDirectory(prefix="fasttrack-index-") as folder:
            yield {"GIT_INDEX_FILE": str(Path(folder) / "index")}

    def _out(self, *args: str, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> str:
        return self._run(*args, env=env, stdin=stdin).stdout.decode("utf-8", "surrogateescape")

    def _run(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        check: bool = True,
        bare: bool = True,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run git with everything configurable switched off. `bare` hides the working tree from it."""
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
        if check and done.returncode:
            raise FasttrackError(
                f"git {args[0]} failed: {_first_line(done.stderr) or f'exit status {done.returncode}'}",
                where=str(self.root),
                expected="a healthy, writable repository",
                next=f"git -C {self.root} fsck",
            )
        return done


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


def _first_line(stderr: bytes) -> str:
    text = stderr.decode("utf-8", "replace").strip()
    return text.splitlines()[0].removeprefix("fatal: ").removeprefix("error: ") if text else ""


def _apply_error(stderr: bytes) -> tuple[str, str]:
    """(where, what) from the complaints of `git apply`: the failing hunk if one is named, else the file."""
    lines = [
        line.removeprefix("error: ").removeprefix("fatal: ") for line in stderr.decode("utf-8", "replace").splitlines()
    ]
    for line in lines:
        if hunk := re.fullmatch(r"patch failed: (.+):(\d+)", line):
            return f"{hunk[1]}:{hunk[2]}", "the hunk at this line does not match"
    for line in lines:
        if corrupt := re.search(r"(?:corrupt patch|patch fragment without header|garbage) at line (\d+)", line):
            return f"patch:{corrupt[1]}", line
    for line in lines:
        if named := re.fullmatch(r"(.+): ([a-z][a-z ]+)", line):
            return named[1], named[2]
    return "patch", lines[0] if lines else "git apply gave no reason"


def _below(path: str, prefixes: Sequence[str]) -> bool:
    return any(path == p.rstrip("/") or path.startswith(p.rstrip("/") + "/") for p in prefixes)


def unsafe_name(path: str) -> str | None:
    """Why a repository path must not be written to disk, or None."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or PurePosixPath(path).is_absolute():
        return "leaves its folder"
    if any(part.lower().rstrip(". ") == ".git" for part in parts):
        return "reaches into git's own folder"
    if not path.isprintable() or "\\" in path or any(len(os.fsencode(part)) > 255 for part in parts):
        return "has control characters, bytes that are not UTF-8, a backslash, or an over-long component"
    return None


def _refuse_unsafe(entries: Sequence[Entry], commit: str) -> None:
    def refuse(path: str, what: str) -> FasttrackError:
        return FasttrackError(
            f"{what} in commit {commit[:12]}",
            where=repr(path) if not path.isprintable() else path,
            expected="plain files with portable names",
            next=f"git ls-tree -r {commit[:12]}",
        )

    seen: dict[str, str] = {}
    for entry in entries:
        if entry.mode == MODE_SYMLINK:
            raise refuse(entry.path, "symbolic link")
        if entry.mode not in (MODE_FILE, MODE_EXECUTABLE):
            raise refuse(
                entry.path,
                f"entry of mode {entry.mode} (submodule)"
                if entry.mode == MODE_SUBMODULE
                else f"entry of mode {entry.mode}",
            )
        if why := unsafe_name(entry.path):
            raise refuse(entry.path, f"file name that {why}")
        parts = entry.path.split("/")
        for depth in range(1, len(parts) + 1):
            actual = "/".join(parts[:depth])
            if seen.setdefault(actual.casefold(), actual) != actual:
                raise refuse(entry.path, f"name that differs from {seen[actual.casefold()]!r} in case only")
    total = sum(e.size or 0 for e in entries)
    if total > _MAX_EXPORT_BYTES:
        raise refuse(
            max(entries, key=lambda e: e.size or 0).path, f"{total} bytes of files (limit {_MAX_EXPORT_BYTES})"
        )


def _make_parents(root: Path, target: Path) -> None:
    for folder in reversed(target.relative_to(root).parents[:-1]):
        path = root / folder
        if not path.exists():
            path.mkdir()
            path.chmod(0o755)


def _ref(name: str) -> str:
    if not _REF_NAME.fullmatch(name) or ".." in name or name.endswith((".lock", ".")):
        raise FasttrackError(
            f"unusable name {name!r}",
            where="refs/fasttrack",
            expected="letters, digits, '.', '_', '-' and '/'",
            next="choose another name",
        )
    return f"refs/fasttrack/{name}"


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _missing_is_fine(function: object, path: str, info: tuple[type[BaseException], BaseException, object]) -> None:  # noqa: ARG001 - shutil's signature
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _walk(root: Path, ignore: frozenset[str]) -> Iterator[tuple[str, str, bytes]]:
    """(path, git mode, content) of every file below a folder; links are not followed."""
    for folder, names, files in os.walk(root, followlinks=False):
        links = [n for n in names if os.path.islink(os.path.join(folder, n))]
        names[:] = sorted(n for n in names if n not in ignore and n not in links)
        for name in sorted([*files, *links]):
            full = Path(folder) / name
            relative = full.relative_to(root).as_posix()
            info = full.lstat()
            if stat.S_ISLNK(info.st_mode):
                yield relative, MODE_SYMLINK, os.fsencode(os.readlink(full))
            elif not stat.S_ISREG(info.st_mode) or info.st_size > _MAX_FILE_BYTES:
                raise FasttrackError(
                    "not a regular file of at most 64 MiB",
                    where=relative,
                    expected="source files",
                    next=f"rm {relative}",
                )
            else:
                yield relative, MODE_EXECUTABLE if info.st_mode & stat.S_IXUSR else MODE_FILE, _read(full, relative)


def _read(path: Path, name: str) -> bytes:
    try:
        # O_NOFOLLOW: the proposer may still be running and swap the file for a link.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise FasttrackError(
            f"cannot read it ({error.strerror})", where=name, expected="a readable file", next=f"ls -l {name}"
        ) from error
    with os.fdopen(fd, "rb") as file:
        return file.read(_MAX_FILE_BYTES + 1)
