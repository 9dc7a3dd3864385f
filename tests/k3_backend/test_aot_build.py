"""Building artifacts: reproducible, cached by content, and every failure named."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from spy_kernels import ARCH, PICO, spy_source, write_kernel

from k3_backend.aot import compile as compile_module
from k3_backend.aot.build import (
    BuildError,
    build,
    build_all,
    build_runtime,
    geometry_macros,
    run_local,
    specialised_ops,
)
from k3_backend.aot.manifest import Artifact, file_digest
from k3_backend.errors import StorageError
from k3_backend.geometry import geometry

OP = "input_projection"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "kernels"
    write_kernel(root, OP, spy_source(OP))
    (root / "common").mkdir()
    (root / "common" / "shared.h").write_text("#pragma once\ninline int shared() { return 1; }\n")
    return root


def _no_compiler(argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    if argv[1:] == ["--version"]:
        return run_local(argv, cwd)
    raise AssertionError(f"the compiler was started: {argv}")


def test_same_digests_in_two_folders_and_two_checkouts(tree: Path, tmp_path: Path) -> None:
    """Paths, time or folder names enter the object, so that no stranger can reproduce a digest."""
    write_kernel(tree, OP, '#include "common/shared.h"\n' + spy_source(OP, "(void)shared(); (void)__FILE__;"))
    first = build(OP, ARCH, PICO, tree, tmp_path / "a")
    elsewhere = tmp_path / "deeper" / "checkout"
    shutil.copytree(tree, elsewhere)
    second = build(OP, ARCH, PICO, elsewhere, tmp_path / "b")
    assert first.path != second.path
    assert (first.digest, first.inputs_digest, dict(first.files)) == (second.digest, second.inputs_digest, second.files)
    assert file_digest(first.object_path) == first.files[f"{OP}.so"]


def test_cache_hit_starts_no_compiler(tree: Path, tmp_path: Path) -> None:
    """An unchanged kernel is compiled again for every candidate."""
    first = build(OP, ARCH, PICO, tree, tmp_path / "out")
    assert build(OP, ARCH, PICO, tree, tmp_path / "out", run=_no_compiler) == first
    assert Artifact.read(first.path) == first


@pytest.mark.parametrize("file", ["cpu.cc", "cpu.toml", "../common/shared.h"])
def test_any_source_change_changes_the_key(tree: Path, tmp_path: Path, file: str) -> None:
    """A changed header or declaration is served from the cache."""
    first = build(OP, ARCH, PICO, tree, tmp_path / "out")
    path = tree / OP / file
    path.write_text(path.read_text() + ("# changed\n" if file.endswith("toml") else "// changed\n"))
    assert build(OP, ARCH, PICO, tree, tmp_path / "out").inputs_digest != first.inputs_digest


def test_geometry_and_arch_enter_the_key(tree: Path, tmp_path: Path) -> None:
    """An object compiled for other dimensions or instructions is served from the cache."""
    keys = {
        build(OP, arch, g, tree, tmp_path / "out").inputs_digest
        for arch in ("x86-64-v3", "x86-64-v4-bf16")
        for g in (PICO, geometry("k3-nano"), dataclasses.replace(PICO, latent=PICO.latent + 32))
    }
    assert len(keys) == 6


def test_geometry_macros_cover_fields_and_derived_widths() -> None:
    """A kernel cannot name a dimension that the interface uses."""
    macros = geometry_macros(PICO)
    names = "HIDDEN HEADS KDA_HEAD_DIM KDA_GATE_RANK KDA_PROJ_ROWS Q_LORA KV_LORA NOPE PE V_DIM MLA_ROW MLA_PROJ_ROWS"
    more = "EXPERTS TOP_K LATENT EXPERT_WIDTH SHARED_WIDTH DENSE_WIDTH ATTN_RES_BLOCKS CONV_WIDTH"
    wanted = f"{names} {more}".split()
    assert {f"K3_{name}" for name in wanted} <= set(macros)
    assert macros["K3_KDA_PROJ_ROWS"] == PICO.kda_proj_rows == 816


def test_compile_error_names_file_line_and_keeps_stderr(tree: Path, tmp_path: Path) -> None:
    """A candidate that does not compile is rejected without saying where."""
    source = write_kernel(tree, OP, '#include "k3_cpu.h"\nint broken( {\n')
    with pytest.raises(BuildError, match=rf"op {OP} for {ARCH}") as caught:
        build(OP, ARCH, PICO, tree, tmp_path / "out")
    assert caught.value.where == f"{source}:2"
    assert "broken" in caught.value.stderr
    assert "-march=" in caught.value.command
    assert not list((tmp_path / "out").iterdir()), "a failed build leaves nothing behind"


def test_undefined_symbol_is_named(tree: Path, tmp_path: Path) -> None:
    """A missing function surfaces only when the object is loaded."""
    write_kernel(tree, OP, spy_source(OP, "extern int nowhere(); if (nowhere()) return 1;"))
    with pytest.raises(BuildError, match="undefined symbol nowhere"):
        build(OP, ARCH, PICO, tree, tmp_path / "out")


@pytest.mark.parametrize("where", ["other_op/tricks.h", "/outside"])
def test_include_outside_the_hashed_inputs_is_refused(tree: Path, tmp_path: Path, where: str) -> None:
    """An object depends on bytes that its cache key does not hash."""
    (tree / "other_op").mkdir()
    target = tmp_path / "outside.h" if where == "/outside" else tree / where
    target.write_text("#pragma once\n")
    include = str(target) if where == "/outside" else where
    write_kernel(tree, OP, f'#include "{include}"\n' + spy_source(OP))
    with pytest.raises(BuildError, match=r"which its cache key does not cover"):
        build(OP, ARCH, PICO, tree, tmp_path / "out")


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("no source", "no such regular file"),
        ("symlink", "no such regular file"),
        ("toml", "not TOML"),
        ("arch", "unknown arch"),
    ],
)
def test_unfit_inputs(tree: Path, tmp_path: Path, breakage: str, message: str) -> None:
    """A folder without a proper kernel ends in a traceback, or follows a link out of the tree."""
    source = tree / OP / "cpu.cc"
    arch = "x86-64-v9" if breakage == "arch" else ARCH
    if breakage == "no source":
        source.unlink()
    elif breakage == "symlink":
        source.rename(tmp_path / "real.cc")
        source.symlink_to(tmp_path / "real.cc")
    elif breakage == "toml":
        (tree / OP / "cpu.toml").write_text("[tunables\n")
    with pytest.raises(BuildError, match=message):
        build(OP, arch, PICO, tree, tmp_path / "out")


def test_missing_compiler_and_unwritable_output_are_clear_errors(tree: Path, tmp_path: Path) -> None:
    """A machine without g++, or a path that cannot be a folder, ends in a traceback."""

    def missing(argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        raise FileNotFoundError(2, "No such file or directory", argv[0])

    with pytest.raises(BuildError, match=r"no usable compiler.*next: apt-get install g\+\+"):
        build(OP, ARCH, PICO, tree, tmp_path / "out", run=missing)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write the artifact"):
        build(OP, ARCH, PICO, tree, tmp_path / "file" / "out")


def test_full_disk_is_not_the_sources_fault(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate is rejected for a compile error that the disk caused; with space left the same words are its own."""

    def full(argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        return (
            run_local(argv, cwd)
            if "--version" in argv
            else subprocess.CompletedProcess(argv, 1, "", "ld: final link failed: No space left on device")
        )

    with pytest.raises(BuildError, match="No space left"):
        build(OP, ARCH, PICO, tree, tmp_path / "out", run=full)
    monkeypatch.setattr(compile_module, "_SPARE_BYTES", 1 << 62)
    with pytest.raises(StorageError, match="No space left"):
        build(OP, ARCH, PICO, tree, tmp_path / "out", run=full)


def test_compiler_that_leaves_no_object(tree: Path, tmp_path: Path) -> None:
    """Exit status 0 is taken for a built object."""

    def idle(argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        return run_local(argv, cwd) if "--version" in argv else subprocess.CompletedProcess(list(argv), 0, "PASS", "")

    with pytest.raises(BuildError, match="the compiler left no such file"):
        build(OP, ARCH, PICO, tree, tmp_path / "out", run=idle)


def test_source_edited_while_compiling(tree: Path, tmp_path: Path) -> None:
    """The cache remembers new bytes under the key of the old source."""

    def edits(argv: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        done = run_local(argv, cwd)
        if "--version" not in argv:
            (tree / OP / "cpu.cc").write_text(spy_source(OP) + "\n// edited\n")
        return done

    with pytest.raises(BuildError, match="inputs changed during the build"):
        build(OP, ARCH, PICO, tree, tmp_path / "out", run=edits)


def test_damaged_cache_entry_is_built_again(tree: Path, tmp_path: Path) -> None:
    """A torn object of an earlier crash is loaded."""
    first = build(OP, ARCH, PICO, tree, tmp_path / "out")
    first.object_path.write_bytes(b"torn")
    again = build(OP, ARCH, PICO, tree, tmp_path / "out")
    assert again == first
    assert file_digest(again.object_path) == first.files[f"{OP}.so"]


def test_build_all_in_parallel_and_listing(tree: Path, tmp_path: Path) -> None:
    """Two compilers at once disturb each other, or a failure is lost."""
    write_kernel(tree, "dense_mlp", spy_source("dense_mlp"))
    assert specialised_ops(tree) == ("dense_mlp", OP)
    built = build_all((OP, "dense_mlp"), ARCH, PICO, tree, tmp_path / "out")
    assert [a.op for a in built.values()] == [OP, "dense_mlp"]
    write_kernel(tree, "dense_mlp", "syntax error")
    with pytest.raises(BuildError, match="op dense_mlp"):
        build_all((OP, "dense_mlp"), ARCH, PICO, tree, tmp_path / "out")


def test_runtime_is_reproducible(tmp_path: Path) -> None:
    """The trusted launcher cannot be rebuilt to the digest that a report names."""
    assert build_runtime(tmp_path / "a").digest == build_runtime(tmp_path / "b").digest
