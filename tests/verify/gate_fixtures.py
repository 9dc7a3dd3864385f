"""A small repository with one op and its kernel, and a gate context on it: gates in tests run on real git trees."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from harness import settings
from harness.git import Repository
from harness.records import Candidate
from harness.store import EvidenceSink
from verify.context import GateContext
from verify.snapshots import JUDGING_PATHS, export_tree

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = settings.load(ROOT)
EDITABLE = ("k3_backend/kernels", "k3_backend/schedules")

HEADER = "#pragma once\nnamespace k3 {\ninline float scaled(float x) { return x + x; }\n}  // namespace k3\n"
KERNEL = """\
// The smallest kernel that keeps the calling convention.
#include "k3_cpu.h"
#include "common/scale.h"

K3_EXPORT(kda_decode) {
  k3::Args args_in(args, num_args, result);
  args_in.context();
  float x = args_in.real();
  if (k3::scaled(x) > 1e9f) args_in.fail("too large");
  return args_in.finish();
}
"""
FILES = {
    "README.md": "# A repository\n",
    "harness.toml": (ROOT / "harness.toml").read_text(),
    "k3_backend/ops/kda_decode/interface.py": "SPEC = None\n",
    "k3_backend/step/plan.py": "def plan(batch):\n    return None\n",
    "k3_backend/kernels/common/scale.h": HEADER,
    "k3_backend/kernels/kda_decode/cpu.cc": KERNEL,
    "k3_backend/kernels/kda_decode/cpu.toml": "",
    "k3_backend/schedules/cpu/k3-nano/kda_decode.toml": "version = 1\n\n[[bucket]]\nmax_rows = 512\n",
    "verify/x.py": "",
    "harness/x.py": "",
}


def make_bench(factory: pytest.TempPathFactory, name: str) -> Bench:
    """A repository of its own that shares its artifact cache with the other test modules of the session."""
    cache = factory.getbasetemp() / "gate-artifacts"
    cache.mkdir(exist_ok=True)
    root = factory.mktemp(name)
    repo = make_repo(root / "repo")
    (repo.root / "build").symlink_to(cache)
    return Bench(repo, root / "scratch")


def make_repo(path: Path) -> Repository:
    """Commit `FILES` in a new repository."""
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    commit_all(path)
    return Repository(path)


def commit_all(path: Path) -> None:
    """Make a repository of a folder, with everything in its first commit."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(path), "GIT_CONFIG_NOSYSTEM": "1"}
    for args in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "base"],
    ):
        subprocess.run(["git", *args], cwd=path, env=environment, check=True)


@dataclass
class Bench:
    """Makes contexts for candidates of one repository."""

    repo: Repository
    scratch: Path
    count: int = 0

    @cached_property
    def base(self) -> str:
        return self.repo.resolve("HEAD")

    def commit(self, files: dict[str, str | tuple[str, bytes] | None]) -> str:
        """A candidate commit: path to text, to (mode, bytes), or to None for deletion."""
        edits = {p: ("100644", c.encode()) if isinstance(c, str) else c for p, c in files.items()}
        return self.repo.commit_files(self.base, edits, "candidate")

    def context(
        self, head: str, *, target: str = "cpu", allow: tuple[str, ...] = (), export: bool = True
    ) -> GateContext:
        """A context on a candidate; without `export` the candidate's tree is not written to disk."""
        self.count += 1
        folder = self.scratch / f"run-{self.count}"
        folder.mkdir(parents=True)
        base_tree = export_tree(self.repo, self.base, JUDGING_PATHS, self.scratch / "trees")
        return GateContext(
            settings=SETTINGS,
            target=SETTINGS.target(target),
            tier=SETTINGS.tier("smoke"),
            repo=self.repo,
            candidate=Candidate(
                base=self.base, head=head, tree=self.repo.tree(head), patch_sha256="0" * 64, origin="rev:test"
            ),
            run_dir=folder,
            evidence=EvidenceSink(folder),
            base_tree=base_tree,
            best_tree=base_tree,
            allow=allow,
            candidate_tree=export_tree(self.repo, head, EDITABLE, self.scratch / "trees") if export else None,
        )
