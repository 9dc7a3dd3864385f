"""A kit in a repository of its own, and a machine without a GPU to run it on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from harness.settings import Settings, Target, Tier
from k3_backend.aot.cuda.descriptor import DESCRIPTOR_NAME, Descriptor, LaunchSpec, VariantSpec
from k3_backend.aot.manifest import Artifact, file_digest
from verify.kit.build import Arm, describe, kit_files, make_kit
from verify.kit.machine import Machine
from verify.kit.manifest import KitManifest, Unit

ROOT = Path(__file__).resolve().parents[3]
ARCH = "sm_90a"
BOOTSTRAP = (
    f"import sys; sys.path[:0] = [sys.argv[1], {str(Path(__file__).parent)!r}]; import fake_card; fake_card.install(); "
    "from verify.workers.main import main; main()"
)


class FakeMachine(Machine):
    """Workers run the fake card, the evaluator computes on the host."""

    bootstrap = BOOTSTRAP

    def evaluator(self) -> Any:
        return torch.device("cpu")

    def require(self, compute_capability: tuple[int, int]) -> None:
        assert compute_capability == (9, 0)

    def describe(self) -> dict[str, Any]:
        return {"gpu": {"name": "fake", "uuid_sha256": "0" * 64}, "gpu_missing": {}, "cuda": None}

    def state(self) -> dict[str, Any]:
        return {"sm_clock_mhz": None, "missing": {"sm_clock_mhz": "no GPU"}}


def fake_artifact(folder: Path, op: str, geometry: str, image: bytes = b"machine code") -> Artifact:
    """An artifact whose image nothing can run: the fake card does not read it."""
    folder.mkdir(parents=True)
    name = f"{hashlib.sha256(image).hexdigest()}.cubin"
    (folder / name).write_bytes(image)
    (folder / name).with_suffix(".ptx").write_text("// text for readers\n")
    launch = LaunchSpec(
        name="only", image=name, entry="kernel", parameters=(), grid=("1", "1", "1"), block=32, cluster=1, shared=0,
        min_ctas_per_sm=1, pdl=True, expects=(), polling=None, registers=32, static_shared=0,
    )  # fmt: skip
    variant = VariantSpec(choices={}, launches=(launch,), workspaces=(), requires=())
    descriptor = Descriptor(op=op, arch=ARCH, geometry=geometry, tunables=(), specialised=(), variants=(variant,))
    (folder / DESCRIPTOR_NAME).write_text(descriptor.to_text())
    (folder / "cute.toml").write_text("# no tunables\n")
    artifact = Artifact(
        op=op, arch=ARCH, geometry=geometry, device="cuda", abi=1, toolchain={"tool": "1"}, inputs_digest="0" * 64,
        files={file.name: file_digest(file) for file in sorted(folder.iterdir())}, path=folder,
    )  # fmt: skip
    artifact.write()
    return artifact


def fake_arm(
    folder: Path, units: Mapping[str, str], max_rows: int = 512, images: Mapping[str, bytes] | None = None
) -> Arm:
    """An arm of fake artifacts.

    Args:
        folder: where to put it.
        units: op to geometry.
        max_rows: where its schedules end.
        images: op to the content of its image.
    """
    artifacts = {}
    for op, geometry in units.items():
        artifacts[Unit(geometry, op, ARCH)] = fake_artifact(
            folder / "artifacts" / geometry / op, op, geometry, (images or {}).get(op, b"machine code")
        )
        schedule = folder / "schedules" / "h200" / geometry / f"{op}.toml"
        schedule.parent.mkdir(parents=True, exist_ok=True)
        schedule.write_text(f"version = 1\n\n[[bucket]]\nmax_rows = {max_rows}\n")
    return Arm(artifacts, folder / "schedules")


def small(settings: Settings, **changes: Any) -> tuple[Target, Tier]:
    """Target and tier with few cases."""
    target = settings.target("h200").model_copy(update={"batches": (1, 2), "drafts": (0, 1), **changes})
    return target, settings.tier("smoke").model_copy(update={"batches": (1, 2)})


def write_fake_kit(
    out: Path, arm: Arm, settings: Settings, gates: tuple[str, ...] = ("kernels",), **changes: Any
) -> KitManifest:
    """A kit folder of this checkout's sources."""
    target, tier = small(settings, **changes)
    described = describe(
        target, tier, base="b" * 40, head="c" * 40, trees={"base": "d" * 40, "head": "e" * 40}, gates=gates,
        arms={"candidate": arm}, mutants={}, command="fasttrack verify --candidate c",
    )  # fmt: skip
    files = kit_files(ROOT, {"candidate": arm})
    listed = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in sorted(files.items())
    }
    manifest = KitManifest(**{**vars(described), "files": listed})
    make_kit(out, manifest, files)
    return manifest


def lines_of(results: Path, gate: str = "kernels") -> list[dict[str, Any]]:
    """Raw lines of a folder of results."""
    return [json.loads(line) for line in (results / "raw" / f"{gate}.jsonl").read_text().splitlines()]
