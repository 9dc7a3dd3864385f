"""Manifests: what is read back is what was built, or an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3_backend.aot.manifest import MANIFEST_NAME, Artifact, ArtifactError, file_digest


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    (tmp_path / "attn_res.so").write_bytes(b"object")
    made = Artifact(
        op="attn_res", arch="x86-64-v3", geometry="k3-pico", device="cpu", abi=1, toolchain={"g++": "12"},
        files={"attn_res.so": file_digest(tmp_path / "attn_res.so")}, inputs_digest="0" * 64, path=tmp_path,
    )  # fmt: skip
    made.write()
    return made


def test_round_trip(artifact: Artifact) -> None:
    """Reading loses or invents a field."""
    assert Artifact.read(artifact.path) == artifact


def test_digest_names_content_not_place_or_build(artifact: Artifact, tmp_path: Path) -> None:
    """Two machines that build the same bytes disagree about what was judged."""
    moved = Artifact.read(artifact.path)
    object.__setattr__(moved, "path", tmp_path / "elsewhere")
    object.__setattr__(moved, "inputs_digest", "1" * 64)
    assert moved.digest == artifact.digest
    object.__setattr__(moved, "arch", "x86-64-v4-bf16")
    assert moved.digest != artifact.digest


@pytest.mark.parametrize("damage", ["object", "missing", "manifest", "field", "no manifest", "version"])
def test_damage_is_found(artifact: Artifact, damage: str) -> None:
    """An altered object or manifest is loaded as if it had been judged."""
    manifest = artifact.path / MANIFEST_NAME
    content = json.loads(manifest.read_text())
    if damage == "object":
        artifact.object_path.write_bytes(b"Object")
    elif damage == "missing":
        artifact.object_path.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-10])
    elif damage == "field":
        manifest.write_text(json.dumps({**content, "geometry": "k3-nano"}))
    elif damage == "version":
        manifest.write_text(json.dumps({**content, "version": 2}))
    else:
        manifest.unlink()
    with pytest.raises(ArtifactError, match="next: build the artifact again"):
        Artifact.read(artifact.path)
