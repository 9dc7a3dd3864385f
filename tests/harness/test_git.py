from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness.errors import FasttrackError
from harness.evidence import DiskError
from harness.git import EMPTY_TREE, Repository, unsafe_name
from harness.git_process import first_line
from harness.settings import Scope, ScopeLimits

SCOPE = Scope(
    editable=("k/**",),
    protected=("p/**",),
    python_imports=("math",),
    cpp_includes=("math.h",),
    limits=ScopeLimits(files=8, file_bytes=1000, line_chars=120),
)


def git(path: Path, *args: str, stdin: bytes = b"") -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(path), "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    done = subprocess.run(["git", *identity, *args], cwd=path, env=env, input=stdin, capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    root = tmp_path / "repo"
    for name, text in {"k/a.txt": "1\n2\n3\n", "p/judge.py": "x = 1\n", "README": "hello\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "base")
    return Repository(root)


def commit_entries(repo: Repository, entries: list[tuple[str, bytes, str]]) -> str:
    """A commit on HEAD's history whose tree holds exactly these (mode, content, path) entries, however unsafe."""
    tree: dict[str, object] = {}
    for mode, content, path in entries:
        blob = content.decode() if mode == "160000" else git(repo.root, "hash-object", "-w", "--stdin", stdin=content)
        node = tree
        *folders, name = path.split("/")
        for folder in folders:
            node = node.setdefault(folder, {})  # type: ignore[assignment]
        node[name] = (mode, blob)
    return git(repo.root, "commit-tree", "-p", "HEAD", "-m", "x", _write_tree(repo, tree))


def _write_tree(repo: Repository, tree: dict[str, object]) -> str:
    """Trees are hashed raw: `git mktree` would refuse some of the names that an attacker can store."""
    rows = []
    for name, value in tree.items():
        mode, blob = ("40000", _write_tree(repo, value)) if isinstance(value, dict) else value  # type: ignore[misc]
        rows.append((name + ("/" if mode == "40000" else ""), f"{mode} {name}\0".encode() + bytes.fromhex(blob)))
    body = b"".join(row for _, row in sorted(rows))
    return git(repo.root, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", stdin=body)


def test_not_a_repository_and_unknown_revision_are_clear_errors(tmp_path: Path, repo: Repository) -> None:
    """A wrong folder or revision ends in a traceback."""
    with pytest.raises(FasttrackError, match="no such folder"):
        Repository(tmp_path / "absent")
    (tmp_path / "plain").mkdir()
    with pytest.raises(FasttrackError, match="not a git repository"):
        Repository(tmp_path / "plain")
    for bad in ("nope", "--output=/tmp/x", EMPTY_TREE, "HEAD:README"):
        with pytest.raises(FasttrackError, match="unknown revision"):
            repo.resolve(bad)
    assert len(repo.resolve("main")) == 40


def test_git_missing_is_a_clear_error(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without git ends in a traceback."""
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(FasttrackError, match="git is not installed"):
        Repository(repo.root)


def test_subfolder_names_the_repository(repo: Repository) -> None:
    """Commands work only from the top folder."""
    assert Repository(repo.root / "k").root == repo.root


def test_dirty_tree_is_refused_and_named(repo: Repository) -> None:
    """Results are credited to a commit whose files did not run."""
    repo.require_clean()
    (repo.root / "my.patch").write_text("untracked at the top is a user's own business")
    repo.require_clean()
    (repo.root / "p" / "shadow.py").write_text("x = 2\n")
    with pytest.raises(FasttrackError, match=r"p/shadow\.py"):
        repo.require_clean()
    (repo.root / "p" / "shadow.py").unlink()
    (repo.root / "README").write_text("changed\n")
    with pytest.raises(FasttrackError, match="dirty: README"):
        repo.require_clean()


def test_patch_round_trip_is_canonical(repo: Repository) -> None:
    """The patch in a bundle does not reproduce the candidate's tree, or its bytes depend on the machine."""
    base = repo.resolve("HEAD")
    head = commit_entries(
        repo,
        [
            ("100644", b"1\n2\nthree\n", "k/a.txt"),
            ("100644", bytes(range(256)) * 4, "k/raw.bin"),
            ("100755", b"#!x\n", "k/run"),
            ("100644", "ünï\n".encode(), "k/ü.txt"),
            ("100644", b"no newline", "README"),
        ],
    )
    patch = repo.patch(base, head)
    again = repo.commit_patch(base, patch, "candidate")
    assert repo.tree(again) == repo.tree(head)
    assert repo.patch(base, again) == patch
    assert repo.commit_patch(base, patch, "candidate") == again
    git(repo.root, "config", "diff.noprefix", "true")
    git(repo.root, "config", "diff.renames", "copies")
    git(repo.root, "config", "core.quotePath", "false")
    (repo.root / ".git" / "info" / "attributes").write_text("*.txt diff=evil\n")
    git(repo.root, "config", "diff.evil.textconv", "touch /tmp/should-not-exist; cat")
    assert repo.patch(base, head) == patch


def test_changes_show_modes_of_links_and_submodules(repo: Repository) -> None:
    """A symbolic link or submodule passes as a plain file."""
    base = repo.resolve("HEAD")
    head = commit_entries(
        repo,
        [("120000", b"/etc/passwd", "k/link"), ("160000", base.encode(), "k/sub"), ("100644", b"1\n2\n3\n", "k/a.txt")],
    )
    changes = {c.path: c for c in repo.changes(base, head)}
    assert changes["k/link"].new_mode == "120000"
    assert changes["k/sub"].new_mode == "160000"
    assert changes["README"].status == "D"
    assert "k/a.txt" not in changes


@pytest.mark.parametrize(
    ("patch", "where", "what"),
    [
        (b"", "patch", "empty"),
        (b"just words\n", "patch", "No valid patches"),
        (b"--- a/k/a.txt\n+++ b/k/a.txt\n@@ -1,3 +1,3 @@\n 1\n-9\n+8\n 3\n", "k/a.txt:1", "does not match"),
        (b"--- a/k/none\n+++ b/k/none\n@@ -1 +1 @@\n-1\n+2\n", "k/none", "does not exist"),
        (b"--- a/k/a.txt\n+++ b/k/a.txt\n@@ -1,3 +1,3 @@\n 1\n", "patch:5", "corrupt patch"),
        (b"--- a/../evil\n+++ b/../evil\n@@ -0,0 +1 @@\n+1\n", "patch", "invalid path"),
    ],
)
def test_patch_that_does_not_apply_names_the_place(repo: Repository, patch: bytes, where: str, what: str) -> None:
    """`fasttrack verify --patch` leaves its user without the failing hunk."""
    with pytest.raises(FasttrackError) as caught:
        repo.commit_patch(repo.resolve("HEAD"), patch, "x")
    assert caught.value.where == where
    assert what in caught.value.what


def test_a_disk_that_refuses_is_not_the_patchs_fault(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`does not apply` about a good patch sends its author the wrong way, and a search drops the candidate."""
    base = repo.resolve("HEAD")
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'error: unable to create temporary file: Read-only file system' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(DiskError, match=r"cannot use its files: unable to create.*df -h"):
        repo.commit_patch(base, b"--- a/k/a.txt\n", "x")


def test_messages_call_a_patch_by_its_file(repo: Repository) -> None:
    """Which of several patches is meant?"""
    for patch in (b"", b"words\n"):
        with pytest.raises(FasttrackError) as caught:
            repo.commit_patch(repo.resolve("HEAD"), patch, "x", "my/own.patch")
        assert caught.value.where == "my/own.patch"
        assert "allow" not in caught.value.what


def test_hints_are_not_complaints() -> None:
    """An advice of git hides the error that follows it."""
    assert first_line(b"hint: use another\nfatal: broken\n") == "broken"
    assert first_line(b"") == ""


def test_patch_that_changes_nothing_is_refused(repo: Repository) -> None:
    """An empty candidate is judged as if it were a change."""
    patch = b"--- a/k/a.txt\n+++ b/k/a.txt\n@@ -1,3 +1,3 @@\n 1\n-2\n+2\n 3\n"
    with pytest.raises(FasttrackError, match="changes nothing"):
        repo.commit_patch(repo.resolve("HEAD"), patch, "x")


def test_working_tree_index_and_hooks_stay_untouched(repo: Repository, tmp_path: Path) -> None:
    """Judging a patch changes the user's files, or runs their hooks and filters on untrusted content."""
    marker = tmp_path / "ran"
    for hook in ("post-checkout", "pre-commit", "reference-transaction", "post-index-change", "applypatch-msg"):
        path = repo.root / ".git" / "hooks" / hook
        path.write_text(f"#!/bin/sh\ntouch {marker}\n")
        path.chmod(0o755)
    git(repo.root, "config", "core.fsmonitor", f"touch {marker}")
    git(repo.root, "config", "filter.evil.clean", f"touch {marker}; cat")
    git(repo.root, "config", "filter.evil.smudge", f"touch {marker}; cat")
    marker.unlink(missing_ok=True)
    base = repo.resolve("HEAD")
    head = commit_entries(repo, [("100644", b"* filter=evil\n", ".gitattributes"), ("100644", b"new\n", "k/a.txt")])
    marker.unlink(missing_ok=True)
    repo.commit_patch(base, repo.patch(base, head), "x")
    repo.export(head, tmp_path / "out")
    repo.add_worktree(tmp_path / "work", head)
    (tmp_path / "work" / "k" / "b.txt").write_text("b\n")
    repo.commit_worktree(tmp_path / "work", "y")
    repo.keep("run/1", head)
    repo.dirty()
    assert not marker.exists()
    assert (tmp_path / "out" / "k" / "a.txt").read_text() == "new\n"
    assert git(repo.root, "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "status", "--porcelain") == ""


def test_export_writes_exact_bytes_and_modes(repo: Repository, tmp_path: Path) -> None:
    """Exports depend on umask, attributes or line-end settings."""
    head = commit_entries(
        repo, [("100755", b"#!/bin/sh\r\n", "k/run.sh"), ("100644", b"\r\n\x00", "k/x"), ("100644", b"p", "p/judge.py")]
    )
    old = os.umask(0o077)
    try:
        repo.export(head, tmp_path / "out", ("k",))
    finally:
        os.umask(old)
    out = tmp_path / "out"
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == ["k/run.sh", "k/x"]
    assert (out / "k/run.sh").read_bytes() == b"#!/bin/sh\r\n"
    assert [oct((out / p).stat().st_mode & 0o777) for p in (".", "k", "k/run.sh", "k/x")] == [
        "0o755",
        "0o755",
        "0o755",
        "0o644",
    ]
    with pytest.raises(FasttrackError, match="not empty"):
        repo.export(head, out)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (("120000", b"/etc", "k/link"), "symbolic link"),
        (("160000", b"1" * 40, "k/sub"), "submodule"),
        (("100644", b"x", "../evil"), "leaves its folder"),
        (("100644", b"x", "k/../../evil"), "leaves its folder"),
        (("100644", b"x", ".git/hooks/post-checkout"), "git's own folder"),
        (("100644", b"x", "k/.GIT/config"), "git's own folder"),
        (("100644", b"x", "k/A.TXT"), "case only"),
        (("100644", b"x", "K/b.txt"), "case only"),
        (("100644", b"x", "k/new\nline"), "control characters"),
        (("100644", b"x", "k/back\\slash"), "backslash"),
    ],
)
def test_export_refuses_unsafe_trees_and_writes_nothing(
    repo: Repository, tmp_path: Path, entry: tuple[str, bytes, str], says: str
) -> None:
    """A candidate's tree writes outside the export folder or plants a link in it."""
    head = commit_entries(repo, [("100644", b"1\n2\n3\n", "k/a.txt"), entry])
    with pytest.raises(FasttrackError, match=says):
        repo.export(head, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["a/b.c", "a/ü", "a b", "a/.gitx"])
def test_ordinary_names_are_safe(name: str) -> None:
    """An honest file name is refused."""
    assert unsafe_name(name) is None


def test_export_to_a_read_only_place_is_a_clear_error(repo: Repository, tmp_path: Path) -> None:
    """A full or read-only disk ends in a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FasttrackError, match="cannot use the file"):
        repo.export(repo.resolve("HEAD"), tmp_path / "file" / "out")


def test_replaced_objects_are_not_believed(repo: Repository) -> None:
    """`git replace` makes a commit id stand for other bytes than those that were reviewed."""
    head = repo.resolve("HEAD")
    blob = next(e.blob for e in repo.entries(head) if e.path == "k/a.txt")
    other = git(repo.root, "hash-object", "-w", "--stdin", stdin=b"evil\n")
    git(repo.root, "replace", blob, other)
    assert repo.read(head, "k/a.txt") == b"1\n2\n3\n"


def test_protected_digest_sees_protected_files_only(repo: Repository) -> None:
    """A changed judge goes unnoticed, or a changed kernel counts as a changed judge."""
    base = repo.resolve("HEAD")
    same = [("100644", b"x = 1\n", "p/judge.py"), ("100644", b"hello\n", "README")]
    kernel = commit_entries(repo, [*same, ("100644", b"other\n", "k/a.txt")])
    judge = commit_entries(repo, [("100644", b"x = 2\n", "p/judge.py"), *same[1:], ("100644", b"1\n2\n3\n", "k/a.txt")])
    mode = commit_entries(repo, [("100755", b"x = 1\n", "p/judge.py"), *same[1:], ("100644", b"1\n2\n3\n", "k/a.txt")])
    assert repo.protected_digest(kernel, SCOPE) == repo.protected_digest(base, SCOPE)
    assert len({repo.protected_digest(c, SCOPE) for c in (base, judge, mode)}) == 3


def test_worktrees_commit_what_is_on_disk(repo: Repository, tmp_path: Path) -> None:
    """A proposer's edit, deletion, new file or mode change is lost, or build litter is committed."""
    work = tmp_path / "work"
    base = repo.resolve("HEAD")
    repo.add_worktree(work, base)
    assert not (work / ".git").exists()
    assert repo.commit_worktree(work, "nothing") is None
    (work / "k" / "a.txt").write_text("1\n")
    (work / "k" / "new.txt").write_text("n\n")
    (work / "README").unlink()
    (work / "k" / "__pycache__").mkdir()
    (work / "k" / "__pycache__" / "x.pyc").write_bytes(b"x")
    first = repo.commit_worktree(work, "edit")
    assert first is not None
    assert [(c.status, c.path) for c in repo.changes(base, first)] == [
        ("D", "README"),
        ("M", "k/a.txt"),
        ("A", "k/new.txt"),
    ]
    (work / "k" / "link").symlink_to("/etc/passwd")
    (work / "k" / "dir").symlink_to("/etc")
    second = repo.commit_worktree(work, "link")
    assert second is not None
    assert {c.path: c.new_mode for c in repo.changes(first, second)} == {"k/dir": "120000", "k/link": "120000"}
    assert git(repo.root, "rev-list", "--count", f"{base}..{second}") == "2"
    repo.remove_worktree(work)
    repo.remove_worktree(work)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["repo"]


def test_special_files_in_a_worktree_are_refused(repo: Repository, tmp_path: Path) -> None:
    """A pipe planted by a proposer hangs the harness, which waits for its content."""
    repo.add_worktree(tmp_path / "work", repo.resolve("HEAD"))
    os.mkfifo(tmp_path / "work" / "k" / "pipe")
    with pytest.raises(FasttrackError, match="not a regular file"):
        repo.commit_worktree(tmp_path / "work", "x")


def test_kept_commits_survive_garbage_collection(repo: Repository) -> None:
    """A candidate's commit disappears before its bundle is read."""
    base = repo.resolve("HEAD")
    head = repo.commit_patch(base, repo.patch(base, commit_entries(repo, [("100644", b"z\n", "k/a.txt")])), "x")
    repo.keep("run-1/001", head)
    git(repo.root, "gc", "-q", "--prune=now")
    assert repo.resolve(head) == head
    assert repo.kept("run-1/") == {"run-1/001": head}
    repo.forget("run-1/001")
    assert repo.kept() == {}
    for bad in ("", "../heads/main", "a..b", "-x", "a b", "a.lock", "a/"):
        with pytest.raises(FasttrackError, match="unusable name"):
            repo.keep(bad, head)


def test_repository_of_another_owner_opens(repo: Repository) -> None:
    """Git's ownership check stops every command where the checkout is mounted from another user (as in containers)."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for folder, _, files in os.walk(repo.root):
        for name in (folder, *(os.path.join(folder, f) for f in files)):
            os.chown(name, 12345, 12345)
    assert Repository(repo.root).resolve("HEAD")


def test_a_linked_worktree_has_its_own_head(repo: Repository, tmp_path: Path) -> None:
    """In a linked worktree, results are credited to the main checkout's commit."""
    git(repo.root, "worktree", "add", "-q", "--detach", str(tmp_path / "linked"), "HEAD")
    git(tmp_path / "linked", "commit", "-q", "--allow-empty", "-m", "second")
    linked = Repository(tmp_path / "linked")
    assert linked.root == tmp_path / "linked"
    assert linked.resolve("HEAD") != repo.resolve("HEAD")
    linked.require_clean()
    linked.keep("x", linked.resolve("HEAD"))
    assert repo.kept() == {"x": linked.resolve("HEAD")}
