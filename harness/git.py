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
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.errors import FasttrackError
from harness.git_process import EMPTY_TREE, GitProcess, first_line
from harness.settings import Scope
from harness.trees import MODE_SUBMODULE, Entry, blob_id, refuse_unsafe, unsafe_name, walk, write_tree

__all__ = ["EMPTY_TREE", "Change", "Entry", "Repository", "unsafe_name"]

NULL_ID = "0" * 40
LITTER = ("__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache")
"""Folders that tools leave behind; never part of a commit made from a worktree."""

_IDENTITY = {"NAME": "fasttrack", "EMAIL": "fasttrack@localhost"}
_REF_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")


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
        found = GitProcess(path, path).run(
            "rev-parse", "--absolute-git-dir", "--show-toplevel", bare=False, check=False
        )
        if found.returncode:
            raise FasttrackError(
                first_line(found.stderr) or "git does not recognise it",
                where=str(path),
                expected="a git repository with a working tree",
                next=f"git -C {path} init, or change to the checkout",
            )
        git_dir, _, root = found.stdout.decode().rstrip("\n").partition("\n")
        self.root = Path(root)
        """Top folder of the working tree."""
        self.git_dir = Path(git_dir)
        """The repository's own folder (of a linked worktree: that worktree's part of it)."""
        self._git = GitProcess(self.root, self.git_dir)

    # --- reading ---------------------------------------------------------------------------------------------------

    def resolve(self, revision: str) -> str:
        """Full commit id of a revision.

        Raises:
            FasttrackError: it names no commit.
        """
        done = self._git.run(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", check=False
        )
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
        return self._git.out("rev-parse", "--verify", "--end-of-options", f"{commit}^{{tree}}").strip()

    def entries(self, commit: str, prefixes: Sequence[str] = ()) -> tuple[Entry, ...]:
        """All files of a commit in path order, or those at or below one of the prefixes."""
        out = self._git.run("ls-tree", "-r", "-z", "-l", "--full-tree", commit).stdout
        entries = []
        for line in out.split(b"\0")[:-1]:
            meta, _, path = line.partition(b"\t")
            mode, _, blob, size = meta.decode().split()
            entries.append(Entry(mode, blob, os.fsdecode(path), None if size == "-" else int(size)))
        return tuple(e for e in entries if not prefixes or _below(e.path, prefixes))

    def changes(self, base: str, head: str) -> tuple[Change, ...]:
        """Raw differences between two commits, without rename detection, in path order."""
        out = self._git.run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", base, head).stdout
        fields = out.split(b"\0")
        changes = []
        for meta, path in zip(fields[::2], fields[1::2], strict=False):
            old_mode, new_mode, old_blob, new_blob, status = meta.decode().lstrip(":").split(" ")
            changes.append(Change(status[0], old_mode, new_mode, old_blob, new_blob, os.fsdecode(path)))
        return tuple(changes)

    def line_counts(self, base: str, head: str) -> dict[str, tuple[int, int] | None]:
        """Added and removed lines per changed path; None for binary files."""
        out = self._git.run(
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
        out = self._git.run("cat-file", "--batch", stdin="".join(f"{i}\n" for i in wanted).encode()).stdout
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
        return self._git.run(
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
        out = self._git.run(
            "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", bare=False
        ).stdout
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
        refuse_unsafe(entries, commit)
        write_tree(entries, self.blobs(e.blob for e in entries), dest)

    def commit_patch(self, base: str, patch: bytes, message: str, name: str = "patch") -> str:
        """Commit a patch on top of a commit without touching index or working tree.

        The id depends on base, patch and message only; messages call the patch `name`.

        Raises:
            FasttrackError: the patch is empty, malformed, changes nothing, or does not apply (names file and line).
        """
        if not patch.strip():
            raise FasttrackError(
                "the patch is empty",
                where=name,
                expected="a diff against the base commit",
                next=f"git diff {base[:12]}",
            )
        with self._temporary_index() as env:
            self._git.run("read-tree", base, env=env)
            done = self._git.run("apply", "--cached", "--whitespace=nowarn", "-", env=env, stdin=patch, check=False)
            if done.returncode:
                where, what = _apply_error(done.stderr, name)
                raise FasttrackError(
                    f"the patch does not apply to {base[:12]}: {what}",
                    where=where,
                    expected="a diff made against the base commit",
                    next="git diff BASE > FILE, or pass --base REV",
                )
            tree = self._git.out("write-tree", env=env).strip()
        if tree == self.tree(base):
            raise FasttrackError(
                "the patch changes nothing", where=name, expected="a diff with changes", next=f"git diff {base[:12]}"
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
            self._git.run("read-tree", base, env=env)
            self._git.run("update-index", "-z", "--add", "--remove", "--index-info", env=env, stdin=b"".join(lines))
            tree = self._git.out("write-tree", env=env).strip()
        return self.commit_tree(tree, base, message)

    def _store(self, content: bytes) -> str:
        return self._git.out("hash-object", "-w", "--no-filters", "--stdin", stdin=content).strip()

    def commit_tree(self, tree: str, parent: str, message: str) -> str:
        """Commit a tree; author, committer and dates are fixed by the parent, so equal input gives an equal id."""
        when = self._git.out("show", "-s", "--format=%ct", parent).strip() + " +0000"
        env = {
            f"GIT_{who}_{key}": value
            for who in ("AUTHOR", "COMMITTER")
            for key, value in (*_IDENTITY.items(), ("DATE", when))
        }
        return self._git.out("commit-tree", tree, "-p", parent, "-m", message, env=env).strip()

    def keep(self, name: str, commit: str) -> None:
        """Protect a commit from garbage collection under `refs/fasttrack/<name>`.

        Raises:
            FasttrackError: unusable name or unknown commit.
        """
        self._git.run("update-ref", "--no-deref", _ref(name), self.resolve(commit))

    def kept(self, prefix: str = "") -> dict[str, str]:
        """Names below `refs/fasttrack/` that start with the prefix, and their commits."""
        out = self._git.out("for-each-ref", "--format=%(refname) %(objectname)", "refs/fasttrack/")
        refs = dict(line.split(" ") for line in out.splitlines())
        return {
            n.removeprefix("refs/fasttrack/"): c
            for n, c in refs.items()
            if n.removeprefix("refs/fasttrack/").startswith(prefix)
        }

    def forget(self, name: str) -> None:
        """Drop a name made by `keep`; git removes the objects in its own time."""
        self._git.run("update-ref", "--no-deref", "-d", _ref(name))

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
        ignore: Sequence[str] = LITTER,
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
        for name, mode, content in walk(path, frozenset(ignore)):
            blob = blob_id(content)
            if name not in before or before[name].blob != blob:
                blob = self._store(content)
            lines.append(f"{mode} {blob}\t".encode() + os.fsencode(name) + b"\0")
        with self._temporary_index() as env:
            self._git.run("read-tree", "--empty", env=env)
            self._git.run("update-index", "-z", "--add", "--index-info", env=env, stdin=b"".join(lines))
            tree = self._git.out("write-tree", env=env).strip()
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


def _apply_error(stderr: bytes, name: str) -> tuple[str, str]:
    """(where, what) from the complaints of `git apply`: the failing hunk if one is named, else the file."""
    lines = [
        line.removeprefix("error: ").removeprefix("fatal: ") for line in stderr.decode("utf-8", "replace").splitlines()
    ]
    for line in lines:
        if hunk := re.fullmatch(r"patch failed: (.+):(\d+)", line):
            return f"{hunk[1]}:{hunk[2]}", "the hunk at this line does not match"
    for line in lines:
        if corrupt := re.search(r"(?:corrupt patch|patch fragment without header|garbage) at line (\d+)", line):
            return f"{name}:{corrupt[1]}", line
    for line in lines:
        if named := re.fullmatch(r"(.+): ([a-z][a-z ]+)", line):
            return named[1], named[2]
    first = lines[0] if lines else "git apply gave no reason"
    return name, first.partition(" (allow with")[0]


def _below(path: str, prefixes: Sequence[str]) -> bool:
    return any(path == p.rstrip("/") or path.startswith(p.rstrip("/") + "/") for p in prefixes)


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
